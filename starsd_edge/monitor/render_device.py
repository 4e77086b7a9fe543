"""The page of one device: where the time of a round goes, what is accepted, its sessions."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from starsd_edge.latency import Histogram
from starsd_edge.monitor.figures import DEVICE_FIGURES
from starsd_edge.monitor.format import UNKNOWN, Form, bar, clean, fit, right, shown, sparkline
from starsd_edge.monitor.screen import STATUS_STYLES, Frame, State, line, part, scrolled, titled
from starsd_edge.monitor.session_figures import SESSION_COLUMNS, SESSION_FIGURES
from starsd_edge.monitor.views import DeviceView
from starsd_edge.protocol.telemetry import Stage

__all__ = ["device_page", "identity"]

BAR_WIDTH = 24
MAPPED_IPV4 = "::ffff:"  # how a socket for both kinds of addresses writes the older kind
STAGE_TITLES = ("STAGE", "ROUNDS", "P50", "P95", "P99", "MEAN")
# Shown by the stage table, the header or the board page already.
SHOWN_ELSEWHERE = ("device", "state", "reason", "gpu_load", "cpu_load", "ram_share", "temperature_c")


def device_page(state: State, width: int, height: int) -> Frame:
    view = state.selected
    if view is None:
        return Frame([line(width, part("no device is selected", "dim"))])
    body = [identity(view, width)]
    if view.reason:
        body.append(line(width, part(f"  {view.reason}", "yellow")))
    body += [Text("", end=""), titled(width, "Time of a round")]
    body += stage_table(view, width, ascii_only=state.ascii_only)
    body += [Text("", end=""), titled(width, "Acceptance by depth (of the walks that came so far)")]
    body += depth_bars(view, width, ascii_only=state.ascii_only)
    body += [Text("", end=""), titled(width, "Tokens/s")]
    body.append(line(width, part("  " + sparkline(view.history, width - 4, ascii_only=state.ascii_only))))
    body += [Text("", end=""), titled(width, "Figures")]
    body += figure_grid(view, width)
    if view.work.fallbacks:
        body += [Text("", end=""), titled(width, "Went over to plain decoding because")]
        body += [line(width, part(f"  {n:>6} x {why}")) for why, n in view.work.fallbacks.items()]
    if view.device.refusals:
        body += [Text("", end=""), titled(width, "Refused by the service since its start")]
        body += [line(width, part(f"  {n:>6} x {why}")) for why, n in view.device.refusals.items()]
    body += [Text("", end=""), titled(width, "Sessions")]
    body += session_table(view, width)
    return scrolled(body, height, state.ui.scroll)


def identity(view: DeviceView, width: int) -> Text:
    device = view.device
    facts = [
        device.address.removeprefix(MAPPED_IPV4),
        f"key {device.fingerprint}" if device.fingerprint else "",
        device.software,
    ]
    facts.append(f"features {device.feature_dtype}" if device.feature_dtype else "")
    return line(
        width,
        part(f"{clean(device.device)} ", "bold"),
        part(f"{view.status.value}  ", STATUS_STYLES[view.status]),
        part("  ".join(fact for fact in facts if fact), "dim"),
    )


def stage_table(view: DeviceView, width: int, *, ascii_only: bool) -> list[Text]:
    """Percentiles of each stage, and its share of the sum of medians."""
    histograms = {stage: view.work.stage(stage) for stage in Stage}
    medians = {stage: histogram.quantile(0.5) or 0.0 for stage, histogram in histograms.items()}
    whole = sum(medians.values())
    head = "  " + fit(STAGE_TITLES[0], 8) + "".join(right(title, 9) for title in STAGE_TITLES[1:])
    lines = [line(width, part(head, "dim"))]
    bar_width = min(BAR_WIDTH, width - cell_len(head) - 2)
    for stage, histogram in histograms.items():
        share = medians[stage] / whole if whole else 0.0
        cells = "".join(right(text, 9) for text in stage_cells(histogram))
        filled = bar(share, bar_width, ascii_only=ascii_only) if histogram.count else ""
        lines.append(line(width, part("  " + fit(stage.value, 8) + cells + "  "), part(filled, "cyan")))
    return lines


def stage_cells(histogram: Histogram) -> list[str]:
    times = [histogram.quantile(q) for q in (0.5, 0.95, 0.99)] + [histogram.mean]
    return [shown(histogram.count, Form.COUNT), *(shown(time, Form.SECONDS) for time in times)]


def depth_bars(view: DeviceView, width: int, *, ascii_only: bool) -> list[Text]:
    rates = view.work.depth_rates
    if not rates:
        return [line(width, part(f"  {UNKNOWN}", "dim"))]
    return [
        line(
            width,
            part(f"  {depth:>2} "),
            part(bar(rate, BAR_WIDTH, ascii_only=ascii_only), "cyan"),
            part(f" {rate:>4.0%}"),
        )
        for depth, rate in enumerate(rates, 1)
    ]


def figure_grid(view: DeviceView, width: int) -> list[Text]:
    """The other figures in as many columns as fit, by name."""
    figures = [figure for figure in DEVICE_FIGURES if figure.key not in SHOWN_ELSEWHERE]
    cells = [f"  {fit(figure.key, 26)}{right(figure.text(view), 9)}" for figure in figures]
    per_line = max(1, width // 38)
    rows = -(-len(cells) // per_line)
    return [line(width, part(" ".join(cells[row::rows]))) for row in range(rows)]


def session_table(view: DeviceView, width: int) -> list[Text]:
    if not view.sessions:
        return [line(width, part("  none", "dim"))]
    columns = [column for column in SESSION_COLUMNS if width >= column.from_width or column.from_width <= 80]

    def row(texts: dict[str, str]) -> Text:
        cells = [(fit if column.is_text else right)(texts[column.key], column.width) for column in columns]
        return line(width, part("  " + " ".join(cells), "dim" if texts is titles else ""))

    titles = {figure.key: figure.title for figure in SESSION_FIGURES}
    lines = [row(titles)]
    for session in view.sessions:
        lines.append(row({figure.key: figure.text(session) for figure in SESSION_FIGURES}))
        if session.session.reason:
            lines.append(line(width, part(f"      {session.session.reason}", "yellow")))
    return lines
