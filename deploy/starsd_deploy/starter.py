"""The first inventory, written from host names on the command line. Pure."""

from __future__ import annotations

import re

from starsd_edge.errors import UsageError

__all__ = ["starter_fleet"]

HEAD = """\
# The fleet: what each device shall be. `starsd deploy doctor` looks at it, `apply` brings it there.
# Every key may also stand in [defaults]; `starsd deploy schema` lists them all.

[defaults]
unit = "system"          # or "user", which needs `loginctl enable-linger` and no sudo
bundle = "bundle"        # what `starsd export` made, for targets
"""
HOST = re.compile(r"(?:(?P<user>[^@]+)@)?(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::(?P<port>\d+))?")


def starter_fleet(hosts: tuple[str, ...], draft: str | None) -> str:
    """An inventory of `user@host[:port]` words; `draft` is one of them, default the first of several.

    Raises:
        UsageError: a word is no host, two make the same name, or `draft` is not among them.
    """
    names = [_split(host)[1] for host in hosts]
    if len(set(names)) != len(names):
        raise UsageError("two hosts make the same device name; write the inventory by hand")
    if draft is None:
        drafting = names[0] if len(hosts) > 1 else ""
    else:
        drafting = _split(draft)[1]
        if drafting not in names:
            raise UsageError(f"--draft {draft} is not among the hosts")
    return HEAD + "".join(_table(host, drafting) for host in hosts)


def _split(text: str) -> tuple[str, str, str]:
    match = HOST.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not of the form user@host[:port]")
    host = match["host"].strip("[]")
    return match["user"] or "", re.sub(r"[^A-Za-z0-9_-]", "-", host), match["port"] or ""


def _table(text: str, drafting: str) -> str:
    user, name, port = _split(text)
    match = HOST.fullmatch(text)
    assert match is not None
    host = match["host"].strip("[]")
    lines = [f"\n[devices.{name}]"]
    if host != name:
        lines.append(f'address = "{host}"')
    if user:
        lines.append(f'user = "{user}"')
    if port:
        lines.append(f"port = {port}")
    if name == drafting:
        lines.append('roles = ["draft"]')
    else:
        lines.append('roles = ["target"]')
        if drafting:
            lines.append(f'service = ["{drafting}"]')
    return "\n".join(lines) + "\n"
