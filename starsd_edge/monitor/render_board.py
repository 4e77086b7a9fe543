"""The board page of a device: load, memory, temperatures and power, as far as the board says."""

from __future__ import annotations

from rich.text import Text

from starsd_edge.monitor.figures import DEVICE_FIGURES
from starsd_edge.monitor.format import UNKNOWN, Form, bar, fit, right, shown
from starsd_edge.monitor.render_device import identity
from starsd_edge.monitor.screen import Frame, State, line, part, scrolled, titled
from starsd_edge.protocol.telemetry import BoardReading

__all__ = ["board_page"]

BAR_WIDTH = 24
NAME_WIDTH = 16


def board_page(state: State, width: int, height: int) -> Frame:
    view = state.selected
    if view is None:
        return Frame([line(width, part("no device is selected", "dim"))])
    body = [identity(view, width)]
    board = view.board
    if board is None:
        body.append(line(width, part("  this device reports nothing about its board", "dim")))
        return scrolled(body, height, state.ui.scroll)
    body += facts(board, width)
    body += [Text("", end=""), *loads(board, width, ascii_only=state.ascii_only)]
    body += [Text("", end=""), titled(width, "Temperatures")]
    zones = [f"{fit(name, 12)}{shown(c, Form.CELSIUS):>6}" for name, c in board.temperatures_c.items()]
    body += in_columns(zones, 22, width)
    body += [Text("", end=""), titled(width, "Power")]
    rails = [f"{fit(name, 16)}{shown(watts, Form.WATTS):>7}" for name, watts in board.rails_w.items()]
    body += in_columns(rails, 27, width)
    body.append(pair("whole board", power_text(board), width))
    for figure in DEVICE_FIGURES:
        if figure.key.endswith("joules_per_token"):
            body.append(pair(figure.title, figure.text(view), width))
    if board.other:
        body += [Text("", end=""), titled(width, "Fields this version does not know")]
        body += [pair(name, value, width) for name, value in board.other.items()]
    return scrolled(body, height, state.ui.scroll)


def facts(board: BoardReading, width: int) -> list[Text]:
    release = f"{board.jetpack}  L4T {board.l4t}" if board.l4t else board.jetpack
    named = [("model", board.model), ("JetPack", release), ("power mode", board.power_mode)]
    return [pair(name, text, width) for name, text in [*named, ("read from", board.source)]]


def loads(board: BoardReading, width: int, *, ascii_only: bool) -> list[Text]:
    """A bar each for GPU, memory bus, memory, swap and every core."""
    rows: list[tuple[str, float | None, str]] = [
        ("GPU", board.gpu_load, megahertz(board.gpu_mhz)),
        ("memory bus", board.memory_bus_load, ""),
        ("RAM", share(board.ram_used_bytes, board.ram_total_bytes), memory(board)),
        ("swap", share(board.swap_used_bytes, board.swap_total_bytes), swap(board)),
    ]
    for core, load in enumerate(board.cpu_loads):
        clock = board.cpu_mhz[core] if core < len(board.cpu_mhz) else None
        rows.append((f"CPU {core}", load, "off" if load is None else megahertz(clock)))
    return [load_line(name, load, more, width, ascii_only=ascii_only) for name, load, more in rows]


def load_line(name: str, load: float | None, more: str, width: int, *, ascii_only: bool) -> Text:
    filled = bar(load, BAR_WIDTH, ascii_only=ascii_only) if load is not None else " " * BAR_WIDTH
    return line(
        width,
        part(f"  {fit(name, NAME_WIDTH)}"),
        part(filled, "cyan"),
        part(f" {right(shown(load, Form.SHARE), 5)}  {more}"),
    )


def share(used: int | None, total: int | None) -> float | None:
    return used / total if used is not None and total else None


def memory(board: BoardReading) -> str:
    return f"{shown(board.ram_used_bytes, Form.BYTES)} of {shown(board.ram_total_bytes, Form.BYTES)}"


def swap(board: BoardReading) -> str:
    if not board.swap_total_bytes:
        return "none" if board.swap_total_bytes == 0 else ""
    return f"{shown(board.swap_used_bytes, Form.BYTES)} of {shown(board.swap_total_bytes, Form.BYTES)}"


def megahertz(clock: float | None) -> str:
    return f"{clock:.0f} MHz" if clock else ""


def power_text(board: BoardReading) -> str:
    """The total and where it comes from: one rail, or a sum that is only about the whole board."""
    if board.power_w is None:
        return ""
    watts = shown(board.power_w, Form.WATTS)
    if len(board.power_rails) == 1:
        return f"{watts} (rail {board.power_rails[0]})"
    return f"{watts} (about: {' + '.join(board.power_rails)})"


def pair(name: str, text: str, width: int) -> Text:
    return line(width, part(f"  {fit(name, NAME_WIDTH)}{text or UNKNOWN}"))


def in_columns(cells: list[str], cell_width: int, width: int) -> list[Text]:
    if not cells:
        return [line(width, part(f"  {UNKNOWN}", "dim"))]
    per_line = max(1, (width - 2) // cell_width)
    return [
        line(width, part("  " + "".join(fit(cell, cell_width) for cell in cells[at : at + per_line])))
        for at in range(0, len(cells), per_line)
    ]
