"""The reader against real child processes that print what boards print."""

import shutil
import sys
from pathlib import Path

import pytest

from starsd_edge.protocol.telemetry import BoardReading
from starsd_jetson.board.tegrastats import parse_tegrastats
from starsd_jetson.board.telemetry import BoardTelemetry, find_board, reading_of

LAB_BOARDS = Path(__file__).parents[2] / "lab" / "boards"
LINE = "RAM 4/8MB CPU [50%@100,off] EMC_FREQ 7%@665 tj@48C VDD_IN 6000mW/5000mW NEW thing"
PATIENCE_S = 20.0  # for a machine under load; every wait ends as soon as it is met


def printing(*lines: str, then: str = "sys.stdin.read()") -> list[str]:
    """A command that prints `lines` as tegrastats would, then does `then`."""
    program = f"import sys, time\nfor line in {lines!r}:\n    print(line, flush=True)\n{then}"
    return [sys.executable, "-c", program]


def anything(_: BoardReading) -> bool:
    return True


@pytest.mark.parametrize(
    ("board", "model", "l4t", "jetpack", "power_mode"),
    [
        (
            "orin-nano-jp62",
            "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
            "36.4.4",
            "6.1/6.2",
            "25W",
        ),
        ("agx-orin-jp72", "NVIDIA Jetson AGX Orin Developer Kit", "39.2.1", "7.2", "MAXN"),
        ("thor-jp71-fresh", "NVIDIA Jetson AGX Thor Developer Kit", "38.4.0", "7.1", "120W"),
    ],
)
def test_a_recorded_board_is_read_in_full(
    tmp_path: Path, board: str, model: str, l4t: str, jetpack: str, power_mode: str
) -> None:
    shutil.copytree(LAB_BOARDS / board / "rootfs", tmp_path, dirs_exist_ok=True)
    shutil.copytree(LAB_BOARDS / board / "devicetree", tmp_path / "sys/firmware/devicetree/base")
    command = [str(LAB_BOARDS / board / "rootfs/usr/bin/tegrastats"), "--interval", "50"]
    telemetry = BoardTelemetry(root=tmp_path, tegrastats=command)
    reading = telemetry.wait(anything, PATIENCE_S)
    telemetry.close()
    assert reading is not None
    assert (reading.model, reading.l4t, reading.jetpack) == (model, l4t, jetpack)
    assert reading.power_mode == power_mode
    assert reading.source.startswith("tegrastats")
    assert reading.power_w is not None


def test_a_reading_holds_what_the_line_says_and_keeps_what_is_new() -> None:
    assert reading_of(parse_tegrastats(LINE)) == BoardReading(
        source="tegrastats (JetPack 5)",
        ram_used_bytes=4 << 20,
        ram_total_bytes=8 << 20,
        cpu_loads=[0.5, None],
        cpu_mhz=[100, None],
        memory_bus_load=0.07,
        temperatures_c={"tj": 48.0},
        rails_w={"VDD_IN": 6.0},
        power_w=6.0,
        power_rails=["VDD_IN"],
        other={"NEW": "thing"},
    )


def test_what_tegrastats_does_not_print_comes_from_sysfs(tmp_path: Path) -> None:
    load = tmp_path / "sys/devices/platform/gpu.0/load"
    load.parent.mkdir(parents=True)
    load.write_text("870")
    telemetry = BoardTelemetry(root=tmp_path, tegrastats=printing(LINE, then="time.sleep(60)"))
    reading = telemetry.wait(anything, PATIENCE_S)
    telemetry.close()
    assert reading is not None
    assert (reading.gpu_load, reading.ram_total_bytes, reading.gpu_mhz) == (0.87, 8 << 20, None)


@pytest.mark.parametrize(
    "command",
    [printing(LINE), printing(), ["/no/such/tegrastats"], printing("command needs root")],
    ids=["ends after a line", "ends at once", "is missing", "prints something else and ends"],
)
def test_sysfs_takes_over_when_tegrastats_is_gone(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 2048 kB\nMemAvailable: 1024 kB\n")
    telemetry = BoardTelemetry(root=tmp_path, tegrastats=command, interval_s=0.01)
    reading = telemetry.wait(lambda reading: reading.source == "sysfs", PATIENCE_S)
    telemetry.close()
    assert reading is not None
    assert reading.ram_total_bytes == 2 << 20


def test_energy_adds_up_while_the_board_reports_power(tmp_path: Path) -> None:
    endless = "while True:\n    print(line, flush=True); time.sleep(0.02)"
    telemetry = BoardTelemetry(root=tmp_path, tegrastats=printing(LINE, then=endless))
    assert telemetry.wait(lambda _: (telemetry.joules() or 0.0) > 0.1, PATIENCE_S) is not None
    telemetry.close()


def test_a_device_without_power_readings_has_no_energy(tmp_path: Path) -> None:
    telemetry = BoardTelemetry(root=tmp_path, tegrastats=["/no/such/tegrastats"], interval_s=0.01)
    reading = telemetry.wait(anything, PATIENCE_S)
    assert (telemetry.joules(), reading is None) == (None, False)
    telemetry.close()
    telemetry.close()  # twice is fine


def test_closing_ends_the_child_process(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); "
    program += "print('RAM 1/2MB', flush=True); time.sleep(60)"
    telemetry = BoardTelemetry(root=tmp_path, tegrastats=[sys.executable, "-c", program, str(pid_file)])
    assert telemetry.wait(anything, PATIENCE_S) is not None
    telemetry.close()
    assert not Path(f"/proc/{pid_file.read_text()}").exists()


def test_a_machine_that_is_no_jetson_has_no_board(tmp_path: Path) -> None:
    assert not find_board(tmp_path).is_jetson
