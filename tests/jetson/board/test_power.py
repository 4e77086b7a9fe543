import pytest

from starsd_jetson.board.power import MAX_GAP_S, EnergyMeter, TotalPower, total_power


@pytest.mark.parametrize(
    ("rails_w", "expected"),
    [
        ({"VDD_IN": 5.3, "VDD_CPU": 2.2}, TotalPower(5.3, ("VDD_IN",))),
        ({"POM_5V_IN": 0.9, "POM_5V_GPU": 0.0}, TotalPower(0.9, ("POM_5V_IN",))),
        ({"VIN": 31.0, "VDD_GPU": 5.0, "VIN_SYS_5V0": 6.7}, TotalPower(31.0, ("VIN",))),
        (
            {"VDD_GPU_SOC": 2.0, "VDD_CPU_CV": 1.0, "VIN_SYS_5V0": 4.0, "VDDQ_VDD2_1V8AO": 0.3},
            TotalPower(7.0, ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")),
        ),
        (
            {"VDD_GPU": 5.0, "VDD_CPU_SOC_MSS": 8.0, "VIN_SYS_5V0": 7.0},
            TotalPower(20.0, ("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0")),
        ),
        (
            {"GPU": 1.0, "CPU": 0.5, "SOC": 2.5, "CV": 0.0, "VDDRQ": 0.25, "SYS5V": 2.75},
            TotalPower(7.0, ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V")),
        ),
        ({"VDD_GPU_SOC": 2.0, "VDD_CPU_CV": 1.0}, None),
        ({"VDD_SOMETHING_NEW": 3.0}, None),
        ({}, None),
    ],
)
def test_the_total_is_read_from_the_rails_that_have_one(
    rails_w: dict[str, float], expected: TotalPower | None
) -> None:
    assert total_power(rails_w) == expected


def test_energy_is_the_area_under_the_readings() -> None:
    meter = EnergyMeter()
    for now_s, watts in [(100.0, 10.0), (101.0, 20.0), (103.0, 20.0)]:
        meter.add(now_s, watts)
    assert meter.joules == pytest.approx(15.0 + 40.0)


def test_a_gap_in_the_readings_is_not_guessed_over() -> None:
    meter = EnergyMeter()
    meter.add(0.0, 10.0)
    meter.add(MAX_GAP_S + 1, 10.0)
    meter.add(MAX_GAP_S + 2, 10.0)
    assert meter.joules == pytest.approx(10.0)


def test_a_failed_reading_ends_the_stretch() -> None:
    meter = EnergyMeter()
    for now_s, watts in [(0.0, 10.0), (1.0, None), (2.0, 10.0), (3.0, 10.0)]:
        meter.add(now_s, watts)
    assert meter.joules == pytest.approx(10.0)


def test_two_readings_at_one_time_count_nothing() -> None:
    meter = EnergyMeter()
    meter.add(1.0, 10.0)
    meter.add(1.0, 30.0)
    assert meter.joules == 0.0
