"""No number of a command line is infinite or none at all."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from starsd_edge.cli.main import cli
from starsd_edge.ranges import FiniteRange


def options(command: click.Command, context: click.Context) -> Iterator[click.Parameter]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                yield from options(inner, click.Context(inner, info_name=name, parent=context))
    yield from command.params


def test_every_fraction_of_the_command_line_is_finite_and_in_a_range() -> None:
    found = [
        option
        for option in options(cli, click.Context(cli))
        if isinstance(option.type, click.types.FloatParamType)
    ]
    assert len(found) > 20
    assert [option.name for option in found if not isinstance(option.type, FiniteRange)] == []


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "-1", "x"])
def test_what_is_no_finite_number_is_refused(value: str) -> None:
    @click.command()
    @click.option("--seconds", type=FiniteRange(0))
    def wait(seconds: float) -> None:
        importlib.import_module("time").sleep(seconds)

    result = CliRunner().invoke(wait, ["--seconds", value])
    assert result.exit_code == 2
    assert "--seconds" in result.output
