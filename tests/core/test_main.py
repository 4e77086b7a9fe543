"""The front command."""

from __future__ import annotations

from click.testing import CliRunner

from starsd_edge.cli.main import cli


def test_help_answers_and_names_the_program() -> None:
    """`starsd --help` needs nothing but the command table."""
    result = CliRunner().invoke(cli, ["--help"])
    assert result.exit_code == 0
    assert "many edge devices" in result.output
