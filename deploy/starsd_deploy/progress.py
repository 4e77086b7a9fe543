"""What a deployment looks like: on a terminal a line a device with its step and bytes, else plain lines."""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from starsd_deploy.plan import DevicePlan
from starsd_deploy.steps import Step, Upload, describe

__all__ = ["FleetProgress"]


class FleetProgress:
    """An observer for the runner. On a terminal lines change in place, else each step is printed once."""

    def __init__(self, console: Console, plans: tuple[DevicePlan, ...]) -> None:
        self._console = console
        self._plans = {plan.device: plan for plan in plans}
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()
        self._bars = Progress(
            TextColumn("{task.fields[device]:<16}"),
            BarColumn(bar_width=20),
            DownloadColumn(),
            TransferSpeedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> FleetProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def step_begins(self, device: str, step: Step) -> None:
        """Show what a device does now."""
        if not self._console.is_terminal:
            self._console.print(f"{device}: {describe(step)}", highlight=False, markup=False)
            return
        task = self._task(device)
        self._bars.update(task, description=describe(step)[2:])

    def step_ends(self, device: str, step: Step) -> None:
        """A finished upload fills its bar, so that a resumed or repaired one never seems short."""
        if isinstance(step, Upload) and self._console.is_terminal:
            self._bars.update(self._task(device), completed=step.size)

    def bytes_settled(self, device: str, count: int) -> None:
        """Advance a device's bar."""
        if self._console.is_terminal:
            self._bars.advance(self._task(device), count)

    def _task(self, device: str) -> TaskID:
        with self._lock:
            if device not in self._tasks:
                total = self._plans[device].upload_bytes
                self._tasks[device] = self._bars.add_task("", total=total, device=device)
            return self._tasks[device]
