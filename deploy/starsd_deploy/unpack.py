"""Install wheels into the venv whose Python runs this. Sent to the device; standard library only.

    venv/bin/python -I unpack.py WHEEL...

What is to be installed was resolved on the workstation, so all that is left is what the wheel specification
(packaging.python.org, "Binary distribution format") calls unpacking and spreading. pip would do it too, but
it must be on the device first, and its start alone takes a slow board ten seconds. Every file is
checked against the wheel's RECORD. Console scripts are not made: the release is started with `python -m`.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import sys
import sysconfig
import zipfile
from pathlib import Path, PurePosixPath

SCHEMES = {"purelib": "purelib", "platlib": "platlib", "scripts": "scripts", "data": "data"}
EXECUTABLE = 0o111


def install(wheel: Path) -> None:
    """Unpack one wheel.

    Raises:
        SystemExit: the wheel is damaged or wants to write outside the venv.
    """
    with zipfile.ZipFile(wheel) as archive:
        info = next((n.split("/")[0] for n in archive.namelist() if n.endswith(".dist-info/WHEEL")), "")
        if not info:
            sys.exit(f"{wheel.name}: not a wheel")
        recorded = _record(archive.read(f"{info}/RECORD").decode())
        for member in archive.infolist():
            if not member.is_dir():
                _place(archive, member, info, recorded, wheel.name)
    (Path(sysconfig.get_path("purelib")) / info / "INSTALLER").write_text("starsd\n")


def _record(text: str) -> dict[str, str]:
    return {row[0]: row[1] for row in csv.reader(text.splitlines()) if len(row) >= 2 and row[1]}


def _place(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, info: str, recorded: dict[str, str], wheel: str
) -> None:
    content = archive.read(member)  # raises on a wrong checksum
    want = recorded.get(member.filename, "")
    if want.startswith("sha256="):
        have = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        if have != want[len("sha256=") :]:
            sys.exit(f"{wheel}: {member.filename} does not match the wheel's RECORD")
    target = _target(member.filename, info, wheel)
    if target is None:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    in_scripts = target.parent == Path(sysconfig.get_path("scripts"))
    if in_scripts or (member.external_attr >> 16) & EXECUTABLE:
        target.chmod(0o755)


def _target(name: str, info: str, wheel: str) -> Path | None:
    """Where a member goes; None for what nobody needs at run time (headers)."""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts:
        sys.exit(f"{wheel}: {name} would be written outside the venv")
    data = info[: -len(".dist-info")] + ".data"
    if parts[0] != data:
        return Path(sysconfig.get_path("platlib"), *parts)
    if parts[1] not in SCHEMES:
        return None
    return Path(sysconfig.get_path(SCHEMES[parts[1]]), *parts[2:])


if __name__ == "__main__":
    os.umask(0o077)
    for argument in sys.argv[1:]:
        install(Path(argument))
