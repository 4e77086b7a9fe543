"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from starsd_edge.whole_file import save_as, write_whole


def test_what_cannot_be_written_whole_leaves_the_older_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_whole(file, "older", 0o644)
    with pytest.raises(ValueError, match="surrogates"):
        write_whole(file, "newer \udcff", 0o644)
    assert file.read_text() == "older"
    assert [file] == list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="the root user may write anywhere")
def test_a_file_that_may_not_be_written_to_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(0o400)
    with pytest.raises(PermissionError):
        save_as(file, "newer")


def test_a_folder_and_a_device_are_refused_by_name() -> None:
    with pytest.raises(IsADirectoryError, match="it is a folder"):
        save_as(Path("/tmp"), "")
    with pytest.raises(OSError, match="no ordinary file"):
        save_as(Path("/dev/null"), "")
