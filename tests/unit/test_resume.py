"""Interrupted conversions: what is left, who may remove it, and that going on gives the same bytes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import make_llama_dir

from w4conv.commands.quantize import ConversionReport, quantize
from w4conv.container import open_container
from w4conv.errors import OutputError, UsageError
from w4conv.files.target import check_target, open_target, partial_of


class Stop:
    """Interrupts when `n` tensors are done; counts them."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.names: list[str] = []

    def start(self, total_nbytes: int) -> None:
        pass

    def advance(self, nbytes: int, name: str) -> None:
        self.names.append(name)
        if len(self.names) == self.n:
            raise KeyboardInterrupt


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_llama_dir(tmp_path / "model", hidden=64, layers=1)


@pytest.fixture
def whole(model: Path, tmp_path: Path) -> bytes:
    quantize(model, tmp_path / "whole.w4", effort=0, scheme="w4a16")
    return (tmp_path / "whole.w4").read_bytes()


def interrupt(model: Path, out: Path, n: int) -> Path:
    """A conversion stopped after `n` tensors; returns what it left."""
    with pytest.raises(KeyboardInterrupt):
        quantize(model, out, resume=True, progress=Stop(n), effort=0, scheme="w4a16")
    assert not out.exists()
    return partial_of(out)


def n_resumed(report: ConversionReport) -> int:
    notes = [note for note in report.notes if note.startswith("resumed: ")]
    return int(notes[0].split()[1]) if notes else 0


def test_going_on_gives_the_same_bytes_from_wherever(model: Path, whole: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.w4"
    counter = Stop(0)
    quantize(model, tmp_path / "count.w4", progress=counter, effort=0, scheme="w4a16")
    for n in range(1, len(counter.names) + 1):
        partial = interrupt(model, out, n)
        assert partial.name == "out.w4.partial"
        report = quantize(model, out, resume=True, effort=0, scheme="w4a16")
        assert out.read_bytes() == whole
        # The tensor at work is done again: `advance` is called before the digest of its last part is known.
        assert n_resumed(report) in (n - 1, n)
        assert not partial.exists()
        out.unlink()


def test_interrupted_again_and_again(model: Path, whole: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.w4"
    for n in (3, 6, 9):
        interrupt(model, out, n)
    quantize(model, out, resume=True, effort=0, scheme="w4a16")
    assert out.read_bytes() == whole


def test_resume_without_a_leftover_is_a_plain_conversion(model: Path, whole: bytes, tmp_path: Path) -> None:
    report = quantize(model, tmp_path / "out.w4", resume=True, effort=0, scheme="w4a16")
    assert n_resumed(report) == 0
    assert (tmp_path / "out.w4").read_bytes() == whole


def flip(at: int) -> Callable[[Path], None]:
    def change(partial: Path) -> None:
        raw = bytearray(partial.read_bytes())
        raw[at] ^= 1
        partial.write_bytes(raw)

    return change


def zero_all(partial: Path) -> None:
    """What a power cut may leave: the size without the content."""
    partial.write_bytes(bytes(partial.stat().st_size))


def zero_a_page(partial: Path) -> None:
    raw = partial.read_bytes()
    partial.write_bytes(raw[:8192] + bytes(4096) + raw[12288:])


def cut(partial: Path) -> None:
    os.truncate(partial, partial.stat().st_size // 2)


def empty(partial: Path) -> None:
    os.truncate(partial, 0)


@pytest.mark.parametrize(
    "damage", [flip(0), flip(100), flip(5000), flip(9000), flip(-1), flip(-500), zero_all, zero_a_page, cut, empty]
)
def test_whatever_a_crash_made_of_the_leftover(
    damage: Callable[[Path], None], model: Path, whole: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out.w4"
    partial = interrupt(model, out, 8)
    if damage.__closure__ and damage.__closure__[0].cell_contents == 0:
        damage(partial)  # the signature is gone: it could be anybody's file
        before = partial.read_bytes()
        with pytest.raises(OutputError, match=r"out\.w4\.partial is in the way"):
            quantize(model, out, resume=True, effort=0, scheme="w4a16")
        assert partial.read_bytes() == before
        return
    damage(partial)
    quantize(model, out, resume=True, effort=0, scheme="w4a16")
    assert out.read_bytes() == whole


def test_a_source_that_has_changed_is_converted_anew(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.w4"
    interrupt(model, out, 8)
    other = make_llama_dir(tmp_path / "other", hidden=64, layers=1, seed=1)
    status = (model / "model.safetensors").stat()
    (model / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    os.utime(model / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))  # as `cp -p` would
    assert n_resumed(quantize(model, out, resume=True, effort=0, scheme="w4a16")) == 0
    quantize(other, tmp_path / "other.w4", effort=0, scheme="w4a16")
    assert out.read_bytes() == (tmp_path / "other.w4").read_bytes()


def test_other_options_start_anew(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.w4"
    interrupt(model, out, 8)
    assert n_resumed(quantize(model, out, resume=True, group_size=32, effort=0, scheme="w4a16")) == 0
    with open_container(out) as container:
        container.check()
        assert container.provenance["group_size"] == 32


def test_the_next_conversion_removes_a_leftover(model: Path, whole: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.w4"
    interrupt(model, out, 4)
    report = quantize(model, out, effort=0, scheme="w4a16")
    assert "the leftover of an interrupted conversion was removed" in report.notes
    assert out.read_bytes() == whole
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out.w4", "whole.w4"]


def test_a_leftover_does_not_count_as_taken_space(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.w4"
    partial = interrupt(model, out, 8)
    taken = partial.stat().st_blocks * 512
    assert taken > 4096
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    check_target(out, taken, overwrite=False)
    with pytest.raises(OutputError, match="are free"):
        check_target(out, taken + 1001, overwrite=False)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """As a living conversion in another process holds it."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("resume", [False, True])
def test_what_a_living_process_writes_is_left_alone(model: Path, tmp_path: Path, resume: bool) -> None:
    out = tmp_path / "out.w4"
    partial = interrupt(model, out, 4)
    before = partial.read_bytes()
    with locked(partial), pytest.raises(OutputError, match="is being written by another process"):
        quantize(model, out, resume=resume, effort=0, scheme="w4a16")
    assert partial.read_bytes() == before


def test_two_conversions_to_one_target(tmp_path: Path) -> None:
    path = tmp_path / "out.w4"
    with open_target(path, 1) as first:
        with pytest.raises(OutputError, match="another process"), open_target(path, 1):
            pass
        first.write(b"1")
    assert path.read_bytes() == b"1"


def test_files_of_that_name_that_are_not_ours_stay(tmp_path: Path) -> None:
    partial = tmp_path / "out.w4.partial"
    for make in (
        lambda: partial.write_bytes(b"my notes"),
        lambda: partial.mkdir(),
        lambda: partial.symlink_to(tmp_path / "elsewhere"),
        lambda: os.mkfifo(partial),
        lambda: (tmp_path / "linked").write_bytes(b"\x89W4C\r\n\x1a\n") and partial.hardlink_to(tmp_path / "linked"),
    ):
        make()
        before = partial.lstat()
        for resume in (False, True):
            with pytest.raises(OutputError), open_target(tmp_path / "out.w4", 1, resume=resume):
                pass
        assert os.path.samestat(partial.lstat(), before)
        partial.rmdir() if partial.is_dir() and not partial.is_symlink() else partial.unlink()


def test_standard_output_cannot_be_resumed(model: Path) -> None:
    with pytest.raises(UsageError, match="cannot be resumed"):
        quantize(model, "-", resume=True, effort=0, scheme="w4a16")
