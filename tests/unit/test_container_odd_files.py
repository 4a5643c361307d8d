"""A `.w4` path that is no ordinary file, or changes while it is opened: an error that names it, never a crash."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from w4files import small_file

from w4conv.container import open_container, reader, validate
from w4conv.errors import FormatError, InputError

RAW = small_file()[0]


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _sparse_after_header(path: Path) -> None:
    with path.open("wb") as file:
        file.write(RAW)
        file.truncate(1 << 40)


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _pipe_of(content: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        os.mkfifo(path)

        def fill() -> None:
            with suppress(BrokenPipeError):  # nobody reads to the end of what is wrong
                path.write_bytes(content)

        threading.Thread(target=fill, daemon=True).start()

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "a directory"),
        (lambda path: path.symlink_to("/proc"), "a directory"),
        (lambda path: path.symlink_to("/proc/self/status"), "2.2"),
        (lambda path: path.symlink_to("/proc/self/mem"), "error"),
        (lambda path: path.symlink_to("/dev/null"), "empty"),
        (lambda path: path.symlink_to("/dev/zero"), "2.2"),
        (lambda path: path.symlink_to("nowhere"), "No such file"),
        (lambda path: path.touch(), "empty"),
        (lambda path: path.write_bytes(RAW[:5]), "inside the signature"),
        (_loop, "symbolic links"),
        (_sparse, "2.2"),
        (_sparse_after_header, "appended to"),
        (_pipe_of(b""), "empty"),
        (_pipe_of(RAW[:1000]), "cut short"),
        (_pipe_of(RAW + b"\0"), "appended to"),
        (_pipe_of(b"x" * (1 << 20)), "2.2"),
    ],
)
def test_no_ordinary_file(make: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.w4"
    make(path)
    with pytest.raises(InputError, match=rf"(?si)m\.w4.*{message}|{message}.*m\.w4") as error:
        open_container(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 700, 4096, 5000, len(RAW) - 1])
@pytest.mark.parametrize("moment", ["before the map", "before the index", "after the index"])
def test_shortened_while_it_is_opened(size: int, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.w4"
    path.write_bytes(RAW)

    def cutting(function: Callable[..., Any], *, after: bool = False) -> Callable[..., Any]:
        def cut(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named) if after else None
            os.truncate(path, size)
            return result if after else function(*arguments, **named)

        return cut

    if moment == "before the map":
        monkeypatch.setattr(mmap, "mmap", cutting(mmap.mmap))
    elif moment == "before the index":
        monkeypatch.setattr(mmap, "mmap", cutting(mmap.mmap, after=True))
    else:
        monkeypatch.setattr(validate, "index", cutting(validate.index, after=True))
    with pytest.raises(FormatError) as error:
        open_container(path)
    assert (error.value.clause, str(path) in str(error.value)) == ("2.5", True)


@pytest.mark.parametrize("replace", [b"", b"other", RAW[:4096]])
def test_replaced_while_it_is_open(replace: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file under the name changes nothing: the one that was opened is read to its end."""
    path = tmp_path / "m.w4"
    path.write_bytes(RAW)
    read_index = validate.index

    def replacing(*arguments: Any, **named: Any) -> Any:
        (tmp_path / "new").write_bytes(replace)
        (tmp_path / "new").rename(path)
        return read_index(*arguments, **named)

    monkeypatch.setattr(reader.validate, "index", replacing)
    with open_container(path) as container:
        container.check()
        assert container.file_nbytes == len(RAW)
