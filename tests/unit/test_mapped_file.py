"""Readers of one file share its mapping, and never that of another file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from w4conv.files.mapped import MappedFile


def test_readers_of_a_file_share_its_pages(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    first, second = MappedFile(tmp_path / "a"), MappedFile(tmp_path / "link")
    view = first.view(0, 4)
    assert np.shares_memory(view, second.view(0, 4))
    first.close()
    assert view.tobytes() == second.view(0, 4).tobytes() == b"0123"
    second.close()
    assert np.shares_memory(view, MappedFile(tmp_path / "a").view(0, 4))  # a view keeps the mapping


def test_a_file_that_takes_the_name_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123")
    old = MappedFile(path)
    (tmp_path / "new").write_bytes(b"4567")
    (tmp_path / "new").replace(path)
    assert MappedFile(path).view(0, 4).tobytes() == b"4567"
    assert old.view(0, 4).tobytes() == b"0123"


def test_a_file_that_has_grown_is_seen_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123")
    old = MappedFile(path)
    with path.open("ab") as file:
        file.write(b"4567")
    assert MappedFile(path).view(0, 8).tobytes() == b"01234567"
    assert old.view(0, 4).tobytes() == b"0123"
