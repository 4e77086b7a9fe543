from pathlib import Path

import pytest

from starsd_edge.protocol.telemetry import BoardReading
from starsd_jetson.board.sysfs import Sysfs

MEMINFO = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB\n"


def tree(root: Path, files: dict[str, str]) -> Sysfs:
    """A /proc and /sys with these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Sysfs(root)


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert Sysfs(tmp_path).read() == BoardReading(source="sysfs")


def test_memory_counts_what_programs_could_still_have_as_free(tmp_path: Path) -> None:
    reading = tree(tmp_path, {"proc/meminfo": MEMINFO}).read()
    assert (reading.ram_used_bytes, reading.ram_total_bytes) == (600 * 1024, 1000 * 1024)
    assert (reading.swap_used_bytes, reading.swap_total_bytes) == (30 * 1024, 50 * 1024)


def test_cpu_load_is_the_time_between_two_looks_and_a_core_that_is_off_has_none(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, {"proc/stat": "cpu 9 9 9 9\ncpu0 10 0 10 80 0 0 0 0\ncpu2 0 0 0 100 0 0 0 0\n"})
    assert sysfs.read().cpu_loads == []
    tree(tmp_path, {"proc/stat": "cpu0 25 5 10 160 0 0 0 0 7 7\ncpu2 0 0 0 150 50 0 0 0\nintr 1\n"})
    assert sysfs.read().cpu_loads == [0.2, None, 0.0]


@pytest.mark.parametrize(
    ("files", "load", "mhz"),
    [
        ({"sys/devices/platform/gpu.0/load": "630\n"}, 0.63, None),
        (
            {
                "sys/class/devfreq/17000000.ga10b/device/load": "250",
                "sys/class/devfreq/17000000.ga10b/cur_freq": "1300500000",
                "sys/class/devfreq/31b0000.memory/cur_freq": "3199000000",
            },
            0.25,
            1300.5,
        ),
        (
            {
                "sys/class/devfreq/gpu-gpc-0/cur_freq": "1575000000",
                "sys/class/devfreq/gpu-nvd-0/cur_freq": "1",
            },
            None,
            1575.0,
        ),
    ],
    ids=["platform file", "Orin, devfreq", "Thor: a clock and no load"],
)
def test_the_gpu_is_found_where_its_release_put_it(
    tmp_path: Path, files: dict[str, str], load: float | None, mhz: float | None
) -> None:
    reading = tree(tmp_path, files).read()
    assert (reading.gpu_load, reading.gpu_mhz) == (load, mhz)


def test_temperatures_have_short_names_and_zones_that_are_off_are_left_out(tmp_path: Path) -> None:
    zones = {
        "sys/class/thermal/thermal_zone0/type": "gpu-thermal\n",
        "sys/class/thermal/thermal_zone0/temp": "48625\n",
        "sys/class/thermal/thermal_zone1/type": "CV0-therm",
        "sys/class/thermal/thermal_zone1/temp": "-256000",
        "sys/class/thermal/thermal_zone2/type": "tj-thermal",
    }
    assert tree(tmp_path, zones).read().temperatures_c == {"gpu": 48.625}


def test_rails_of_the_power_monitor_on_orin(tmp_path: Path) -> None:
    files = {
        "sys/class/hwmon/hwmon1/name": "ina3221\n",
        "sys/class/hwmon/hwmon1/in1_label": "VDD_IN",
        "sys/class/hwmon/hwmon1/in1_input": "19000",
        "sys/class/hwmon/hwmon1/curr1_input": "500",
        "sys/class/hwmon/hwmon1/in2_label": "NC",
        "sys/class/hwmon/hwmon1/in2_input": "0",
        "sys/class/hwmon/hwmon1/curr2_input": "0",
        "sys/class/hwmon/hwmon1/in7_label": "sum of shunt voltages",
        "sys/class/hwmon/hwmon1/in7_input": "20",
        "sys/class/hwmon/hwmon2/name": "pwmfan",
    }
    reading = tree(tmp_path, files).read()
    assert (reading.rails_w, reading.power_w, reading.power_rails) == ({"VDD_IN": 9.5}, 9.5, ["VDD_IN"])


def test_rails_of_the_power_monitor_on_older_releases(tmp_path: Path) -> None:
    device = "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
    files = {f"{device}/rail_name_0": "POM_5V_IN", f"{device}/in_power0_input": "2763"}
    reading = tree(tmp_path, files).read()
    assert (reading.power_w, reading.power_rails) == (2.763, ["POM_5V_IN"])


@pytest.mark.parametrize(
    ("status", "power_w"),
    [("Discharging", 12.5), ("Charging", None)],
)
def test_a_laptop_says_its_power_on_battery_only(tmp_path: Path, status: str, power_w: float | None) -> None:
    files = {
        "sys/class/power_supply/BAT0/status": status,
        "sys/class/power_supply/BAT0/power_now": "12500000",
        "sys/class/power_supply/AC/online": "0",
    }
    assert tree(tmp_path, files).read().power_w == power_w


def test_a_battery_that_gives_volts_and_amperes(tmp_path: Path) -> None:
    files = {
        "sys/class/power_supply/BAT1/status": "Discharging",
        "sys/class/power_supply/BAT1/voltage_now": "12000000",
        "sys/class/power_supply/BAT1/current_now": "1500000",
    }
    assert tree(tmp_path, files).read().power_w == 18.0


def test_a_sensor_that_refuses_or_talks_nonsense_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "sys/devices/platform/gpu.0/load").mkdir(parents=True)  # reading it fails
    sysfs = tree(tmp_path, {"proc/meminfo": "MemTotal: lots\n\n", "proc/stat": "cpux\n\n"})
    assert sysfs.read() == BoardReading(source="sysfs")
