"""Check the calls to TensorRT against its type stubs, as `make types` does:

    python tests/jetson/tensorrt_types.py FOLDER     the stubs are fetched to FOLDER when they are not there

The stubs require TensorRT itself, gigabytes that a type checker has no use for; and inside the environment
they would look like an installed TensorRT. So they are put aside, without what they require.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

STUBS = "tensorrt-stubs==10.13.0.35.1"
# They are generated, and these lines of them are not Python: (what is wrong, what it becomes).
MENDS = (
    (re.compile(r"\bin: "), "in_: "),
    (re.compile(r"(= None, channel_axis: int)\)"), r"\1 = 0)"),
)


def fetch(folder: Path) -> bool:
    """Whether the stubs could be had."""
    options = ["--quiet", "--no-deps", "--retries", "1", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", *options, STUBS]
    if subprocess.run(command, check=False).returncode != 0:
        return False
    for file in folder.rglob("*.pyi"):
        text = file.read_text("utf-8")
        for wrong, mended in MENDS:
            text = wrong.sub(mended, text)
        file.write_text(text, "utf-8")
    return True


def check(folder: Path) -> int:
    """mypy's exit code. The stubs never say None, so what is done about None looks unreachable."""
    command = [sys.executable, "-m", "mypy", "--no-warn-unreachable", "--cache-dir", str(folder / ".cache")]
    return subprocess.run(
        [*command, "--package", "starsd_jetson"], env={**os.environ, "MYPYPATH": str(folder)}, check=False
    ).returncode


if __name__ == "__main__":
    place = Path(sys.argv[1]).absolute()
    if not place.exists() and not fetch(place):
        sys.stderr.write(f"NOT RUN: the calls to TensorRT were not checked, {STUBS} cannot be had\n")
        sys.exit()
    sys.exit(check(place))
