"""A bundle and a head that were not made for each other are told before any device is asked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from starsd_deploy.cli import command
from starsd_deploy.inventory import load_fleet
from starsd_deploy.matches import require_matches
from starsd_edge.bundle import Manifest
from starsd_edge.errors import BundleError, ConfigError
from tests.core.test_bundle import MANIFEST

FLEET = """\
[devices.desk]
address = "127.0.0.1"
port = 1
roles = ["draft"]
head = "head"

[devices.nano1]
address = "127.0.0.1"
port = 1
roles = ["target"]
bundle = "bundle"
service = ["desk", "lab"]

[services.lab]
address = "tcp://10.0.0.9:7731"
key = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
"""
EAGLE3 = replace(MANIFEST, files={}, tensors={}, feature_layers=(1, 2, 3), projection="ab" * 32)
EAGLE1 = replace(MANIFEST, files={}, tensors={})


def make_fleet(folder: Path, bundle: Manifest, head: dict[str, object]) -> Path:
    """An inventory, a bundle without files, and a head's configuration as `starsd draft` writes it."""
    for name in ("bundle", "head"):
        (folder / name).mkdir()
    (folder / "bundle" / "manifest.json").write_text(bundle.to_json())
    (folder / "head" / "config.json").write_text(json.dumps({"name": "h", "identity": head}))
    fleet = folder / "fleet.toml"
    fleet.write_text(FLEET)
    return fleet


def wants(manifest: Manifest, **changes: object) -> dict[str, object]:
    return {"target": "any name", **manifest.for_heads(), **changes}


@pytest.mark.parametrize("made_for", [EAGLE1, EAGLE3], ids=["EAGLE-1", "EAGLE-3"])
def test_what_was_made_for_each_other_goes_on(made_for: Manifest, tmp_path: Path) -> None:
    fleet = load_fleet(make_fleet(tmp_path, made_for, wants(made_for)))
    require_matches(fleet, fleet.devices)


@pytest.mark.parametrize(
    ("differs", "bundle", "head"),
    [
        ("target_hash is", EAGLE1, wants(EAGLE1, target_hash="f" * 64)),
        ("tokenizer_hash is", EAGLE1, wants(EAGLE1, tokenizer_hash="f" * 64)),
        ("vocab_size is", EAGLE1, wants(EAGLE1, vocab_size=1)),
        ("feature_layers is [-1] of the bundle, [1, 2, 3] of the head", EAGLE1, wants(EAGLE3)),
        ("feature_layers is [1, 2, 3] of the bundle, [-1] of the head", EAGLE3, wants(EAGLE1)),
        (
            "projection is abababababab... of the bundle, cd of the head",
            EAGLE3,
            wants(EAGLE3, projection="cd"),
        ),
        ("projection is none of the bundle, cd of the head", EAGLE1, wants(EAGLE1, projection="cd")),
    ],
)
@pytest.mark.parametrize("limit", ["nano1", "desk"])
def test_what_was_not_is_told_with_its_line_and_nothing_else(
    limit: str, differs: str, bundle: Manifest, head: dict[str, object], tmp_path: Path
) -> None:
    fleet = make_fleet(tmp_path, bundle, head)
    done = CliRunner().invoke(command, ["plan", "--fleet", str(fleet), "--limit", limit])
    assert isinstance(done.exception, ConfigError)
    told = str(done.exception)
    assert told.startswith(f"{fleet}, line 11, devices.nano1.bundle: {tmp_path}/bundle and the head of desk")
    assert differs in told
    assert done.output == ""


def test_a_damaged_head_or_bundle_is_named(tmp_path: Path) -> None:
    fleet = load_fleet(make_fleet(tmp_path, EAGLE1, wants(EAGLE1)))
    (tmp_path / "head" / "config.json").write_text("[]")
    with pytest.raises(BundleError, match=r"head/config\.json: not a draft head's configuration"):
        require_matches(fleet, fleet.devices)
    (tmp_path / "head" / "config.json").write_text(json.dumps({"identity": wants(EAGLE1)}))
    (tmp_path / "bundle" / "manifest.json").write_text("{")
    with pytest.raises(BundleError, match=r"bundle/manifest\.json: damaged"):
        require_matches(fleet, fleet.devices)
