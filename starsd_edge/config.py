"""Where a user's files live (XDG base directories), and the settings file.

`STARSD_CACHE`, `STARSD_STATE` and `STARSD_CONFIG` name a folder directly and win over the XDG variables.
A flag wins over an environment variable, that over the file, that over the default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["cache_dir", "config_dir", "state_dir"]


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """What can be made again: fetched models, exported bundles. Not created here."""
    return _folder(environ, "STARSD_CACHE", "XDG_CACHE_HOME", ".cache")


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """What a program remembers between runs: chat history. Not created here."""
    return _folder(environ, "STARSD_STATE", "XDG_STATE_HOME", ".local/state")


def config_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """What the user wrote: settings, keys. Not created here."""
    return _folder(environ, "STARSD_CONFIG", "XDG_CONFIG_HOME", ".config")


def _folder(environ: Mapping[str, str], own: str, xdg: str, default: str) -> Path:
    if environ.get(own):
        return Path(environ[own]).expanduser()
    base = environ.get(xdg, "")
    # The XDG specification: a relative path is invalid and ignored.
    root = Path(base) if os.path.isabs(base) else Path(environ.get("HOME", "~")).expanduser() / default
    return root / "starsd"
