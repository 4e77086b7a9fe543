"""Bytes from a terminal to keys. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from starsd_edge.monitor.ui import Key

__all__ = ["KeyBytes", "parse_keys"]

ESCAPE = b"\x1b"
SEQUENCES: dict[bytes, Key] = {
    b"\x1b[A": Key.UP,
    b"\x1b[B": Key.DOWN,
    b"\x1bOA": Key.UP,
    b"\x1bOB": Key.DOWN,
    b"\x1b[5~": Key.PAGE_UP,
    b"\x1b[6~": Key.PAGE_DOWN,
    b"\x1b[H": Key.HOME,
    b"\x1b[F": Key.END,
    b"\x1bOH": Key.HOME,
    b"\x1bOF": Key.END,
    b"\x1b[1~": Key.HOME,
    b"\x1b[4~": Key.END,
}
SINGLE: dict[bytes, Key] = {
    b"\r": Key.ENTER,
    b"\n": Key.ENTER,
    b"\x7f": Key.BACKSPACE,
    b"\x08": Key.BACKSPACE,
    b"\x03": Key.INTERRUPT,
    b"\x04": Key.INTERRUPT,
}
LONGEST_SEQUENCE = 16  # what is longer was no key


@dataclass(frozen=True, slots=True)
class KeyBytes:
    """Keys that were complete, and the beginning of one that was not."""

    keys: list[Key | str]
    rest: bytes = b""


def parse_keys(data: bytes, *, complete: bool) -> KeyBytes:
    """Keys in `data`. A sequence may arrive in pieces over a slow line: its beginning is kept in `rest`,
    unless `complete` says that nothing more came in time, and then a lone escape is the Esc key."""
    keys: list[Key | str] = []
    while data:
        if data.startswith(ESCAPE):
            length = sequence_length(data)
            if length is None and not complete:
                return KeyBytes(keys, data)
            if length is None:
                keys.append(Key.ESCAPE)
                data = data[1:] if len(data) == 1 else b""
                continue
            if data[:length] == ESCAPE:
                keys.append(Key.ESCAPE)
            elif data[:length] in SEQUENCES:
                keys.append(SEQUENCES[data[:length]])
            data = data[length:]
        elif data[:1] in SINGLE:
            keys.append(SINGLE[data[:1]])
            data = data[1:]
        else:
            size = utf8_length(data[0])
            if len(data) < size and not complete:
                return KeyBytes(keys, data)
            try:
                character = data[:size].decode()
            except UnicodeDecodeError:
                data = data[1:]  # not text: skipped byte by byte
                continue
            if character.isprintable():
                keys.append(character)
            data = data[size:]
    return KeyBytes(keys)


def sequence_length(data: bytes) -> int | None:
    """Bytes of the escape sequence at the start of `data`; None while it is not complete."""
    if len(data) < 2:
        return None
    if data[1:2] == ESCAPE:
        return 1  # Esc pressed twice
    if data[1:2] == b"O":
        return 3 if len(data) >= 3 else None
    if data[1:2] != b"[":
        return 2  # Alt and a key: not used, skipped
    for index in range(2, min(len(data), LONGEST_SEQUENCE)):
        if 0x40 <= data[index] <= 0x7E:
            return index + 1
    return None if len(data) < LONGEST_SEQUENCE else LONGEST_SEQUENCE


def utf8_length(first: int) -> int:
    if first < 0xC0:
        return 1
    return 2 if first < 0xE0 else 3 if first < 0xF0 else 4
