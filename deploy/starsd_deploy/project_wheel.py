"""The wheel of this very project: built from a checkout, or packed again from the installed files."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from importlib import metadata, resources
from pathlib import Path

from starsd_edge.errors import DeployError

__all__ = ["project_constraints", "project_wheel"]

DISTRIBUTION = "starsd-edge"
SOURCE_FOLDERS = ("starsd_edge", "server/starsd_server", "jetson/starsd_jetson", "deploy/starsd_deploy")
EPOCH = (2020, 1, 1, 0, 0, 0)  # one time for every member, so that the same content is the same wheel


def project_wheel(cache: Path) -> Path:
    """A wheel of the running code, kept in `cache` by a hash of its sources.

    Raises:
        DeployError: it cannot be built; the message ends in the builder's own words.
    """
    checkout = _checkout()
    return _built(checkout, cache) if checkout else _repacked(cache)


def project_constraints() -> Path | None:
    """The checkout's constraints.txt, so that devices get the versions that were tested."""
    checkout = _checkout()
    path = checkout / "constraints.txt" if checkout else None
    return path if path and path.exists() else None


def _checkout() -> Path | None:
    root = Path(str(resources.files("starsd_edge"))).parent
    return (
        root if (root / "pyproject.toml").exists() and (root / "deploy" / "starsd_deploy").is_dir() else None
    )


def _built(root: Path, cache: Path) -> Path:
    folder = cache / f"project-{_tree_hash(root)}"
    ready = sorted(folder.glob("*.whl"))
    if ready:
        return ready[0]
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(root),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ready = sorted(folder.glob("*.whl"))
    if done.returncode or not ready:
        raise DeployError(
            f"the wheel of {root} could not be built: {' '.join(done.stderr.splitlines()[-3:])}"
        )
    return ready[0]


def _tree_hash(root: Path) -> str:
    digest = hashlib.sha256()
    files = [root / "pyproject.toml", root / "README.md", root / "LICENSE"]
    for folder in SOURCE_FOLDERS:
        files += [
            path
            for path in sorted((root / folder).rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        ]
    for path in files:
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _repacked(cache: Path) -> Path:
    """An installed wheel's RECORD lists every file of it, so the wheel can be put together again."""
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise DeployError(f"{DISTRIBUTION} is neither a checkout nor installed: no wheel to deploy") from None
    members = [
        path
        for path in distribution.files or ()
        if not str(path).startswith("..")
        and path.suffix != ".pyc"
        and path.name not in {"INSTALLER", "REQUESTED", "direct_url.json"}
    ]
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / f"starsd_edge-{distribution.version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in sorted(members, key=str):
            info = zipfile.ZipInfo(str(member), EPOCH)
            info.external_attr = 0o644 << 16
            archive.writestr(info, Path(str(member.locate())).read_bytes(), zipfile.ZIP_DEFLATED)
    return target
