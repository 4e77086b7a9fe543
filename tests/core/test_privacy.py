"""Nothing that this project loads tells others about it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

RUN_A_MODEL = """
import starsd_edge, onnx, onnxruntime
from onnx import TensorProto, helper
value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", value[:1], value[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
"""


def test_onnx_runtime_keeps_its_usage_reports_to_itself(tmp_path: Path) -> None:
    """It would queue them in the user's cache folder before it sends them."""
    home = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", RUN_A_MODEL], env=home, check=True, timeout=120)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []
