"""A small random head for the services of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.drafting import IDENTITY


@pytest.fixture(scope="session")
def head_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from starsd_server.heads.checkpoint import HeadManifest, save_head
    from starsd_server.heads.head import HeadKind
    from tests.server.heads import random_head, small_config

    folder = tmp_path_factory.mktemp("head")
    manifest = HeadManifest(name="toy-head", head=small_config(HeadKind.EAGLE1), identity=IDENTITY)
    save_head(random_head(HeadKind.EAGLE1), manifest, folder)
    return folder
