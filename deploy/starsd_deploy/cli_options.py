"""Options that several `starsd deploy` commands share, and how a command ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from starsd_deploy.inventory import Device, Fleet, load_fleet
from starsd_deploy.ssh_config import load_ssh_files
from starsd_deploy.sudo import SudoPassword
from starsd_deploy.survey import Login
from starsd_edge.errors import StarSDError, UsageError

__all__ = ["Selection", "ask_on_terminal", "confirm_on_terminal", "end_with", "selecting", "sudo_from"]

DEFAULT_FLEET = "fleet.toml"
PARALLEL = 10

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Selection:
    """The inventory, the devices chosen from it, and how to get to them."""

    fleet: Fleet
    devices: tuple[Device, ...]
    login: Login
    parallel: int


def selecting(function: Function) -> Function:
    """The options that choose devices; the command gets one `selection`."""

    def wrapped(
        fleet: Path,
        limit: tuple[str, ...],
        exclude: tuple[str, ...],
        tags: tuple[str, ...],
        ssh_config: Path | None,
        ask_password: bool,
        parallel: int,
        **others: Any,
    ) -> Any:
        inventory = load_fleet(fleet)
        devices = inventory.select(_words(limit), _words(exclude), _words(tags))
        login = Login(load_ssh_files(ssh_config), ask_on_terminal if ask_password else None)
        return function(selection=Selection(inventory, devices, login, parallel), **others)

    wrapped.__name__, wrapped.__doc__ = function.__name__, function.__doc__
    wrapped.__dict__.update(function.__dict__)  # click keeps the options of outer decorators there
    options = [
        click.option("--fleet", type=click.Path(path_type=Path), default=DEFAULT_FLEET, show_default=True),
        click.option(
            "--limit", multiple=True, help="Only devices whose name matches; wildcards, commas, repeats."
        ),
        click.option("--exclude", multiple=True, help="Not these."),
        click.option("--tags", multiple=True, help="Only devices with one of these tags."),
        click.option("--ssh-config", type=click.Path(path_type=Path), help="Instead of ~/.ssh/config."),
        click.option("--ask-password", is_flag=True, help="Ask for an SSH password or a key's passphrase."),
        click.option("--parallel", type=click.IntRange(1), default=PARALLEL, show_default=True),
    ]
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]  # click sees a command function either way


def sudo_from(file: Any) -> SudoPassword:
    if file is not None:
        password = file.readline().rstrip("\n")
        return SudoPassword(lambda question: password)
    return SudoPassword(ask_on_terminal)


def ask_on_terminal(question: str) -> str:
    """Ask without echo; there must be somebody to ask."""
    if not sys.stdin.isatty():
        raise UsageError(
            f"{question.strip()} is needed and there is no terminal to ask on; see --sudo-password-file"
        )
    return str(click.prompt(question.removesuffix(": "), hide_input=True, err=True))


def confirm_on_terminal(question: str, *, err: bool) -> None:
    """Ask whether to go on; end the command if not.

    Raises:
        UsageError: nobody is there to ask.
    """
    if not sys.stdin.isatty():
        raise UsageError(f"{question} There is no terminal to ask on: add -y")
    click.confirm(question, abort=True, err=err)


def _words(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word.strip() for value in values for word in value.split(",") if word.strip())


def end_with(errors: tuple[StarSDError | None, ...], *, already_shown: bool = True) -> None:
    """End with the exit code of the first error; its text is on the screen already."""
    first = next((error for error in errors if error is not None), None)
    if first is None:
        return
    if not already_shown:
        raise first
    raise SystemExit(first.exit_code)
