"""Fixtures of the deployer's tests. What needs an sshd says loudly that it did not run where there is none."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

NO_SSHD = "no sshd on this machine: install openssh-server"


def _load(name: str) -> ModuleType:
    """A module beside this file; importlib mode puts no folder on sys.path."""
    spec = importlib.util.spec_from_file_location(f"starsd_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
