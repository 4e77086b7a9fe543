"""What real boards print, and what each print must be read as."""

from __future__ import annotations

import pytest

from starsd_edge.board import Board, BoardSources, jetpack_of, parse_dpkg_versions, read_board

R36 = (
    "# R36 (release), REVISION: 4.4, GCID: 41062509, BOARD: generic, EABI: aarch64, "
    "DATE: Mon Jun 16 16:07:13 UTC 2025\n# KERNEL_VARIANT: oot\n"
    "TARGET_USERSPACE_LIB_DIR=nvidia\nINSTALL_TYPE=\n"
)
R39 = (
    "# R39 (release), REVISION: 2.1, GCID: 46758480, BOARD: generic, EABI: aarch64, "
    "DATE: Fri Aug 7 05:54:22 AM UTC 2026\n"
)
ORIN_NANO_DTB = "nvidia,p3768-0000+p3767-0005-super\0nvidia,p3767-0005\0nvidia,tegra234\0"
AGX_ORIN_DTB = "nvidia,p3737-0000+p3701-0005\0nvidia,p3701-0005\0nvidia,tegra234\0nvidia,tegra23x\0"
THOR_DTB = "nvidia,p4071-0000+p3834-0008\0nvidia,p3834-0008\0nvidia,tegra264\0"


def test_orin_nano_super_with_generic_board_and_nul_bytes() -> None:
    board = read_board(
        BoardSources(
            tegra_release=R36,
            model="NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\0",
            compatible=ORIN_NANO_DTB,
            nvpmodel="NV Power Mode: 25W\n1\n",
            dpkg_versions=parse_dpkg_versions(
                "nvidia-l4t-core 36.4.4-20250616085344\nnvidia-jetpack 6.2.1+b38\n"
                "libnvinfer10:arm64 10.3.0.30-1+cuda12.5\ncuda-cudart-12-6 12.6.68-1\nlibnvinfer8\n"
            ),
        )
    )
    assert board == Board(
        model="NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
        module="p3767-0005",
        chip="tegra234",
        compute="8.7",
        l4t="36.4.4",
        jetpack="6.2.1+b38",
        jetpack_line="6.1/6.2",
        tensorrt="10.3.0.30",
        cuda="12.6.68",
        power_mode="25W",
    )


def test_agx_orin_with_twelve_hour_date() -> None:
    board = read_board(BoardSources(tegra_release=R39, compatible=AGX_ORIN_DTB))
    assert (board.l4t, board.jetpack_line, board.module) == ("39.2.1", "7.2", "p3701-0005")


def test_freshly_flashed_thor_has_no_jetpack_and_says_so() -> None:
    board = read_board(
        BoardSources(
            model="NVIDIA Jetson AGX Thor Developer Kit\0",
            compatible=THOR_DTB,
            dpkg_versions=(("nvidia-l4t-core", "38.4.0-20251230160601"),),
        )
    )
    assert (board.l4t, board.jetpack_line, board.compute, board.tensorrt) == ("38.4.0", "7.1", "11.0", "")
    assert board.lacks_jetpack


def test_container_without_release_file_falls_back_to_the_package() -> None:
    board = read_board(BoardSources(dpkg_versions=(("nvidia-l4t-core", "36.4.4-20250616085344"),)))
    assert board.l4t == "36.4.4"


def test_laptop_is_no_jetson() -> None:
    assert read_board(BoardSources()) == Board()
    assert not read_board(BoardSources(model="20XW0055GE")).is_jetson


@pytest.mark.parametrize(
    ("l4t", "line"),
    [
        ("36.5.2", "6.2"),
        ("36.9.9", "6.x (L4T 36.9.9)"),
        ("41.1.0", "unknown JetPack (L4T 41.1.0)"),
        ("35.6.4", "5.1"),
        ("32.7.6", "4.x (L4T 32.7.6)"),
        ("", ""),
        ("garbage", ""),
    ],
)
def test_unknown_future_releases_are_shown_not_refused(l4t: str, line: str) -> None:
    assert line == jetpack_of(l4t)


def test_side_installed_tensorrt_wins_over_the_older_one() -> None:
    board = read_board(
        BoardSources(dpkg_versions=(("libnvinfer8", "8.6.2.3-1"), ("libnvinfer10", "10.7.0.23-1+cuda12.6")))
    )
    assert board.tensorrt == "10.7.0.23"
