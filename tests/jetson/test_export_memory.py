"""An export holds one layer at a time: its memory does not grow with the number of layers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.jetson.random_model import write_random_model

SHAPE = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
EXPORT = """
import resource, sys
from pathlib import Path
from starsd_jetson.export import ExportSettings, export
export(Path(sys.argv[1]), Path(sys.argv[2]), ExportSettings(quant="int4"))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def peak_mib(tmp_path: Path, layers: int) -> int:
    folder = tmp_path / f"model-{layers}"
    write_random_model(folder, SHAPE | {"num_hidden_layers": layers})
    command = [sys.executable, "-c", EXPORT, str(folder), str(tmp_path / f"bundle-{layers}")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
def test_memory_does_not_grow_with_layers(tmp_path: Path) -> None:
    """18 more layers are 58 million weights, 230 MB in float32; only the int4 bundle that is tried out
    grows.
    """
    assert peak_mib(tmp_path, 20) - peak_mib(tmp_path, 2) < 120
