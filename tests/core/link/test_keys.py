"""Key files: private from the first byte on, and plain about what is wrong with them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from starsd_edge.errors import AuthenticationError, ConfigError
from starsd_edge.link.keys import KeyPair, PublicKey, parse_public


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
