"""`starsd`: one command, whose sub-commands are loaded when they are called.

The table below is all that `starsd --help` needs, so that it answers at once; a sub-command's module, and
with it torch or onnxruntime, is imported only when it runs. Products are reached by name, never imported by
the core.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from starsd_edge.cli.streams import open_streams
from starsd_edge.errors import MissingDependencyError, ResourceError, StarSDError
from starsd_edge.extras import EXTRA_OF, install_hint

__all__ = ["COMMANDS", "cli", "main"]

INTERRUPTED_EXIT_CODE = 130  # what a shell reports for a program ended by Ctrl-C


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """Where a sub-command lives: `module` has a click command called `command`. One without a summary is not
    for people, and not listed."""

    module: str
    summary: str


COMMANDS: dict[str, CommandEntry] = {
    "monitor": CommandEntry("starsd_edge.cli.monitor", "Watch every link and device in one terminal."),
    "demo": CommandEntry("starsd_edge.cli.demo", "Plain against StarSD decoding, in real processes."),
    "demo-target": CommandEntry("starsd_edge.cli.demo_target", ""),
    "chat": CommandEntry("starsd_edge.cli.chat", "Talk to a model in the terminal."),
    "serve": CommandEntry("starsd_edge.cli.serve", "Serve a model to programs that speak OpenAI's API."),
    "export": CommandEntry("starsd_edge.cli.export", "Make a bundle of a model."),
    "bundle": CommandEntry("starsd_edge.cli.bundle", "Look at a bundle, or prove that it is whole."),
    "keys": CommandEntry("starsd_edge.cli.keys", "Make a device's key, and say whom a service lets in."),
    "ping": CommandEntry("starsd_edge.cli.ping", "Measure the link to a draft service."),
    "draft": CommandEntry("starsd_server.cli", "Serve draft heads to many edges, and make them."),
    "doctor": CommandEntry("starsd_edge.cli.doctor", "What this machine has for each role, and the fixes."),
    "bench": CommandEntry("starsd_edge.cli.bench", "Measure: tree sizes, waits, devices."),
    "capacity": CommandEntry("starsd_server.capacity.cli", "How many devices a draft host carries."),
    "deploy": CommandEntry("starsd_deploy.cli", "Provision and update a fleet of devices over SSH."),
}


class LazyGroup(click.Group):
    """A click group over a table of entries; a product's own group (`starsd draft`) is one, too."""

    def __init__(self, *args: Any, entries: dict[str, CommandEntry] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._entries = COMMANDS if entries is None else entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._entries)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            listed = [name for name, entry in self._entries.items() if entry.summary]
            near = difflib.get_close_matches(args[0], listed, 1)
            if not near:
                raise
            words = f"there is no command '{args[0]}'; did you mean '{near[0]}'?"
            raise click.UsageError(words, ctx) from error

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self._entries.get(cmd_name)
        if entry is None:
            return None
        command = importlib.import_module(entry.module).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, entry.summary) for name, entry in self._entries.items() if entry.summary]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def _show_version(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from starsd_edge.cli.drafts import software

        click.echo(software())
        context.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version, help="Show it."
)
def cli(debug: bool) -> None:
    """One draft service, many edge devices, the very same text."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run `starsd`; every StarSDError ends as one line on stderr and its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    open_streams()
    try:
        sys.exit(cli.main(args=args, prog_name="starsd", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except StarSDError as error:
        if "--debug" in args:
            traceback.print_exc()
        click.echo(f"starsd: {error}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(INTERRUPTED_EXIT_CODE)
    except Exception as error:
        if "--debug" in args:
            raise
        told = _told(error)
        click.echo(f"starsd: {told}", err=True)
        sys.exit(told.exit_code)


def _told(error: Exception) -> StarSDError:
    """What nobody down there put into words, in one line."""
    if (
        isinstance(error, ModuleNotFoundError)
        and (package := (error.name or "").partition(".")[0]) in EXTRA_OF
    ):
        return MissingDependencyError(f"this needs the {package} package: {install_hint(EXTRA_OF[package])}")
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return ResourceError(f"{where}{error.strerror}")
    if isinstance(error, MemoryError):
        return ResourceError("this machine has too little memory for that")
    first = next(iter(str(error).splitlines()), "")
    return StarSDError(
        f"unexpected {type(error).__name__}: {first[:200]} (a bug: add --debug after starsd and report it)"
    )
