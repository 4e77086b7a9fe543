"""Where files go."""

from __future__ import annotations

from pathlib import Path

import pytest

from starsd_edge.config import cache_dir, config_dir, state_dir


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
