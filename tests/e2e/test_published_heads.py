"""Published heads from their files to trees on a device, on small stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

from starsd_edge.cli.drafts import identity_of
from starsd_jetson.export import ExportSettings, export
from starsd_server.heads.convert import convert
from tests.e2e.published import EAGLE1, EAGLE3, SOURCES


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("head", [EAGLE1, EAGLE3])
def test_a_head_and_a_bundle_of_the_same_files_fit(kind: str, head: Path, tmp_path: Path) -> None:
    """Whatever the tokenizer is read from; and a head that was converted from the bundle is the same."""
    source = SOURCES[kind](tmp_path)
    identity = convert(head, source, tmp_path / "head").identity
    eagle3 = tmp_path / "head" if head is EAGLE3 else None
    settings = ExportSettings("fp32", eagle3=eagle3, chat_template="vicuna_v1.1")
    bundle = export(source, tmp_path / "bundle", settings)
    assert identity_of(bundle.manifest) == identity
    assert convert(head, bundle.path, tmp_path / "again").identity == identity
