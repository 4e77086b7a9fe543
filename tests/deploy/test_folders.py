"""A bundle or head that is missing here is told before any device is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from starsd_deploy.cli import command
from starsd_edge.errors import ConfigError

FLEET = """\
[defaults]
bundle = "bundle"

[devices.desk]
address = "127.0.0.1"
port = 1
roles = ["draft"]
head = "{head}"

[devices.nano1]
address = "127.0.0.1"
port = 1
roles = ["target"]
"""


@pytest.mark.parametrize("name", ["plan", "apply"])
@pytest.mark.parametrize(
    ("head", "told"),
    [
        ("/nope", "line 8, devices.desk.head: /nope: no such folder"),
        ("here", "line 2, defaults.bundle: {folder}/bundle: no such folder; `starsd export` makes a bundle"),
    ],
)
def test_a_folder_that_is_missing_is_told_with_its_line_and_nothing_else(
    name: str, head: str, told: str, tmp_path: Path
) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(FLEET.format(head=head))
    (tmp_path / "here").mkdir()
    done = CliRunner().invoke(command, [name, "--fleet", str(fleet)])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith(f"{fleet}, {told.format(folder=tmp_path)}")
    assert done.output == ""
