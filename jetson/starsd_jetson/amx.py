"""ONNX Runtime without AMX, the tiles of newer Xeons: plain steps run faster, and at one speed.

Where Linux grants the tiles, int8 products use them for any number of rows and lay the weights out for them.
A product of one row does nothing but read weights: through tiles at 12 GB/s at some moments and 6.5 at most,
probably while the core's other thread is busy; with the VNNI instructions at 11 all along. Sums are exact
integers either way, so logits have the same bits. docs/decisions/without-amx.md has what many rows lose.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import sys
from collections.abc import Iterator

__all__ = ["without_amx"]

AT_MINSIGSTKSZ = 51  # of getauxval: bytes that a signal takes on a stack, all registers saved
TILE_BYTES = 8192  # of them, where the processor has tiles


class SignalStack(ctypes.Structure):
    """stack_t of sigaltstack(2)."""

    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextlib.contextmanager
def without_amx() -> Iterator[None]:
    """Whoever asks Linux for the tiles meanwhile is refused. Does nothing where there are none, or where the
    process has them already.

    Linux grants them only if every thread's signal stack has room to save them. This thread gets one that is
    a byte too small, yet large enough for a signal without tiles; the one it had is put back."""
    system = signal_calls()
    if system is None or (needed := int(system.getauxval(AT_MINSIGSTKSZ))) <= TILE_BYTES:
        yield
        return
    memory = ctypes.create_string_buffer(needed - 1)
    small, before = SignalStack(ctypes.addressof(memory), 0, needed - 1), SignalStack()
    changed = system.sigaltstack(ctypes.byref(small), ctypes.byref(before)) == 0
    try:
        yield
    finally:
        if changed:
            system.sigaltstack(ctypes.byref(before), None)


def signal_calls() -> ctypes.CDLL | None:
    """The C library; None where there is no AMX to refuse."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    system = ctypes.CDLL(None)
    system.getauxval.restype, system.getauxval.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
    return system
