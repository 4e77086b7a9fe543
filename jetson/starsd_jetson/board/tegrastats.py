"""One line of NVIDIA's tegrastats, whatever release printed it.

The format drifts with every JetPack: the timestamp, SWAP, EMC, the GPU's load and its brackets, the case of
temperature names, the number of values a rail has, all come and go, and more appears when root asks. So the
line is read field by field; each may be missing, what is unknown is kept in `other`, and only a line
without RAM is no tegrastats line at all.

Fields: docs.nvidia.com/jetson, "Tegrastats Utility"; samples of every dialect are in the tests.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Core", "Dialect", "Engine", "Memory", "Rail", "Tegrastats", "parse_tegrastats"]

# A zone or rail that is switched off, or wired to nothing, reads as one of these.
OFF_ZONE_C = -200.0
NOT_CONNECTED = "NC"

UNIT_BYTES = {"k": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in use and there."""

    used_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Core:
    """One CPU core; both None when it is switched off."""

    load: float | None  # 0..1
    mhz: int | None


@dataclass(frozen=True, slots=True)
class Engine:
    """A unit with a clock: GPU (GR3D), memory bus (EMC), video and vision engines.

    `load` is None where the release prints none; `mhz` has one entry for each cluster.
    """

    on: bool
    load: float | None = None  # 0..1
    mhz: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rail:
    """Power of one supply rail in milliwatts: now, mean and, from R39 on, highest since tegrastats
    started."""

    now_mw: int
    mean_mw: int
    max_mw: int | None = None


class Dialect(enum.Enum):
    """The family of releases that prints like this, for a bug report."""

    JETPACK_4 = "JetPack 4"  # rails without a unit
    JETPACK_5 = "JetPack 5"  # rails in mW, a timestamp, zones in upper case
    JETPACK_6 = "JetPack 6 or 7.0"  # zones in lower case
    JETPACK_7_2 = "JetPack 7.2"  # zones with now/highest, rails with now/mean/highest


@dataclass(slots=True)
class Tegrastats:
    """Everything a line says. Names are the line's own, `_FREQ` cut off, temperatures in lower case."""

    timestamp: str = ""  # local time of a clock that may be wrong: shown, never computed with
    ram: Memory | None = None
    swap: Memory | None = None
    cores: list[Core] = field(default_factory=list)
    engines: dict[str, Engine] = field(default_factory=dict)
    temperatures_c: dict[str, float] = field(default_factory=dict)
    rails: dict[str, Rail] = field(default_factory=dict)
    other: dict[str, str] = field(default_factory=dict)
    dialect: Dialect = Dialect.JETPACK_4

    @property
    def gpu_load(self) -> float | None:
        """0..1, the busier cluster where there are two; None where the release does not say (Thor)."""
        loads = [e.load for name, e in self.engines.items() if name.startswith("GR3D") and e.load is not None]
        return max(loads, default=None)

    @property
    def gpu_mhz(self) -> int | None:
        """Clock of the fastest cluster; None where it is not printed (no root)."""
        return max((m for n, e in self.engines.items() if n.startswith("GR3D") for m in e.mhz), default=None)


def parse_tegrastats(line: str) -> Tegrastats:
    """Read one line. Raises ValueError when it has no RAM field, which every release prints."""
    stats = Tegrastats()
    rest = line.strip()
    unknown = ""
    while rest:
        for pattern, take in FIELDS:
            match = pattern.match(rest)
            if match:
                take(stats, match)
                rest = rest[match.end() :].lstrip()
                unknown = ""
                break
        else:
            word, _, rest = rest.partition(" ")
            rest = rest.lstrip()
            unknown = _keep(stats, unknown, word)
    if stats.ram is None:
        raise ValueError(f"not a line of tegrastats (no RAM field): {line[:60]!r}")
    stats.dialect = _dialect(line)
    return stats


def _keep(stats: Tegrastats, name: str, word: str) -> str:
    """Keep an unknown word: the first one names a field, those that follow are its value."""
    if not name:
        stats.other.setdefault(word, "")
        return word
    stats.other[name] = f"{stats.other[name]} {word}".strip()
    return name


