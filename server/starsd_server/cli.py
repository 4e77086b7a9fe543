"""`starsd draft`: what has to do with draft heads, each part loaded when it is called."""

from __future__ import annotations

from starsd_edge.cli.main import CommandEntry, LazyGroup

__all__ = ["command"]

command = LazyGroup(
    name="draft",
    help="Serve, train and convert draft heads.",
    entries={
        "serve": CommandEntry("starsd_server.cli_serve", "Draft for many edges from this machine."),
    },
)
