"""What is known of a device: the output of facts.sh, read by pure functions into frozen records."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shlex
from importlib import resources

import msgspec

from starsd_deploy.inventory import UnitScope
from starsd_edge.board import Board, BoardSources, parse_dpkg_versions, read_board
from starsd_edge.errors import DeployError

__all__ = [
    "Facts",
    "Manifest",
    "PythonFacts",
    "ReleaseFacts",
    "State",
    "facts_digest",
    "facts_script",
    "parse_facts",
]

MARK = re.compile(r"^@@starsd (\w+)$", re.MULTILINE)
KIBI = 1024


class PythonFacts(msgspec.Struct, frozen=True):
    """One interpreter on the device. `platform` is sysconfig's, such as linux-aarch64."""

    path: str
    version: str
    platform: str
    has_venv: bool
    has_ensurepip: bool
    has_pip: bool
    has_tensorrt: bool

    @property
    def minor(self) -> tuple[int, int]:
        """(3, 10) of "3.10.12"."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


class ReleaseFacts(msgspec.Struct, frozen=True):
    """One folder of releases/ and how far it got."""

    id: str
    complete: bool = False  # everything is in place
    gated: bool = False  # the health gate before the switch passed
    confirmed: bool = False  # it ran as the current release and answered


class Manifest(msgspec.Struct, frozen=True):
    """release.json: what a kept release needs, so that pruning can tell.

    engine, engine_for  key of its TensorRT engine, and what that was made for, for people
    """

    id: str
    version: str
    device: str
    role: str
    wheels: dict[str, str]
    links: dict[str, str]
    blobs: tuple[str, ...]
    engine: str = ""
    engine_for: str = ""


class State(msgspec.Struct, frozen=True):
    """What earlier deployments left on the device: all that a plan depends on and changes.

    unit_sha256   of the installed unit file, empty if none
    running       release that the running process was started from, empty if none runs
    restart_pending  a key was replaced that the running process has read
    history       releases in the order they were switched to, the newest last
    public_key    the device's public CURVE key, Z85
    engines       keys of the TensorRT engines that are there (engines.py)
    pinned        services -> `key address` that the device holds; trusted (draft role): devices it admits
    """

    root: str = ""
    blobs: dict[str, int] = {}
    bundles: tuple[str, ...] = ()
    releases: tuple[ReleaseFacts, ...] = ()
    manifests: tuple[Manifest, ...] = ()
    history: tuple[str, ...] = ()
    current: str = ""
    running: str = ""
    unit_sha256: str = ""
    unit_enabled: bool = False
    unit_active: bool = False
    restart_pending: bool = False
    public_key: str = ""
    pinned: dict[str, str] = {}
    trusted: dict[str, str] = {}
    engines: tuple[str, ...] = ()

    def release(self, release_id: str) -> ReleaseFacts:
        """A release by id; one that is not there has reached nothing."""
        return next((r for r in self.releases if r.id == release_id), ReleaseFacts(id=release_id))


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """One device at one moment. Sizes in bytes, empty strings where the device does not say."""

    hostname: str
    machine: str
    kernel: str
    system: str
    os_name: str
    glibc: tuple[int, int]
    board: Board
    container: str
    gpus: tuple[str, ...]
    pythons: tuple[PythonFacts, ...]
    cpus: int
    memory_bytes: int
    available_bytes: int
    swap_free_bytes: int
    disk_free_bytes: int
    free_inodes: int
    user: str
    uid: int
    groups: tuple[str, ...]
    device_groups: tuple[str, ...]  # of video and render, those that exist
    home: str
    linger: bool
    sudo: str  # root, free, password or none
    init: str
    init_state: str
    tools: frozenset[str]
    clock_s: int  # the device's wall clock; reported, never relied upon
    boot_id: str
    uptime_s: float
    port_users: tuple[str, ...]
    routes: dict[str, str]
    mtu: dict[str, str]  # draft services -> `bytes interface passes|lost|unknown`, of packets of that size
    reach: dict[str, str]
    lease: str
    parts: dict[str, int]
    state: State


def facts_script(root: str, unit: str, scope: UnitScope, port: int, peers: tuple[str, ...] = ()) -> str:
    """The script to feed to `sh -s` on the device; `peers` are host:port of draft services to try."""
    words = " ".join(shlex.quote(word) for word in (root, unit, scope.value, str(port), *peers))
    return f"set -- {words}\n" + resources.files("starsd_deploy").joinpath("facts.sh").read_text("utf-8")


def parse_facts(output: str) -> Facts:
    """Read what facts.sh printed.

    Raises:
        DeployError: the output is not facts.sh's, or was cut short.
    """
    sections = _sections(output)
    if "root" not in sections or "clock" not in sections:
        raise DeployError(
            f"the device answered the facts script with {output.strip()[:80]!r}: is its shell a POSIX sh?"
        )
    clock = _lines(sections, "clock", 3)
    uname = _lines(sections, "uname", 4)
    user = _lines(sections, "user", 4)
    memory = _memory(sections.get("memory", ""))
    disk = sections.get("disk", "").splitlines()
    systemd = _lines(sections, "systemd", 2)
    return Facts(
        hostname=uname[3],
        machine=uname[1],
        kernel=uname[2],
        system=uname[0],
        os_name=_os_name(sections.get("os", "")),
        glibc=_glibc(sections.get("libc", "")),
        board=_board(sections),
        container=sections.get("container", "").split("\n")[0].strip(),
        gpus=tuple(line.strip() for line in sections.get("nvidia_smi", "").splitlines() if "," in line),
        pythons=_pythons(sections.get("python", "")),
        cpus=_int(sections.get("cpus", "")),
        memory_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", 0),
        swap_free_bytes=memory.get("SwapFree", 0),
        disk_free_bytes=_df_free(disk, 0) * KIBI,
        free_inodes=_df_free(disk, 1),
        user=user[0],
        uid=_int(user[1]),
        groups=tuple(user[2].split()),
        device_groups=tuple(sections.get("device_groups", "").split()),
        home=user[3],
        linger="yes" in sections.get("linger", ""),
        sudo=sections.get("sudo", "").strip() or "none",
        init=systemd[0],
        init_state=systemd[1],
        tools=frozenset(sections.get("tools", "").split()),
        clock_s=_int(clock[0]),
        boot_id=clock[1],
        uptime_s=float(clock[2] or 0),
        port_users=tuple(line for line in sections.get("port", "").splitlines() if line.strip()),
        routes=_pairs(sections.get("routes", "")),
        mtu=_pairs(sections.get("mtu", "")),
        reach=_pairs(sections.get("reach", "")),
        lease=sections.get("lease", "").strip(),
        parts=_sizes(sections.get("parts", "")),
        state=_state(sections),
    )


def facts_digest(facts: Facts) -> str:
    """A short hash of all that a plan depends on, the system included that wheels and engines are for: a plan
    made for one device is refused on another, or after an upgrade."""
    board = facts.board
    pythons = [(python.path, python.version, python.has_tensorrt) for python in facts.pythons]
    system = (facts.machine, facts.glibc, pythons, board.module, board.l4t, board.tensorrt)
    return hashlib.sha256(msgspec.json.encode((facts.state, system), order="deterministic")).hexdigest()[:16]


def _sections(output: str) -> dict[str, str]:
    pieces = MARK.split(output)
    return {name: body.strip("\n") for name, body in zip(pieces[1::2], pieces[2::2], strict=True)}


def _lines(sections: dict[str, str], name: str, count: int) -> list[str]:
    lines = [line.strip() for line in sections.get(name, "").splitlines()]
    return (lines + [""] * count)[:count]


def _int(text: str) -> int:
    match = re.match(r"\s*(\d+)", text)
    return int(match.group(1)) if match else 0


def _pairs(text: str) -> dict[str, str]:
    """`name rest of the line` -> {name: rest}."""
    pairs = (line.partition(" ") for line in text.splitlines() if line.strip())
    return {name: rest.strip() for name, _, rest in pairs}


def _sizes(text: str) -> dict[str, int]:
    """`folder/name size` -> {name: size}."""
    pairs = (line.rpartition(" ") for line in text.splitlines() if line.strip())
    return {path.rpartition("/")[2]: _int(size) for path, _, size in pairs}


def _os_name(text: str) -> str:
    match = re.search(r'^PRETTY_NAME="?([^"\n]*)', text, re.MULTILINE)
    return match.group(1) if match else ""


def _glibc(text: str) -> tuple[int, int]:
    match = re.search(r"glibc (\d+)\.(\d+)", text)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def _board(sections: dict[str, str]) -> Board:
    return read_board(
        BoardSources(
            tegra_release=sections.get("tegra_release", ""),
            model=sections.get("model", ""),
            compatible=sections.get("compatible", ""),
            nvpmodel=sections.get("nvpmodel", ""),
            dpkg_versions=parse_dpkg_versions(sections.get("dpkg", "")),
        )
    )


def _pythons(text: str) -> tuple[PythonFacts, ...]:
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) == 7 and re.fullmatch(r"\d+\.\d+\.\d+", words[1]):
            flags = [word != "-" for word in words[3:]]
            found.append(PythonFacts(words[0], words[1], words[2], *flags))
    return tuple(found)


def _memory(text: str) -> dict[str, int]:
    return {name.rstrip(":"): _int(rest) * KIBI for name, rest in _pairs(text).items()}


def _df_free(lines: list[str], index: int) -> int:
    """Fourth column of a `df -P` line, counted from the percent sign: a device name may hold blanks."""
    if index >= len(lines):
        return 0
    match = re.search(r"(\d+)\s+(?:\d+%|-)\s", lines[index])
    return int(match.group(1)) if match else 0


def _state(sections: dict[str, str]) -> State:
    unit = _lines(sections, "unit", 5)
    # with no unit file the sha256 line is missing, so fields are told by their form
    sha256 = next((word for word in unit if re.fullmatch(r"[0-9a-f]{64}", word)), "")
    cwd = next((word for word in unit if word.startswith("/")), "")
    running = re.search(r"/releases/([^/ ]+)", cwd)
    return State(
        root=sections["root"].splitlines()[0] if sections["root"] else "",
        blobs=_sizes(sections.get("blobs", "")),
        bundles=tuple(sorted(sections.get("bundles", "").split())),
        releases=tuple(_release(line) for line in sections.get("releases", "").splitlines() if line),
        manifests=_manifests(sections.get("manifests", "")),
        history=tuple(sections.get("history", "").split()),
        current=sections.get("current", "").strip().removeprefix("releases/"),
        running=running.group(1) if running else "",
        unit_sha256=sha256,
        unit_enabled="enabled" in unit,
        unit_active="active" in unit,
        restart_pending="yes" in sections.get("restart_pending", ""),
        public_key=sections.get("public_key", "").strip(),
        pinned=_pairs(sections.get("pinned", "")),
        trusted=_pairs(sections.get("trusted", "")),
        engines=tuple(sorted(sections.get("engines", "").split())),
    )


def _manifests(text: str) -> tuple[Manifest, ...]:
    """One JSON object a line; a line that is none belongs to a release that is being built or broken."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(msgspec.MsgspecError):
            found.append(msgspec.json.decode(line, type=Manifest))
    return tuple(found)


def _release(line: str) -> ReleaseFacts:
    name, *words = line.split()
    return ReleaseFacts(
        id=name, complete="complete" in words, gated="gated" in words, confirmed="confirmed" in words
    )
