"""The front command."""

from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

from starsd_edge.cli.main import cli, main
from starsd_edge.errors import MissingDependencyError


def test_help_answers_and_names_the_program() -> None:
    """`starsd --help` needs nothing but the command table."""
    result = CliRunner().invoke(cli, ["--help"])
    assert result.exit_code == 0
    assert "many edge devices" in result.output


@pytest.mark.parametrize(
    ("meant", "typed"),
    [("chat", ["chta"]), ("doctor", ["doctr"]), ("serve", ["draft", "srve"]), (None, ["zzzz"])],
)
def test_a_mistyped_command_is_told_what_may_be_meant(meant: str | None, typed: list[str]) -> None:
    result = CliRunner().invoke(cli, typed)
    assert result.exit_code == 2
    assert (f"did you mean '{meant}'?" in result.output) == (meant is not None)
    assert typed[-1] in result.output


def test_a_missing_package_is_one_line_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever command needs it, and however deep the import is."""
    monkeypatch.setitem(sys.modules, "paramiko", None)
    for name in [name for name in sys.modules if name.startswith("starsd_deploy")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as ended:
        main(["deploy", "--help"])
    assert ended.value.code == MissingDependencyError.exit_code
    assert capsys.readouterr().err == (
        "starsd: this needs the paramiko package: pip install '.[deploy]' in this project's folder\n"
    )


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            FileNotFoundError(2, "No such file or directory", "model.gguf"),
            "model.gguf: No such file or directory",
        ),
        (MemoryError(), "this machine has too little memory for that"),
        (
            ValueError("first\nsecond"),
            "unexpected ValueError: first (a bug: add --debug after starsd and report it)",
        ),
    ],
)
def test_an_unforeseen_error_is_one_line_too(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code not in (0, None)
    assert capsys.readouterr().err == f"starsd: {line}\n"
    with pytest.raises(type(error)):
        main(["--debug"])
