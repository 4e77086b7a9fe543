"""Lines that real boards printed, of every dialect, are in tegrastats_samples.tsv: name, source, line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd_jetson.board.tegrastats import Core, Dialect, Engine, Memory, Rail, Tegrastats, parse_tegrastats

SAMPLES = {
    name: line
    for name, _source, line in (
        row.split("\t") for row in (Path(__file__).parent / "tegrastats_samples.tsv").read_text().splitlines()
    )
}
MIB = 1 << 20


def parsed(name: str) -> Tegrastats:
    return parse_tegrastats(SAMPLES[name])


@pytest.mark.parametrize("name", SAMPLES)
def test_no_field_of_any_sample_is_left_unread(name: str) -> None:
    """What the samples print beside the known fields is IRAM and MTS, kept as text."""
    assert set(parsed(name).other) <= {"IRAM", "MTS"}


@pytest.mark.parametrize(
    ("name", "dialect", "total_mib", "cores", "gpu_load", "gpu_mhz", "zones", "rails"),
    [
        ("tx2-jp4-early", Dialect.JETPACK_4, 7852, 6, 0.0, None, 8, 6),
        ("tx2-jp4", Dialect.JETPACK_4, 7859, 6, 0.0, 114, 8, 6),
        ("xaviernx-jp512", Dialect.JETPACK_5, 6851, 6, 0.0, 114, 6, 3),
        ("xaviernx-cores-off", Dialect.JETPACK_5, 6854, 6, 0.0, 510, 5, 3),
        ("agxorin-jp5", Dialect.JETPACK_5, 62801, 12, 0.0, 0, 7, 4),
        ("agxorin-jp621", Dialect.JETPACK_6, 62841, 12, 0.0, 0, 5, 3),
        ("orinnano-jp6-root", Dialect.JETPACK_6, 7620, 6, 0.63, 621, 6, 3),
        ("orinnano-jp6-nonroot", Dialect.JETPACK_6, 7620, 6, 0.0, None, 6, 3),
        ("orinnx8-jp6-busy", Dialect.JETPACK_6, 7620, 6, 0.84, 713, 9, 3),
        ("orinnanosuper-jp62-idle", Dialect.JETPACK_6, 7620, 6, 0.0, 305, 6, 3),
        ("orinnanosuper-jp62-busy", Dialect.JETPACK_6, 7620, 6, 0.99, 612, 6, 3),
        ("thor-jp71-idle", Dialect.JETPACK_6, 125773, 14, None, 0, 4, 3),
        ("thor-jp72", Dialect.JETPACK_7_2, 125811, 14, None, 314, 5, 3),
        ("agxorin-jp72-cores-off", Dialect.JETPACK_7_2, 62878, 12, 0.0, 0, 5, 3),
        ("agxorin-jp72-busy", Dialect.JETPACK_7_2, 62817, 12, 0.12, 1300, 4, 3),
        ("template-nano-jp4-root", Dialect.JETPACK_4, 3964, 4, 0.05, 76, 6, 3),
        ("template-tx2-swap-after-cpu", Dialect.JETPACK_4, 7844, 6, 0.05, 1300, 9, 6),
        ("template-agxxavier-jp4-root", Dialect.JETPACK_4, 15823, 8, 0.05, 1377, 9, 6),
        ("template-agxorin-jp5-early-root", Dialect.JETPACK_5, 30536, 12, 0.05, 0, 7, 4),
        ("template-agxorin-jp5-early-nonroot", Dialect.JETPACK_5, 30536, 12, 0.05, None, 7, 0),
    ],
)
def test_every_dialect_gives_its_fields(
    name: str,
    dialect: Dialect,
    total_mib: int,
    cores: int,
    gpu_load: float | None,
    gpu_mhz: int | None,
    zones: int,
    rails: int,
) -> None:
    stats = parsed(name)
    assert stats.ram is not None
    assert (stats.dialect, stats.ram.total_bytes // MIB) == (dialect, total_mib)
    assert (len(stats.cores), stats.gpu_load, stats.gpu_mhz) == (cores, gpu_load, gpu_mhz)
    assert (len(stats.temperatures_c), len(stats.rails)) == (zones, rails)


def test_one_line_in_full() -> None:
    stats = parsed("orinnx8-jp6-busy")
    assert stats.timestamp == "05-15-2025 18:30:28"
    assert (stats.ram, stats.swap) == (
        Memory(6982 * MIB, 7620 * MIB),
        Memory(2640 * MIB, 16384 * MIB),
    )
    assert (stats.cores[0], stats.cores[5]) == (Core(0.97, 1984), Core(0.93, 247))
    assert stats.engines["EMC"] == Engine(on=True, load=0.18, mhz=(3199,))
    assert stats.engines["NVDEC"] == Engine(on=True, load=0.40, mhz=(115,))
    assert stats.engines["OFA"] == Engine(on=False)
    assert stats.engines["APE"] == Engine(on=True, mhz=(174,))
    assert stats.temperatures_c["tj"] == 65.562
    assert stats.rails["VDD_IN"] == Rail(17946, 15710)


def test_thor_gives_three_values_a_rail_and_no_gpu_load() -> None:
    stats = parsed("thor-jp72")
    assert stats.rails["VDD_CPU_SOC_MSS"] == Rail(7953, 8332, 8710)
    assert stats.temperatures_c["cpu"] == 34.312
    assert stats.engines["GR3D"] == Engine(on=True, mhz=(314, 314, 314))


def test_cores_that_are_off_have_no_load() -> None:
    assert parsed("agxorin-jp72-cores-off").cores[7:9] == [Core(0.57, 729), Core(None, None)]


def test_rails_called_like_units_are_not_taken_for_them() -> None:
    """AGX Xavier prints GPU@28C, CPU@28C, CPU [..] and the rails GPU and CPU in one line."""
    stats = parsed("template-agxxavier-jp4-root")
    assert (stats.rails["GPU"], stats.rails["CPU"]) == (Rail(1155, 1155), Rail(385, 385))
    assert (stats.temperatures_c["gpu"], len(stats.cores)) == (28.0, 8)


def test_a_zone_that_is_off_and_a_rail_that_leads_nowhere_are_left_out() -> None:
    stats = parsed("agxorin-jp5")
    assert "gpu" not in stats.temperatures_c
    assert "NC" not in stats.rails


def test_one_clock_for_all_cores() -> None:
    assert parse_tegrastats("RAM 1/2MB CPU [5%,off]@1190").cores == [Core(0.05, 1190), Core(None, None)]


def test_a_memory_bus_with_a_clock_but_no_load() -> None:
    assert parse_tegrastats("RAM 1/2MB EMC_FREQ @665").engines["EMC"] == Engine(on=True, mhz=(665,))


def test_fields_of_a_future_release_are_kept_beside_the_known_ones() -> None:
    stats = parse_tegrastats("RAM 1/2MB NPU {busy: 12%} fast GR3D_FREQ 7% WARP 9.1x VDD_IN 5mW/5mW")
    assert stats.other == {"NPU": "{busy: 12%} fast", "WARP": "9.1x"}
    assert (stats.gpu_load, stats.rails["VDD_IN"]) == (0.07, Rail(5, 5))


@pytest.mark.parametrize("line", ["", "tegrastats: command not found", "RAM lots", "SWAP 1/2MB"])
def test_what_is_no_tegrastats_line_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="no RAM field"):
        parse_tegrastats(line)


@given(
    st.permutations(
        ["RAM 1/2MB", "SWAP 3/4MB (cached 5MB)", "CPU [5%@6]", "GR3D_FREQ 7%", "tj@8C", "VDD_IN 9/9"]
    )
)
def test_the_order_of_fields_does_not_matter(parts: list[str]) -> None:
    """SWAP stands after RAM on some releases and after CPU on others."""
    stats = parse_tegrastats(" ".join(parts))
    assert (stats.ram, stats.swap) == (Memory(MIB, 2 * MIB), Memory(3 * MIB, 4 * MIB))
    assert (stats.cores, stats.gpu_load) == ([Core(0.05, 6)], 0.07)
    assert (stats.temperatures_c, stats.rails) == ({"tj": 8.0}, {"VDD_IN": Rail(9, 9)})


@given(st.text(alphabet="RAM 0123456789/%@[],.CPUoffmWB_", max_size=120))
def test_any_text_is_read_or_refused_with_a_value_error(text: str) -> None:
    try:
        parse_tegrastats(f"RAM 1/2MB {text}")
    except ValueError as error:
        pytest.fail(f"RAM was there: {error}")
