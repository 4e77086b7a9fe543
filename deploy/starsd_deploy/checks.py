"""What `starsd deploy doctor` looks at: facts of one device judged one by one, each with the fix. Pure.

A blocker stops `plan`; a warning says what will hurt later. The table at the end is the whole list.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import msgspec

from starsd_deploy.facts import Facts
from starsd_deploy.inventory import Device, Role, Runtime, UnitScope
from starsd_deploy.releases import MIN_PYTHON, choose_python
from starsd_edge.errors import DeployError

__all__ = ["Check", "Level", "blockers", "check_device"]

MACHINES = {"x86_64", "aarch64"}
MIN_GLIBC = (2, 28)  # onnxruntime's and pyzmq's wheels are manylinux_2_28
NEEDED_TOOLS = ("sha256sum", "flock", "dd", "stat", "sync")
LOW_DISK_BYTES = 4 << 30
LOW_MEMORY_BYTES = 1 << 30
CLOCK_SKEW_S = 300  # TLS and apt fail beyond some minutes; nothing of ours compares clocks


class Level(enum.Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    BLOCKER = "blocker"


class Check(msgspec.Struct, frozen=True):
    """One finding. `fix` is what to do, empty where nothing is to be done."""

    name: str
    level: Level
    found: str
    fix: str = ""


def check_device(device: Device, facts: Facts, now_s: float) -> tuple[Check, ...]:
    """All checks of one device; `now_s` is this machine's clock at about the time the facts were taken."""
    checks = [check(device, facts) for check in CHECKS]
    return (*(check for check in checks if check is not None), _clock(facts, now_s))


def blockers(checks: tuple[Check, ...]) -> tuple[Check, ...]:
    """Those that forbid to deploy."""
    return tuple(check for check in checks if check.level is Level.BLOCKER)


def _ok(name: str, found: str) -> Check:
    return Check(name, Level.OK, found)


def _system(device: Device, facts: Facts) -> Check:
    found = f"{facts.os_name or facts.system}, {facts.machine}, kernel {facts.kernel}"
    if facts.system != "Linux" or facts.machine not in MACHINES:
        return Check("system", Level.BLOCKER, found, "StarSD runs on Linux, x86_64 or aarch64")
    return _ok("system", found)


def _glibc(device: Device, facts: Facts) -> Check:
    found = f"glibc {facts.glibc[0]}.{facts.glibc[1]}"
    if facts.glibc < MIN_GLIBC:
        fix = "compiled wheels need glibc 2.28: Ubuntu 20.04 (JetPack 5) or newer"
        return Check("glibc", Level.BLOCKER, found, fix)
    return _ok("glibc", found)


def _board(device: Device, facts: Facts) -> Check | None:
    board = facts.board
    if not board.is_jetson:
        return _ok("board", ", ".join(facts.gpus)) if facts.gpus else _ok("board", "no Jetson, no NVIDIA GPU")
    found = f"{board.model or 'Jetson'} ({board.module or 'module unknown'}), L4T {board.l4t or 'unknown'}"
    if board.jetpack_line:
        found += f", JetPack {board.jetpack_line}"
    return _ok("board", found)


def _jetpack(device: Device, facts: Facts) -> Check | None:
    board = facts.board
    if not board.is_jetson:
        return None
    if board.lacks_jetpack:
        level = Level.BLOCKER if device.runtime is Runtime.TENSORRT else Level.WARNING
        return Check(
            "jetpack",
            level,
            "freshly flashed: no CUDA, cuDNN and TensorRT yet",
            "on the device: sudo apt update && sudo apt install nvidia-jetpack",
        )
    return _ok(
        "jetpack", f"{board.jetpack or 'parts'}, TensorRT {board.tensorrt or '-'}, CUDA {board.cuda or '-'}"
    )


