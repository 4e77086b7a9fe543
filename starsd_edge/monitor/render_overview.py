"""The overview: a head for each service, what is wrong, and a row for each device."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from starsd_edge.monitor.figures import SERVICE_BY_KEY, device_figure
from starsd_edge.monitor.format import clean, fit, right, sparkline
from starsd_edge.monitor.link_state import LinkState
from starsd_edge.monitor.model import ServiceModel
from starsd_edge.monitor.screen import STATUS_STYLES, Frame, State, alarm_lines, line, part
from starsd_edge.monitor.views import DeviceView

__all__ = ["overview"]

MAX_SERVICE_HEADS = 3  # more services than that share one line
SPARK_WIDTH = 16
WIDE = 100  # cells from which sparklines get their full width
HEAD_FIGURES = (
    "busy",
    "demand",
    "batch_rows",
    "step_p50_s",
    "queue_depth",
    "kv_share",
    "refused",
    "bytes_per_s",
)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the device table; it appears on screens at least `from_width` cells wide."""

    key: str
    width: int
    from_width: int = 80


SPARK = "spark"
# In the order of the screen. 80 columns hold those without a minimum, wider screens say more.
DEVICE, STATE = Column("device", 14), Column("state", 8)
COLUMNS = (
    DEVICE,
    STATE,
    Column("tokens_per_s", 6),
    Column(SPARK, 8),
    Column("acceptance_length", 5),
    Column("tree_nodes", 5, 96),
    Column("link_p50_s", 7),
    Column("link_p95_s", 7, 120),
    Column("link_p99_s", 7),
    Column("jitter_s", 7, 104),
    Column("queue_p99_s", 7),
    Column("draft_p50_s", 7, 112),
    Column("verify_p50_s", 7),
    Column("late_trees", 5, 128),
    Column("stale_trees", 5, 134),
    Column("timeouts", 4, 139),
    Column("speedup", 6, 146),
    Column("plain_share", 6, 153),
    Column("joules_per_token", 6, 160),
    Column("temperature_c", 5, 166),
    Column("gpu_load", 5, 172),
    Column("reconnects", 5, 178),
    Column("bytes_up_per_s", 7, 186),
    Column("bytes_down_per_s", 7, 194),
)


