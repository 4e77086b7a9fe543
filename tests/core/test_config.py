"""Where files go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from starsd_edge.config import cache_dir, config_dir, read_config, state_dir
from starsd_edge.errors import ConfigError
from starsd_edge.link.keys import key_dir


@pytest.mark.parametrize(
    ("expected", "environ"),
    [
        ("/home/u/.cache/starsd", {"HOME": "/home/u"}),
        ("/x/starsd", {"HOME": "/home/u", "XDG_CACHE_HOME": "/x"}),
        ("/home/u/.cache/starsd", {"HOME": "/home/u", "XDG_CACHE_HOME": "relative"}),
        ("/own", {"HOME": "/home/u", "XDG_CACHE_HOME": "/x", "STARSD_CACHE": "/own"}),
    ],
)
def test_the_cache_follows_the_environment(expected: str, environ: dict[str, str]) -> None:
    assert Path(expected) == cache_dir(environ)


def test_state_and_configuration_have_their_own_places() -> None:
    assert Path("/h/.local/state/starsd") == state_dir({"HOME": "/h"})
    assert Path("/h/.config/starsd") == config_dir({"HOME": "/h"})


@pytest.mark.parametrize("place", [config_dir, state_dir, cache_dir])
def test_the_home_of_nobody_is_named(place: Callable[[Mapping[str, str]], Path]) -> None:
    name = "STARSD_" + place.__name__.removesuffix("_dir").upper()
    with pytest.raises(ConfigError, match=name):
        place({name: "~nobody-of-this-name/x"})
    with pytest.raises(ConfigError, match="STARSD_KEYS"):
        key_dir({"STARSD_KEYS": "~nobody-of-this-name/x"})


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a = ", "[chat]\nbundel = 'x'"])
def test_a_damaged_settings_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.toml"):
        read_config({"STARSD_CONFIG": str(tmp_path)})


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            "chat.bundel: there is no such field; known: bundle, service, history, settings",
            "[chat]\nbundel = 'x'",
        ),
        ("chta: there is no such field; known: chat", "[chta]"),
        ("chat.history: expected true or false, got text in quotes", "[chat]\nhistory = 'yes'"),
        ("chat.bundle: expected text in quotes, got a number", "[chat]\nbundle = 3"),
        ("chat.settings: expected a table, got a list", "[chat]\nsettings = [1]"),
        ('text is in quotes: NAME = "TEXT"', "[chat]\nbundle = /models/x"),
    ],
)
def test_a_wrong_field_is_named_as_in_the_file_with_what_is_allowed(
    tmp_path: Path, said: str, text: str
) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_config({"STARSD_CONFIG": str(tmp_path)})
    assert str(refused.value).endswith(said)


def test_a_settings_file_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "config.toml").mkdir()
    with pytest.raises(ConfigError) as caught:
        read_config({"STARSD_CONFIG": str(tmp_path)})
    assert str(caught.value) == f"{tmp_path}/config.toml cannot be read: Is a directory"
