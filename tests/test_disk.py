"""Files that are there whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from residua import disk


def test_a_text_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    disk.write_text(path, "old")
    monkeypatch.setattr(disk, "sync", lambda p: (_ for _ in ()).throw(OSError("cut off here")))
    with pytest.raises(OSError, match="cut off"):
        disk.write_text(path, "new and longer")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["config.yaml"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_of_what_was_not_finished(tmp_path: Path, error: BaseException) -> None:
    def write() -> None:
        with disk.replacing(tmp_path / "a.bin") as part:
            part.write_bytes(b"half")
            assert part.parent == tmp_path
            raise error

    with pytest.raises(type(error)):
        write()
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")  # as `write` has it, without a name

    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises(OSError, match=r"No space left on device: '.*config\.yaml'$"):
        disk.write_text(tmp_path / "config.yaml", "text")


def test_only_errors_of_the_disk_are_given_a_file(tmp_path: Path) -> None:
    """A tracker that loses its connection has not failed to write to the run."""
    for number, file in ((errno.ENOSPC, str(tmp_path)), (errno.ECONNREFUSED, None)):
        with pytest.raises(OSError) as raised, disk.named(tmp_path):
            raise OSError(number, "something is wrong")
        assert raised.value.filename == file


def test_an_error_speaks_of_the_file_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()  # where it cannot be put
    with pytest.raises(OSError, match=r"'[^']*/a\.txt'$"):
        disk.write_text(tmp_path / "a.txt", "text")
    with pytest.raises(FileNotFoundError, match=r"'[^']*/gone/a\.txt'$"):
        disk.write_text(tmp_path / "gone" / "a.txt", "text")


def test_what_failed_is_told_where_the_folder_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        disk.write_text(tmp_path / "gone" / "a.txt", "text")


def test_a_new_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    disk.write_text(tmp_path / "ours", "text")
    (tmp_path / "plain").write_text("text")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_nothing_is_left_of_a_file_made_for_others_to_read_either(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    for name in ("old", "new"):
        with pytest.raises(OSError, match="full"), disk.readable(tmp_path / name):
            raise OSError("full")
    assert os.listdir(tmp_path) == ["old"]
    assert (tmp_path / "old").read_text() == "old"


def test_two_writers_do_not_share_what_is_unfinished(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with disk.replacing(path) as one:
        one.write_text("one")
        with disk.replacing(path) as two:
            two.write_text("two")
        assert path.read_text() == "two"
    assert path.read_text() == "one"
    assert os.listdir(tmp_path) == ["a.txt"]
