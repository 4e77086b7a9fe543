"""`starsd draft`: what has to do with draft heads, each part loaded when it is called."""

from __future__ import annotations

from starsd_edge.cli.main import CommandEntry, LazyGroup

__all__ = ["command"]

command = LazyGroup(
    name="draft",
    help="Serve, train and convert draft heads.",
    entries={
        "serve": CommandEntry("starsd_server.cli_serve", "Draft for many edges from this machine."),
        "train": CommandEntry("starsd_server.cli_train", "Train a head for a model you exported."),
        "convert": CommandEntry("starsd_server.cli_convert", "Read an EAGLE head as published."),
    },
)
