"""The text that a perplexity is measured on: a file of the user's, or the WikiText-2 raw test split."""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from w4conv.errors import InputError
from w4conv.files.mapped import HEAD_NBYTES, refuse_stand_in

WIKITEXT2_NAME: Final = "WikiText-2 raw, test split"
WIKITEXT2_SHA256: Final = "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"
WIKITEXT2_VARIABLE: Final = "W4CONV_WIKITEXT2"
# A public archive of the raw files, under huggingface_hub's names.
WIKITEXT2_ARCHIVE: Final = {"repo_id": "ggml-org/ci", "repo_type": "dataset", "filename": "wikitext-2-raw-v1.zip"}
WIKITEXT2_MEMBER: Final = "wikitext-2-raw/wiki.test.raw"
MAX_TEXT_NBYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Text:
    """name: what a figure calls it. sha256: of the file's bytes. content: those bytes as UTF-8, line ends untouched."""

    name: str
    nbytes: int
    sha256: str
    content: str

    def joined_rows(self) -> str:
        r"""The text as papers on quantization have it, from the dataset's rows: "\n\n".join(rows).

        A row is a line with its line feed; a line of nothing but white space is an empty row. Of wiki.test.raw's
        1,290,590 bytes this makes 1,296,370.
        """
        lines = io.StringIO(self.content, newline="\n")
        return "\n\n".join(line if line.strip() else "" for line in lines)


def load_text(path: Path | None = None) -> Text:
    """The file `path`, or by default the WikiText-2 raw test split, its digest checked.

    The default is looked for in the file that W4CONV_WIKITEXT2 names, then in the user's cache, then fetched into the
    cache by huggingface_hub where that is installed. Raises InputError, which says where to get the text.
    """
    if path is not None:
        return _as_text(_read(path), path.name)
    if named := os.environ.get(WIKITEXT2_VARIABLE):
        return _checked(_read(Path(named)), f"{named} ({WIKITEXT2_VARIABLE})")
    cached = cache_dir() / "wikitext-2-raw" / "wiki.test.raw"
    if cached.exists():
        return _checked(_read(cached), str(cached))
    data = _fetch(cached)
    text = _checked(data, "the file that was fetched")
    _store(cached, data)
    return text


def cache_dir() -> Path:
    """Where fetched texts are kept: $XDG_CACHE_HOME/w4conv or ~/.cache/w4conv."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "w4conv"


def _checked(data: bytes, where: str) -> Text:
    text = _as_text(data, WIKITEXT2_NAME)
    if text.sha256 != WIKITEXT2_SHA256:
        raise InputError(
            f"{where}: not the {WIKITEXT2_NAME}: sha256 is {text.sha256}, expected {WIKITEXT2_SHA256}; "
            "figures from it would not compare. Replace it, or name another text with --text"
        )
    return text


def _as_text(data: bytes, name: str) -> Text:
    sha256 = hashlib.sha256(data).hexdigest()
    try:
        content = data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    return Text(WIKITEXT2_NAME if sha256 == WIKITEXT2_SHA256 else name, len(data), sha256, content)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_NBYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: the text cannot be read: {error.strerror}") from error
    refuse_stand_in(data[:HEAD_NBYTES], path, text=True)
    if len(data) > MAX_TEXT_NBYTES:
        raise InputError(f"{path}: larger than {MAX_TEXT_NBYTES:,} bytes, the limit for a text")
    return data


def _fetch(cached: Path) -> bytes:
    advice = (
        f"get wiki.test.raw (1,290,590 bytes; it is in {WIKITEXT2_ARCHIVE['filename']}) and name it in "
        f"{WIKITEXT2_VARIABLE} or put it at {cached}; or measure on a text of your own with --text"
    )
    try:
        hub: Any = importlib.import_module("huggingface_hub")  # optional, so that its types cannot be relied on
        settings: Any = importlib.import_module("huggingface_hub.utils")
    except ImportError:
        raise InputError(
            f"the {WIKITEXT2_NAME} is not here, and huggingface_hub is not installed to fetch it (pip "
            f"install 'w4conv[hub]'); {advice}"
        ) from None
    settings.disable_progress_bars()  # they would write to standard error
    try:
        archive = hub.hf_hub_download(**WIKITEXT2_ARCHIVE)
        with zipfile.ZipFile(archive) as z, z.open(WIKITEXT2_MEMBER) as member:
            return member.read(MAX_TEXT_NBYTES)
    except Exception as error:  # network, hub or archive
        raise InputError(f"the {WIKITEXT2_NAME} could not be fetched ({type(error).__name__}); {advice}") from error


def _store(cached: Path, data: bytes) -> None:
    """Store in the cache; a cache that cannot be written is ignored."""
    partial = cached.with_name(f"{cached.name}.{os.getpid()}.partial")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(cached)
    except OSError:
        partial.unlink(missing_ok=True)
