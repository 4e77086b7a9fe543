"""Which extra of this project brings which package, and what to do when one is missing."""

from __future__ import annotations

__all__ = ["EXTRA_OF", "install_hint"]

# By the name that is imported; where several extras bring it, the one that a user is most likely to want.
EXTRA_OF = {
    "gguf": "export",
    "h11": "endpoint",
    "jinja2": "chat",
    "matplotlib": "bench",
    "onnx": "export",
    "onnxruntime": "onnx",
    "packaging": "deploy",
    "paramiko": "deploy",
    "prometheus_client": "endpoint",
    "prompt_toolkit": "chat",
    "safetensors": "export",
    "starlette": "endpoint",
    "tensorrt": "tensorrt",
    "tokenizers": "chat",
    "torch": "server",
    "transformers": "dev",
    "uvicorn": "endpoint",
}


def install_hint(*extras: str) -> str:
    """The command that installs `extras`. From the checkout: no index is known to carry this project."""
    return f"pip install '.[{','.join(extras)}]' in this project's folder"
