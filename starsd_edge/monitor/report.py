"""The figures as text for scripts and bug reports: JSON, CSV, Markdown. Pure."""

from __future__ import annotations

import csv
import enum
import io
import json
from typing import Any

from starsd_edge.monitor.alarms import alarms_of
from starsd_edge.monitor.figures import DEVICE_FIGURES, SERVICE_FIGURES, Figure, Value
from starsd_edge.monitor.format import Form, clean
from starsd_edge.monitor.model import Model
from starsd_edge.monitor.session_figures import SESSION_FIGURES
from starsd_edge.monitor.views import SessionView

__all__ = ["Format", "report"]

ROUND_TO = 6  # digits behind the point: a microsecond


class Format(enum.Enum):
    """What a report is written in."""

    JSON = "json"
    CSV = "csv"
    MARKDOWN = "markdown"


def report(model: Model, window_s: float, form: Format, *, head: bool = True) -> str:
    """Services, devices and alarms over the window. CSV has the devices only, one a line; `head` its
    titles."""
    if form is Format.JSON:
        return json.dumps(as_data(model, window_s), allow_nan=False)
    if form is Format.CSV:
        return as_csv(model, window_s, head=head)
    return as_markdown(model, window_s)


def as_data(model: Model, window_s: float) -> dict[str, Any]:
    """Everything, by the keys that docs/metrics.md defines; None for what is not known."""
    services = []
    for service in model.services:
        view = service.view(window_s)
        figures = {figure.key: plain(figure.value(view)) for figure in SERVICE_FIGURES} if view else {}
        services.append(
            {
                **figures,
                "service": service.name,
                "link": service.link.state.value,
                "link_advice": service.link.advice,
                "devices": [
                    {figure.key: plain(figure.value(device)) for figure in DEVICE_FIGURES}
                    | {
                        "depth_rates": [round(rate, ROUND_TO) for rate in device.work.depth_rates],
                        "fallback_reasons": device.work.fallbacks,
                        "each_session": [session_data(session) for session in device.sessions],
                    }
                    for device in service.device_views(window_s)
                ],
            }
        )
    devices = model.device_views(window_s)
    alarms = [
        {"severity": a.severity.name.lower(), "what": a.what, "where": a.where, "why": a.why}
        for a in alarms_of(model, devices, window_s)
    ]
    return {"services": services, "alarms": alarms}


def session_data(session: SessionView) -> dict[str, Value]:
    return {figure.key: plain(figure.value(session)) for figure in SESSION_FIGURES}


def plain(value: Value) -> Value:
    return round(value, ROUND_TO) if isinstance(value, float) else value


def as_csv(model: Model, window_s: float, *, head: bool) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if head:
        writer.writerow(["service", *(figure.key for figure in DEVICE_FIGURES)])
    for service in model.services:
        for view in service.device_views(window_s):
            cells = (plain(figure.value(view)) for figure in DEVICE_FIGURES)
            writer.writerow([safe_cell(service.name), *(safe_cell(cell) for cell in cells)])
    return text.getvalue().rstrip("\n")


def safe_cell(value: Value) -> Value:
    """Text that a spreadsheet would take for a formula is marked as text."""
    if not isinstance(value, str):
        return value
    text = clean(value)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def as_markdown(model: Model, window_s: float) -> str:
    """A table of services, one of devices with the figures that any device has, and the alarms."""
    lines = []
    for service in model.services:
        view = service.view(window_s)
        lines.append(f"## {escaped(service.name)}: {service.link.state.value}\n")
        if service.link.advice:
            lines.append(service.link.advice + "\n")
        if view is None:
            continue
        facts = [
            f"{figure.title} {figure.text(view)}"
            for figure in SERVICE_FIGURES
            if figure.form is not Form.TEXT
        ]
        lines.append(", ".join(facts) + "\n")
        devices = service.device_views(window_s)
        figures = [f for f in DEVICE_FIGURES if any(f.value(device) is not None for device in devices)]
        if devices:
            lines += table(figures, [[escaped(f.text(device)) for f in figures] for device in devices])
    alarms = alarms_of(model, model.device_views(window_s), window_s)
    lines += [f"* **{alarm.what}** {escaped(alarm.where)}: {escaped(alarm.why)}" for alarm in alarms]
    return "\n".join(lines)


def table(figures: list[Figure[Any]], rows: list[list[str]]) -> list[str]:
    head = [figure.title for figure in figures]
    rule = [":--" if figure.form is Form.TEXT else "--:" for figure in figures]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)] + [""]


def escaped(text: str) -> str:
    return clean(text).replace("|", "\\|").replace("<", "&lt;")
