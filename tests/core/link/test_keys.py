"""Key files: private from the first byte on, and plain about what is wrong with them."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from starsd_edge.errors import AuthenticationError, ConfigError, UsageError
from starsd_edge.link.keys import KeyPair, PublicKey, parse_public
from starsd_edge.link.trust import TrustStore


@pytest.fixture
def trusted(tmp_path: Path) -> TrustStore:
    return TrustStore(tmp_path / "trusted")


def public(name: str) -> PublicKey:
    return KeyPair.generate(name).key


def test_a_pair_comes_back_from_its_file(tmp_path: Path) -> None:
    pair = KeyPair.generate("jet1")
    pair.save(tmp_path / "device.key")
    assert KeyPair.load(tmp_path / "device.key") == pair


def test_a_public_key_is_never_taken_for_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 85 began with a dash, and `starsd keys trust NAME KEY` called it an unknown option."""
    pairs = iter([(b"-" + b"1" * 39, b"1" * 40), (b"3" * 40, b"2" * 40)])
    monkeypatch.setattr(zmq, "curve_keypair", lambda: next(pairs))
    pair = KeyPair.generate("jet1")
    assert (pair.key.public, pair.secret) == ("3" * 40, "2" * 40)


def test_a_secret_is_never_readable_by_others_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        KeyPair.generate("jet1").save(tmp_path / "keys" / "device.key")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "keys" / "device.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_a_secret_others_may_read_is_refused_with_what_to_do(tmp_path: Path) -> None:
    KeyPair.generate("jet1").save(tmp_path / "device.key")
    (tmp_path / "device.key").chmod(0o640)
    with pytest.raises(AuthenticationError, match=r"mode 0640.*chmod 600"):
        KeyPair.load(tmp_path / "device.key")


def test_a_key_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    pair = KeyPair.generate("jet1")
    pair.save(tmp_path / "device.key")
    with pytest.raises(ConfigError, match="rotate"):
        KeyPair.generate("jet1").save(tmp_path / "device.key")
    assert KeyPair.load(tmp_path / "device.key") == pair


def test_a_secret_does_not_show_in_logs() -> None:
    pair = KeyPair.generate("jet1")
    assert pair.secret not in repr(pair)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "{}", '{"name": "x"}', '{"name": "jet1", "public": 5}', "x" * 5000]
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "device.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"device\.key"):
        KeyPair.load(path)


def test_halves_of_different_pairs_are_noticed(tmp_path: Path) -> None:
    pair = KeyPair(public("jet1"), KeyPair.generate("x").secret)
    pair.save(tmp_path / "device.key")
    with pytest.raises(ConfigError, match="do not belong together"):
        KeyPair.load(tmp_path / "device.key")


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="starsd keys generate"):
        KeyPair.load(tmp_path / "device.key")


@pytest.mark.parametrize("text", ["", "abc", "0" * 40, "é" * 40, "~" * 40, "#####" * 8])
def test_what_is_no_public_key_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_public(text)


def test_a_fingerprint_is_short_and_of_the_key_alone() -> None:
    one = KeyPair.generate("jet1").key
    same = PublicKey("other", one.public, "2026-01-01")
    assert one.fingerprint == same.fingerprint != public("jet1").fingerprint
    assert [len(group) for group in one.fingerprint.split("-")] == [4, 4, 4, 4]


@pytest.mark.parametrize("name", ["", "../x", "a b", ".hidden", "x" * 64])
def test_a_name_that_could_leave_the_directory_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no name for a key"):
        public(name)


def test_trust_and_revocation_are_seen_by_another_reader(tmp_path: Path) -> None:
    writer, reader = TrustStore(tmp_path), TrustStore(tmp_path)
    key = public("jet1")
    writer.trust(key)
    assert reader.device_of(key.public) is None
    assert reader.refresh()
    assert reader.device_of(key.public) == "jet1"
    assert not reader.refresh()
    writer.revoke(key.fingerprint)
    assert reader.refresh()
    assert reader.device_of(key.public) is None


