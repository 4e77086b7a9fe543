"""From arriving snapshots to what the screen shows. Pure: the time of an arrival comes with it.

Of each service a few snapshots are kept, dense for the last seconds and sparse for the last minutes, so that
figures can be worked out over a window the user chooses. A service that started again (another boot_id)
begins anew; `reset` moves the start of every window to now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from starsd_edge.monitor.link_state import Link
from starsd_edge.monitor.views import DeviceView, ServiceView
from starsd_edge.protocol.telemetry import DeviceSnapshot, ServiceSnapshot

__all__ = ["WINDOWS_S", "Kept", "Model", "ServiceModel"]

# Lengths of the window a user zooms through; the last one is "since the start or the last reset".
WINDOWS_S = (10.0, 60.0, 300.0, float("inf"))
HISTORY = 240  # points of a sparkline: two minutes at two snapshots a second

DENSE_FOR_S, DENSE_EVERY_S = 12.0, 0.9  # what the shortest window needs
SPARSE_FOR_S, SPARSE_EVERY_S = 310.0, 10.0
MIN_RATE_SPAN_S = 0.9  # a speed over less than two snapshots jumps about


@dataclass(frozen=True, slots=True)
class Kept:
    """A snapshot and its devices by name."""

    snapshot: ServiceSnapshot
    devices: dict[str, DeviceSnapshot]

    @property
    def at_s(self) -> float:
        """The service's own clock: rates do not depend on when a snapshot arrived here."""
        return self.snapshot.uptime_s


@dataclass(slots=True)
class ServiceModel:
    """What is known of one service."""

    name: str
    link: Link = field(default_factory=Link)
    kept: deque[Kept] = field(default_factory=deque)
    start: Kept | None = None  # windows do not reach behind it
    history: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    device_history: dict[str, deque[float]] = field(default_factory=dict)
    num_bytes: int = 0
    arrivals: int = 0
    restarts: int = 0

    @property
    def latest(self) -> Kept | None:
        return self.kept[-1] if self.kept else None

    def take(self, snapshot: ServiceSnapshot) -> None:
        """Take in the next snapshot. One that came late, or twice, is dropped."""
        latest = self.latest
        if latest is not None and latest.snapshot.boot_id != snapshot.boot_id:
            self.restarts += 1
            self.kept.clear()
            self.start = None
        elif latest is not None and snapshot.sequence <= latest.snapshot.sequence:
            return
        kept = Kept(snapshot, {device.device: device for device in snapshot.devices})
        if self.start is None:
            # What a service did before anybody watched belongs to no window but the endless one.
            self.start = kept
        self._thin_out(kept.at_s)
        self.kept.append(kept)
        self._note_speeds(kept)

    def reset(self) -> None:
        """Begin all windows and sparklines now."""
        latest = self.latest
        self.start = latest
        self.kept = deque([latest] if latest else [])
        self.history.clear()
        self.device_history.clear()

    def baseline(self, window_s: float) -> Kept | None:
        """The snapshot at the start of the window: the oldest one within it; None before there are two."""
        latest = self.latest
        if latest is None or self.start is None:
            return None
        if window_s == float("inf"):
            return self.start if self.start is not latest else None
        for kept in self.kept:
            if latest.at_s - kept.at_s <= window_s:
                return kept if kept is not latest else None
        return None

    def _thin_out(self, now_s: float) -> None:
        """Drop the last but one where it stands too close to its neighbour, and what is too old."""
        if len(self.kept) >= 2 and self.kept[-1].at_s - self.kept[-2].at_s < DENSE_EVERY_S:
            self.kept.pop()
        while self.kept and now_s - self.kept[0].at_s > SPARSE_FOR_S:
            self.kept.popleft()
        dense_from = next(
            (i for i, kept in enumerate(self.kept) if now_s - kept.at_s <= DENSE_FOR_S), len(self.kept)
        )
        # Only the newest of the old ones can have become too dense since the last time.
        if (
            dense_from >= 2
            and self.kept[dense_from - 1].at_s - self.kept[dense_from - 2].at_s < SPARSE_EVERY_S
        ):
            del self.kept[dense_from - 1]

    def _note_speeds(self, kept: Kept) -> None:
        before = next((k for k in reversed(self.kept) if kept.at_s - k.at_s >= MIN_RATE_SPAN_S), None)
        if before is None:
            return
        seconds = kept.at_s - before.at_s
        total = 0.0
        for name, device in kept.devices.items():
            earlier = before.devices.get(name)
            speed = max(0.0, (device.work.tokens - (earlier.work.tokens if earlier else 0)) / seconds)
            self.device_history.setdefault(name, deque(maxlen=HISTORY)).append(speed)
            total += speed
        self.history.append(total)

    def view(self, window_s: float) -> ServiceView | None:
        """The service over the window; None before the first snapshot."""
        latest = self.latest
        if latest is None:
            return None
        before = self.baseline(window_s)
        seconds = latest.at_s - before.at_s if before else 0.0
        return ServiceView(latest.snapshot, before.snapshot if before else None, seconds, list(self.history))

    def device_views(self, window_s: float) -> list[DeviceView]:
        """Every device over the window, in the service's order."""
        latest = self.latest
        if latest is None:
            return []
        before = self.baseline(window_s)
        seconds = latest.at_s - before.at_s if before else 0.0
        return [
            DeviceView(
                service=self.name,
                device=device,
                before=before.devices.get(name) if before else None,
                seconds=seconds,
                history=list(self.device_history.get(name, ())),
            )
            for name, device in latest.devices.items()
        ]


@dataclass(slots=True)
class Model:
    """All services that are watched."""

    services: list[ServiceModel]

    @classmethod
    def of(cls, names: Sequence[str]) -> Model:
        return cls([ServiceModel(name) for name in names])

    def take(self, source: int, snapshot: ServiceSnapshot, num_bytes: int) -> None:
        """Take in a snapshot of the service at index `source`."""
        service = self.services[source]
        service.num_bytes += num_bytes
        service.arrivals += 1
        service.take(snapshot)

    def note_links(self, links: Sequence[Link]) -> None:
        for service, link in zip(self.services, links, strict=True):
            service.link = link

    def reset(self) -> None:
        for service in self.services:
            service.reset()

    def device_views(self, window_s: float) -> list[DeviceView]:
        """The devices of all services."""
        return [view for service in self.services for view in service.device_views(window_s)]
