"""Who may do what when: the states of both ends and their transition tables.

A pair (state, event) that is missing from its table is a mistake: of our own code for what we do ourselves
(LocalProtocolError), of the peer for what it sent (RemoteProtocolError).
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from starsd_edge.errors import LocalProtocolError
from starsd_edge.protocol.messages import ErrorCode, MessageKind, WireError

__all__ = [
    "EDGE_TABLE",
    "LINKED",
    "SERVER_TABLE",
    "TIMED",
    "EdgeEvent",
    "EdgeState",
    "ServerState",
    "ServiceAct",
    "next_edge_state",
    "next_server_state",
]


class Quick(Enum):
    """Members are looked up several times a message: by identity, which `Enum` does in Python."""

    __hash__ = object.__hash__


class ServerState(Quick):
    """A session as the service sees it."""

    NEW = "new"  # nothing said yet, or said to an earlier boot
    GREETED = "greeted"  # the two ends fit; no context is held
    OPENED = "opened"  # a context is held
    CLOSED = "closed"


class ServiceAct(Quick):
    """What the service itself does to a session."""

    EVICT = "evict"
    CLOSE = "close"


# fmt: off
SERVER_TABLE: dict[ServerState, dict[MessageKind | ServiceAct, ServerState]] = {
    ServerState.NEW: {
        MessageKind.HELLO:   ServerState.GREETED,
        MessageKind.OPEN:    ServerState.NEW,  # these three are answered with NEED_PREFILL{0}:
        MessageKind.PREFILL: ServerState.NEW,  # the edge has not noticed that the service restarted
        MessageKind.UPDATE:  ServerState.NEW,
        MessageKind.PING:    ServerState.NEW,
        MessageKind.REPORT:  ServerState.NEW,
        MessageKind.CLOSE:   ServerState.CLOSED,
        ServiceAct.EVICT:    ServerState.NEW,
        ServiceAct.CLOSE:    ServerState.CLOSED,
    },
    ServerState.GREETED: {
        MessageKind.HELLO:   ServerState.GREETED,
        MessageKind.OPEN:    ServerState.OPENED,
        MessageKind.PREFILL: ServerState.GREETED,  # NEED_PREFILL{0}: evicted, or its OPEN was refused
        MessageKind.UPDATE:  ServerState.GREETED,
        MessageKind.PING:    ServerState.GREETED,
        MessageKind.REPORT:  ServerState.GREETED,
        MessageKind.CLOSE:   ServerState.CLOSED,
        ServiceAct.EVICT:    ServerState.GREETED,
        ServiceAct.CLOSE:    ServerState.CLOSED,
    },
    ServerState.OPENED: {
        MessageKind.HELLO:   ServerState.OPENED,  # a new connection goes on where the old one broke
        MessageKind.OPEN:    ServerState.OPENED,
        MessageKind.PREFILL: ServerState.OPENED,
        MessageKind.UPDATE:  ServerState.OPENED,
        MessageKind.PING:    ServerState.OPENED,
        MessageKind.REPORT:  ServerState.OPENED,
        MessageKind.CLOSE:   ServerState.CLOSED,
        ServiceAct.EVICT:    ServerState.GREETED,
        ServiceAct.CLOSE:    ServerState.CLOSED,
    },
    ServerState.CLOSED: {
        MessageKind.CLOSE:   ServerState.CLOSED,
        ServiceAct.EVICT:    ServerState.CLOSED,
        ServiceAct.CLOSE:    ServerState.CLOSED,
    },
}
# fmt: on


class EdgeState(Quick):
    """The link as the edge sees it. Decoding goes on in every one of them."""

    DOWN = "down"  # breaker open; a probe is due at a known time
    CONNECTING = "connecting"  # a socket is being connected
    GREETING = "greeting"  # HELLO sent
    IDLE = "idle"  # welcomed, nothing under way
    FILLING = "filling"  # OPEN or prefill chunks are under way
    DRAFTING = "drafting"  # a tree is under way
    PAUSED = "paused"  # told to come back later
    REFUSED = "refused"  # the two ends do not fit, or the key is not trusted; a probe is due, rarely
    CLOSED = "closed"


# States with a usable connection.
LINKED = frozenset(
    {EdgeState.GREETING, EdgeState.IDLE, EdgeState.FILLING, EdgeState.DRAFTING, EdgeState.PAUSED}
)
# States that end at a time that is known when they begin.
TIMED = frozenset(
    {EdgeState.DOWN, EdgeState.REFUSED, EdgeState.CONNECTING, EdgeState.GREETING, EdgeState.PAUSED}
)


class EdgeEvent(Quick):
    """What happens to the edge's side, beside the messages of the service."""

    CONNECT = "connect"  # the pause is over: a new socket
    CONNECTED = "connected"  # the security handshake is done
    LOST = "lost"  # the connection broke, or nothing answers any more
    DENIED = "denied"  # the security handshake was refused
    GREET_AGAIN = "greet again"  # the service has restarted, or forgot us
    WELCOMED = "welcomed"
    SEND_ROWS = "send rows"  # OPEN or PREFILL leaves
    SEND_UPDATE = "send update"
    FILLED = "filled"  # nothing is under way any more
    DRAFTED = "drafted"  # the tree is here
    TOLD_TO_WAIT = "told to wait"
    PAUSE_OVER = "pause over"
    REFUSE = "refuse"
    RESTART = "restart"  # the context changed under what was under way: that no longer counts
    CLOSE = "close"