def _tensorrt(device: Device, facts: Facts) -> Check | None:
    if device.runtime is not Runtime.TENSORRT or facts.board.lacks_jetpack:
        return None
    if facts.container:
        fix = "run the deployer against the board itself: engines and drivers belong to the host"
        return Check("tensorrt", Level.BLOCKER, f"inside a {facts.container} container", fix)
    if not any(python.has_tensorrt for python in facts.pythons):
        fix = "on the device: sudo apt install python3-libnvinfer"
        return Check("tensorrt", Level.BLOCKER, "no Python on the device can import tensorrt", fix)
    return _ok("tensorrt", "importable")


def _power_mode(device: Device, facts: Facts) -> Check | None:
    mode = facts.board.power_mode
    if not facts.board.is_jetson or not mode:
        return None
    if not mode.startswith("MAXN"):
        fix = "for speed, on the device: sudo nvpmodel -p --verbose lists modes, sudo nvpmodel -m ID sets one"
        return Check("power mode", Level.WARNING, f"{mode}: the board has faster modes, at more power", fix)
    return _ok("power mode", mode)


def _groups(device: Device, facts: Facts) -> Check | None:
    missing = [group for group in facts.device_groups if group not in facts.groups]
    if not facts.board.is_jetson or not missing or facts.uid == 0:
        return None
    fix = f"on the device: sudo usermod -aG {','.join(missing)} {facts.user}, then log in again"
    level = Level.BLOCKER if device.runtime is Runtime.TENSORRT else Level.WARNING
    return Check("groups", level, f"{facts.user} is not in {', '.join(missing)}: the GPU stays hidden", fix)


def _python(device: Device, facts: Facts) -> Check:
    try:
        python = choose_python(device, facts)
    except DeployError as error:
        fix = f"on the device: sudo apt install python3 (at least {MIN_PYTHON[0]}.{MIN_PYTHON[1]})"
        return Check("python", Level.BLOCKER, str(error).partition(": ")[2], fix)
    extras = [
        name for name, there in (("ensurepip", python.has_ensurepip), ("pip", python.has_pip)) if not there
    ]
    note = f" (no {' and '.join(extras)}, not needed)" if extras else ""
    return _ok("python", f"{python.path} {python.version}{note}")


def _tools(device: Device, facts: Facts) -> Check:
    missing = [tool for tool in NEEDED_TOOLS if tool not in facts.tools]
    if missing:
        fix = "on the device: sudo apt install coreutils util-linux"
        return Check("tools", Level.BLOCKER, f"missing: {', '.join(missing)}", fix)
    return _ok("tools", "all there")


def _memory(device: Device, facts: Facts) -> Check:
    found = f"{facts.memory_bytes >> 20} MiB, {facts.available_bytes >> 20} MiB available"
    if facts.swap_free_bytes:
        found += f", {facts.swap_free_bytes >> 20} MiB swap"
    if facts.available_bytes < LOW_MEMORY_BYTES:
        fix = (
            "end what else runs: sudo systemctl set-default multi-user.target frees about 800 MB on a Jetson"
        )
        return Check("memory", Level.WARNING, found, fix)
    return _ok("memory", found)


def _disk(device: Device, facts: Facts) -> Check:
    found = f"{facts.disk_free_bytes >> 20} MiB free in {facts.state.root}"
    if facts.free_inodes == 0 and facts.disk_free_bytes:
        return _ok("disk", found)  # btrfs counts no inodes
    if facts.disk_free_bytes < LOW_DISK_BYTES:
        fix = "make room, or set `root` in the inventory to a folder on a larger disk (NVMe)"
        return Check("disk", Level.WARNING, found, fix)
    return _ok("disk", found)


def _systemd(device: Device, facts: Facts) -> Check:
    # process 1 may be hidden from this user; `offline` is systemctl's word for a host not booted with systemd
    no_system = facts.init not in {"systemd", "unknown"} or facts.init_state == "offline"
    if "systemctl" not in facts.tools or (device.unit is UnitScope.SYSTEM and no_system):
        found = f"process 1 is {facts.init}, systemctl says {facts.init_state or 'nothing'}"
        fix = "boot the device with systemd, which starts the service and keeps it running"
        return Check("systemd", Level.BLOCKER, found, fix)
    if device.unit is UnitScope.USER and facts.init_state in {"", "offline"}:
        fix = 'log in through PAM (UsePAM yes in sshd_config), or set unit = "system"'
        return Check("systemd", Level.BLOCKER, "the user's systemd cannot be reached", fix)
    return _ok("systemd", f"{device.unit.value} units, {facts.init_state or 'running'}")


