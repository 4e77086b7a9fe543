"""`starsd keys`, as a person and as the deployer use it."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner

from starsd_edge.cli.keys import command
from starsd_edge.errors import ConfigError, StarSDError
from starsd_edge.link.keys import KeyPair
from starsd_edge.link.pins import Pin, edge_keys, pin_service
from starsd_edge.link.sockets import make_context, service_socket


def keys(*arguments: str) -> str:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STARSD_KEYS", str(tmp_path / "keys"))
    return tmp_path / "keys"


def test_the_deployers_way_from_a_fresh_device_to_a_trusted_one(folder: Path, tmp_path: Path) -> None:
    """generate, show --public on the device; trust NAME KEY --dir on the service."""
    keys("generate", "--dir", str(folder), "--name", "device")
    public = keys("show", "--dir", str(folder), "--public").strip()
    assert (folder / "device.pub").read_text().strip() == public
    assert stat.S_IMODE((folder / "device.key").stat().st_mode) == 0o600
    trusted = tmp_path / "service" / "trusted"
    for named in (trusted.parent, trusted):
        keys("trust", "jet1", public, "--dir", str(named))
        assert (trusted / "jet1.pub").exists(), "where the service looks"
        assert [entry["name"] for entry in json.loads(keys("list", "--json", "--dir", str(named)))] == [
            "jet1"
        ]
        keys("revoke", "jet1", "--dir", str(named))
        assert "nobody is let in yet" in keys("list", "--dir", str(named))


def test_a_missing_key_is_told_with_the_command_that_makes_it(folder: Path, tmp_path: Path) -> None:
    for words, made_with in [
        ((), "starsd keys generate`"),
        (("--name", "service"), "starsd keys generate --name service`"),
        (
            ("--name", "service", "--dir", str(tmp_path / "a b")),
            f"starsd keys generate --name service --dir '{tmp_path / 'a b'}'`",
        ),
    ]:
        with pytest.raises(ConfigError) as refused:
            keys("show", *words)
        assert made_with in str(refused.value)


def test_a_key_is_made_once(folder: Path) -> None:
    first = json.loads(keys("generate", "--json"))
    assert json.loads(keys("generate", "--json")) == first
    assert "kept" in keys("generate")


def test_rotation_makes_another_key_and_keeps_the_old_one_private(folder: Path) -> None:
    first = json.loads(keys("generate", "--json"))
    second = json.loads(keys("rotate", "--json"))
    assert first["public"] != second["public"] == json.loads(keys("show", "--json"))["public"]
    assert KeyPair.load(folder / "device.old.key").key.public == first["public"]
    keys("trust", "jet1", first["public"])
    with pytest.raises(StarSDError, match="--replace"):
        keys("trust", "jet1", second["public"])
    keys("trust", "jet1", second["public"], "--replace", "--keep-previous")
    assert "and its previous key" in keys("list")


def test_a_key_may_be_given_as_a_file(folder: Path) -> None:
    keys("generate")
    assert "jet1 is let in" in keys("trust", "jet1", str(folder / "device.pub"))
    with pytest.raises(ConfigError, match="40 characters"):
        keys("trust", "jet1", "no/such/file")


def test_no_secret_is_ever_printed(folder: Path) -> None:
    output = keys("generate") + keys("show") + keys("show", "--json") + keys("generate", "--json")
    assert KeyPair.load(folder / "device.key").secret not in output


def test_the_key_of_a_service_is_found_by_address_or_because_it_is_the_only_one(folder: Path) -> None:
    one, other = KeyPair.generate("a").key.public, KeyPair.generate("b").key.public
    keys("generate")
    with pytest.raises(ConfigError, match="starsd keys pin"):
        edge_keys("tcp://10.0.0.9:7700")
    assert edge_keys("tcp://127.0.0.1:7700") is None
    keys("pin", "bench", one)
    found = edge_keys("tcp://10.0.0.9:7700")
    assert found is not None
    assert found.service == one
    assert edge_keys("tcp://127.0.0.1:7700") is None
    pin_service(folder, Pin("local", other, "tcp://127.0.0.1:7700"))
    local = edge_keys("tcp://127.0.0.1:7700")
    assert local is not None
    assert local.service == other
    pin_service(folder, Pin("second", other))
    with pytest.raises(ConfigError, match="which of the services bench, second"):
        edge_keys("tcp://10.0.0.9:7700")
    given = edge_keys("tcp://10.0.0.9:7700", other)
    assert given is not None
    assert given.service == other


def test_pinned_services_are_listed_and_forgotten(folder: Path) -> None:
    """A wrong pin that no command showed kept a device from the right service."""
    assert "no service is known yet" in keys("pins")
    one, other = KeyPair.generate("a").key, KeyPair.generate("b").key
    keys("pin", "desk", one.public)
    keys("pin", "lab", other.public, "--address", "192.0.2.2:7731")
    shown = keys("pins").splitlines()
    assert shown == [
        f"desk  {one.fingerprint}  at any address",
        f"lab   {other.fingerprint}  192.0.2.2:7731",
    ]
    assert json.loads(keys("pins", "--json"))[1] == {
        "name": "lab",
        "public": other.public,
        "address": "192.0.2.2:7731",
        "fingerprint": other.fingerprint,
    }
    assert "desk is forgotten" in keys("unpin", "desk")
    assert [pin["name"] for pin in json.loads(keys("pins", "--json"))] == ["lab"]
    with pytest.raises(ConfigError, match="no draft service is pinned as 'desk'; pinned: lab"):
        keys("unpin", "desk")
    with pytest.raises(ConfigError, match="is no name for a key"):
        keys("unpin", "../device")


def test_a_damaged_pin_is_named(folder: Path) -> None:
    (folder / "services").mkdir(parents=True)
    (folder / "services" / "bench.pub").write_text("")
    with pytest.raises(ConfigError, match=r"bench\.pub"):
        edge_keys("tcp://10.0.0.9:7700")


@pytest.fixture
def encrypted() -> Iterator[tuple[str, KeyPair]]:
    """The address of something on this machine that wants keys, and its own."""
    pair = KeyPair.generate("service")
    with make_context() as context, service_socket(context, pair) as socket:
        socket.bind("tcp://127.0.0.1:0")
        yield socket.getsockopt_string(zmq.LAST_ENDPOINT).replace("[::ffff:127.0.0.1]", "127.0.0.1"), pair


def test_an_encrypted_service_of_this_machine_is_opened_with_its_own_key(
    encrypted: tuple[str, KeyPair], folder: Path
) -> None:
    """The workstation watches and pings its own service, whose key it can read."""
    address, service = encrypted
    with pytest.raises(ConfigError, match="keys show --name service --public` there"):
        edge_keys(address)
    service.save(folder / "service.key")
    found = edge_keys(address)
    assert found is not None
    assert found.own == service
    assert found.service == service.key.public


def test_an_encrypted_service_of_this_machine_is_opened_with_a_device_key_and_a_pin(
    encrypted: tuple[str, KeyPair], folder: Path
) -> None:
    address, service = encrypted
    keys("generate")
    keys("pin", "desk", service.key.public)
    found = edge_keys(address)
    assert found is not None
    assert found.service == service.key.public


def test_a_pin_holds_for_the_monitor_of_its_service_too(folder: Path) -> None:
    keys("generate")
    keys("pin", "desk", KeyPair.generate("x").key.public)
    lab = KeyPair.generate("lab").key.public
    keys("pin", "lab", lab, "--address", "192.0.2.2")
    for address in ("tcp://192.0.2.2:7731", "tcp://192.0.2.2:7732"):
        found = edge_keys(address)
        assert found is not None
        assert found.service == lab


@pytest.mark.parametrize("name", ["n" * 300, "a\nb", "../up", ""])
@pytest.mark.parametrize("verb", ["generate", "show", "rotate"])
def test_a_name_that_is_none_is_told_on_one_line(verb: str, name: str) -> None:
    with pytest.raises(ConfigError, match="is no name for a key") as caught:
        keys(verb, "--name", name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["k" * 300, "", "a\0b"])
@pytest.mark.parametrize("verb", ["trust", "pin"])
def test_a_key_that_is_none_is_told(verb: str, key: str) -> None:
    with pytest.raises(ConfigError, match="a public key is 40 characters"):
        keys(verb, "jet1", key)


def test_a_file_that_holds_no_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pub").write_text("")
    with pytest.raises(ConfigError, match=r"empty\.pub: a public key is 40 characters"):
        keys("trust", "jet1", str(tmp_path / "empty.pub"))


@pytest.mark.parametrize("spoilt", ["file", "loop"])
def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, spoilt: str) -> None:
    place = tmp_path / "place"
    if spoilt == "file":
        place.write_text("in the way")
    else:
        place.symlink_to(place)
    public = KeyPair.generate("x").key.public
    for arguments in (["generate"], ["show"], ["rotate"], ["pin", "lab", public], ["trust", "jet1", public]):
        with pytest.raises(ConfigError, match="place"):
            keys(*arguments, "--dir", str(place / "keys"))


def test_a_key_that_others_may_have_read_is_put_out_of_use_by_rotation(folder: Path) -> None:
    """The advice for such a key; rotate refused it with the same advice."""
    keys("generate")
    (folder / "device.key").chmod(0o644)
    with pytest.raises(StarSDError, match="otherwise `starsd keys rotate`"):
        keys("show")
    keys("rotate")
    for name in ("device.key", "device.old.key"):
        assert 0o600 == stat.S_IMODE((folder / name).stat().st_mode)
    keys("show")


@pytest.mark.parametrize("address", ["a/b", "tcp://desk:99999", "desk:x"])
def test_an_address_that_is_none_is_not_pinned(address: str) -> None:
    with pytest.raises(StarSDError, match="no address"):
        keys("pin", "lab", KeyPair.generate("x").key.public, "--address", address)
