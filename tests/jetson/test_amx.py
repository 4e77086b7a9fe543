"""The tiles of newer Xeons are refused to what is loaded meanwhile, and to nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# arch_prctl(ARCH_GET_XCOMP_PERM): which registers Linux lets this process use; 18 are the tiles' data.
PERMITTED = """
import ctypes, signal
libc = ctypes.CDLL(None)
def permitted():
    mask = ctypes.c_ulong()
    libc.syscall(158, 0x1022, ctypes.byref(mask))
    return bool(mask.value >> 18 & 1)
def ask():
    return libc.syscall(158, 0x1023, 18) == 0
"""

STACK = """
from starsd_jetson.amx import SignalStack, without_amx
def stack():
    now = SignalStack()
    libc.sigaltstack(None, ctypes.byref(now))
    return now.start, now.flags, now.size
"""

needs_tiles = pytest.mark.skipif(
    sys.platform != "linux" or "amx_tile" not in Path("/proc/cpuinfo").read_text(),
    reason="a processor without AMX",
)


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PERMITTED + code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@needs_tiles
def test_the_runtime_of_a_target_has_no_tiles() -> None:
    code = """
from starsd_jetson.onnx_session import import_onnxruntime
import_onnxruntime()
print(permitted(), ask())
"""
    assert run(code) == "False True"


@needs_tiles
def test_a_runtime_that_is_imported_as_it_is_asks_for_tiles() -> None:
    """Otherwise there is nothing to refuse, and starsd_jetson/amx.py can go."""
    assert run("import onnxruntime\nprint(permitted())") == "True"


def test_a_signal_is_handled_while_tiles_are_refused_and_the_thread_gets_its_own_stack_back() -> None:
    code = """
import faulthandler
faulthandler.enable()
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
before = stack()
with without_amx():
    signal.raise_signal(signal.SIGUSR1)
print(stack() == before, heard)
"""
    assert run(STACK + code) == "True [1]"


def test_a_process_that_has_tiles_keeps_them_and_its_stack() -> None:
    code = """
granted, before = ask(), stack()
with without_amx():
    pass
print(permitted() == granted, stack() == before)
"""
    assert run(STACK + code) == "True True"
