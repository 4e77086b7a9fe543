"""The wheels of a device: what pip's resolver gets wrong about foreign Pythons is put right here."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import resources
from pathlib import Path

import pytest
from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

from starsd_deploy.wheels import DeviceEnvironment, closure, environment_of, platform_tags
from tests.deploy.samples import ORIN_NANO, facts_with
from tests.deploy.toys import make_wheel

JETPACK6 = DeviceEnvironment("3.10", "aarch64", (2, 35))
LAPTOP = DeviceEnvironment("3.12", "x86_64", (2, 39))
REQUIRES = {
    "starsd-edge": (
        'tomli>=2; python_version < "3.11"',
        'onnxruntime>=1.20; extra == "onnx"',
        'torch; extra == "server"',
        "click>=8",
    ),
    "click": ('colorama; platform_system == "Windows"',),
    "onnxruntime": ("numpy",),
    "numpy": (),
    "tomli": (),
    "torch": ('nvidia-cublas; platform_system == "Linux" and platform_machine == "x86_64"',),
}


def test_markers_are_judged_by_the_device_and_not_by_this_machine() -> None:
    needed, missing = closure(("starsd-edge[onnx]",), REQUIRES, JETPACK6)
    assert needed == {"starsd-edge", "click", "onnxruntime", "numpy", "tomli"}
    assert missing == ()
    assert "tomli" not in closure(("starsd-edge[onnx]",), REQUIRES, LAPTOP)[0]


def test_missing_requirements_are_named_with_their_versions() -> None:
    requires = {name: lines for name, lines in REQUIRES.items() if name != "tomli"}
    _, missing = closure(("starsd-edge",), requires, JETPACK6)
    assert [str(requirement) for requirement in missing] == ["tomli>=2"]


def test_machine_decides_what_torch_needs() -> None:
    assert [str(r) for r in closure(("starsd-edge[server]",), REQUIRES, LAPTOP)[1]] == ["nvidia-cublas"]
    assert closure(("starsd-edge[server]",), REQUIRES, JETPACK6)[1] == ()


@pytest.mark.parametrize(
    ("environment", "wheel", "fits"),
    [
        (JETPACK6, "a-1-cp310-cp310-manylinux_2_28_aarch64.whl", True),
        (JETPACK6, "a-1-cp310-cp310-manylinux_2_39_aarch64.whl", False),
        (JETPACK6, "a-1-cp310-cp310-manylinux2014_aarch64.whl", True),
        (JETPACK6, "a-1-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        (LAPTOP, "a-1-cp312-cp312-manylinux_2_39_x86_64.whl", True),
        (LAPTOP, "a-1-cp38-abi3-manylinux1_x86_64.whl", True),
    ],
)
def test_platform_tags_fit_the_devices_glibc(environment: DeviceEnvironment, wheel: str, fits: bool) -> None:
    tags: frozenset[Tag] = parse_wheel_filename(wheel)[3]
    assert bool({tag.platform for tag in tags} & set(platform_tags(environment))) is fits


def test_environment_comes_from_the_interpreter() -> None:
    facts = facts_with(**ORIN_NANO)
    assert environment_of(facts, facts.pythons[0]) == JETPACK6
    thirty_two = facts_with(**{**ORIN_NANO, "python": "/usr/bin/python3 3.10.12 linux-armv7l venv - - -"})
    assert environment_of(thirty_two, thirty_two.pythons[0]).machine == "armv7l"


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder


def unpack(venv: Path, *wheels: Path) -> subprocess.CompletedProcess[str]:
    code = resources.files("starsd_deploy").joinpath("unpack.py").read_text("utf-8")
    command = [str(venv / "bin" / "python"), "-I", "-c", code, *map(str, wheels)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_unpacked_wheel_is_importable_and_its_metadata_is_found(venv: Path, tmp_path: Path) -> None:
    wheel = make_wheel(
        tmp_path,
        "stars",
        "1.5",
        {
            "stars/__init__.py": "where = 'site-packages'\n",
            "stars-1.5.data/scripts/stars-tool": "#!/bin/sh\necho tool\n",
            "stars-1.5.data/purelib/stars/extra.py": "x = 1\n",
            "stars-1.5.data/headers/stars.h": "int x;\n",
        },
    )
    assert unpack(venv, wheel).returncode == 0
    code = (
        "import stars.extra, importlib.metadata as m; print(stars.where, m.version('stars'), stars.extra.x)"
    )
    python = str(venv / "bin" / "python")
    assert subprocess.check_output([python, "-I", "-c", code], text=True) == "site-packages 1.5 1\n"
    assert subprocess.check_output([str(venv / "bin" / "stars-tool")], text=True) == "tool\n"
    assert not list(venv.rglob("stars.h"))


def test_wheel_that_does_not_match_its_record_is_refused(venv: Path, tmp_path: Path) -> None:
    good = make_wheel(tmp_path, "bad", "1.0", {"bad.py": "x = 1\n"})
    with zipfile.ZipFile(good) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["bad.py"] = b"x = 2\n"
    with zipfile.ZipFile(good, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    done = unpack(venv, good)
    assert done.returncode == 1
    assert "bad.py does not match the wheel's RECORD" in done.stderr


@pytest.mark.parametrize("name", ["../evil.py", "/tmp/evil.py"])
def test_wheel_that_writes_outside_the_venv_is_refused(venv: Path, tmp_path: Path, name: str) -> None:
    done = unpack(venv, make_wheel(tmp_path, "evil", "1.0", {name: "x = 1\n"}))
    assert "outside the venv" in done.stderr
    assert done.returncode == 1
