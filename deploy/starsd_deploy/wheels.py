"""Wheels for a device, found on the workstation: boards in the field reach no package index.

pip resolves for the device's Python, architecture and glibc. One thing it gets wrong: environment markers
(`; python_version < "3.11"`) are judged by the interpreter that runs pip, not by the one asked for. So the
closure is checked here against the device's own environment: what is missing is downloaded, what is not
needed is left out. The result is kept as a lock, so that the next plan finds the same wheels without any
network.
"""

from __future__ import annotations

import email
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from starsd_deploy.blobs import Blob, hash_file
from starsd_deploy.facts import Facts, PythonFacts
from starsd_deploy.steps import WheelFile
from starsd_edge.errors import DeployError
from starsd_edge.whole_file import write_whole

__all__ = ["DeviceEnvironment", "WheelSet", "closure", "environment_of", "platform_tags", "resolve_wheels"]

OLDEST_MANYLINUX = 17  # manylinux2014; wheels for older glibc carry this tag as well
PIP_TIMEOUT_S = 1800
MAX_PASSES = 8  # each pass finds at least one missing package; chains of markers are short
LOCK_MODE = 0o600


class DeviceEnvironment(msgspec.Struct, frozen=True):
    """What decides which wheels fit."""

    python: str  # "3.10"
    machine: str  # x86_64 or aarch64
    glibc: tuple[int, int]


class WheelSet(msgspec.Struct, frozen=True):
    """Everything a release installs, in name order."""

    environment: DeviceEnvironment
    wheels: tuple[WheelFile, ...]


def environment_of(facts: Facts, python: PythonFacts) -> DeviceEnvironment:
    """The environment of one interpreter on a device. A 32-bit Python on a 64-bit kernel says so itself."""
    machine = python.platform.removeprefix("linux-") or facts.machine
    major, minor = python.minor
    return DeviceEnvironment(python=f"{major}.{minor}", machine=machine, glibc=facts.glibc)


def platform_tags(environment: DeviceEnvironment) -> tuple[str, ...]:
    """Platform tags that run there, best first: pip expands none of them by itself."""
    machine, (major, minor) = environment.machine, environment.glibc
    tags = [f"manylinux_{major}_{n}_{machine}" for n in range(minor, OLDEST_MANYLINUX - 1, -1)]
    tags.append(f"manylinux2014_{machine}")
    if machine == "x86_64":
        tags += [
            f"manylinux_2_12_{machine}",
            f"manylinux2010_{machine}",
            f"manylinux_2_5_{machine}",
            f"manylinux1_{machine}",
        ]
    return (*tags, f"linux_{machine}")


def closure(
    roots: tuple[str, ...], requires: dict[str, tuple[str, ...]], environment: DeviceEnvironment
) -> tuple[frozenset[str], tuple[Requirement, ...]]:
    """Which of the wheels at hand are needed, and which requirements none of them meets.

    `requires` maps the canonical name of each wheel at hand to its Requires-Dist lines; pure.
    """
    markers = _markers(environment)
    needed: set[str] = set()
    missing: dict[str, Requirement] = {}
    todo = [Requirement(root) for root in roots]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        mark = (name, frozenset(requirement.extras))
        if mark in seen:
            continue
        seen.add(mark)
        if name not in requires:
            missing[str(requirement)] = requirement
            continue
        needed.add(name)
        for line in requires[name]:
            try:
                child = Requirement(line)
            except InvalidRequirement:
                continue
            extras = requirement.extras or {""}
            if child.marker is None or any(
                child.marker.evaluate({**markers, "extra": extra}) for extra in extras
            ):
                child.marker = None
                todo.append(child)
    return frozenset(needed), tuple(missing.values())


def resolve_wheels(
    environment: DeviceEnvironment,
    extras: tuple[str, ...],
    project_wheel: Path,
    cache: Path,
    constraints: Path | None,
    *,
    refresh: bool = False,
    report: Callable[[str], None] | None = None,
) -> WheelSet:
    """The wheels of a release for one environment; from the lock where there is one.

    Where packages come from is pip's own configuration; `constraints` pins versions: a torch without CUDA.

    Raises:
        DeployError: pip found no fitting wheel; the message ends in pip's own words.
    """
    digest = hash_file(project_wheel)
    limits = constraints.read_text("utf-8") if constraints else ""
    key = hashlib.sha256(msgspec.json.encode((environment, sorted(extras), digest, limits))).hexdigest()[:16]
    folder = cache / key
    lock = folder / "lock.json"
    if lock.exists() and not refresh:
        found = msgspec.json.decode(lock.read_bytes(), type=WheelSet)
        if all(Path(wheel.blob.source).exists() for wheel in found.wheels):
            return found
    if report:
        report(f"resolving wheels for Python {environment.python} on {environment.machine}")
    folder.mkdir(parents=True, exist_ok=True)
    root = f"starsd-edge[{','.join(sorted(extras))}]" if extras else "starsd-edge"
    _download(folder, environment, (f"{root} @ {project_wheel.resolve().as_uri()}",), constraints)
    for _ in range(MAX_PASSES):
        names = _names(folder)
        requires = {name: _requires(path) for name, path in names.items()}
        needed, missing = closure((root,), requires, environment)
        if not missing:
            break
        _download(folder, environment, tuple(str(requirement) for requirement in missing), constraints)
    else:
        raise DeployError(
            f"wheels for Python {environment.python} are not complete after {MAX_PASSES} passes"
        )
    wheels = tuple(_wheel_file(names[name]) for name in sorted(needed))
    result = WheelSet(environment=environment, wheels=wheels)
    write_whole(lock, msgspec.json.format(msgspec.json.encode(result)).decode(), LOCK_MODE)
    return result


def _download(
    folder: Path, environment: DeviceEnvironment, requirements: tuple[str, ...], constraints: Path | None
) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
    ]
    command += ["--implementation", "cp", "--python-version", environment.python]
    command += ["--abi", f"cp{environment.python.replace('.', '')}", "--abi", "abi3", "--abi", "none"]
    command += ["--constraint", str(constraints)] if constraints else []
    for tag in platform_tags(environment):
        command += ["--platform", tag]
    done = subprocess.run(
        [*command, *requirements], capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False
    )
    if done.returncode:
        said = done.stderr.splitlines()
        lines = [line for line in said if line.startswith("ERROR")] or said[-3:]
        glibc = ".".join(map(str, environment.glibc))
        where = f"Python {environment.python}, {environment.machine}, glibc {glibc}"
        raise DeployError(f"no wheels for {where}: {' '.join(lines)}")


def _names(folder: Path) -> dict[str, Path]:
    """Newest file of each distribution in a folder."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.whl"), key=lambda path: parse_wheel_filename(path.name)[1]):
        found[parse_wheel_filename(path.name)[0]] = path
    return found


def _requires(wheel: Path) -> tuple[str, ...]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(
            name
            for name in archive.namelist()
            if name.endswith(".dist-info/METADATA") and name.count("/") == 1
        )
        metadata = email.message_from_bytes(archive.read(name))
    return tuple(metadata.get_all("Requires-Dist") or ())


def _wheel_file(path: Path) -> WheelFile:
    return WheelFile(path.name, Blob(sha256=hash_file(path), size=path.stat().st_size, source=str(path)))


def _markers(environment: DeviceEnvironment) -> dict[str, str]:
    """The device's answers to environment markers; its patch release decides nothing that we depend on."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{environment.python}.0",
        "os_name": "posix",
        "platform_machine": environment.machine,
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{environment.python}.0",
        "python_version": environment.python,
        "sys_platform": "linux",
    }
