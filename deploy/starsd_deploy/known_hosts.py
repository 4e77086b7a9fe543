"""Host keys: what known_hosts says about a server's key, and the one line that is added for a new server.

The file is never rewritten, only appended to: comments, markers and lines this code does not understand are
somebody's and stay (a library that saved its own parse of the file has cost people theirs).
"""

from __future__ import annotations

import base64
import binascii
import enum
import fcntl
import fnmatch
import hashlib
import hmac
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostKey", "Verdict", "append_host", "fingerprint", "host_pattern", "known_kinds", "look_up"]


class Verdict(enum.Enum):
    """What is known of a server's key."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class HostKey:
    """A server's public key: algorithm name and wire bytes."""

    kind: str
    blob: bytes


@dataclass(frozen=True, slots=True)
class _Entry:
    marker: str
    hosts: str
    key: HostKey


def fingerprint(key: HostKey) -> str:
    """`SHA256:...` as ssh-keygen prints it."""
    digest = base64.b64encode(hashlib.sha256(key.blob).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"


def host_pattern(host: str, port: int) -> str:
    """How known_hosts names a server: `host`, or `[host]:port` off the standard port."""
    return host if port == 22 else f"[{host}]:{port}"


def look_up(texts: tuple[str, ...], pattern: str, key: HostKey) -> Verdict:
    """What the known_hosts files `texts` say about `key` of the server named `pattern`.

    A key of another algorithm than the recorded ones counts as changed: the caller must have asked the
    server for a recorded algorithm first (`known_kinds`), so it has no such key any more.
    """
    entries = [entry for text in texts for entry in _entries(text) if _matches(entry.hosts, pattern)]
    if any(entry.marker == "@revoked" and entry.key == key for entry in entries):
        return Verdict.REVOKED
    plain = [entry for entry in entries if not entry.marker]
    if any(entry.key == key for entry in plain):
        return Verdict.KNOWN
    return Verdict.CHANGED if plain else Verdict.UNKNOWN


def known_kinds(texts: tuple[str, ...], pattern: str) -> tuple[str, ...]:
    """Key algorithms recorded for a server, so that it is asked for one of those."""
    found = [e.key.kind for t in texts for e in _entries(t) if not e.marker and _matches(e.hosts, pattern)]
    return tuple(dict.fromkeys(found))


def append_host(path: Path, pattern: str, key: HostKey) -> None:
    """Add one line, whole or not at all, under a lock; a line break before it where the file lacks its last.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    line = f"{pattern} {key.kind} {base64.b64encode(key.blob).decode()}\n".encode()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                line = b"\n" + line
        try:
            while line:
                line = line[file.write(line) :]
        except OSError:  # a full disk takes a part of it
            file.truncate(size)
            raise


def _entries(text: str) -> list[_Entry]:
    entries = []
    for line in text.splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        marker = words.pop(0) if words[0].startswith("@") else ""
        if len(words) < 3:
            continue
        try:
            blob = base64.b64decode(words[2], validate=True)
        except (binascii.Error, ValueError):
            continue
        entries.append(_Entry(marker, words[0], HostKey(words[1], blob)))
    return entries


def _matches(hosts: str, pattern: str) -> bool:
    """`hosts` is a hash, or a comma-separated list of patterns of which `!` ones exclude."""
    if hosts.startswith("|1|"):
        return _matches_hash(hosts, pattern)
    matched = False
    for candidate in hosts.lower().split(","):
        if candidate.startswith("!"):
            if fnmatch.fnmatchcase(pattern.lower(), _literal(candidate[1:])):
                return False
        elif fnmatch.fnmatchcase(pattern.lower(), _literal(candidate)):
            matched = True
    return matched


def _literal(candidate: str) -> str:
    """ssh patterns know * and ?, fnmatch also [..]; `[host]:port` must stay literal."""
    return candidate.replace("[", "[[]")


def _matches_hash(hosts: str, pattern: str) -> bool:
    parts = hosts.split("|")
    if len(parts) != 4:
        return False
    try:
        salt, digest = base64.b64decode(parts[2]), base64.b64decode(parts[3])
    except (binascii.Error, ValueError):
        return False
    return hmac.compare_digest(hmac.new(salt, pattern.encode(), hashlib.sha1).digest(), digest)