def _timestamp(stats: Tegrastats, match: re.Match[str]) -> None:
    stats.timestamp = match[1]


def _ram(stats: Tegrastats, match: re.Match[str]) -> None:
    stats.ram = _memory(match)


def _swap(stats: Tegrastats, match: re.Match[str]) -> None:
    stats.swap = _memory(match)


def _memory(match: re.Match[str]) -> Memory:
    unit = UNIT_BYTES[match[3]]
    return Memory(int(match[1]) * unit, int(match[2]) * unit)


def _verbatim(stats: Tegrastats, match: re.Match[str]) -> None:
    stats.other[match[1]] = match[2].strip()


def _cores(stats: Tegrastats, match: re.Match[str]) -> None:
    shared_mhz = match[2]
    for text in filter(None, match[1].split(",")):
        load, _, mhz = text.partition("@")
        if load.strip() == "off":
            stats.cores.append(Core(None, None))
        else:
            clock = mhz or shared_mhz
            stats.cores.append(Core(int(load.strip().rstrip("%")) / 100, int(clock) if clock else None))


def _temperature(stats: Tegrastats, match: re.Match[str]) -> None:
    celsius = float(match[2])
    if celsius > OFF_ZONE_C:
        stats.temperatures_c[match[1].lower()] = celsius


def _rail(stats: Tegrastats, match: re.Match[str]) -> None:
    if match[1] != NOT_CONNECTED:
        stats.rails[match[1]] = Rail(int(match[2]), int(match[3]), int(match[4]) if match[4] else None)


def _engine(stats: Tegrastats, match: re.Match[str]) -> None:
    name = match["name"].removesuffix("_FREQ")
    clocks = match["clocks"] or match["clock"] or match["bare"] or ""
    stats.engines[name] = Engine(
        on=match["off"] is None,
        load=int(match["load"]) / 100 if match["load"] else None,
        mhz=tuple(int(mhz) for mhz in clocks.split(",") if mhz),
    )


def _dialect(line: str) -> Dialect:
    if re.search(r"@-?[\d.]+C/", line):
        return Dialect.JETPACK_7_2
    if re.search(r"\bcpu@", line):
        return Dialect.JETPACK_6
    if re.search(r"\d+mW/", line) or TIMESTAMP.match(line):  # a pipe's reader may have cut the timestamp
        return Dialect.JETPACK_5
    return Dialect.JETPACK_4


TIMESTAMP = re.compile(r"(\d\d-\d\d-\d{4} \d\d:\d\d:\d\d)")
END = r"(?=\s|$)"
Take = Callable[[Tegrastats, "re.Match[str]"], None]

# In this order: RAM, SWAP and IRAM come first, because the pattern of a rail would fit 2020/7852 too.
FIELDS: list[tuple[re.Pattern[str], Take]] = [
    (re.compile(pattern + END), take)
    for pattern, take in [
        (TIMESTAMP.pattern, _timestamp),
        (r"RAM (\d+)/(\d+)([kMG])B(?: \(lfb \d+x\d+[kMG]B\))?", _ram),
        (r"SWAP (\d+)/(\d+)([kMG])B(?: \(cached \d+[kMG]B\))?", _swap),
        (r"(IRAM) (\d+/\d+[kMG]B ?(?:\(lfb \d+[kMG]B\))?)", _verbatim),
        (r"(MTS) (fg \d+% bg \d+%)", _verbatim),
        (r"CPU \[((?:off|\d+%(?:@\d+)?)(?:,(?:off|\d+%(?:@\d+)?))*)\](?:@(\d+))?", _cores),
        (r"([\w.-]+)@(-?\d+(?:\.\d+)?)C(?:/-?\d+(?:\.\d+)?C)?", _temperature),
        (r"([A-Za-z]\w*) (\d+)(?:mW)?/(\d+)(?:mW)?(?:/(\d+)(?:mW)?)?", _rail),
        (
            r"(?P<name>[A-Za-z]\w*) (?:(?P<off>off)|(?=[\d@])(?:(?P<load>\d+)%)?"
            r"(?:@(?:\[(?P<clocks>\d+(?:,\d+)*)\]|(?P<clock>\d+)))?|(?P<bare>\d+))",
            _engine,
        ),
    ]
]
