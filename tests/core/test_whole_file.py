"""Files that are written whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from starsd_edge.whole_file import check_savable, save_as, whole, write_whole
from tests.nobody import as_nobody, shared_folder

__all__ = ["shared_folder"]


def test_what_cannot_be_written_whole_leaves_the_older_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_whole(file, "older", 0o644)
    with pytest.raises(ValueError, match="surrogates"):
        write_whole(file, "newer \udcff", 0o644)
    assert file.read_text() == "older"
    assert [file] == list(tmp_path.iterdir())


@pytest.mark.parametrize("act", [lambda path: save_as(path, "newer"), check_savable])
def test_a_file_that_may_not_be_written_to_is_not_replaced(
    shared_folder: Path, act: Callable[[Path], None]
) -> None:
    file = shared_folder / "file"
    file.write_text("older")
    file.chmod(0o444)
    assert as_nobody(lambda: act(file)) == "PermissionError"
    assert file.read_text() == "older"
    assert as_nobody(lambda: act(shared_folder / "other")) == "nothing"


def test_a_place_in_a_folder_that_may_not_be_written_to_is_none(shared_folder: Path) -> None:
    shared_folder.chmod(0o555)
    assert as_nobody(lambda: check_savable(shared_folder / "file")) == "PermissionError"


def test_looking_at_a_place_leaves_it_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("older")
    for name in ("file", "other"):
        check_savable(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "older"
    with pytest.raises(NotADirectoryError):
        check_savable(tmp_path / "file" / "below")


def test_a_writer_that_fails_in_the_middle_leaves_the_older_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_whole(file, "older", 0o644)

    def fail() -> None:
        with whole(file, 0o644) as draft:
            draft.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [file] == list(tmp_path.iterdir())
    assert file.read_text() == "older"


def test_a_folder_and_a_device_are_refused_by_name() -> None:
    with pytest.raises(IsADirectoryError, match="it is a folder"):
        save_as(Path("/tmp"), "")
    with pytest.raises(OSError, match="no ordinary file"):
        save_as(Path("/dev/null"), "")
