"""Which board is this? Pure readings of what a Jetson says about itself.

Callers hand in the bytes of files and the output of commands; nothing is opened here. The deployer reads them
over SSH, the device's own programs from disk, and both must come to the same answer: a TensorRT engine is
keyed by it.

What is trusted, and what is not (each of these has broken a tool in the field):

* `nvidia,tegraNNN` in the device tree names the chip, `pNNNN-NNNN` the module. The model string is for
  people: carrier vendors write anything into it.
* `/etc/nv_tegra_release` says BOARD: generic from R36 on, and its date changed format at R39:
  neither is read.
* Device tree strings end in a NUL byte, and `compatible` separates with them.
* Releases are matched by (major, minor); an unknown patch is shown as such, never refused.
* A freshly flashed board has L4T but no `nvidia-jetpack`, hence no CUDA and no TensorRT. That is normal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Board", "BoardSources", "jetpack_of", "parse_dpkg_versions", "read_board"]

# Chip in the device tree -> (name, CUDA compute capability).
CHIPS: dict[str, tuple[str, str]] = {
    "tegra210": ("Nano/TX1", "5.3"),
    "tegra186": ("TX2", "6.2"),
    "tegra194": ("Xavier", "7.2"),
    "tegra234": ("Orin", "8.7"),
    "tegra264": ("Thor", "11.0"),
}

# L4T (major, minor) -> JetPack line. Patches do not change what runs on a device, so they are not listed.
JETPACK_LINES: dict[tuple[int, int], str] = {
    (35, 2): "5.1",
    (35, 3): "5.1",
    (35, 4): "5.1",
    (35, 5): "5.1",
    (35, 6): "5.1",
    (36, 3): "6.0",
    (36, 4): "6.1/6.2",
    (36, 5): "6.2",
    (38, 2): "7.0",
    (38, 4): "7.1",
    (39, 0): "7.2",
    (39, 2): "7.2",
}
# L4T major -> JetPack major, for releases newer than the table above.
JETPACK_MAJORS: dict[int, str] = {32: "4.x", 34: "5.0", 35: "5.x", 36: "6.x", 38: "7.x", 39: "7.x"}

RELEASE_LINE = re.compile(r"#?\s*R(\d+)\s*\(release\).*?REVISION:\s*(\d+)(?:\.(\d+))?")
PACKAGE_RELEASE = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?-")
CHIP = re.compile(r"nvidia,(tegra\d+)")
MODULE = re.compile(r"p\d{4}-\d{4}")


@dataclass(frozen=True, slots=True)
class BoardSources:
    """Raw text as found on the device; empty where a file or command is missing.

    dpkg_versions  package -> version, of the packages that `parse_dpkg_versions` was given
    nvpmodel       output of `nvpmodel -q`
    """

    tegra_release: str = ""
    model: str = ""
    compatible: str = ""
    nvpmodel: str = ""
    dpkg_versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Board:
    """A device as far as engines and runtimes care. Every field is empty where the device does not say.

    module      part number such as p3767-0005, which decides memory and clocks
    chip        tegra234 and so on; empty on anything that is not a Jetson
    compute     CUDA compute capability, "8.7"
    l4t         "36.4.4"
    jetpack     the installed meta package ("6.2.1+b38"); empty on a freshly flashed board
    jetpack_line  what the L4T release belongs to, "6.1/6.2" or "6.x (L4T 36.9.9)"
    """

    model: str = ""
    module: str = ""
    chip: str = ""
    compute: str = ""
    l4t: str = ""
    jetpack: str = ""
    jetpack_line: str = ""
    tensorrt: str = ""
    cuda: str = ""
    power_mode: str = ""

    @property
    def is_jetson(self) -> bool:
        """Whether a Tegra chip or an L4T release was found."""
        return bool(self.chip or self.l4t)

    @property
    def lacks_jetpack(self) -> bool:
        """A Jetson on which `sudo apt install nvidia-jetpack` was never run."""
        return self.is_jetson and not self.jetpack and not self.tensorrt


def read_board(sources: BoardSources) -> Board:
    """Combine the sources; contradicting or missing ones leave a field empty, nothing raises."""
    compatible = sources.compatible.replace("\0", "\n")
    chip_match, module_match = CHIP.search(compatible), MODULE.findall(compatible)
    chip = chip_match.group(1) if chip_match else ""
    packages = dict(sources.dpkg_versions)
    l4t = _l4t(sources.tegra_release, packages.get("nvidia-l4t-core", ""))
    return Board(
        model=sources.model.replace("\0", "").strip(),
        # `nvidia,p3768-0000+p3767-0005-super`: the carrier comes first, the module last
        module=module_match[0] if len(module_match) == 1 else _module(compatible),
        chip=chip,
        compute=CHIPS[chip][1] if chip in CHIPS else "",
        l4t=l4t,
        jetpack=packages.get("nvidia-jetpack", "") or packages.get("nvidia-jetpack-runtime", ""),
        jetpack_line=jetpack_of(l4t),
        tensorrt=_tensorrt(packages),
        cuda=_upstream(_first(packages, "cuda-cudart-")),
        power_mode=_power_mode(sources.nvpmodel),
    )


def jetpack_of(l4t: str) -> str:
    """The JetPack line of an L4T release: "36.4.4" -> "6.1/6.2", "36.9.9" -> "6.x (L4T 36.9.9)"."""
    numbers = [int(part) for part in l4t.split(".") if part.isdigit()]
    if len(numbers) < 2:
        return ""
    known = JETPACK_LINES.get((numbers[0], numbers[1]))
    if known:
        return known
    return f"{JETPACK_MAJORS.get(numbers[0], 'unknown JetPack')} (L4T {l4t})"


def parse_dpkg_versions(text: str) -> tuple[tuple[str, str], ...]:
    """Read `package version` lines, one a package; a package known but not installed has no version."""
    pairs = (line.split() for line in text.splitlines())
    return tuple((words[0].split(":")[0], words[1]) for words in pairs if len(words) == 2)


def _l4t(tegra_release: str, core_package: str) -> str:
    """The file is missing in most containers, the package on hand-made images: either will do."""
    match = RELEASE_LINE.search(tegra_release) or PACKAGE_RELEASE.match(core_package)
    if match is None:
        return ""
    return f"{match.group(1)}.{match.group(2)}.{match.group(3) or 0}"


def _module(compatible: str) -> str:
    """The first entry names carrier and module, `carrier+module`; the module may also stand alone later."""
    for entry in compatible.splitlines():
        if "+" in entry:
            found = MODULE.findall(entry.split("+", 1)[1])
            if found:
                return str(found[0])
    found = MODULE.findall(compatible)
    return str(found[-1]) if found else ""


def _tensorrt(packages: dict[str, str]) -> str:
    newest = ""
    for name, version in packages.items():
        if re.fullmatch(r"libnvinfer\d+", name) and _numbers(version) > _numbers(newest):
            newest = version
    return _upstream(newest)


def _first(packages: dict[str, str], prefix: str) -> str:
    return next((version for name, version in sorted(packages.items()) if name.startswith(prefix)), "")


def _upstream(version: str) -> str:
    """`10.3.0.30-1+cuda12.5` -> `10.3.0.30`."""
    return version.split("-")[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", _upstream(version)))


def _power_mode(nvpmodel: str) -> str:
    """The name; ids mean different modes on different boards."""
    match = re.search(r"NV Power Mode:\s*(\S+)", nvpmodel)
    return match.group(1) if match else ""