def overview(state: State, width: int, height: int) -> Frame:
    """The whole screen less title and footer."""
    lines: list[Text] = []
    services = state.model.services
    for service in services[:MAX_SERVICE_HEADS]:
        lines += service_head(state, service, width)
    if len(services) > MAX_SERVICE_HEADS:
        lines.append(line(width, part(f"... and {len(services) - MAX_SERVICE_HEADS} more services", "dim")))
    lines += what_is_wrong(state, width, max(4, height // 4))
    lines.append(Text("", end=""))
    columns = [column for column in COLUMNS if width >= column.from_width]
    lines.append(table_head(state, columns, width))
    lines += table_rows(state, columns, width, height - len(lines))
    return Frame(lines[:height])


def service_head(state: State, service: ServiceModel, width: int) -> list[Text]:
    view = service.view(state.ui.window_s)
    up = service.link.state is LinkState.UP
    shown_name = view.snapshot.service if view is not None and view.snapshot.service else service.name
    name = part(f"{fit(clean(shown_name), 14)} ", "bold")
    link = part(f"{service.link.state.value}  ", "green" if up else "bold red")
    if view is None:
        return [line(width, name, link, part("nothing heard yet", "dim"))]
    snapshot = view.snapshot
    spark = sparkline(
        view.history, SPARK_WIDTH if width >= WIDE else SPARK_WIDTH // 2, ascii_only=state.ascii_only
    )
    first = fitting(
        width,
        [name, link, part(f"{SERVICE_BY_KEY['tokens_per_s'].text(view)} tok/s {spark}", "bold")],
        [
            part(f"  devices {SERVICE_BY_KEY['devices'].text(view)}/{len(snapshot.devices)}"),
            part(f"  sessions {SERVICE_BY_KEY['sessions'].text(view)}"),
            part(f"  up {SERVICE_BY_KEY['uptime_s'].text(view)}"),
            part(f"  {view.engine.hardware}" if view.engine.hardware else "", "dim"),
            part(f"  {', '.join(head.name for head in snapshot.heads)}", "dim"),
        ],
    )
    figures = [SERVICE_BY_KEY[key] for key in HEAD_FIGURES]
    second = fitting(width, [], [part(f"  {figure.title} {figure.text(view)}") for figure in figures])
    return [first, second]


def fitting(width: int, needed: list[tuple[str, str]], more: list[tuple[str, str]]) -> Text:
    """The needed pieces, and of the others those that still fit in full."""
    room = width - sum(cell_len(text) for text, _ in needed)
    pieces = list(needed)
    for text, style in more:
        if cell_len(text) <= room:
            pieces.append((text, style))
            room -= cell_len(text)
    return line(width, *pieces)


def what_is_wrong(state: State, width: int, room: int) -> list[Text]:
    """The alarms, worst first; those that find no room are counted."""
    alarms = state.alarms
    lines: list[Text] = []
    for number, alarm in enumerate(alarms):
        more = alarm_lines(alarm, width)
        if len(lines) + len(more) > room - (number < len(alarms) - 1):
            left = f"   ... and {len(alarms) - number} more"
            return [*lines, line(width, part(left, "yellow"))]
        lines += more
    return lines


def table_head(state: State, columns: list[Column], width: int) -> Text:
    cells: list[tuple[str, str] | str] = []
    for column in columns:
        if column.key == SPARK:
            cells.append(part(f"{'':{column.width}} ", "reverse"))
            continue
        title = device_figure(column.key).title
        if column.key == state.ui.sort:
            title += "^" if state.ui.reverse else "v"
        text = fit(title, column.width) if is_text(column) else right(title, column.width)
        cells.append(part(f"{text} ", "bold reverse" if column.key == state.ui.sort else "reverse"))
    used = sum(column.width + 1 for column in columns)
    return line(width, *cells, part(" " * max(0, width - used), "reverse"))


def is_text(column: Column) -> bool:
    return column in (DEVICE, STATE)


def table_rows(state: State, columns: list[Column], width: int, room: int) -> list[Text]:
    """As many rows as fit, the selected one among them."""
    views = state.listed
    if not views:
        heard = any(service.latest for service in state.model.services)
        known = "no device is known to the service" if heard else "waiting for the first snapshot"
        nothing = "no device matches the filter" if state.views else known
        return [line(width, part(f"  {nothing}", "dim"))]
    selected = state.selected
    at = views.index(selected) if selected in views else 0
    above = len(views) > room
    rows = max(1, room - 1) if above else room
    first = min(max(0, at - rows + 1 if at >= rows else 0), max(0, len(views) - rows))
    lines = [
        row(view, columns, width, selected=view is selected, ascii_only=state.ascii_only)
        for view in views[first : first + rows]
    ]
    if above:
        lines.append(
            line(width, part(f"  {first + 1} to {first + len(lines)} of {len(views)} devices", "dim"))
        )
    return lines


def row(view: DeviceView, columns: list[Column], width: int, *, selected: bool, ascii_only: bool) -> Text:
    """Name and state with a style each; the numbers as one piece: fifty rows are drawn twice a second."""
    emphasis = "underline" if selected else ""
    name = fit((">" if selected else " ") + view.device.device, DEVICE.width) + " "
    state = fit(view.status.value, STATE.width) + " "
    numbers = [number(view, column, ascii_only=ascii_only) for column in columns[2:]]
    return line(
        width,
        part(name, f"bold {emphasis}".strip()),
        part(state, f"{STATUS_STYLES[view.status]} {emphasis}".strip()),
        (" ".join(numbers) + " ", emphasis),
    )


def number(view: DeviceView, column: Column, *, ascii_only: bool) -> str:
    if column.key == SPARK:
        return sparkline(view.history, column.width, ascii_only=ascii_only)
    return right(device_figure(column.key).text(view), column.width)
