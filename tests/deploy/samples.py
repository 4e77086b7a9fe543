"""Facts to test with: what a real device printed, with sections replaced."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from starsd_deploy.facts import Facts, State, parse_facts

CAPTURED = Path(__file__).parent / "facts" / "laptop-draft.txt"

ORIN_NANO = {
    "uname": "Linux\naarch64\n5.15.148-tegra\nnano",
    "os": 'PRETTY_NAME="Ubuntu 22.04.5 LTS"',
    "libc": "glibc 2.35",
    "tegra_release": "# R36 (release), REVISION: 4.4, GCID: 41062509, BOARD: generic",
    "model": "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\n",
    "compatible": "nvidia,p3768-0000+p3767-0005-super\nnvidia,p3767-0005\nnvidia,tegra234",
    "nvpmodel": "NV Power Mode: MAXN_SUPER\n2",
    "dpkg": "nvidia-l4t-core 36.4.4-2025\nnvidia-jetpack 6.2.1+b38\nlibnvinfer10 10.3.0.30-1+cuda12.5",
    "python": "/usr/bin/python3 3.10.12 linux-aarch64 venv - - tensorrt",
    "user": "edge\n1000\nedge sudo video render\n/home/edge",
    "device_groups": "video\nrender",
}


def output_with(**sections: str) -> str:
    """The captured output, some sections replaced."""
    text = CAPTURED.read_text()
    for name, body in sections.items():
        pattern = rf"(@@starsd {name}\n).*?(?=\n@@starsd |\Z)"
        text, count = re.subn(pattern, lambda match, body=body: match[1] + body + "\n", text, flags=re.DOTALL)
        assert count == 1, name
    return text


def facts_with(**sections: str) -> Facts:
    """Parsed facts, some sections replaced."""
    return parse_facts(output_with(**sections))


def bare(facts: Facts) -> Facts:
    """The same device before anything was deployed."""
    return msgspec.structs.replace(
        facts, state=State(root=facts.state.root), port_users=(), parts={}, lease=""
    )
