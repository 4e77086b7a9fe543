"""Whom a folder of keys lets in, whatever becomes of the folder and of the process that looks at it."""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from starsd_edge.errors import UsageError
from starsd_edge.link.keys import KeyPair, PublicKey
from starsd_edge.link.trust import TrustStore


@pytest.fixture
def trusted(tmp_path: Path) -> TrustStore:
    return TrustStore(tmp_path / "trusted")


def public(name: str) -> PublicKey:
    return KeyPair.generate(name).key


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Whatever this process opens finds none left."""
    next_free = os.dup(0)
    os.close(next_free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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


@pytest.mark.parametrize("spoilt", ["a file", "a loop", "gone"])
def test_a_folder_that_cannot_be_looked_at_lets_nobody_in_and_is_told_once(
    trusted: TrustStore, caplog: pytest.LogCaptureFixture, spoilt: str
) -> None:
    """A service looks four times a second: a line each time would fill its disk."""
    key = public("jet1")
    trusted.trust(key)
    kept = trusted.folder.rename(trusted.folder.with_name("kept"))
    if spoilt == "a file":
        trusted.folder.write_text("")
    elif spoilt == "a loop":
        trusted.folder.symlink_to(trusted.folder)
    for _ in range(3):
        trusted.refresh()
        assert trusted.find(key.public) is None
    assert (0 if spoilt == "gone" else 1) == caplog.text.count("nobody is let in")
    trusted.folder.unlink(missing_ok=True)
    kept.rename(trusted.folder)
    assert trusted.find(key.public) == "jet1"


def test_a_process_without_descriptors_forgets_nobody_and_still_sees_who_is_revoked(
    trusted: TrustStore,
) -> None:
    """Strangers' connections can hold them all. That must neither lock out those who are trusted, nor keep
    in those who are not any more."""
    stays, goes, changes, comes, other = map(public, ("stays", "goes", "changes", "comes", "x"))
    for key in (stays, goes, changes):
        trusted.trust(key)
    with no_descriptors():
        assert not trusted.refresh()
        assert trusted.find(other.public) is None
        assert ["changes", "goes", "stays"] == [key.name for key in trusted.devices()]
    TrustStore(trusted.folder).revoke("goes")
    TrustStore(trusted.folder).trust(public("changes"), replace_other=True)
    TrustStore(trusted.folder).trust(comes)
    with no_descriptors():
        assert trusted.refresh()
        assert ["stays"] == [key.name for key in trusted.devices()]
        assert trusted.device_of(goes.public) is trusted.device_of(changes.public) is None
        assert not trusted.refresh()
    assert trusted.refresh()
    assert ["changes", "comes", "stays"] == [key.name for key in trusted.devices()]


def test_a_device_whose_file_cannot_be_read_for_want_of_a_descriptor_is_read_later(
    trusted: TrustStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is listed with the last descriptor, and the file finds none."""
    key = public("jet1")
    TrustStore(trusted.folder).trust(key)
    opened = Path.open

    def short(path: Path, *args: str) -> object:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "open", short)
    assert trusted.find(key.public) is None
    monkeypatch.setattr(Path, "open", opened)
    assert trusted.find(key.public) == "jet1"


def test_a_file_written_anew_with_its_old_time_is_read_anew(trusted: TrustStore) -> None:
    """As copying tools do that keep times; and a file that became readable has its old time, too."""
    first, second = public("jet1"), public("jet1")
    path = trusted.folder / "jet1.pub"
    trusted.folder.mkdir(exist_ok=True)
    path.write_text(first.public)
    trusted.refresh()
    times = path.stat()
    path.write_text(second.public)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert trusted.refresh()
    assert trusted.device_of(first.public) is None
    assert trusted.device_of(second.public) == "jet1"


def test_whoever_lists_the_devices_meanwhile_gets_all_or_none_of_a_change(trusted: TrustStore) -> None:
    """The gateway lists them on one thread; another one has a look when a stranger knocks."""
    others = [public(f"jet{number}") for number in range(20)]
    for key in others:
        trusted.trust(key)
    kept, over = trusted.folder.with_name("kept"), threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            trusted.folder.rename(kept)
            trusted.refresh()
            kept.rename(trusted.folder)
            trusted.refresh()

    switching_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    changing = threading.Thread(target=come_and_go)
    changing.start()
    try:
        assert {0, 20} == {len(trusted.devices()) for _ in range(20_000)} | {0, 20}
    finally:
        over.set()
        changing.join()
        sys.setswitchinterval(switching_s)


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
