"""Coverage-guided fuzzing of one target: `python -m tests.fuzz.guided TARGET [libFuzzer options]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["starsd_edge.protocol", "starsd_edge.decoding"]):
    from tests.fuzz.targets import CORPORA, TARGETS


def main() -> None:
    target = TARGETS[sys.argv[1]]
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(CORPORA[sys.argv[1]]):
            Path(folder, f"golden-{number}").write_bytes(data)
        atheris.Setup([sys.argv[0], *sys.argv[2:], folder], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
