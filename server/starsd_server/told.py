"""What a device tells of itself: several programs may run on it, and each reports for its own sessions."""

from __future__ import annotations

from starsd_edge.protocol.telemetry import (
    BoardReading,
    DeviceSnapshot,
    EdgeReport,
    EdgeSession,
    Energy,
    Work,
    added,
    can_be_told,
)

__all__ = ["Told"]

# Programs of one device told apart, more than it may have sessions; what older ones did is kept as a sum.
MAX_PROGRAMS = 16


class Told:
    """The newest report of each program, by its `edge_boot`; counts never fall when one of them ends."""

    def __init__(self) -> None:
        self._reports: dict[str, EdgeReport] = {}  # the newest stands last
        self._ended = Work()
        self._ended_energy = Energy()

    def take(self, report: EdgeReport) -> None:
        """Raises ValueError, and takes nothing, where no snapshot could tell what it comes to with the
        others: one device must not make the service unreadable."""
        before = dict(self._reports)
        self._reports.pop(report.edge_boot, None)
        self._reports[report.edge_boot] = report
        sums = DeviceSnapshot("", reconnects=self.reconnects, work=self.work or Work(), energy=self.energy)
        if not can_be_told(sums):
            self._reports = before
            raise ValueError("the counts of a report are beyond all measure")
        if len(self._reports) > MAX_PROGRAMS:
            oldest = self._reports.pop(next(iter(self._reports)))
            self._ended = added([self._ended, *(session.work for session in oldest.sessions)])
            if oldest.energy is not None:
                self._ended_energy = _sum(self._ended_energy, oldest.energy)

    @property
    def newest(self) -> EdgeReport | None:
        """What is of the moment (jitter, plain speed) is the newest program's."""
        return self._reports[next(reversed(self._reports))] if self._reports else None

    @property
    def sessions(self) -> dict[str, EdgeSession]:
        """Every session that was told of, by its name."""
        return {session.session: session for report in self._reports.values() for session in report.sessions}

    @property
    def work(self) -> Work | None:
        """Of all programs together; None when none told of a session."""
        works = [session.work for report in self._reports.values() for session in report.sessions]
        return added([self._ended, *works]) if works else None

    @property
    def reconnects(self) -> int:
        return sum(report.reconnects for report in self._reports.values())

    @property
    def board(self) -> BoardReading | None:
        """The newest reading there is."""
        return next((r.board for r in reversed(self._reports.values()) if r.board is not None), None)

    @property
    def energy(self) -> Energy | None:
        """The sum, though each program counts what the whole board used while it generated itself."""
        energies = [report.energy for report in self._reports.values() if report.energy is not None]
        if not energies:
            return None
        total = self._ended_energy
        for energy in energies:
            total = _sum(total, energy)
        return total


def _sum(one: Energy, other: Energy) -> Energy:
    return Energy(
        one.drafting_j + other.drafting_j,
        one.drafting_tokens + other.drafting_tokens,
        one.plain_j + other.plain_j,
        one.plain_tokens + other.plain_tokens,
    )
