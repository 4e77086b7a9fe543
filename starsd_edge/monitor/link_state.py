"""How the monitor's own link to a service stands, and why: pure, fed with what the socket reports.

ZeroMQ reconnects in silence, so the reason must be put together from its events: a refused key, an endless
handshake failure (the service has another key than the pinned one), a handshake in plain text, a connection
that ends before one, or tries without a connection, which a TCP probe then tells apart into "nothing listens"
and "no route". A connection that stands while no snapshot comes is a service that hangs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Link", "LinkEvent", "LinkState", "after"]

# Snapshots come twice a second: after this long without one, the service does not turn any more.
HUNG_AFTER_S = 3.0


class LinkState(enum.Enum):
    """What a user should know of a link, in a word."""

    CONNECTING = "connecting"
    UP = "up"
    UNKNOWN_KEY = "wrong key"  # the service does not know ours
    TOO_MANY = "too many"  # connections of ours
    OTHER_SERVICE = "wrong service key"  # theirs is not the one we pinned
    NOT_ENCRYPTED = "no encryption"
    OTHER_PROGRAM = "other program"  # what answers there publishes no snapshots
    SERVER_DOWN = "server down"
    NO_ROUTE = "no route"
    HUNG = "hung"
    ENDED = "ended"  # a recording has come to its end


ADVICE = {
    LinkState.CONNECTING: "",
    LinkState.UP: "",
    LinkState.UNKNOWN_KEY: "the service does not trust this key: add it there with starsd keys trust",
    LinkState.TOO_MANY: "this key has as many connections there as it may: end programs that hold them",
    LinkState.OTHER_SERVICE: "it has another key than is known here: compare with keys show --name service",
    LinkState.NOT_ENCRYPTED: "one end has keys and the other none: starsd keys pin, or --keys of the service",
    LinkState.OTHER_PROGRAM: "what answers there is no monitor's port: it is one above the draft service's",
    LinkState.SERVER_DOWN: "the host answers, but nothing listens on that port: is the service running?",
    LinkState.NO_ROUTE: "the host cannot be reached: check address, network and firewall",
    LinkState.HUNG: "it takes connections and says nothing: a service that hangs, or another program",
    LinkState.ENDED: "end of the recording",
}


class LinkEvent(enum.Enum):
    """What happened, in the words of the socket's monitor and of the TCP probe."""

    RETRYING = enum.auto()
    HANDSHAKE_DONE = enum.auto()
    KEY_DENIED = enum.auto()  # ZAP answered 400
    KEY_FULL = enum.auto()  # ZAP answered 500
    HANDSHAKE_BROKEN = enum.auto()  # closed without a word
    HANDSHAKE_TIMED_OUT = enum.auto()  # the kernel took the connection, the program never answered
    HANDSHAKE_MISFIT = enum.auto()  # one end has keys, the other none
    HANDSHAKE_FOREIGN = enum.auto()  # what came, or that the connection ended, fits no service
    DISCONNECTED = enum.auto()
    SNAPSHOT = enum.auto()
    PROBE_REFUSED = enum.auto()
    PROBE_UNREACHED = enum.auto()
    TICK = enum.auto()
    END = enum.auto()


@dataclass(frozen=True, slots=True)
class Link:
    """State since `since_s`; `heard_s` is when the last snapshot or handshake came."""

    state: LinkState = LinkState.CONNECTING
    since_s: float = 0.0
    heard_s: float | None = None

    @property
    def advice(self) -> str:
        """What it means and what to do; "" when all is well."""
        return ADVICE[self.state]


# Event -> state it leads to. What is missing here leaves the state alone.
LEADS_TO = {
    LinkEvent.HANDSHAKE_DONE: LinkState.CONNECTING,
    LinkEvent.KEY_DENIED: LinkState.UNKNOWN_KEY,
    LinkEvent.KEY_FULL: LinkState.TOO_MANY,
    LinkEvent.HANDSHAKE_BROKEN: LinkState.OTHER_SERVICE,
    LinkEvent.HANDSHAKE_TIMED_OUT: LinkState.HUNG,
    LinkEvent.HANDSHAKE_MISFIT: LinkState.NOT_ENCRYPTED,
    LinkEvent.HANDSHAKE_FOREIGN: LinkState.OTHER_PROGRAM,
    LinkEvent.DISCONNECTED: LinkState.CONNECTING,
    LinkEvent.SNAPSHOT: LinkState.UP,
    LinkEvent.PROBE_REFUSED: LinkState.SERVER_DOWN,
    LinkEvent.PROBE_UNREACHED: LinkState.NO_ROUTE,
    LinkEvent.END: LinkState.ENDED,
}

# What these say about the reason must not be hidden by the disconnect that follows, or by the next attempt.
KNOWN_REASON = (
    LinkState.UNKNOWN_KEY,
    LinkState.TOO_MANY,
    LinkState.OTHER_SERVICE,
    LinkState.NOT_ENCRYPTED,
    LinkState.OTHER_PROGRAM,
    LinkState.SERVER_DOWN,
    LinkState.NO_ROUTE,
    LinkState.HUNG,
)


def after(link: Link, event: LinkEvent, now_s: float) -> Link:
    """The link after `event` at `now_s` (monotonic seconds)."""
    if event is LinkEvent.DISCONNECTED and link.state in KNOWN_REASON:
        return Link(link.state, link.since_s)
    if event is LinkEvent.DISCONNECTED and link.state is LinkState.CONNECTING and link.heard_s is None:
        # A connection that ended before any handshake, and without a word of why.
        return Link(LinkState.OTHER_PROGRAM, now_s)
    if event is LinkEvent.TICK:
        silent = link.heard_s is not None and now_s - link.heard_s > HUNG_AFTER_S
        waiting = link.state in (LinkState.UP, LinkState.CONNECTING)
        return Link(LinkState.HUNG, now_s, link.heard_s) if silent and waiting else link
    state = LEADS_TO.get(event, link.state)
    heard_s = link.heard_s
    if event in (LinkEvent.HANDSHAKE_DONE, LinkEvent.SNAPSHOT):
        heard_s = now_s
    elif event is not LinkEvent.RETRYING:
        heard_s = None  # not connected: silence means nothing
    return Link(state, link.since_s if state is link.state else now_s, heard_s)
