"""Which devices can share a TensorRT engine. Pure."""

from __future__ import annotations

import hashlib

from starsd_deploy.facts import Facts
from starsd_deploy.inventory import Device

__all__ = ["engine_for", "engine_key"]


def engine_key(device: Device, facts: Facts, bundle: str) -> str:
    """The same for devices whose engines of a bundle are interchangeable: one module, L4T and TensorRT.

    An engine holds kernels that were timed and compiled for exactly that. A device that does not say all
    three is identical to none but itself.
    """
    board = facts.board
    identity = (board.module, board.l4t, board.tensorrt)
    if not all(identity):
        identity = (f"device {device.name}", facts.kernel, board.tensorrt)
    return hashlib.sha256("|".join((bundle, *identity)).encode()).hexdigest()[:16]


def engine_for(facts: Facts) -> str:
    """What a device's engines are made for, in words."""
    return f"L4T {facts.board.l4t or 'unknown'}, TensorRT {facts.board.tensorrt or 'unknown'}"
