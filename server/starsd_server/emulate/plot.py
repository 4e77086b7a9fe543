"""Throughput and busy fraction against the number of targets, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from starsd_edge.bench.result_files import save_picture
from starsd_server.emulate.bench import BenchRow
from starsd_server.scheduling import Policy

__all__ = ["draw"]

MARKERS = {
    Policy.SERIAL.value: ("s", "--"),
    Policy.WHOLE.value: ("^", ":"),
    Policy.BATCHED.value: ("o", "-"),
}


def draw(rows: Sequence[BenchRow], title: str, file: Path) -> None:
    """Write a picture. Raises UsageError where it cannot be written."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for scheduler, (marker, line) in MARKERS.items():
        own = sorted((row for row in rows if row.scheduler == scheduler), key=lambda row: row.targets)
        if not own:
            continue
        targets = [row.targets for row in own]
        style = {"marker": marker, "linestyle": line, "label": scheduler}
        left.plot(targets, [row.system_tokens_per_s for row in own], **style)
        right.plot(targets, [row.engine_busy_fraction for row in own], **style)
    for axes, label in ((left, "tokens/s of all targets"), (right, "engine busy, share of the time")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("targets")
        axes.set_ylabel(label)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    right.set_ylim(0, 1.05)
    ticks = sorted({row.targets for row in rows})
    for axes in (left, right):
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    save_picture(figure, file, 120)
    pyplot.close(figure)
