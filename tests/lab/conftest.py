"""The lab's devices: containers with real systemd and sshd. Only `make test-lab` runs this."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.devices import Lab, LabNotRunError

RUN = "STARSD_RUN_LAB"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """An empty lab; whatever it started is gone afterwards. Skipped, loudly, where it was not asked for."""
    if not os.environ.get(RUN):
        pytest.skip(
            "NOT RUN: the device lab; `make test-lab` runs it (root, Debian packages, up to 30 minutes)"
        )
    made = Lab(tmp_path_factory.mktemp("lab"), Path(os.environ.get("STARSD_LAB", "/var/lib/starsd-lab")))
    try:
        made.build("amd64")
        made.build("arm64")
        yield made
    except (LabNotRunError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"NOT RUN: the lab cannot be built here: {error}")
    finally:
        made.close()