_E, _S = EdgeEvent, EdgeState
_ANY_TIME = {_E.LOST: _S.DOWN, _E.DENIED: _S.REFUSED, _E.REFUSE: _S.REFUSED, _E.CLOSE: _S.CLOSED}
_WELCOMED = {**_ANY_TIME, _E.GREET_AGAIN: _S.GREETING, _E.TOLD_TO_WAIT: _S.PAUSED, _E.RESTART: _S.IDLE}

# fmt: off
EDGE_TABLE: dict[EdgeState, dict[EdgeEvent, EdgeState]] = {
    _S.DOWN:       {**_ANY_TIME, _E.CONNECT: _S.CONNECTING},
    _S.CONNECTING: {**_ANY_TIME, _E.CONNECTED: _S.GREETING},
    _S.GREETING:   {**_ANY_TIME, _E.GREET_AGAIN: _S.GREETING, _E.WELCOMED: _S.IDLE,
                    _E.TOLD_TO_WAIT: _S.PAUSED},
    _S.IDLE:       {**_WELCOMED, _E.SEND_ROWS: _S.FILLING, _E.SEND_UPDATE: _S.DRAFTING},
    _S.FILLING:    {**_WELCOMED, _E.SEND_ROWS: _S.FILLING, _E.SEND_UPDATE: _S.DRAFTING,
                    _E.FILLED: _S.IDLE},
    _S.DRAFTING:   {**_WELCOMED, _E.DRAFTED: _S.IDLE},
    _S.PAUSED:     {**_WELCOMED, _E.PAUSE_OVER: _S.IDLE},
    _S.REFUSED:    {**_ANY_TIME, _E.CONNECT: _S.CONNECTING},
    _S.CLOSED:     {_E.CLOSE: _S.CLOSED},
}
# fmt: on

AnyEvent = TypeVar("AnyEvent")


def next_server_state(state: ServerState, event: MessageKind | ServiceAct) -> ServerState:
    """Raises WireError for a message, LocalProtocolError for an act that `state` does not allow."""
    try:
        return SERVER_TABLE[state][event]
    except KeyError:
        text = f"{event.name} at the service in state {state.value}"
        if isinstance(event, MessageKind):
            raise WireError(ErrorCode.UNEXPECTED, text) from None
        raise LocalProtocolError(text) from None


def next_edge_state(state: EdgeState, event: EdgeEvent) -> EdgeState:
    """Raises LocalProtocolError: the edge's events are its own conclusions."""
    try:
        return EDGE_TABLE[state][event]
    except KeyError:
        raise LocalProtocolError(f"'{event.value}' at the edge in state {state.value}") from None
