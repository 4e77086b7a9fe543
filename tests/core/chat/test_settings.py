"""What a user may set, and what is said when it cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd_edge.chat.settings import SETTINGS, ChatSettings, FullWindow, change_setting, show_setting
from starsd_edge.errors import UsageError


@pytest.mark.parametrize(
    ("shown", "name", "value"),
    [
        ("0.7", "temperature", "0.7"),
        ("40", "top_k", "40"),
        ("None", "max_tokens", "none"),
        ("12", "max_tokens", "12"),
        ("be brief", "system", "be brief"),
        (r"\n END", "stop", r"\n END"),
        ("refuse", "full_window", "refuse"),
        ("off", "draft", "off"),
    ],
)
def test_a_setting_shows_what_was_set(shown: str, name: str, value: str) -> None:
    settings = change_setting(ChatSettings(), name, value)
    assert shown.replace("None", "") == show_setting(settings, name)


@pytest.mark.parametrize(
    ("message", "name", "value"),
    [
        ("a number", "temperature", "warm"),
        ("between 0 and 100", "temperature", "-1"),
        ("a whole number", "top_k", "1.5"),
        ("above 0", "max_tokens", "0"),
        ("on or off", "draft", "maybe"),
        ("drop-oldest, refuse", "full_window", "explode"),
        ("temperature", "temprature", "1"),
        ("whose backslashes begin", "stop", "\\"),
        ("whose backslashes begin", "stop", "\\x2"),
    ],
)
def test_a_wrong_value_is_answered_with_what_is_allowed(message: str, name: str, value: str) -> None:
    with pytest.raises(UsageError, match=message):
        change_setting(ChatSettings(), name, value)


@given(stops=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5), max_size=3))
def test_any_stop_strings_survive_being_shown_and_set(stops: list[str]) -> None:
    settings = ChatSettings(stop=tuple(stops))
    assert settings == change_setting(ChatSettings(), "stop", show_setting(settings, "stop"))


def test_every_setting_can_be_set_to_what_it_shows() -> None:
    settings = ChatSettings(max_tokens=5, full_window=FullWindow.REFUSE, stop=("é b",))
    for name in SETTINGS:
        assert settings == change_setting(settings, name, show_setting(settings, name))
