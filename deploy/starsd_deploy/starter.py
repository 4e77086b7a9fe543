"""The first inventory, written from host names on the command line. Pure."""

from __future__ import annotations

import ipaddress
import re

from starsd_deploy.inventory import MAX_NAME
from starsd_edge.errors import UsageError

__all__ = ["starter_fleet"]

HEAD = """\
# The fleet: what each device shall be. `starsd deploy doctor` looks at it, `apply` brings it there.
# Every key may also stand in [defaults]; `starsd deploy schema` lists them all.

[defaults]
unit = "system"          # or "user", which needs `loginctl enable-linger` and no sudo
bundle = "bundle"        # what `starsd export` made, for targets
"""
LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"  # what stands between two dots of a host's name
HOST = re.compile(
    rf"(?:(?P<user>[\w.$+-]+)@)?(?P<host>\[[0-9A-Fa-f:.]+\]|{LABEL}(?:\.{LABEL})*)(?::(?P<port>\d{{1,5}}))?"
)


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
    if match is None or not _is_address(match["host"]) or not 1 <= int(match["port"] or 22) <= 65535:
        raise UsageError(f"{text!r} is not of the form user@host[:port], with a host's name or IP address")
    host = match["host"].strip("[]")
    name = re.sub(r"[^A-Za-z0-9_-]", "-", host).lstrip("-_")[:MAX_NAME]
    return match["user"] or "", name or "device", match["port"] or ""


def _is_address(host: str) -> bool:
    """Whether what looks like an IP address is one; a name always is."""
    if not host.startswith("[") and re.search("[^0-9.]", host):
        return True
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


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
