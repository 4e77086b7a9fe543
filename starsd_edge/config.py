"""Where a user's files live (XDG base directories), and the settings file.

`STARSD_CACHE`, `STARSD_STATE` and `STARSD_CONFIG` name a folder directly and win over the XDG variables.
A flag wins over an environment variable, that over the file, that over the default.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from starsd_edge.errors import ConfigError

__all__ = [
    "ChatConfig",
    "UserConfig",
    "cache_dir",
    "config_dir",
    "config_path",
    "named_folder",
    "read_config",
    "state_dir",
]

CONFIG_NAME = "config.toml"
# What a user writes for each kind that msgspec names.
TOML_WORDS = {
    "bool": "true or false",
    "str": "text in quotes",
    "str | null": "text in quotes",
    "int": "a number",
    "float": "a number",
    "bool | int | float | str": "text in quotes, a number, true or false",
    "object": "a table",
    "array": "a list",
}


class ChatConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[chat]`: what `starsd chat` and `starsd serve` take where no flag says otherwise.

    settings  names and values as /set takes them
    """

    bundle: str | None = None
    service: str | None = None
    history: bool = True
    settings: dict[str, str | int | float | bool] = {}


class UserConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole settings file; every table may be missing."""

    chat: ChatConfig = ChatConfig()


def read_config(environ: Mapping[str, str] = os.environ) -> UserConfig:
    """The user's settings file; defaults where there is none.

    Raises ConfigError that names file, key and what is allowed.
    """
    path = config_path(environ)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return UserConfig()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from error
    try:
        return msgspec.convert(_parse_toml(text), UserConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_in_words(str(error))}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'{path} is not TOML: {error}; text is in quotes: NAME = "TEXT"') from error


def _in_words(refusal: str) -> str:
    """What msgspec found wrong, behind the name that it has in the file, with what is allowed.

    It says no more than "Expected `bool`, got `str` - at `$.chat.history`".
    """
    what, _, where = refusal.partition(" - at `$.")
    where = where.rstrip("`")
    found = re.search(r"unknown field `(.+?)`", what)
    if found:
        known = ChatConfig if where else UserConfig
        where = f"{where}.{found[1]}".lstrip(".")
        what = f"there is no such field; known: {', '.join(known.__struct_fields__)}"
    for kind, word in TOML_WORDS.items():
        what = what.replace(f"`{kind}`", word)
    return f"{where}: {what[:1].lower()}{what[1:]}"


def config_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The settings file; it need not exist."""
    return config_dir(environ) / CONFIG_NAME


def _parse_toml(text: str) -> dict[str, object]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    table: dict[str, object] = tomllib.loads(text)
    return table


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """What can be made again: fetched models, exported bundles. Not created here."""
    return _folder(environ, "STARSD_CACHE", "XDG_CACHE_HOME", ".cache")


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """What a program remembers between runs: chat history. Not created here."""
    return _folder(environ, "STARSD_STATE", "XDG_STATE_HOME", ".local/state")


def config_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """What the user wrote: settings, keys. Not created here."""
    return _folder(environ, "STARSD_CONFIG", "XDG_CONFIG_HOME", ".config")


def named_folder(environ: Mapping[str, str], name: str) -> Path:
    """The folder that a variable names. Raises ConfigError for the home of nobody."""
    try:
        return Path(environ[name]).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{name}={environ[name]}: {error}") from error


def _folder(environ: Mapping[str, str], own: str, xdg: str, default: str) -> Path:
    if environ.get(own):
        return named_folder(environ, own)
    base = environ.get(xdg, "")
    # The XDG specification: a relative path is invalid and ignored.
    root = Path(base) if os.path.isabs(base) else Path(environ.get("HOME", "~")).expanduser() / default
    return root / "starsd"
