"""`starsd --help` answers at once: nothing heavy is imported for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from starsd_edge.cli.main import cli

GROUPS = ("", "bench", "bundle", "deploy", "deploy keys", "draft", "keys", "monitor")

HEAVY = frozenset(
    [
        "numpy",
        "torch",
        "onnxruntime",
        "onnx",
        "zmq",
        "rich",
        "prompt_toolkit",
        "starlette",
        "uvicorn",
        "tokenizers",
        "jinja2",
        "paramiko",
        "transformers",
        "msgspec",
    ]
)


def test_the_front_command_loads_nothing_heavy(record_property: Callable[[str, object], None]) -> None:
    code = (
        "import sys, time\n"
        "from starsd_edge.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "print(' '.join(sys.modules))\n"
        "print(time.process_time())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *_, modules, seconds = done.stdout.splitlines()
    assert set() == HEAVY & {name.split(".")[0] for name in modules.split()}
    record_property("help_cpu_ms", f"{float(seconds) * 1e3:.0f}")  # to be read, not judged


@pytest.mark.parametrize("group", GROUPS)
def test_a_list_of_commands_ends_no_line_in_the_middle(group: str) -> None:
    done = CliRunner().invoke(cli, [*group.split(), "--help"], terminal_width=80)
    assert done.exit_code == 0, done.output
    assert "..." not in done.output.partition("Commands:")[2]
