"""Steps: what may be done to a device, as data. A plan is a list of these, and apply does exactly them.

Each step can be cut at any point and done again; each says in one line what it will do.
"""

from __future__ import annotations

import msgspec

from starsd_deploy.blobs import Blob

__all__ = [
    "Bundle",
    "Confirm",
    "Content",
    "ContentFile",
    "Engine",
    "Gate",
    "InstallUnit",
    "MakeKey",
    "Pin",
    "Prepare",
    "Prune",
    "Release",
    "Restart",
    "Step",
    "Switch",
    "Trust",
    "Upload",
    "WheelFile",
    "describe",
    "human_bytes",
]


class WheelFile(msgspec.Struct, frozen=True):
    """A wheel of a release: file name and content."""

    name: str
    blob: Blob


class ContentFile(msgspec.Struct, frozen=True):
    """A file of a bundle or head folder: path inside it, and content."""

    path: str
    blob: Blob


class Content(msgspec.Struct, frozen=True):
    """A folder of files, named by its hash. `link` is its path inside a release: bundle/NAME or head."""

    link: str
    id: str
    files: tuple[ContentFile, ...]


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Make the folders."""

    root: str


class Upload(msgspec.Struct, frozen=True, tag=True):
    """Bring missing files to the device."""

    blobs: tuple[Blob, ...]

    @property
    def size(self) -> int:
        """Bytes to send."""
        return sum(blob.size for blob in self.blobs)


class Bundle(msgspec.Struct, frozen=True, tag=True):
    """Assemble a content folder from files that are there."""

    content: Content


class Release(msgspec.Struct, frozen=True, tag=True):
    """Build a release: a venv with exactly these wheels, linked contents, start and gate scripts."""

    id: str
    python: str
    site_packages: bool
    wheels: tuple[WheelFile, ...]
    links: dict[str, str]
    run: str
    gate: str
    config: str
    manifest: str


class MakeKey(msgspec.Struct, frozen=True, tag=True):
    """Make the device's CURVE key pair on the device; the secret half never leaves it."""

    release: str
    name: str
    script: str


class Pin(msgspec.Struct, frozen=True, tag=True):
    """Write a service's public key on the device. An empty key is asked of the draft device `service`."""

    service: str
    address: str
    public_key: str


class Trust(msgspec.Struct, frozen=True, tag=True):
    """Let the draft device `service` admit this device by its public key."""

    service: str
    device: str
    script: str


class Engine(msgspec.Struct, frozen=True, tag=True):
    """Have the TensorRT engine of a release's bundle: the one of `source`, an identical device, or build it.

    The build goes on by itself on the device, whatever becomes of the connection. `reason`: what was upgraded
    since the engine of the current release was made.
    """

    release: str
    key: str
    source: str
    script: str
    timeout_s: float
    reason: str = ""


class Gate(msgspec.Struct, frozen=True, tag=True):
    """Load the model, run its self-test, reach the service; the release may go live only after this."""

    release: str
    timeout_s: float


class Switch(msgspec.Struct, frozen=True, tag=True):
    """Make a release the current one, by rename."""

    release: str
    previous: str


class InstallUnit(msgspec.Struct, frozen=True, tag=True):
    """Write, enable and start the systemd unit; a system unit is the one thing that needs sudo."""

    unit: str
    scope: str
    text: str


class Restart(msgspec.Struct, frozen=True, tag=True):
    """Let running answers end, then start the current release."""

    unit: str
    scope: str
    drain_s: float


class Confirm(msgspec.Struct, frozen=True, tag=True):
    """Wait until the new release answers; otherwise go back to `previous` and show the journal."""

    release: str
    previous: str
    unit: str
    scope: str
    drain_s: float
    timeout_s: float
    probe: str


class Prune(msgspec.Struct, frozen=True, tag=True):
    """Remove what no kept release needs."""

    releases: tuple[str, ...]
    bundles: tuple[str, ...]
    blobs: tuple[str, ...]
    keep: tuple[str, ...]


Step = (
    Prepare
    | Upload
    | Bundle
    | Release
    | MakeKey
    | Pin
    | Trust
    | Engine
    | Gate
    | Switch
    | InstallUnit
    | Restart
    | Confirm
    | Prune
)


def describe(step: Step) -> str:
    """One line for people: a sign (+ adds, ~ changes, - removes, ? checks) and what."""
    match step:
        case Prepare():
            return f"+ folders in {step.root}"
        case Upload():
            return f"+ upload {_count(len(step.blobs), 'file')}, {human_bytes(step.size)}"
        case Bundle():
            return f"+ {step.content.link} {step.content.id} ({_count(len(step.content.files), 'file')})"
        case Release():
            return f"+ release {step.id} ({step.python}, {_count(len(step.wheels), 'wheel')})"
        case MakeKey():
            return "+ key pair, made on the device"
        case Pin():
            return f"+ public key of service {step.service} ({step.address})"
        case Trust():
            return f"+ service {step.service} admits {step.device}"
        case Engine():
            why = f" ({step.reason})" if step.reason else ""
            return f"+ engine {step.key}, {f'from {step.source}' if step.source else 'built here'}{why}"
        case Gate():
            return f"? health gate of {step.release} before it goes live"
        case Switch():
            return f"~ current: {step.previous or 'nothing'} -> {step.release}"
        case InstallUnit():
            return f"~ {step.scope} unit {step.unit}"
        case Restart():
            return f"~ restart {step.unit} (a running answer may take {step.drain_s:g} s)"
        case Confirm():
            return f"? {step.release} answers, else back to {step.previous or 'nothing'}"
        case Prune():
            return (
                f"- remove {_count(len(step.releases), 'release')}, {_count(len(step.bundles), 'bundle')}, "
                f"{_count(len(step.blobs), 'file')} that nothing needs"
            )


def human_bytes(count: float) -> str:
    """1536 -> "1.5 KB"; decimal, as disks and networks are sold."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
