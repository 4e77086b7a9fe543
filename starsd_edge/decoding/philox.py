"""Philox-4x32-10: a counter-based generator, so that position p's uniform needs no history.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Written out in integers
because its numbers are part of what a seed means: they must not change with a platform or a numpy version.
"""

from __future__ import annotations

__all__ = ["philox", "uniform"]

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
ROUNDS = 10
WORD = 0xFFFFFFFF
DOUBLE_BITS = 53  # a float64 holds this many bits of a uniform exactly


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words from four counter words and two key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0 = MULTIPLIER_0 * c0
        product_1 = MULTIPLIER_1 * c2
        c0 = (product_1 >> 32) ^ c1 ^ k0
        c1 = product_1 & WORD
        c2 = (product_0 >> 32) ^ c3 ^ k1
        c3 = product_0 & WORD
        k0 = k0 + WEYL_0 & WORD
        k1 = k1 + WEYL_1 & WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The uniform in [0, 1) that decides the token at absolute `position`; 53 bits, exact in float64."""
    high, low, _, _ = philox((position & WORD, position >> 32, 0, 0), (seed & WORD, seed >> 32 & WORD))
    return float((high << 32 | low) >> 64 - DOUBLE_BITS) * 2.0**-DOUBLE_BITS
