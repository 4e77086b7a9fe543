"""A corpus on disk: grows sequence by sequence, opens as memory-mapped arrays, survives an interruption.

    tokens.i32  features.f16  sequences.i64   raw little-endian arrays, appended to
    corpus.json                               vocabulary size, feature width, what wrote it

`sequences` has a row (length, start, greedy) per sequence and is written last: what other files hold beyond
it is the rest of an interrupted write and is cut off when writing goes on.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from starsd_edge.errors import BundleError
from starsd_edge.types import FeatureArray, TokenArray
from starsd_edge.whole_file import SHARED_MODE, write_whole
from starsd_server.train.data import Corpus

__all__ = ["CorpusWriter", "open_corpus"]

TOKENS, FEATURES, SEQUENCES, ABOUT = "tokens.i32", "features.f16", "sequences.i64", "corpus.json"
SEQUENCE_FIELDS = 3  # length, start, greedy


class CorpusWriter:
    """Appends to the corpus in `folder`, made when missing.

    about: what the corpus depends on (target, settings); an existing corpus must have the same.
    Raises BundleError when it has not.
    """

    def __init__(self, folder: Path, feature_size: int, about: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        described = about | {"feature_size": str(feature_size)}
        file = folder / ABOUT
        if not file.exists():
            write_whole(file, json.dumps(described, indent=1) + "\n", SHARED_MODE)
        found = json.loads(file.read_text("utf-8"))
        if found != described:
            different = sorted(
                key for key in set(found) | set(described) if found.get(key) != described.get(key)
            )
            raise BundleError(
                f"{folder}: holds texts of another run ({', '.join(different)} differ); name another folder"
            )
        self._feature_size = feature_size
        written = _read_sequences(folder)
        self.num_sequences, total = len(written), int(written[:, 0].sum())
        self.num_tokens = total
        self._files = []
        for name, size in (
            (TOKENS, 4 * total),
            (FEATURES, 2 * feature_size * total),
            (SEQUENCES, written.nbytes),
        ):
            path = folder / name
            path.touch()
            os.truncate(path, size)
            self._files.append(path.open("ab"))

    def append(self, tokens: TokenArray, features: FeatureArray, start: int, *, greedy: bool) -> None:
        """One sequence: tokens int32 [n], features [n, F] of the same positions, `start` the first token that
        the target wrote (n for text that it only read)."""
        if features.shape != (len(tokens), self._feature_size):
            raise ValueError(f"{len(tokens)} tokens with features {features.shape}")
        row = np.array([len(tokens), start, greedy], "<i8")
        parts = (tokens.astype("<i4"), features.astype("<f2"), row)
        for file, part in zip(self._files, parts, strict=True):
            file.write(part.tobytes())
            file.flush()
        self.num_sequences += 1
        self.num_tokens += len(tokens)

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()


def open_corpus(folder: Path) -> Corpus:
    """The corpus written so far. Raises BundleError when there is none."""
    try:
        about = json.loads((folder / ABOUT).read_text("utf-8"))
        sequences = _read_sequences(folder)
        total, width = int(sequences[:, 0].sum()), int(about["feature_size"])
        tokens = np.fromfile(folder / TOKENS, "<i4", total)
        features: NDArray[np.float16] = np.memmap(folder / FEATURES, "<f2", "r", shape=(total, width))
    except (OSError, ValueError, KeyError) as error:
        raise BundleError(f"{folder}: no texts to train on can be read there ({error})") from error
    return Corpus(
        tokens,
        features,
        np.concatenate([[0], np.cumsum(sequences[:, 0])]),
        sequences[:, 1],
        sequences[:, 2] != 0,
    )


def _read_sequences(folder: Path) -> NDArray[np.int64]:
    """[sequences, 3]; a row that was cut off does not count."""
    file = folder / SEQUENCES
    flat = np.fromfile(file, "<i8") if file.exists() else np.zeros(0, np.int64)
    rows = len(flat) // SEQUENCE_FIELDS
    return flat[: rows * SEQUENCE_FIELDS].reshape(rows, SEQUENCE_FIELDS)
