"""Who knocked and was not let in: the latest of them for the monitor, and a line in the log for each.

Whoever knows the service's public key can knock with a new key each time, so both are bounded: neither memory
nor the disk is a stranger's to fill.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass

from starsd_edge.link.zap import Knock
from starsd_edge.protocol.telemetry import RefusedPeer

__all__ = ["Refusals"]

log = logging.getLogger("starsd.gateway")

MAX_PEERS = 32  # remembered, the latest; as many as a snapshot takes
MAX_LINES, WINDOW_S = 10, 10.0  # in the log, within so many seconds; the others are counted
NO_KEY = "no key"


@dataclass(slots=True)
class Refused:
    peer: RefusedPeer
    latest_s: float


class Refusals:
    """Any thread may call anything. `now_s` is monotonic seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, Refused] = OrderedDict()
        self._window_s = float("-inf")  # when it began
        self._lines = self._untold = 0  # in it

    def note(self, knock: Knock, now_s: float) -> None:
        """`knock` was refused. Told once, and again when the reason is another one."""
        name = knock.fingerprint or NO_KEY
        with self._lock:
            refused = self._peers.get(name)
            if refused is None or refused.peer.reason != knock.reason:
                self._tell(f"refused {name} from {knock.address}: {knock.reason}", now_s)
                times = refused.peer.times if refused else 0
                refused = self._peers[name] = Refused(
                    RefusedPeer(name, knock.address, knock.reason, times), now_s
                )
            refused.peer.times += 1
            refused.latest_s = now_s
            self._peers.move_to_end(name)
            if len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)

    def look(self, now_s: float) -> None:
        """Say what there was no line for. Called now and then."""
        with self._lock:
            self._turn_window(now_s)

    def peers(self, now_s: float) -> list[RefusedPeer]:
        """The latest, whoever was quiet for longest first."""
        with self._lock:
            for refused in self._peers.values():
                refused.peer.quiet_s = now_s - refused.latest_s
            return [refused.peer for refused in self._peers.values()]

    def _tell(self, line: str, now_s: float) -> None:
        self._turn_window(now_s)
        if self._lines < MAX_LINES:
            self._lines += 1
            log.warning("%s", line)
        else:
            self._untold += 1

    def _turn_window(self, now_s: float) -> None:
        if now_s - self._window_s < WINDOW_S:
            return
        if self._untold:
            log.warning("refused %d others within %.0f s", self._untold, WINDOW_S)
        self._window_s = now_s
        self._lines = self._untold = 0
