"""Keys: from bytes to what the user looks at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd_edge.monitor.keys import parse_keys
from starsd_edge.monitor.model import WINDOWS_S
from starsd_edge.monitor.ui import SORT_KEYS, Command, Key, Page, Ui, after_key, listed

from .scenes import watched

ORDER = ["desk/a", "desk/b", "desk/c"]


def press(*keys: Key | str, ui: Ui | None = None, max_scroll: int = 5) -> Ui:
    ui = ui or Ui()
    for key in keys:
        ui, _ = after_key(ui, key, ORDER, max_scroll)
    return ui


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"jk", ["j", "k"]),
        (b"\x1b[A\x1bOB\x1b[6~", [Key.UP, Key.DOWN, Key.PAGE_DOWN]),
        (b"\x1b", [Key.ESCAPE]),
        (b"\x1b\x1b", [Key.ESCAPE, Key.ESCAPE]),
        (b"\r\n\x7f\x03", [Key.ENTER, Key.ENTER, Key.BACKSPACE, Key.INTERRUPT]),
        ("é设".encode(), ["é", "设"]),
        (b"\x1b[200~x", ["x"]),
        (b"\x1bxq", ["q"]),
        (b"\xff\x00q", ["q"]),
        (b"", []),
    ],
)
def test_bytes_become_keys(data: bytes, keys: list[Key | str]) -> None:
    assert parse_keys(data, complete=True).keys == keys


def test_a_key_that_arrives_in_pieces_is_one_key() -> None:
    first = parse_keys(b"j\x1b", complete=False)
    assert (first.keys, first.rest) == (["j"], b"\x1b")
    assert parse_keys(first.rest + b"[A", complete=False).keys == [Key.UP]


@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_are_read_to_their_end(data: bytes, complete: bool) -> None:
    parsed = parse_keys(data, complete=complete)
    assert not (complete and parsed.rest)
    assert data.endswith(parsed.rest)


@pytest.mark.parametrize(
    ("keys", "page"),
    [
        ((Key.ENTER,), Page.DEVICE),
        (("d",), Page.DEVICE),
        (("b",), Page.BOARD),
        (("b", "d", Key.ESCAPE), Page.OVERVIEW),
        (("?",), Page.HELP),
        (("b", "?", Key.ESCAPE), Page.BOARD),
        (("b", "?", "?", Key.ESCAPE), Page.BOARD),
        (("d", "o"), Page.OVERVIEW),
    ],
)
def test_keys_lead_from_page_to_page(keys: tuple[Key | str, ...], page: Page) -> None:
    assert press(*keys).page is page


@pytest.mark.parametrize(
    ("key", "command"),
    [
        ("q", Command.QUIT),
        ("Q", Command.QUIT_KEEPING_SCREEN),
        ("r", Command.RESET),
        (Key.INTERRUPT, Command.QUIT),
    ],
)
def test_keys_that_the_loop_acts_on(key: Key | str, command: Command) -> None:
    assert after_key(Ui(), key, ORDER)[1] is command


def test_moving_stops_at_both_ends() -> None:
    assert press(Key.DOWN).selected == "desk/b"
    assert press(*[Key.DOWN] * 5).selected == "desk/c"
    assert press(Key.END, Key.UP).selected == "desk/b"
    assert press(Key.END, Key.HOME).selected == "desk/a"
    assert press("j", "k", "k").selected == "desk/a"


def test_a_page_scrolls_no_further_than_its_end() -> None:
    assert press("?", *[Key.DOWN] * 9).scroll == 5
    assert press("?", Key.END, Key.UP).scroll == 4
    assert press("?", Key.DOWN, Key.ESCAPE).scroll == 0


def test_typing_a_filter_takes_every_key() -> None:
    ui = press("/", "q", "x", Key.BACKSPACE, "?")
    assert (ui.filter, ui.typing, ui.page) == ("q?", True, Page.OVERVIEW)
    assert press(Key.ENTER, ui=ui).typing is False
    assert press(Key.ENTER, ui=ui).filter == "q?"
    assert press(Key.ESCAPE, ui=ui).filter == ""


def test_even_while_typing_an_interrupt_quits() -> None:
    assert after_key(press("/"), Key.INTERRUPT, ORDER)[1] is Command.QUIT


def test_the_window_zooms_between_its_ends() -> None:
    assert [press(*["+"] * n).window_s for n in range(6)] == [*WINDOWS_S, *WINDOWS_S[-1:] * 2]
    assert press("+", "-", "-").window == 0


def test_sorting_goes_round_and_turns() -> None:
    assert [press(*["s"] * n).sort for n in range(len(SORT_KEYS))] == list(SORT_KEYS)
    assert press(*["s"] * len(SORT_KEYS)).sort == SORT_KEYS[0]
    assert press("S").reverse
    assert not press("S", "s").reverse


@given(
    st.lists(st.one_of(st.sampled_from(Key), st.characters(min_codepoint=32, max_codepoint=126)), max_size=30)
)
def test_no_keys_lead_to_a_state_that_is_none(keys: list[Key | str]) -> None:
    ui = press(*keys)
    assert ui.selected in ("", *ORDER)
    assert 0 <= ui.scroll <= 5
    assert 0 <= ui.window < len(WINDOWS_S)


class TestListed:
    def names(self, ui: Ui) -> list[str]:
        return [view.device.device for view in listed(watched(12, 3).device_views(10.0), ui)]

    def test_the_worst_come_first(self) -> None:
        assert self.names(Ui())[:3] == ["orin-03", "orin-05", "orin-00"]

    def test_the_fastest_come_first_and_ties_go_by_name(self) -> None:
        assert self.names(Ui(sort="tokens_per_s"))[:2] == ["orin-04", "orin-09"]
        assert self.names(Ui(sort="tokens_per_s", reverse=True))[0] == "orin-03"

    @pytest.mark.parametrize("sort", SORT_KEYS)
    def test_every_order_lists_all(self, sort: str) -> None:
        assert sorted(self.names(Ui(sort=sort))) == [f"orin-{n:02d}" for n in range(12)]

    @pytest.mark.parametrize(
        ("words", "names"),
        [
            ("plain", ["orin-05"]),
            ("ORIN-1", ["orin-10", "orin-11"]),
            ("orin-1 !11", ["orin-10"]),
            ("link broke", ["orin-03"]),
            ("nothing-like-it", []),
        ],
    )
    def test_the_filter_looks_at_name_state_and_reason(self, words: str, names: list[str]) -> None:
        assert self.names(Ui(filter=words)) == names
