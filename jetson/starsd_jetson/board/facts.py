"""What board this is: pure readers of the texts that JetPack leaves on a device.

Nothing here may fail on a release that does not exist yet. An unknown L4T is shown as it is, a carrier
board's own name is passed on, and a missing text gives an empty field. Detection leans on what stayed stable:
`nvidia,tegraNNN` and the module number in the device tree, never BOARD= (t186ref became "generic"), never
DATE (its format changed), never the id of a power mode (0 is MAXN on one board and 15W on another).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "INSTALL_JETPACK",
    "L4T",
    "BoardIdentity",
    "jetpack_of",
    "parse_compatible",
    "parse_device_tree_text",
    "parse_dpkg",
    "parse_l4t_package",
    "parse_nv_tegra_release",
    "parse_power_mode",
]

# What a freshly flashed board lacks, and with it CUDA, cuDNN and TensorRT.
INSTALL_JETPACK = "sudo apt install nvidia-jetpack"

# Chip -> CUDA compute capability, as sm_NN.
SM_OF_CHIP = {
    "tegra210": 53,
    "tegra186": 62,
    "tegra194": 72,
    "tegra234": 87,
    "tegra264": 110,
}

# Module number -> what people call it. Only for display: an unknown module shows its number.
MODULES = {
    "p2888-0001": "AGX Xavier 16GB",
    "p2888-0004": "AGX Xavier 32GB",
    "p3668-0000": "Xavier NX",
    "p3668-0001": "Xavier NX",
    "p3701-0000": "AGX Orin",
    "p3701-0004": "AGX Orin 32GB",
    "p3701-0005": "AGX Orin 64GB",
    "p3767-0000": "Orin NX 16GB",
    "p3767-0001": "Orin NX 8GB",
    "p3767-0003": "Orin Nano 8GB",
    "p3767-0004": "Orin Nano 4GB",
    "p3767-0005": "Orin Nano 8GB devkit",
    "p3834-0008": "AGX Thor T5000",
}

# (L4T release, revision, patch) -> JetPack, for display. What is missing here is shown by its family.
JETPACKS = {
    (32, 7, 6): "4.6.6",
    (35, 1, 0): "5.0.2",
    (35, 2, 1): "5.1",
    (35, 3, 1): "5.1.1",
    (35, 4, 1): "5.1.2",
    (35, 5, 0): "5.1.3",
    (35, 6, 0): "5.1.4",
    (35, 6, 4): "5.1.6",
    (35, 6, 5): "5.1.7",
    (36, 2, 0): "6.0 DP",
    (36, 3, 0): "6.0",
    (36, 4, 0): "6.1",
    (36, 4, 3): "6.2",
    (36, 4, 4): "6.2.1",
    (36, 4, 7): "6.2.1",
    (36, 5, 0): "6.2.2",
    (36, 5, 2): "6.2.3",
    (38, 2, 0): "7.0",
    (38, 4, 0): "7.1",
    (39, 2, 0): "7.2",
    (39, 2, 1): "7.2.1",
    (39, 2, 2): "7.2.2",
}
FAMILIES = {32: "4.x", 34: "5.0", 35: "5.x", 36: "6.x", 38: "7.x", 39: "7.x"}


@dataclass(frozen=True, slots=True, order=True)
class L4T:
    """A Jetson Linux release: R36, revision 4.4 is 36.4.4."""

    release: int
    revision: int
    patch: int = 0

    def __str__(self) -> str:
        return f"{self.release}.{self.revision}.{self.patch}"


@dataclass(frozen=True, slots=True)
class BoardIdentity:
    """What the device tree's `compatible` says; "" and None where it says nothing."""

    chip: str = ""  # tegra234
    module: str = ""  # p3767-0005
    carrier: str = ""  # p3768-0000
    is_super: bool = False  # booted with the Super power table

    @property
    def sm(self) -> int | None:
        """CUDA compute capability as sm_NN; None for an unknown chip."""
        return SM_OF_CHIP.get(self.chip)

    @property
    def name(self) -> str:
        """What people call the module; its number when nobody told us."""
        name = MODULES.get(self.module, self.module or self.chip)
        return f"{name} Super" if name and self.is_super else name


def parse_nv_tegra_release(text: str) -> L4T | None:
    """L4T from /etc/nv_tegra_release; None when the text is not one (the file is absent in most
    containers)."""
    match = re.search(r"#\s*R(\d+)\s*\(release\).*?REVISION:\s*(\d+)(?:\.(\d+))?", text)
    return L4T(int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def parse_l4t_package(version: str) -> L4T | None:
    """L4T from the version of the package nvidia-l4t-core (36.4.4-20250616085344)."""
    match = re.match(r"\s*(\d+)\.(\d+)\.(\d+)(?:-|\s|$)", version)
    return L4T(int(match[1]), int(match[2]), int(match[3])) if match else None


def jetpack_of(l4t: L4T) -> str:
    """JetPack of a release for display. An unknown patch is named by its family and L4T, never refused."""
    known = JETPACKS.get((l4t.release, l4t.revision, l4t.patch))
    if known:
        return known
    family = FAMILIES.get(l4t.release)
    return f"{family} (L4T {l4t})" if family else f"L4T {l4t}"


def parse_device_tree_text(data: bytes) -> str:
    """Text of a device tree property such as `model`, which ends in a NUL byte."""
    return data.split(b"\0", 1)[0].decode("utf-8", "replace").strip()


def parse_compatible(data: bytes) -> BoardIdentity:
    """Chip, module and carrier from the NUL-separated device tree property `compatible`."""
    text = data.replace(b"\0", b"\n").decode("utf-8", "replace")
    chip = re.search(r"nvidia,(tegra\d+)(?!\w)", text)
    pair = re.search(r"nvidia,(p\d{4}-\d{4})\+(p\d{4}-\d{4})(-super)?", text)
    alone = re.search(r"nvidia,(p\d{4}-\d{4})(-super)?\s*$", text, re.MULTILINE)
    if pair:
        module, carrier, is_super = pair[2], pair[1], bool(pair[3])
    elif alone:
        module, carrier, is_super = alone[1], "", bool(alone[2])
    else:
        module, carrier, is_super = "", "", False
    return BoardIdentity(chip[1] if chip else "", module, carrier, is_super)


def parse_power_mode(text: str) -> str:
    """Name of the power mode from `nvpmodel -q` ("" when it gave none). Ids differ between boards: names
    count."""
    match = re.search(r"NV Power Mode:\s*(\S+)", text)
    return match[1].removeprefix("MODE_") if match else ""


def parse_dpkg(text: str) -> dict[str, str]:
    """Package -> version from lines "name<tab>version" of `dpkg-query -W` (status columns of `dpkg -l` are
    understood too). A package that is known but not installed has no version and is left out."""
    versions = {}
    for line in text.splitlines():
        match = re.match(r"(?:ii\s+)?([a-z0-9][a-z0-9+.-]+)(?::\w+)?\s+(\d\S*)", line)
        if match:
            versions[match[1]] = match[2]
    return versions
