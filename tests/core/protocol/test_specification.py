"""docs/protocol.md says what the code does: tables are compared cell by cell."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from starsd_edge.latency import MAX_BUCKETS, Histogram
from starsd_edge.protocol.decoder import DECODERS
from starsd_edge.protocol.features import FeatureDtype
from starsd_edge.protocol.head import COMMON, MAGIC, MAJOR, MINOR
from starsd_edge.protocol.limits import (
    ACK_WINDOW,
    DEFAULT_TIMING,
    MAX_CHUNK_BYTES,
    MAX_CONTEXT_TOKENS,
    MAX_FRAMES,
    MAX_GREETING_BYTES,
    MAX_NODES,
    MAX_PENDING,
    MAX_ROWS,
)
from starsd_edge.protocol.messages import BusyReason, ErrorCode, MessageKind
from starsd_edge.protocol.states import (
    EDGE_TABLE,
    SERVER_TABLE,
    EdgeEvent,
    EdgeState,
    ServerState,
    ServiceAct,
)
from starsd_edge.protocol.telemetry import (
    MAX_REPORT_BYTES,
    BoardReading,
    EdgeReport,
    EdgeSession,
    Energy,
    Mode,
    Stage,
    Work,
)

TEXT = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
SIZES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "2 bytes": 2}


def table(first_header: str) -> list[list[str]]:
    """The rows of the table whose header begins with `first_header`, header included."""
    lines = TEXT[TEXT.index(f"\n| {first_header} |") + 1 :].splitlines()
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not set(line) <= set("|-: "):
            rows.append(cells)
    return rows


def test_the_head_is_laid_out_as_written() -> None:
    rows = table("offset")[1:]
    offset = 0
    for written, kind, *_ in rows:
        assert offset == int(written)
        offset += SIZES[kind]
    assert offset == COMMON.size
    assert f"common head ({COMMON.size} bytes)" in TEXT
    assert rows[0][3].startswith(f"`{MAGIC.hex(' ')}`")
    assert f"version {MAJOR}.{MINOR}" in TEXT


def test_every_type_has_its_number_and_body() -> None:
    rows = {int(number): (name, body) for number, name, _, body in table("type")[1:]}
    assert {number: name for number, (name, _) in rows.items()} == {
        kind.value: kind.name for kind in MessageKind
    }
    for number, (name, body) in rows.items():
        sizes = [SIZES[word] for word in re.findall(r"\bu(?:8|16|32|64)\b", body)]
        assert sum(sizes) == DECODERS[number].body.size, name


def test_the_services_table_is_the_one_in_force() -> None:
    header, *rows = table("state \\ message")
    for state, *cells in rows:
        for column, cell in zip(header[1:], cells, strict=True):
            for event in column.split(", "):
                key = ServiceAct.EVICT if event == "evicted" else MessageKind[event]
                assert SERVER_TABLE[ServerState(state)][key] == ServerState(cell.split()[0]), (state, event)


def test_the_edges_table_is_the_one_in_force() -> None:
    events = {
        "connect": EdgeEvent.CONNECT,
        "connected": EdgeEvent.CONNECTED,
        "welcomed": EdgeEvent.WELCOMED,
        "rows sent": EdgeEvent.SEND_ROWS,
        "UPDATE sent": EdgeEvent.SEND_UPDATE,
        "BUSY": EdgeEvent.TOLD_TO_WAIT,
        "pause over": EdgeEvent.PAUSE_OVER,
        "greet again": EdgeEvent.GREET_AGAIN,
        "lost": EdgeEvent.LOST,
        "refused": EdgeEvent.REFUSE,
    }
    header, *rows = table("state \\ event")
    assert [row[0] for row in rows] == [state.value for state in EdgeState if state is not EdgeState.CLOSED]
    for state, *cells in rows:
        for column, cell in zip(header[1:], cells, strict=True):
            if column in events:
                reached = EDGE_TABLE[EdgeState(state)].get(events[column])
                assert (reached.value if reached else "") == cell, (state, column)


@pytest.mark.parametrize(
    ("row", "value"),
    [
        ("frames of a message", f"{MAX_FRAMES}"),
        ("features in one message", f"{MAX_CHUNK_BYTES // 1024} KiB, {MAX_ROWS:,} rows"),
        ("nodes of a tree", f"{MAX_NODES}"),
        ("base_len", f"{MAX_CONTEXT_TOKENS:,}"),
        ("HELLO, WELCOME body", f"{MAX_GREETING_BYTES // 1024} KiB"),
        ("REPORT body", f"{MAX_REPORT_BYTES // 1024} KiB"),
        ("unanswered requests of a session", f"{MAX_PENDING}"),
    ],
)
def test_limits_are_those_in_force(row: str, value: str) -> None:
    assert f"| {row} | {value} |" in TEXT


def test_numbers_in_prose_are_those_in_force() -> None:
    timing = DEFAULT_TIMING
    assert f"No answer for {timing.answer_s:g} s (or four times" in TEXT
    assert f"{timing.chunk_s:g} s while chunks are under way" in TEXT
    assert f"PING every {timing.ping_s:g} s" in TEXT
    assert f"{timing.probe_first_s:g} s, doubled up to {timing.probe_max_s:g} s" in TEXT
    assert (timing.max_misses, ACK_WINDOW) == (3, 2)
    assert re.search(r"After three misses\s+in a row", TEXT)
    assert re.search(r"at most two may be unanswered", TEXT)


def test_reasons_codes_and_dtypes_have_their_numbers() -> None:
    codes = re.search(r"Codes: (.*?)\.", TEXT, re.DOTALL)
    assert codes is not None
    numbers = [int(number) for number in re.findall(r"\d+", codes[1])]
    assert numbers == [code.value for code in ErrorCode]
    reasons = re.search(r"Reasons: (.*?)\. An", TEXT, re.DOTALL)
    assert reasons is not None
    assert [int(n) for n in re.findall(r"\d+", reasons[1])] == [reason.value for reason in BusyReason]
    for dtype in FeatureDtype:
        assert f"{dtype.value} {dtype.name}" in TEXT


def in_words(kind: msgspec.inspect.Type) -> str:
    """A type as the tables of section 4.2 write it."""
    match kind:
        case msgspec.inspect.Metadata(type=inner):
            return in_words(inner)
        case msgspec.inspect.UnionType(types=types):
            named = [in_words(inner) for inner in types if not isinstance(inner, msgspec.inspect.NoneType)]
            return f"{named[0]} or null"
        case msgspec.inspect.IntType(ge=0):
            return "count"
        case msgspec.inspect.IntType():
            return "int"
        case msgspec.inspect.FloatType(ge=0):
            return "amount"
        case msgspec.inspect.FloatType():
            return "number"
        case msgspec.inspect.StrType(max_length=length):
            return {80: "name", 240: "sentence"}[length or 0]
        case msgspec.inspect.EnumType():
            return "string"
        case msgspec.inspect.ListType(item_type=item, max_length=most):
            return f"list of at most {most} {in_many_words(item)}" if most else "list of counts"
        case msgspec.inspect.DictType(value_type=value, max_length=most):
            return (
                f"object of at most {most} {in_many_words(value)} by name" if most else "object of histograms"
            )
        case msgspec.inspect.StructType(cls=cls):
            return REPORT_TABLES[cls].removeprefix("a ")
    raise AssertionError(kind)


def in_many_words(kind: msgspec.inspect.Type) -> str:
    one = in_words(kind)
    return {"number or null": "numbers or nulls"}.get(one, f"{one}s")


REPORT_TABLES: dict[type, str] = {
    EdgeReport: "a report",
    EdgeSession: "a session",
    Work: "work",
    Histogram: "a histogram",
    BoardReading: "a board",
    Energy: "energy",
}


@pytest.mark.parametrize("cls", REPORT_TABLES, ids=REPORT_TABLES.get)
def test_a_report_has_the_keys_types_and_defaults_written(cls: type[msgspec.Struct]) -> None:
    fields = msgspec.inspect.type_info(cls)
    assert isinstance(fields, msgspec.inspect.StructType)
    expected = []
    for field in fields.fields:
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if isinstance(default, msgspec.Struct):
            default = {}
        words = in_words(field.type)
        if default is not msgspec.NODEFAULT:
            words += f", `{msgspec.json.encode(default).decode()}`"
        expected.append([field.name, words])
    assert [row[:2] for row in table(f"key of {REPORT_TABLES[cls]}")[1:]] == expected


def test_what_a_report_may_say_in_words_is_written() -> None:
    for word in (*Mode, Stage.LINK, Stage.VERIFY, Stage.SAMPLE, Stage.QUEUE, Stage.DRAFT):
        assert f'`"{word.value}"`' in TEXT
    assert f"first + length is at most {MAX_BUCKETS}" in TEXT
