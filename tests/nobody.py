"""What a user who is not root may do, also in tests that root runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

__all__ = ["as_nobody", "shared_folder"]

NOBODY = 65534  # as everywhere


def as_nobody(act: Callable[[], object]) -> str:
    """What `act` raises in a process whose user is not root, who may write anywhere."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told = "nothing"
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            act()
        except BaseException as error:
            told = type(error).__name__
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return told


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """One that every user can reach, and write to."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder
