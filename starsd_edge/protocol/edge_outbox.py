"""What an edge has to send, in order: its requests, and greetings, pings, reports and goodbyes."""

from __future__ import annotations

from starsd_edge.decoding.roles import RoundHints
from starsd_edge.protocol.codec import Frames, encode
from starsd_edge.protocol.edge_events import Counters
from starsd_edge.protocol.greeting import HelloBody
from starsd_edge.protocol.limits import MAX_NODES
from starsd_edge.protocol.messages import Close, Head, Hello, Hints, Ping, Report
from starsd_edge.protocol.telemetry import EdgeReport
from starsd_edge.protocol.uplink import Request, Uplink

__all__ = ["EdgeOutbox", "wire_hints"]


class EdgeOutbox:
    """Frames that wait to be sent. `uplink` says which boot and epoch they are stamped with."""

    def __init__(self, uplink: Uplink, counters: Counters) -> None:
        self._uplink = uplink
        self._counters = counters
        self._frames: list[Frames] = []
        self._nonce = 0

    def take(self) -> list[Frames]:
        frames, self._frames = self._frames, []
        return frames

    def clear(self) -> None:
        self._frames.clear()

    def request(self, request: Request) -> None:
        self._add(request.frames, request.num_bytes)

    def hello(self, body: HelloBody) -> None:
        self._encode(Hello(self._stamp(), body))

    def ping(self) -> int:
        """The nonce that its PONG will have."""
        self._nonce += 1
        self._encode(Ping(self._stamp(), self._nonce))
        return self._nonce

    def report(self, body: EdgeReport) -> None:
        self._encode(Report(self._stamp(), body))

    def close(self) -> None:
        self._encode(Close(self._stamp()))

    def _encode(self, message: Hello | Ping | Report | Close) -> None:
        frames = encode(message)
        self._add(frames, sum(map(len, frames)))

    def _add(self, frames: Frames, num_bytes: int) -> None:
        self._counters.bytes_up += num_bytes
        self._frames.append(frames)

    def _stamp(self) -> Head:
        return Head(self._uplink.session, self._uplink.boot_id, self._uplink.epoch)


def wire_hints(hints: RoundHints, link_s: float) -> Hints:
    """The decode loop's hints as they travel; `link_s` is the link's share of the last round trip."""
    return Hints(
        max_nodes=min(max(hints.max_nodes, 1), MAX_NODES),
        num_accepted=hints.num_accepted,
        verify_nodes=hints.verify_nodes,
        verify_us=round(hints.verify_s * 1e6),
        plain_us=round(hints.plain_s * 1e6),
        wait_us=round(hints.wait_s * 1e6),
        link_us=round(link_s * 1e6),
        ahead_nodes=min(hints.ahead_nodes, MAX_NODES),
    )
