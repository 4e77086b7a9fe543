"""The `llm` program talks to the endpoint like to any other of OpenAI's kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.core.chat.toys import toy_speaker
from tests.core.endpoint.serving import MODEL, serving

FOX = "The quick brown fox jumps over the lazy dog"


def test_llm_gets_streamed_and_whole_answers(tmp_path: Path) -> None:
    with serving(toy_speaker(script=FOX)) as served:
        models = f"- model_id: edge\n  model_name: {MODEL}\n  api_base: {served.url}/v1\n"
        (tmp_path / "extra-openai-models.yaml").write_text(models)
        environ = {**os.environ, "LLM_USER_PATH": str(tmp_path), "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "llm", "-m", "edge", "--key", "none", "--no-log"]
        for option in ([], ["--no-stream"]):
            done = subprocess.run(
                [*command, *option, "Who?"], env=environ, capture_output=True, text=True, timeout=120
            )
            assert FOX == done.stdout.strip(), done.stderr