def _sudo(device: Device, facts: Facts) -> Check | None:
    if device.unit is not UnitScope.SYSTEM:
        return None
    if facts.sudo == "none" and not facts.state.unit_enabled:
        fix = f'let {facts.user} use sudo, or set unit = "user" in the inventory'
        return Check(
            "sudo", Level.BLOCKER, f"{facts.user} may not use sudo, and the unit is not installed", fix
        )
    words = {
        "root": "not needed: root",
        "free": "without a password",
        "password": "with a password (asked once)",
    }
    return _ok("sudo", words.get(facts.sudo, "no more needed: the unit is installed"))


def _linger(device: Device, facts: Facts) -> Check | None:
    if device.unit is not UnitScope.USER:
        return None
    if not facts.linger:
        fix = f"on the device: sudo loginctl enable-linger {facts.user}"
        return Check("linger", Level.BLOCKER, "user units end with the last login", fix)
    return _ok("linger", "on")


def _port(device: Device, facts: Facts) -> Check:
    key = "endpoint_port" if device.role is Role.TARGET else "draft_port"
    port = getattr(device, key)
    if facts.port_users and not facts.state.unit_active:
        fix = f"end the other program, or set `{key}` in the inventory to a free one (`port` is SSH's)"
        return Check("port", Level.BLOCKER, f"{port} is taken by another program", fix)
    return _ok("port", f"{port} is {'ours' if facts.port_users else 'free'}")


def _service(device: Device, facts: Facts) -> Check | None:
    if device.role is Role.DRAFT:
        return None
    if not device.service:
        fix = "set `service` in the inventory; without it every answer is decoded plainly"
        return Check("service", Level.WARNING, "no draft service", fix)
    lost = [f"{peer} ({said})" for peer, said in facts.reach.items() if said != "open"]
    unrouted = [p for p, route in facts.routes.items() if not route and facts.reach.get(p) != "open"]
    if unrouted and set(unrouted) == set(facts.routes):
        fix = "check address, cable or Wi-Fi, and the device's routes: ip route"
        return Check("service", Level.WARNING, f"no route to {', '.join(unrouted)}", fix)
    if lost:
        fix = "start it (starsd deploy apply does, if it is in the fleet) and open the port in its firewall"
        return Check("service", Level.WARNING, f"not reachable: {', '.join(lost)}", fix)
    return _ok("service", f"{', '.join(facts.reach) or 'not tried'} reachable")


def _mtu(device: Device, facts: Facts) -> Check | None:
    """Whether packets as large as the interface sends them arrive at the draft service."""
    if device.role is Role.DRAFT or not facts.mtu:
        return None
    for peer, found in facts.mtu.items():
        size, interface, said = [*found.split(), "", ""][:3]
        if said == "lost":
            fix = f"on the device, until the way is mended: sudo ip link set dev {interface} mtu 1280"
            return Check("mtu", Level.WARNING, f"packets of {size} bytes do not reach {peer}", fix)
    return _ok("mtu", ", ".join(sorted({found.split()[0] for found in facts.mtu.values()})))


def _clock(facts: Facts, now_s: float) -> Check:
    skew = facts.clock_s - now_s
    if abs(skew) > CLOCK_SKEW_S:
        fix = "on the device: sudo timedatectl set-ntp true (boards without a battery start in the past)"
        return Check("clock", Level.WARNING, f"{skew:+.0f} s off this machine's", fix)
    return _ok("clock", f"{skew:+.0f} s")


CHECKS: tuple[Callable[[Device, Facts], Check | None], ...] = (
    _system,
    _glibc,
    _board,
    _jetpack,
    _tensorrt,
    _power_mode,
    _groups,
    _python,
    _tools,
    _memory,
    _disk,
    _systemd,
    _sudo,
    _linger,
    _port,
    _service,
    _mtu,
)
