"""The traps of board detection, each as text that a board left behind."""

import pytest

from starsd_jetson.board.facts import (
    L4T,
    BoardIdentity,
    jetpack_of,
    parse_compatible,
    parse_device_tree_text,
    parse_dpkg,
    parse_l4t_package,
    parse_nv_tegra_release,
    parse_power_mode,
)

JETPACK_6_RELEASE = """\
# R36 (release), REVISION: 4.4, GCID: 41062509, BOARD: generic
# KERNEL_VARIANT: oot
TARGET_USERSPACE_LIB_DIR=nvidia
TARGET_USERSPACE_LIB_DIR_PATH=usr/lib/aarch64-linux-gnu/nvidia
INSTALL_TYPE=
"""


@pytest.mark.parametrize(
    ("text", "l4t", "jetpack"),
    [
        ("# R32 (release), REVISION: 7.1, GCID: 29689809, BOARD: t186ref", "32.7.1", "4.x (L4T 32.7.1)"),
        ("# R34 (release), REVISION: 1.1, GCID: 30414990, BOARD: t186ref", "34.1.1", "5.0 (L4T 34.1.1)"),
        ("# R35 (release), REVISION: 3.1, GCID: 32827747, BOARD: t186ref", "35.3.1", "5.1.1"),
        (JETPACK_6_RELEASE, "36.4.4", "6.2.1"),
        ("# R38 (release), REVISION: 2.0, GCID: 41844464, BOARD: generic", "38.2.0", "7.0"),
        ("# R39 (release), REVISION: 2.1, DATE: Fri Aug 7 05:54:22 AM UTC 2026", "39.2.1", "7.2.1"),
        ("# R39 (release), REVISION: 2, GCID: 1", "39.2.0", "7.2"),
        ("# R36 (release), REVISION: 9.9, GCID: 1, BOARD: generic", "36.9.9", "6.x (L4T 36.9.9)"),
        ("# R47 (release), REVISION: 1.2, GCID: 1, BOARD: generic", "47.1.2", "L4T 47.1.2"),
    ],
)
def test_the_release_file_of_every_generation(text: str, l4t: str, jetpack: str) -> None:
    found = parse_nv_tegra_release(text)
    assert found is not None
    assert (str(found), jetpack_of(found)) == (l4t, jetpack)


@pytest.mark.parametrize("text", ["", "cat: /etc/nv_tegra_release: No such file or directory", "R36"])
def test_a_container_without_the_release_file(text: str) -> None:
    assert parse_nv_tegra_release(text) is None


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("36.4.4-20250616085344", L4T(36, 4, 4)),
        ("39.2.0-20260601141651\n", L4T(39, 2, 0)),
        ("", None),
        ("dpkg-query: no packages found matching nvidia-l4t-core", None),
    ],
)
def test_the_package_version_stands_in_for_the_release_file(version: str, expected: L4T | None) -> None:
    assert parse_l4t_package(version) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"NVIDIA Jetson AGX Orin Developer Kit\0", "NVIDIA Jetson AGX Orin Developer Kit"),
        (b"Jetson AGX Orin\0", "Jetson AGX Orin"),
        (b"lanai-3636\0", "lanai-3636"),
        (b"no terminator", "no terminator"),
        (b"", ""),
    ],
)
def test_the_model_ends_in_a_nul_byte(data: bytes, expected: str) -> None:
    assert parse_device_tree_text(data) == expected


@pytest.mark.parametrize(
    ("data", "expected", "name", "sm"),
    [
        (
            b"nvidia,p3768-0000+p3767-0005-super\0nvidia,p3767-0005\0nvidia,tegra234\0",
            BoardIdentity("tegra234", "p3767-0005", "p3768-0000", is_super=True),
            "Orin Nano 8GB devkit Super",
            87,
        ),
        (
            b"nvidia,p3737-0000+p3701-0005\0nvidia,p3701-0005\0nvidia,tegra234\0nvidia,tegra23x\0",
            BoardIdentity("tegra234", "p3701-0005", "p3737-0000"),
            "AGX Orin 64GB",
            87,
        ),
        (
            b"nvidia,p4071-0000+p3834-0008\0nvidia,p3834-0008\0nvidia,tegra264\0",
            BoardIdentity("tegra264", "p3834-0008", "p4071-0000"),
            "AGX Thor T5000",
            110,
        ),
        (
            b"acme,carrier\0nvidia,p3767-0009\0nvidia,tegra234\0",
            BoardIdentity("tegra234", "p3767-0009"),
            "p3767-0009",
            87,
        ),
        (b"nvidia,tegra999\0", BoardIdentity("tegra999"), "tegra999", None),
        (b"raspberrypi,5-model-b\0brcm,bcm2712\0", BoardIdentity(), "", None),
        (b"", BoardIdentity(), "", None),
    ],
)
def test_chip_and_module_come_from_the_device_tree(
    data: bytes, expected: BoardIdentity, name: str, sm: int | None
) -> None:
    identity = parse_compatible(data)
    assert (identity, identity.name, identity.sm) == (expected, name, sm)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NV Power Mode: MAXN\n0\n", "MAXN"),
        ("NV Power Mode: MODE_30W\n2\n", "30W"),
        ("NV Power Mode: 120W\n1\n", "120W"),
        ("NV Power Mode: MAXN_SUPER\n2\n", "MAXN_SUPER"),
        ("NVPM ERROR: request for bad power mode 2", ""),
        ("", ""),
    ],
)
def test_power_modes_are_told_by_name(text: str, expected: str) -> None:
    assert parse_power_mode(text) == expected


def test_packages_from_dpkg_query_and_from_dpkg_list() -> None:
    text = (
        "nvidia-l4t-core\t36.4.4-20250616085344\n"
        "libnvinfer10\t10.3.0.30-1+cuda12.5\n"
        "libnvinfer8\t\n"
        "ii  nvidia-jetpack          6.2.1+b38    arm64  NVIDIA Jetpack Meta Package\n"
        "ii  libnvinfer-bin:arm64    10.3.0.30-1+cuda12.5 arm64 tools\n"
        "dpkg-query: no packages found matching libnvinfer11\n"
    )
    assert parse_dpkg(text) == {
        "nvidia-l4t-core": "36.4.4-20250616085344",
        "libnvinfer10": "10.3.0.30-1+cuda12.5",
        "nvidia-jetpack": "6.2.1+b38",
        "libnvinfer-bin": "10.3.0.30-1+cuda12.5",
    }


def test_a_freshly_flashed_board_has_no_packages_of_jetpack() -> None:
    assert "nvidia-jetpack" not in parse_dpkg("nvidia-l4t-core\t36.4.4-20250616085344\nnvidia-jetpack\t\n")