def test_a_name_is_not_taken_over_silently(trusted: TrustStore) -> None:
    first, second = public("jet1"), public("jet1")
    trusted.trust(first)
    with pytest.raises(UsageError, match="--replace"):
        trusted.trust(second)
    with pytest.raises(UsageError, match="already trusted, as 'jet1'"):
        trusted.trust(PublicKey("jet2", first.public, ""))
    trusted.trust(second, replace_other=True)
    assert trusted.device_of(first.public) is None
    assert trusted.device_of(second.public) == "jet1"


def test_a_rotation_can_keep_the_old_key_good_for_a_while(trusted: TrustStore) -> None:
    first, second = public("jet1"), public("jet1")
    trusted.trust(first)
    trusted.trust(second, replace_other=True, keep_previous=True)
    assert trusted.device_of(first.public) == trusted.device_of(second.public) == "jet1"
    trusted.trust(second)
    assert trusted.device_of(first.public) is None


def test_a_damaged_or_misnamed_file_lets_nobody_in(
    trusted: TrustStore, caplog: pytest.LogCaptureFixture
) -> None:
    good, other = public("jet1"), public("jet2")
    trusted.trust(good)
    (trusted.folder / "bad.pub").write_text("{")
    (trusted.folder / "jet3.pub").write_text(
        json.dumps({"name": "jet2", "public": other.public, "created": ""})
    )
    trusted.refresh()
    assert [key.name for key in trusted.devices()] == ["jet1"]
    assert trusted.device_of(other.public) is None
    assert "bad.pub" in caplog.text
    assert "jet3.pub" in caplog.text


def test_revoking_nobody_says_who_there_is(trusted: TrustStore) -> None:
    trusted.trust(public("jet1"))
    with pytest.raises(UsageError, match="trusted: jet1"):
        trusted.revoke("jet9")


@pytest.mark.parametrize("spoilt", ["nowhere", "loop", "pipe", "folder"])
def test_a_file_that_cannot_be_looked_at_locks_nobody_else_out(
    trusted: TrustStore, caplog: pytest.LogCaptureFixture, spoilt: str
) -> None:
    pair = KeyPair.generate("dev1")
    trusted.trust(pair.key)
    path = trusted.folder / "dev0.pub"
    if spoilt == "pipe":
        os.mkfifo(path)
    elif spoilt == "folder":
        path.mkdir()
    else:
        path.symlink_to({"nowhere": "gone.pub", "loop": "dev0.pub"}[spoilt])
    trusted.refresh()
    assert "dev1" == trusted.find(pair.key.public)
    assert "dev0.pub" in caplog.text
    with pytest.raises(UsageError, match="already trusted, as 'dev1'"):
        trusted.trust(replace(pair.key, name="dev2"))


def test_a_file_that_goes_while_it_is_looked_for_takes_nobody_along(
    trusted: TrustStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("dev1", "dev2"):
        trusted.trust(KeyPair.generate(name).key)
    listed = os.listdir(trusted.folder)
    (trusted.folder / "dev2.pub").unlink()
    monkeypatch.setattr(os, "listdir", lambda folder: listed)
    trusted.refresh()
    assert ["dev1"] == [key.name for key in trusted.devices()]


@pytest.mark.parametrize("by", ["jet1", "kitchen", "fingerprint"])
def test_a_revoked_key_is_let_in_under_none_of_its_names(
    trusted: TrustStore, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    device, other = KeyPair.generate("device").key, public("jet2")
    trusted.trust(other)
    for name in ("jet1", "kitchen"):
        (trusted.folder / f"{name}.pub").write_text(device.public)
    trusted.refresh()
    assert "jet1 and kitchen hold the same key" in caplog.text
    trusted.revoke(device.fingerprint if by == "fingerprint" else by)
    assert trusted.device_of(device.public) is None
    assert trusted.devices() == [other]


def test_a_public_key_copied_by_hand_lets_the_device_in_under_its_files_name(trusted: TrustStore) -> None:
    device = KeyPair.generate("device")
    trusted.folder.mkdir(parents=True, exist_ok=True)
    (trusted.folder / "jet7.pub").write_text(device.key.public + "\n")
    trusted.refresh()
    assert trusted.device_of(device.key.public) == "jet7"
