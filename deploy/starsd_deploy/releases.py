"""What a release is, and its name. Pure: device, facts, wheels and contents in, one record out.

The name is a hash of everything that makes the release: wheels, contents, interpreter, scripts. The same
input is the same release, so a second apply finds it there.

    <root>/
        blobs/<sha256>                 every uploaded file once; bundles are hard links to them
        bundles/<id>/                  a bundle or head, shared by releases
        releases/<id>/                 venv/, run, gate, config/, release.json, bundle -> ../../bundles/<id>
            complete gated confirmed   how far it got: marks, each written last
        current -> releases/<id>       switched by rename
        history                        releases in the order they went live
        keys/ engines/ cache/ state/ lease/ parts/ releases.log
"""

from __future__ import annotations

import hashlib

import msgspec

from starsd_deploy.commands import ServiceLink, bundle_link, config_text, gate_script, run_script
from starsd_deploy.engine_key import engine_for, engine_key
from starsd_deploy.facts import Facts, Manifest, PythonFacts, State
from starsd_deploy.inventory import Device, Runtime
from starsd_deploy.steps import Content, Release
from starsd_deploy.wheels import WheelSet
from starsd_edge.errors import DeployError, UsageError

__all__ = ["MIN_PYTHON", "choose_python", "kept_releases", "make_release", "rollback_target"]

MIN_PYTHON = (3, 10)
NEWEST_PYTHON = (3, 14)  # beyond it wheels of compiled packages may not exist yet


def choose_python(device: Device, facts: Facts) -> PythonFacts:
    """The interpreter to build with: the inventory's, else the newest (with TensorRT: that can import it).

    Raises:
        DeployError: none fits; says what there is and what to install.
    """
    fitting = [p for p in facts.pythons if p.has_venv and MIN_PYTHON <= p.minor <= NEWEST_PYTHON]
    if device.python:
        fitting = [p for p in fitting if device.python in {p.path, p.path.rsplit("/", 1)[-1]}]
    elif device.runtime is Runtime.TENSORRT:
        fitting = [p for p in fitting if p.has_tensorrt] or fitting
    if not fitting:
        there = ", ".join(f"{p.path} ({p.version})" for p in facts.pythons) or "none"
        wanted = device.python or f"Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer"
        raise DeployError(
            f"{device.name}: no usable {wanted}; found {there}. Install one: sudo apt install python3"
        )
    return max(fitting, key=lambda p: p.minor)


def make_release(
    device: Device,
    facts: Facts,
    version: str,
    wheels: WheelSet,
    contents: tuple[Content, ...],
    services: tuple[ServiceLink, ...],
) -> Release:
    """The release that a device shall run."""
    python = choose_python(device, facts)
    root = facts.state.root
    unnamed = Release(
        id="",
        python=python.path,
        # apt's tensorrt module is seen only from a venv with the system's packages
        site_packages=device.runtime is Runtime.TENSORRT,
        wheels=wheels.wheels,
        links={content.link: content.id for content in contents},
        run=run_script(device, root, services),
        gate=gate_script(device, root, services),
        config=config_text(device, root, services),
        manifest="",
    )
    bundle = unnamed.links.get(bundle_link(device), "")
    has_engine = device.runtime is Runtime.TENSORRT and bool(bundle)
    # Of the name, too: after an upgrade of L4T or TensorRT it is another release, with a gate of its own.
    engine = engine_key(device, facts, bundle) if has_engine else ""
    identity = (
        python.version,
        unnamed.python,
        unnamed.site_packages,
        [(wheel.name, wheel.blob.sha256) for wheel in wheels.wheels],
        unnamed.links,
        unnamed.run,
        unnamed.gate,
        unnamed.config,
        *([engine] if engine else []),
    )
    digest = hashlib.sha256(msgspec.json.encode(identity, order="deterministic")).hexdigest()[:12]
    release_id = f"{version}-{digest}"
    blobs = {wheel.blob.sha256 for wheel in wheels.wheels}
    blobs |= {file.blob.sha256 for content in contents for file in content.files}
    manifest = Manifest(
        id=release_id,
        version=version,
        device=device.name,
        role=device.role.value,
        wheels={wheel.name: wheel.blob.sha256 for wheel in wheels.wheels},
        links=unnamed.links,
        blobs=tuple(sorted(blobs)),
        engine=engine,
        engine_for=engine_for(facts) if engine else "",
    )
    return msgspec.structs.replace(
        unnamed, id=release_id, manifest=msgspec.json.encode(manifest, order="deterministic").decode()
    )


def kept_releases(state: State, wanted: str, keep: int) -> tuple[str, ...]:
    """Releases that stay once `wanted` is live: it, then the latest that were live before, `keep` in all."""
    earlier = (state.current, *reversed(state.history))
    gated = [name for name in earlier if name and state.release(name).gated]
    return tuple(dict.fromkeys((wanted, *gated)))[:keep]


def rollback_target(state: State, to: str = "") -> str:
    """The release to go back to: `to`, or the one that was live before the current one first was.

    Raises:
        UsageError: there is none; names those that could be chosen.
    """
    ready = [release.id for release in state.releases if release.gated and release.id != state.current]
    if to:
        if to in ready:
            return to
        raise UsageError(f"release {to!r} cannot be gone back to; ready are: {', '.join(ready) or 'none'}")
    first = state.history.index(state.current) if state.current in state.history else len(state.history)
    for name in reversed(state.history[:first]):
        if name in ready:
            return name
    forward = f"; others that are ready (--to): {', '.join(ready)}" if ready else ""
    raise UsageError(f"no release before {state.current or 'the first'} to go back to{forward}")
