"""What a machine says of itself, from files as desktops and boards have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from starsd_edge import machine


@pytest.mark.parametrize(
    ("cpu_info", "board", "expected"),
    [
        ("processor\t: 0\nmodel name\t: AMD EPYC 9354\nmodel name\t: AMD EPYC 9354\n", None, "AMD EPYC 9354"),
        (
            "processor\t: 0\nCPU part\t: 0xd42\n",
            "NVIDIA Jetson AGX Orin Developer Kit\0",
            "NVIDIA Jetson AGX Orin Developer Kit",
        ),
        ("model name\t:\n", "Raspberry Pi 5\0", "Raspberry Pi 5"),
    ],
)
def test_the_processor_or_else_the_board(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu_info: str, board: str | None, expected: str
) -> None:
    (tmp_path / "cpuinfo").write_text(cpu_info)
    if board is not None:
        (tmp_path / "model").write_text(board)
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine, "BOARD_NAME", tmp_path / "model")
    assert machine.cpu_name() == expected


def test_a_machine_that_tells_nothing_still_has_an_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "none")
    monkeypatch.setattr(machine, "BOARD_NAME", tmp_path / "none")
    assert machine.cpu_name()
