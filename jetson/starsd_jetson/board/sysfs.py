"""One look at a device through /proc and /sys: needs no root, no other program, and works on a laptop too.

Paths differ by release, so each reading tries the places that are known and gives nothing where there are
none:

* GPU load: `/sys/devices/platform/gpu.0/load`, or `<devfreq>/device/load`; per mille.
* GPU clock: `/sys/class/devfreq/*` of a name with gpu, ga10b, gp10b, gv11b or gpc; hertz.
* Rails: hwmon chips called ina3221 (mV and mA a channel; L4T 35 and later), iio devices of the driver
ina3221x (mW; L4T 32). * A laptop has no rails, but on battery the battery's own power is what the whole
machine draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from starsd_edge.protocol.telemetry import BoardReading
from starsd_jetson.board.power import total_power

__all__ = ["Sysfs"]

GPU_NAMES = ("gpu", "ga10b", "gp10b", "gv11b", "gm20b", "gpc")
MAX_CHANNELS = 8  # an INA3221 has three; some hwmon drivers number a sum after them
OFF_ZONE_MILLIDEGREES = -200_000
BATTERY = "BATTERY"


@dataclass(slots=True)
class CpuTimes:
    """Jiffies of one core since boot."""

    busy: int
    total: int


class Sysfs:
    """Reads below `root`; keeps the last CPU times, because load is a difference."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._cpu_times: dict[str, CpuTimes] = {}

    def read(self) -> BoardReading:
        """A reading of what is there. The first one has no CPU load: it takes two looks."""
        memory = self._memory()
        rails_w = self._rails_w()
        total = total_power(rails_w)
        battery_w = None if total else self._battery_w()
        if battery_w is not None:
            rails_w[BATTERY] = battery_w
        return BoardReading(
            source="sysfs",
            ram_used_bytes=_difference(memory, "MemTotal", "MemAvailable"),
            ram_total_bytes=memory.get("MemTotal"),
            swap_used_bytes=_difference(memory, "SwapTotal", "SwapFree"),
            swap_total_bytes=memory.get("SwapTotal"),
            cpu_loads=self._cpu_loads(),
            cpu_mhz=self._cpu_mhz(),
            gpu_load=self._gpu_load(),
            gpu_mhz=self._gpu_mhz(),
            temperatures_c=self._temperatures_c(),
            rails_w=rails_w,
            power_w=total.watts if total else battery_w,
            power_rails=list(total.rails) if total else [BATTERY] if battery_w is not None else [],
        )

    def _memory(self) -> dict[str, int]:
        """Bytes by name of /proc/meminfo."""
        memory = {}
        for line in (_text(self._root / "proc/meminfo") or "").splitlines():
            name, _, value = line.partition(":")
            words = value.split()
            if words and words[0].isdigit():
                memory[name] = int(words[0]) * 1024
        return memory

    def _cpu_loads(self) -> list[float | None]:
        """Share of time each core was busy since the last look; a core that is off is missing from
        /proc/stat."""
        loads: dict[int, float | None] = {}
        for line in (_text(self._root / "proc/stat") or "").splitlines():
            name, *fields = line.split()
            if not name.startswith("cpu") or not name[3:].isdigit():
                continue
            times = [int(field) for field in fields[:8]]  # guest time is already in user time
            idle = times[3] + times[4] if len(times) > 4 else 0
            now = CpuTimes(sum(times) - idle, sum(times))
            last = self._cpu_times.get(name)
            self._cpu_times[name] = now
            if last is not None and now.total > last.total:
                loads[int(name[3:])] = (now.busy - last.busy) / (now.total - last.total)
        return [loads.get(core) for core in range(max(loads, default=-1) + 1)]

    def _cpu_mhz(self) -> list[float | None]:
        clocks: dict[int, float | None] = {}
        for folder in _glob(self._root / "sys/devices/system/cpu", "cpu[0-9]*"):
            khz = _number(folder / "cpufreq/scaling_cur_freq")
            if khz is not None:
                clocks[int(folder.name[3:])] = khz / 1000
        return [clocks.get(core) for core in range(max(clocks, default=-1) + 1)]

    def _gpu_load(self) -> float | None:
        places = [self._root / "sys/devices/platform/gpu.0/load"]
        places += [folder / "device/load" for folder in self._gpu_devfreq()]
        loads = [load for load in map(_number, places) if load is not None]
        return max(loads) / 1000 if loads else None

    def _gpu_mhz(self) -> float | None:
        clocks = [_number(folder / "cur_freq") for folder in self._gpu_devfreq()]
        return max((hertz / 1e6 for hertz in clocks if hertz is not None), default=None)

    def _gpu_devfreq(self) -> Iterator[Path]:
        for folder in _glob(self._root / "sys/class/devfreq", "*"):
            if any(name in folder.name for name in GPU_NAMES):
                yield folder

    def _temperatures_c(self) -> dict[str, float]:
        temperatures = {}
        for zone in _glob(self._root / "sys/class/thermal", "thermal_zone*"):
            name, millidegrees = _text(zone / "type"), _number(zone / "temp")
            if name and millidegrees is not None and millidegrees > OFF_ZONE_MILLIDEGREES:
                short = name.removesuffix("-thermal").removesuffix("-therm").lower()
                temperatures[short] = millidegrees / 1000
        return temperatures

    def _rails_w(self) -> dict[str, float]:
        rails = {}
        for chip in _glob(self._root / "sys/class/hwmon", "hwmon*"):
            if _text(chip / "name") != "ina3221":
                continue
            for channel in range(1, MAX_CHANNELS + 1):
                label = _text(chip / f"in{channel}_label")
                millivolts = _number(chip / f"in{channel}_input")
                milliamperes = _number(chip / f"curr{channel}_input")
                if label and label != "NC" and millivolts is not None and milliamperes is not None:
                    rails[label] = millivolts * milliamperes / 1e6
        for device in _glob(self._root / "sys/bus/i2c/drivers/ina3221x", "*/iio:device*"):
            for channel in range(MAX_CHANNELS):
                label = _text(device / f"rail_name_{channel}")
                milliwatts = _number(device / f"in_power{channel}_input")
                if label and label != "NC" and milliwatts is not None:
                    rails[label] = milliwatts / 1000
        return rails

    def _battery_w(self) -> float | None:
        """What a laptop draws from its battery; None while it charges, because then nobody measures."""
        for supply in _glob(self._root / "sys/class/power_supply", "BAT*"):
            if _text(supply / "status") != "Discharging":
                continue
            microwatts = _number(supply / "power_now")
            if microwatts is not None:
                return microwatts / 1e6
            microvolts, microamperes = _number(supply / "voltage_now"), _number(supply / "current_now")
            if microvolts is not None and microamperes is not None:
                return microvolts * microamperes / 1e12
        return None


def _difference(memory: dict[str, int], total: str, free: str) -> int | None:
    return memory[total] - memory[free] if total in memory and free in memory else None


def _glob(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern)) if folder.is_dir() else []


def _text(path: Path) -> str | None:
    """Text of a small file; None where it is missing, unreadable or its driver refuses to read the sensor."""
    try:
        return path.read_bytes().decode("utf-8", "replace").strip("\0 \n")
    except OSError:
        return None


def _number(path: Path) -> float | None:
    text = _text(path)
    try:
        return float(text) if text else None
    except ValueError:
        return None
