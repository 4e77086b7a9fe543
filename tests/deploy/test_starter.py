"""`deploy init` writes an inventory that can be read at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from starsd_deploy.cli import command
from starsd_deploy.inventory import Role, load_fleet, parse_fleet
from starsd_deploy.starter import starter_fleet
from starsd_edge.errors import ConfigError, UsageError


def test_first_of_several_hosts_drafts_for_the_others() -> None:
    fleet = parse_fleet(
        starter_fleet(("me@10.0.0.2", "edge@nano1:2222", "[fe80::1]"), None), Path("fleet.toml")
    )
    desk, nano, other = fleet.devices
    assert (desk.name, desk.role, desk.host, desk.user) == ("10-0-0-2", Role.DRAFT, "10.0.0.2", "me")
    assert (nano.name, nano.role, nano.port, nano.service) == ("nano1", Role.TARGET, 2222, ("10-0-0-2",))
    assert (other.host, other.service) == ("fe80::1", ("10-0-0-2",))


def test_single_host_is_a_target_without_a_service() -> None:
    (only,) = parse_fleet(starter_fleet(("nano1",), None), Path("fleet.toml")).devices
    assert (only.role, only.service) == (Role.TARGET, ())


@pytest.mark.parametrize("host", ["_lab.example.org", "[::1]", "a." * 60 + "org", "my_nano"])
def test_every_address_that_is_taken_makes_an_inventory_that_can_be_read(host: str) -> None:
    (only,) = parse_fleet(starter_fleet((host,), None), Path("fleet.toml")).devices
    assert only.host == host.strip("[]")


@pytest.mark.parametrize(
    ("hosts", "draft", "message"),
    [
        (("a", "a"), None, "same device name"),
        (("a b:c:d",), None, "not of the form"),
        (("a b",), None, "'a b' is not of the form"),
        (("me you@nano1",), None, "not of the form"),
        (('a"b',), None, "not of the form"),
        (("-v",), None, "not of the form"),
        (("nano1..lan",), None, "not of the form"),
        (("10.0.0.256",), None, "not of the form"),
        (("[fe80:::1]",), None, "not of the form"),
        (("nano1:70000",), None, "not of the form"),
        (("a",), "b", "not among"),
    ],
)
def test_mistakes(hosts: tuple[str, ...], draft: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        starter_fleet(hosts, draft)


def test_file_is_written_once_and_never_over_another(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    words = ["init", "desk", "edge@nano1", "--fleet", str(path)]
    assert CliRunner().invoke(command, words).exit_code == 0
    assert [device.name for device in load_fleet(path).devices] == ["desk", "nano1"]
    again = CliRunner().invoke(command, words)
    assert isinstance(again.exception, UsageError)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    told = CliRunner().invoke(command, ["init", "desk", "--fleet", str(tmp_path / "gone" / "fleet.toml")])
    assert isinstance(told.exception, ConfigError)
