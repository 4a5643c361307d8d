"""The invalid vectors: at least one for each MUST that a file can break, everything else about it being right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from writer import FLOATS, FP4, NF4, File, Index, Tensor, count_marks, make, provenance, put_together, spell, tensor

Change = Callable[[Index], object]
BLOBS = {"config.json": b"{}", "b": b"bb"}


def base() -> File:
    """The sound file that the invalid ones are made from."""
    return make([tensor("w", (3, 37), "int4", 32), tensor("b", (5,), "f16")], BLOBS)


@dataclass
class Fault:
    """clause: what a reader reports. breaks: the MUSTs meant to be broken, as clause/number of the MUST within it."""

    name: str
    clause: str
    breaks: tuple[str, ...]
    raw: bytes
    found_by: str = "open"


def put(*path: str | int, to: object) -> Change:
    def change(index: Index) -> None:
        at: Any = index
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = to

    return change


def drop(*path: str | int) -> Change:
    def change(index: Index) -> None:
        at: Any = index
        for step in path[:-1]:
            at = at[step]
        del at[path[-1]]

    return change


def header_faults() -> Iterator[Fault]:
    raw = put_together(base())

    def field(name: str, must: str, **fields: int) -> Fault:
        return Fault(name, must.split("/")[0], (must,), put_together(base(), header=fields))

    yield Fault("cut-in-header", "2.1", ("2.1/1",), raw[:127])
    yield Fault("empty-file", "2.2", ("2.2/1", "2.1/1"), b"")
    yield Fault("cut-in-signature", "2.2", ("2.2/1", "2.1/1"), raw[:7])
    yield Fault("other-signature", "2.2", ("2.2/1",), b"GGUF" + raw[4:])
    yield Fault("sent-as-text", "2.2", ("2.2/1",), raw.replace(b"\r\n", b"\n"))
    yield Fault("seven-bits", "2.2", ("2.2/1",), b"\x09" + raw[1:])
    yield field("next-major", "2.3/1", major=2)
    yield field("next-minor", "2.3/1", minor=2)
    yield field("major-0", "2.3/1", major=0)
    yield Fault(
        "version-comes-first", "2.3", ("2.3/1",),
        put_together(base(), header={"major": 65535, "header_nbytes": 256}, header_digest=b"\xaa" * 32),
    )  # fmt: skip
    yield field("header-of-129", "2.4/1", header_nbytes=129)
    yield field("file-longer-than-its-regions", "2.5/1", file_nbytes=len(raw) + 32)
    yield field("file-of-2-64", "2.5/1", file_nbytes=2**64 - 1)
    yield Fault("cut-by-a-byte", "2.5", ("2.5/2",), raw[:-1])
    yield Fault("cut-after-header", "2.5", ("2.5/2",), raw[:128])
    yield Fault("cut-in-data", "2.5", ("2.5/2",), raw[:4100])
    yield Fault("byte-appended", "2.5", ("2.5/2",), raw + b"\0")
    yield field("index-of-1", "2.6/1", index_nbytes=1)
    yield field("index-of-2-25-and-1", "2.6/1", index_nbytes=2**25 + 1)
    yield field("index-of-2-64", "2.6/1", index_nbytes=2**64 - 1)
    yield field("data-a-page-late", "2.7/1", data_offset=8192)
    yield field("data-at-0", "2.7/1", data_offset=0)
    yield field("data-not-in-lines", "2.8/1", data_nbytes=65)
    yield field("data-of-2-53", "2.8/1", data_nbytes=2**53)
    yield field("data-of-2-64", "2.8/1", data_nbytes=2**64 - 64)
    yield field("parts-2-18-and-1", "2.9/1", n_parts=2**18 + 1)
    yield field("sources-2-16-and-1", "2.9/1", n_sources=2**16 + 1)
    yield field("reserved-bit", "2.10/1", reserved=1 << 63)
    yield Fault("index-digest", "2.11", ("2.11/1",), put_together(base(), index_digest=bytes(32)))
    yield Fault("header-digest", "2.12", ("2.12/1",), put_together(base(), header_digest=b"\x55" * 32))


def text_faults() -> Iterator[Fault]:
    sound = spell(base().index)

    def text(name: str, must: str, text: bytes, also: str = "") -> Fault:
        return Fault(name, must.split("/")[0], (must, also) if also else (must,), put_together(base(), text=text))

    def inside(name: str, must: str, value: bytes, also: str = "") -> Fault:
        """`value` as the text of a further member of provenance, where any JSON may stand."""
        assert sound.count(b'"provenance":{') == 1
        return text(name, must, sound.replace(b'"provenance":{', b'"provenance":{"extra":' + value + b",", 1), also)

    assert inside("", "3.1/1", b"1").raw == put_together(
        make([tensor("w", (3, 37), "int4", 32), tensor("b", (5,), "f16")], BLOBS, provenance(extra=1))
    )  # so that `inside` breaks what it says and nothing else
    yield text("two-texts", "3.1/1", sound + b"{}")
    yield text("not-json", "3.1/1", b"not JSON")
    yield text("cut-json", "3.1/1", sound[:-1])
    yield text("byte-order-mark", "3.1/1", b"\xef\xbb\xbf" + sound)
    yield text("utf-16", "3.1/1", sound.decode().encode("utf-16-le"))
    for name, sequence in (("overlong", b"\xc1\x81"), ("overlong-3", b"\xe0\x9f\xbf"), ("cut", b"\xc3"),
                           ("stray", b"\x80"), ("beyond", b"\xf4\x90\x80\x80"), ("ff", b"\xff")):  # fmt: skip
        yield inside(f"utf-8-{name}", "3.1/1", b'"' + sequence + b'"')
    yield inside("trailing-comma", "3.1/1", b"[1,]")
    yield inside("control-character", "3.1/1", b'"\x01"')
    yield inside("escape-unknown", "3.1/1", b'"\\x41"')
    yield inside("nan", "3.1/1", b"NaN")
    yield text("space", "3.1/2", sound.replace(b":[", b": [", 1))
    yield text("line-feed-at-end", "3.1/2", sound + b"\n")
    yield text("keys-not-sorted", "3.1/3", sound.replace(b'"name":"b","nbytes":2,', b'"nbytes":2,"name":"b",', 1))
    yield inside("keys-sorted-as-utf-16", "3.1/3", '{"\U00010000":1,"\uffff":2}'.encode())
    yield inside("key-twice", "3.1/4", b'{"a":1,"a":1}')
    yield inside("escape-without-need", "3.1/5", b'"\\u0041"')
    yield inside("escaped-slash", "3.1/5", b'"\\/"')
    yield inside("escape-long", "3.1/5", b'"\\u000a"')
    yield inside("escape-upper-case", "3.1/5", b'"\\u001F"')
    yield inside("escape-of-delete", "3.1/5", b'"\\u007f"')
    yield inside("surrogate-pair-escaped", "3.1/5", b'"\\ud83d\\ude00"')
    yield inside("lone-surrogate-escaped", "3.1/6", b'"\\ud800"')
    yield inside("lone-surrogate", "3.1/6", b'"\xed\xa0\x80"')
    yield inside("integer-2-53", "3.1/7", b"9007199254740992")
    yield inside("integer-minus-2-53", "3.1/7", b"-9007199254740992")
    yield inside("integer-of-400-digits", "3.1/7", b"9" * 400)
    yield inside("fraction", "3.1/8", b"1.0")
    yield inside("exponent", "3.1/8", b"1e5")
    yield inside("leading-zero", "3.1/8", b"01")
    yield inside("minus-zero", "3.1/8", b"-0")
    yield inside("plus", "3.1/8", b"+1")
    yield inside("minus-alone", "3.1/8", b"-")
    yield inside("null", "3.1/9", b"null")
    yield text("commas", "3.2/1", b"," * (2**22 + 1))
    for name, mark in (("arrays", b"["), ("objects", b"{")):
        yield inside(f"{name}-in-a-string", "3.2/1", b'"' + mark * (2**22 + 1 - count_marks(sound) - 1) + b'"')
    yield inside("marks-of-all-kinds", "3.2/1", b"[" + b"[],{}," * (2**20) + b"1]")
    yield text("depth-65-of-no-json", "3.2/2", b"]" + b"[" * 66 + b"\xff", also="3.1/1")
    yield text("depth-65-after-an-escaped-quote", "3.2/2", b'\\"' + b"[" * 65, also="3.1/1")
    yield text("depth-64-in-half-a-string", "3.1/1", b"[" * 64 + b'\\\\"' + b"[" * 65)
    yield inside("depth-65-after-a-null", "3.2/2", b"[null," + b"[" * 62 + b"]" * 63, also="3.1/9")
    yield inside("depth-65", "3.2/2", b"[" * 63 + b"]" * 63)
    yield inside("depth-2000", "3.2/2", b'{"":' * 1999 + b"{}" + b"}" * 1999)
    yield text("index-is-array", "3.3/1", b"[]")
    yield text("index-is-true", "3.3/1", b"true")


def index_faults() -> Iterator[Fault]:
    def rule(name: str, must: str, change: Change, clause: str | None = None) -> Fault:
        file = base()
        change(file.index)
        return Fault(name, clause or must.split("/")[0], (must,), put_together(file))

    w, b = ("tensors", 0), ("tensors", 1)
    yield rule("top-key-missing", "3.3/1", drop("blobs"))
    yield rule("top-key-unknown", "3.3/1", put("extra", to=1))
    yield rule("blobs-not-array", "3.4/1", put("blobs", to={}))
    yield rule("blobs-1025", "3.4/1", put("blobs", to=[{}] * 1025))
    yield rule("blob-not-object", "3.4/2", put("blobs", 0, to=[]))
    yield rule("blob-key-unknown", "3.4/2", put("blobs", 0, "mode", to=1))
    yield rule("blob-key-missing", "3.4/2", drop("blobs", 0, "offset"))
    yield rule("blob-of-minus-1", "3.4/2", put("blobs", 0, "nbytes", to=-1))
    yield rule("blob-of-true-bytes", "3.4/2", put("blobs", 0, "nbytes", to=True))
    yield rule("blob-name-above", "3.4/3", put("blobs", 0, "name", to="a/../config.json"))
    yield rule("blob-name-not-ascii", "3.4/3", put("blobs", 0, "name", to="\u00e9"))
    yield rule("blob-name-full-width", "3.4/3", put("blobs", 0, "name", to="\uff21"))
    yield rule("blob-name-empty", "3.4/3", put("blobs", 0, "name", to=""))
    yield rule("blob-name-513", "3.4/3", put("blobs", 0, "name", to="a" * 513))
    yield rule("blob-name-not-string", "3.4/3", put("blobs", 0, "name", to=1))
    yield rule("blob-name-hidden", "3.4/4", put("blobs", 0, "name", to=".netrc"))
    yield rule("blob-twice", "3.4/5", put("blobs", 0, "name", to="b"))
    yield rule("blob-too-large", "3.4/6", put("blobs", 0, "nbytes", to=2**28 + 1))
    yield rule("blob-of-false-bytes", "3.4/2", put("blobs", 0, "nbytes", to=False))
    yield rule("blob-offset-missing-and-size-text", "3.4/2", put("blobs", 1, to={"name": "b", "nbytes": "2"}))
    yield rule("blobs-too-large-together", "3.4/6", put("blobs", 1, "nbytes", to=2**28 - 1))
    file = make(blobs={"config.json": b"{}"})
    file.index["blobs"][0]["nbytes"] = 65
    yield Fault("blob-beyond-data", "4.4", ("4.4/1",), put_together(file))
    yield rule("provenance-not-object", "3.5/1", put("provenance", to=[]))
    yield rule("tool-missing", "3.5/2", drop("provenance", "tool"))
    yield rule("tool-not-string", "3.5/2", put("provenance", "tool", to=1))
    yield rule("source-missing", "3.5/2", drop("provenance", "source"))
    yield rule("source-key-unknown", "3.5/2", put("provenance", "source", "host", to="h"))
    yield rule("source-kind-not-string", "3.5/2", put("provenance", "source", "kind", to=1))
    yield rule("source-files-not-array", "3.5/2", put("provenance", "source", "files", to={}))
    yield rule("source-files-too-few", "3.5/3", put("provenance", "source", "files", to=[]))
    yield rule("source-file-not-object", "3.5/3", put("provenance", "source", "files", 0, to=1))
    yield rule("source-file-size-missing", "3.5/3", drop("provenance", "source", "files", 0, "nbytes"))
    yield rule("source-file-with-path", "3.5/3", put("provenance", "source", "files", 0, "name", to="/home/m"))
    yield rule("source-file-key-unknown", "3.5/3", put("provenance", "source", "files", 0, "digest", to=""))
    yield rule("source-file-of-false-bytes", "3.5/3", put("provenance", "source", "files", 0, "nbytes", to=False))
    yield rule("source-file-of-true-bytes", "3.5/3", put("provenance", "source", "files", 0, "nbytes", to=True))
    yield rule("source-file-size-text", "3.5/3", put("provenance", "source", "files", 0, "nbytes", to="7"))
    yield rule("source-file-name-empty", "3.5/3", put("provenance", "source", "files", 0, "name", to=""))
    yield rule("source-file-name-513", "3.5/3", put("provenance", "source", "files", 0, "name", to="a" * 513))
    yield rule("source-file-of-minus-1", "3.5/3", put("provenance", "source", "files", 0, "nbytes", to=-1))
    yield rule("tensors-not-array", "3.6/1", put("tensors", to={}))
    yield rule("tensors-65537", "3.6/1", put("tensors", to=[{}] * 65537))
    yield rule("tensor-not-object", "3.6/2", put(*w, to=1))
    yield rule("tensor-key-unknown", "3.6/2", put(*w, "extra", to=1))
    yield rule("tensor-shape-missing", "3.6/2", drop(*w, "shape"))
    yield rule("float-with-groups", "3.6/2", put(*b, "group_size", to=32))
    yield rule("int4-with-codebook", "3.6/2", put(*w, "codebook", to=NF4))
    yield rule("name-missing", "3.6/3", drop(*w, "name"))
    yield rule("name-empty", "3.6/3", put(*w, "name", to=""))
    yield rule("name-514-bytes", "3.6/3", put(*w, "name", to="\u00e9" * 257))
    yield rule("name-with-line-feed", "3.6/4", put(*w, "name", to="a\n"))
    yield rule("name-with-control-character", "3.6/4", put(*w, "name", to="a\x1f"))
    yield rule("name-with-delete", "3.6/4", put(*w, "name", to="\x7f"))
    yield rule("name-twice", "3.6/5", put(*w, "name", to="b"))
    yield rule("name-not-string", "3.6/3", put(*w, "name", to=False))
    yield rule("source-dtype-not-string", "3.6/6", put(*w, "source_dtype", to=32))
    yield rule("float-with-scale-dtype", "3.6/2", put(*b, "scale_dtype", to="f16"))
    yield rule("source-dtype-with-space", "3.6/6", put(*w, "source_dtype", to="F 32"))
    yield rule("source-dtype-not-ascii", "3.6/6", put(*w, "source_dtype", to="\u00e9"))
    yield rule("source-dtype-empty", "3.6/6", put(*w, "source_dtype", to=""))
    yield rule("source-dtype-33", "3.6/6", put(*w, "source_dtype", to="F" * 33))
    yield rule("scheme-unknown", "3.7/1", put(*w, "scheme", to="int3"))
    yield rule("scheme-not-string", "3.7/1", put(*w, "scheme", to=["int4"]))
    yield rule("group-size-48", "3.7/2", put(*w, "group_size", to=48))
    yield rule("group-size-512", "3.7/2", put(*w, "group_size", to=512))
    yield rule("group-size-false", "3.7/2", put(*w, "group_size", to=False))
    yield rule("group-size-true", "3.7/2", put(*w, "group_size", to=True))
    yield rule("group-size-minus-32", "3.7/2", put(*w, "group_size", to=-32))
    yield rule("scale-dtype-false", "3.7/2", put(*w, "scale_dtype", to=False))
    yield rule("group-size-text", "3.7/2", put(*w, "group_size", to="32"))
    yield rule("group-size-missing", "3.7/2", drop(*w, "group_size"))
    yield rule("scale-dtype-bf16", "3.7/2", put(*w, "scale_dtype", to="bf16"))
    yield rule("scale-dtype-missing", "3.7/2", drop(*w, "scale_dtype"))
    yield rule("codebook-missing", "3.7/3", put(*w, "scheme", to="nf4"))

    def codebook(entries: object) -> Change:
        return lambda index: index["tensors"][0].update(scheme="nf4", codebook=entries)

    yield rule("codebook-of-15", "3.7/3", codebook(NF4[:15]))
    yield rule("codebook-upper-case", "3.7/3", codebook([*NF4[:15], "3F800000"]))
    yield rule("codebook-of-numbers", "3.7/3", codebook([0] * 16))
    yield rule("codebook-of-fp4", "3.7/4", codebook(FP4))
    yield rule("parts-of-int4o", "3.9/2", put(*w, "scheme", to="int4o"))
    yield rule("codebook-one-bit", "3.7/4", codebook([*NF4[:15], "3f800001"]))
    yield rule("shape-not-array", "3.8/1", put(*w, "shape", to=111))
    yield rule("rank-9", "3.8/1", put(*w, "shape", to=[1] * 9))
    yield rule("dimension-minus-3", "3.8/1", put(*w, "shape", to=[-3, 37]))
    yield rule("dimension-2-32", "3.8/1", put(*w, "shape", to=[2**32, 1]))
    yield rule("dimension-true", "3.8/1", put(*w, "shape", to=[True, 37]))
    yield rule("dimension-false", "3.8/1", put(*w, "shape", to=[3, False]))
    yield rule("dimension-text", "3.8/1", put(*w, "shape", to=["3", 37]))
    yield rule("product-2-49", "3.8/2", put(*w, "shape", to=[2**25, 2**24]))
    yield rule("product-2-62-under-a-zero", "3.8/2", put(*w, "shape", to=[0, 2**31, 2**31]))
    yield rule("product-2-248", "3.8/2", put(*w, "shape", to=[2**31] * 8))
    yield rule("parts-not-array", "3.9/1", put(*w, "parts", to={}))
    yield rule("part-key-unknown", "3.9/1", put(*w, "parts", 0, "digest", to=""))
    yield rule("part-not-object", "3.9/1", put(*w, "parts", 0, to=1))
    yield rule("parts-none", "3.9/2", put(*w, "parts", to=[]))
    yield rule("parts-three", "3.9/2", lambda index: index["tensors"][0]["parts"].append({}))
    yield rule("part-kind", "3.9/2", put(*w, "parts", 0, "kind", to="values"))
    yield rule("parts-swapped", "3.9/2", lambda index: index["tensors"][0]["parts"].reverse())
    yield rule("part-size", "3.9/2", put(*w, "parts", 0, "nbytes", to=256))
    yield rule("shape-other", "3.9/2", put(*w, "shape", to=[3, 41]))
    yield rule("part-size-text", "3.9/2", put(*w, "parts", 0, "nbytes", to="384"))
    file = make([tensor("w", (0,), "f16")], BLOBS)
    file.index["tensors"][0]["parts"][0]["nbytes"] = False
    yield Fault("part-of-false-bytes", "3.9", ("3.9/2",), put_together(file))
    file = make([tensor("w", (0,), "f16")], BLOBS)
    file.index["tensors"].pop()
    yield Fault("part-missing-at-end", "3.9", ("3.9/3",), put_together(file))
    yield rule("codes-of-vector", "codes 2.4/1", put(*w, "shape", to=[111]), "3.9")
    yield rule("first-part-at-64", "4.2/1", put("blobs", 0, "offset", to=64))
    yield rule("first-part-at-minus-64", "4.2/1", put("blobs", 0, "offset", to=-64))
    yield rule("overlap", "4.2/2", put(*w, "parts", 1, "offset", to=128))
    yield rule("hole", "4.2/2", put(*w, "parts", 1, "offset", to=512))
    yield rule("offset-2-53", "4.2/2", put(*w, "parts", 1, "offset", to=2**53 - 64))
    yield rule("blob-offset-false", "4.2/1", put("blobs", 0, "offset", to=False))
    yield rule("blob-offset-text", "4.2/1", put("blobs", 0, "offset", to="0"))
    yield rule("blob-offset-array", "4.2/1", put("blobs", 0, "offset", to=[0]))
    file = make([tensor("w", (5,), "f16")])
    file.index["tensors"][0]["parts"][0]["offset"] = False
    yield Fault("offset-false", "4.2", ("4.2/1",), put_together(file))


def order_faults() -> Iterator[Fault]:
    """Files with several faults: a reader reports the one that comes first in w4-container 7.6."""

    def both(name: str, *musts: str, change: Change) -> Fault:
        """musts: in the order in which they are found."""
        file = base()
        change(file.index)
        return Fault(name, musts[0].split("/")[0], musts, put_together(file))

    def all_of(*changes: Change) -> Change:
        return lambda index: [change(index) for change in changes]

    w, b = ("tensors", 0), ("tensors", 1)
    part = (*b, "parts", 0)
    yield Fault("then-size", "2.4", ("2.4/1", "2.5/2"), put_together(base(), header={"header_nbytes": 129})[:-1])
    yield Fault(
        "then-file-nbytes", "2.9", ("2.9/1", "2.5/1"),
        put_together(base(), header={"n_parts": 2**18 + 1, "file_nbytes": 2**64 - 1}),
    )  # fmt: skip
    yield Fault("then-index-digest", "2.5", ("2.5/2", "2.11/1"), put_together(base(), index_digest=bytes(32)) + b"\0")
    yield Fault(
        "then-text", "2.11", ("2.11/1", "3.1/1"), put_together(base(), text=b"not JSON", index_digest=bytes(32))
    )
    yield both("blob-then-provenance", "4.2/1", "3.5/2",
               change=all_of(put("blobs", 0, "offset", to=64), drop("provenance", "tool")))  # fmt: skip
    yield both("blob-size-then-place", "3.4/2", "4.2/1",
               change=all_of(put("blobs", 0, "nbytes", to=-1), put("blobs", 0, "offset", to=64)))  # fmt: skip
    yield both("blob-place-then-next-blob", "4.2/1", "3.4/5",
               change=all_of(put("blobs", 0, "offset", to=64), put("blobs", 1, "name", to="b")))  # fmt: skip
    yield both("provenance-then-tensors", "3.5/2", "3.6/1",
               change=all_of(drop("provenance", "source"), put("tensors", to={})))  # fmt: skip
    yield both("name-twice-then-offset", "3.6/5", "4.2/2",
               change=lambda index: index["tensors"].append(index["tensors"][1]))  # fmt: skip
    yield both("name-twice-then-scheme", "3.6/5", "3.7/1",
               change=all_of(put(*b, "name", to="w"), put(*b, "scheme", to="int3")))  # fmt: skip
    yield both("offset-then-name-twice", "4.2/2", "3.6/5",
               change=all_of(put(*w, "parts", 0, "offset", to=0), put(*b, "name", to="w")))  # fmt: skip
    yield both("scheme-then-key-unknown", "3.7/1", "3.6/2",
               change=all_of(put(*b, "scheme", to="int3"), put(*b, "extra", to=1)))  # fmt: skip
    yield both("group-size-missing-then-shape", "3.7/2", "3.6/2",
               change=all_of(drop(*w, "group_size"), drop(*w, "shape")))  # fmt: skip
    yield both("codebook-left-over-then-shape", "3.6/2", "3.8/1",
               change=all_of(put(*w, "codebook", to=NF4), put(*w, "shape", to=[1] * 9)))  # fmt: skip
    yield both("source-dtype-then-shape", "3.6/6", "3.8/1",
               change=all_of(put(*w, "source_dtype", to=""), put(*w, "shape", to=111)))  # fmt: skip
    yield both("shape-then-parts", "3.8/1", "3.9/1",
               change=all_of(put(*w, "shape", to=[-3, 37]), put(*w, "parts", to={})))  # fmt: skip
    yield both("size-then-place", "3.9/2", "4.2/2",
               change=all_of(put(*part, "nbytes", to=11), put(*part, "offset", to=0)))  # fmt: skip
    yield both("place-then-next-part", "4.2/2", "3.9/2",
               change=all_of(put(*w, "parts", 0, "offset", to=0), put(*w, "parts", 1, "kind", to="")))  # fmt: skip
    yield both("number-of-parts-then-data-nbytes", "3.9/3", "4.4/1", change=lambda index: index["tensors"].pop())
    longer = base()
    longer.section.extend(bytes(64))
    yield Fault("data-nbytes-then-gap", "4.4", ("4.4/1", "4.1/1"), put_together(longer, gap=_one))
    yield Fault(
        "gap-then-trailer", "4.1", ("4.1/1", "5.3/1"), put_together(base(), gap=_one, conversion_digest=b"\1" * 32)
    )


def _one(gap: bytearray) -> None:
    gap[0] = 1


def data_faults() -> Iterator[Fault]:
    def data(
        name: str, must: str, t: Tensor, kind: str, at: int, change: bytes, *, after: bool = False, clause: str = ""
    ) -> Fault:
        """`change` written at byte `at` of a part of the only tensor, or after its end."""
        file = make([t])
        offset, nbytes = file.places[list(t.parts).index(kind)]
        start = offset + (nbytes if after else 0) + at
        assert bytes(file.section[start : start + len(change)]) != change
        file.section[start : start + len(change)] = change
        return Fault(name, clause or must.split("/")[0], (must,), put_together(file), "verify")

    int4, int4z = tensor("w", (3, 37), "int4", 32), tensor("w", (2, 3, 9), "int4z", 32)
    int4o, int4o_f32 = tensor("w", (3, 37), "int4o", 32), tensor("w", (3, 37), "int4o", 32, "f32")
    nf4, fp4, e2m1 = (tensor("w", (3, 9), s, 32) for s in ("nf4", "fp4", "e2m1"))
    int8, int8_f32 = tensor("w", (3, 5), "int8", 32), tensor("w", (3, 5), "int8", 32, "f32")
    f16, bf16, f32 = (tensor("w", (3, 3), s) for s in FLOATS)

    raw = bytearray(put_together(base()))
    raw[4095] = 1
    yield Fault("gap-after-index", "4.1", ("4.1/1",), bytes(raw))
    yield data("gap-after-part", "4.3/1", tensor("w", (5,), "f16"), "values", 0, b"\1", after=True)
    file = make(blobs=BLOBS)
    file.section[63] = 0x80
    yield Fault("gap-after-blob", "4.3", ("4.3/1",), put_together(file), "verify")
    file = base()
    file.section.extend(bytes(64))
    yield Fault("data-longer-than-parts", "4.4", ("4.4/1",), put_together(file))
    yield data("row-padding-int4", "4.5/1", int4, "codes", 4 * 3, b"\x89")
    yield data("column-padding-int4", "codes 3.5/1", int4, "codes", 4 * 64 + 1, b"\x78", clause="4.5")
    yield data("row-padding-int4z-second-matrix", "4.5/1", int4z, "codes", 128 + 4 * 3, b"\x08")
    yield data("row-padding-nf4", "4.5/1", nf4, "codes", 4 * 15, b"\x88")
    yield data("row-padding-fp4", "4.5/1", fp4, "codes", 4 * 15, b"\x08")
    yield data("row-padding-e2m1", "4.5/1", e2m1, "codes", 4 * 15, b"\x08")
    yield data("column-padding-int4o", "4.5/1", int4o, "codes", 4 * 64 + 1, b"\x80")
    yield data("column-padding-int8", "4.5/1", int8, "codes", 64 + 1, b"\xff")
    yield data("column-padding-f16-is-minus-0", "4.5/1", f16, "values", 64 + 3, b"\x80")
    yield data("row-padding-bf16", "4.5/1", bf16, "values", 4 * 3, b"\1")
    yield data("row-padding-f32-is-minus-0", "4.5/1", f32, "values", 4 * 3 + 3, b"\x80")
    yield data("row-padding-of-scales", "4.5/1", int4, "scales", 2 * 3, b"\1")
    yield data("row-padding-of-scales-is-minus-0", "4.5/1", int8_f32, "scales", 4 * 3 + 3, b"\x80")
    yield data("row-padding-of-zero-points", "4.5/1", int4z, "zero_points", 16 + 3, b"\1")
    yield data("row-padding-of-offsets", "4.5/1", int4o, "offsets", 2 * 3, b"\1")
    yield data("row-padding-of-offsets-is-minus-0", "4.5/1", int4o_f32, "offsets", 4 * 3 + 3, b"\x80")
    yield data("scale-infinite", "4.6/1", int4, "scales", 0, b"\x00\x7c")
    yield data("scale-minus-infinite-f32", "4.6/1", int8_f32, "scales", 0, b"\x00\x00\x80\xff")
    yield data("scale-nan", "4.6/1", int4, "scales", 2, b"\x01\xfe")
    yield data("offset-infinite", "4.6/1", int4o, "offsets", 0, b"\x00\x7c")
    yield data("offset-nan-f32", "4.6/1", int4o_f32, "offsets", 4, b"\x01\x00\xc0\x7f")
    yield data("zero-point-16", "4.6/2", int4z, "zero_points", 0, b"\x10")
    raw = bytearray(put_together(make([int4])))
    raw[4096] ^= 1
    yield Fault("bit-of-codes", "5.1", ("5.1/1",), bytes(raw), "verify")
    raw = bytearray(put_together(make(blobs=BLOBS)))
    raw[4096] ^= 1
    yield Fault("bit-of-blob", "5.1", ("5.1/1",), bytes(raw), "verify")
    yield Fault(
        "digest-of-empty-part", "5.1", ("5.1/1",),
        put_together(make([tensor("w", (0,), "f16")]), part_digests=lambda d: d.__setitem__(0, bytes(32))), "verify",
    )  # fmt: skip
    yield from data_order_faults()
    yield Fault("conversion-digest", "5.3", ("5.3/1",), put_together(base(), conversion_digest=b"\1" * 32))
    raw = bytearray(put_together(base()))
    raw[-33] ^= 1
    yield Fault("bit-of-source-digest", "5.3", ("5.3/1",), bytes(raw))
    raw[-33] ^= 1
    raw[-32 * 6] ^= 1
    yield Fault("bit-of-part-digest", "5.3", ("5.3/1",), bytes(raw))


def faults_of_1_1() -> Iterator[Fault]:
    """What version 1.1 adds: in a file that says 1.0, and broken."""

    def file_of(*arguments: Any, minor: int | None = None, change: Change | None = None) -> bytes:
        file = make([tensor("w", *arguments)])
        if change:
            change(file.index)
        return put_together(file, header={} if minor is None else {"minor": minor})

    w = ("tensors", 0)
    for name, arguments in {
        "iq4nl": ((3, 9), "iq4nl", 32), "int8o": ((3, 9), "int8o", 32), "group-of-16": ((3, 9), "int4", 16),
        "two-levels": ((3, 9), "int4", 32, "i8"), "nl4": ((3, 9), "nl4", 32, "s6"),
        "nl3": ((3, 9), "nl3", 32, "s6"),
    }.items():  # fmt: skip
        yield Fault(f"{name}-in-1.0", "3.7", ("3.7/5",), file_of(*arguments, minor=0))
    two = ((3, 300), "int4o", 32, "i8")
    for size in (0, 256):
        change = put(*w, "group_size", to=size)
        yield Fault(f"two-levels-of-{size}", "3.7", ("codes 2.5/1",), file_of(*two, change=change))
    nl4, nl3 = ((3, 300), "nl4", 32, "s6"), ((3, 35), "nl3", 32, "s6")
    for size in (0, 256):
        for arguments in (nl4, nl3):
            change = put(*w, "group_size", to=size)
            yield Fault(f"{arguments[1]}-of-{size}", "3.7", ("codes 2.6/1",), file_of(*arguments, change=change))
    for scheme, of, to in (
        ("nl4", "s6", "i8"), ("nl4", "s6", "f16"), ("nl3", "s6", "i8"), ("nl3", "s6", "f16"), ("int4", "i8", "s6"),
        ("iq4nl", "i8", "s6"),
    ):  # fmt: skip
        change = put(*w, "scale_dtype", to=to)
        yield Fault(f"{scheme}-with-{to}", "3.7", ("3.7/2",), file_of((3, 9), scheme, 32, of, change=change))
    change = put(*w, "parts", 2, "nbytes", to=64)
    yield Fault("nl4-super-scales-by-256", "3.9", ("3.9/2",), file_of(*nl4, change=change))
    for name, size in (("group-size-8", 8), ("group-size-24", 24)):
        yield Fault(name, "3.7", ("3.7/2",), file_of((3, 9), "int4", 16, change=put(*w, "group_size", to=size)))
    iq4nl = tensor("w", (3, 9), "iq4nl", 32)
    wrong = [*iq4nl.entry["codebook"][:15], "42e20001"]
    yield Fault(
        "codebook-of-iq4nl", "3.7", ("3.7/4",), file_of((3, 9), "iq4nl", 32, change=put(*w, "codebook", to=wrong))
    )
    book = tensor("w", *nl3).entry["codebook"]
    for name, wrong in (
        ("codebook-of-nl3", [*book[:7], "42ce0001"]), ("codebook-of-nl3-twice", book * 2),
        ("codebook-of-nl3-short", book[:7]), ("codebook-of-nl3-is-that-of-nl4", tensor("w", *nl4).entry["codebook"]),
    ):  # fmt: skip
        yield Fault(name, "3.7", ("3.7/4",), file_of(*nl3, change=put(*w, "codebook", to=wrong)))
    for name, n_lines in (("codes-of-nl3-by-dwords", 4), ("codes-of-nl3-as-of-4-bits", 5)):
        change = put(*w, "parts", 0, "nbytes", to=64 * n_lines)
        yield Fault(name, "3.9", ("3.9/2",), file_of(*nl3, change=change))
    yield Fault("super-scales-missing", "3.9", ("3.9/2",), file_of(*two, change=drop(*w, "parts", 2)))
    yield Fault(
        "super-scales-last", "3.9", ("3.9/2",),
        file_of(*two, change=lambda index: index["tensors"][0]["parts"].append(index["tensors"][0]["parts"].pop(2))),
    )  # fmt: skip
    yield Fault("super-scales-too-many", "3.9", ("3.9/2",), file_of(*two, change=put(*w, "parts", 2, "nbytes", to=160)))
    yield Fault("super-scales-of-f16", "3.9", ("3.9/2",), file_of(*two, change=put(*w, "scale_dtype", to="f16")))
    int4o, int8o = tensor("w", *two), tensor("w", (3, 5), "int8o", 16)
    for name, must, t, kind, at, change_to in (
        ("row-padding-of-sub-scales", "4.5/1", int4o, "scales", 3, b"\1"),
        ("row-padding-of-super-scales-is-minus-0", "4.5/1", int4o, "super_scales", 2 * 3 + 1, b"\x80"),
        ("row-padding-of-sub-offsets", "4.5/1", int4o, "offsets", 16 + 3, b"\1"),
        ("row-padding-of-super-offsets", "4.5/1", int4o, "super_offsets", 2 * 3, b"\1"),
        ("super-scale-infinite", "4.6/1", int4o, "super_scales", 0, b"\x00\x7c"),
        ("super-offset-nan", "4.6/1", int4o, "super_offsets", 32, b"\x01\xfe"),
        ("column-padding-int8o", "4.5/1", int8o, "codes", 64 + 1, b"\1"),
        ("row-padding-iq4nl", "4.5/1", iq4nl, "codes", 4 * 15, b"\x08"),
        ("row-padding-nl4", "4.5/1", tensor("w", *nl4), "codes", 4 * 15, b"\x09"),
        ("row-padding-nl3", "4.5/1", tensor("w", *nl3), "codes", 4 * 15, b"\x08"),
        ("column-padding-nl3", "4.5/1", tensor("w", *nl3), "codes", 4 * 64, b"\x01"),
        ("column-padding-nl3-in-a-dword", "4.5/1", tensor("w", *nl3), "codes", 3 * 64 + 3, b"\x01"),
        ("column-padding-nl3-in-fourth-bits", "4.5/1", tensor("w", *nl3), "codes", 5 * 64 + 4 + 3, b"\x80"),
        ("row-padding-of-shifts", "4.5/1", tensor("w", *nl4), "scales", 3, b"\x40"),
        ("row-padding-of-super-scales-of-rows", "4.5/1", tensor("w", *nl4), "super_scales", 2 * 3, b"\1"),
        ("super-scale-of-a-row-nan", "4.6/1", tensor("w", *nl4), "super_scales", 0, b"\x01\x7e"),
    ):  # fmt: skip
        file = make([t])
        start = file.places[list(t.parts).index(kind)][0] + at
        assert bytes(file.section[start : start + len(change_to)]) != change_to
        file.section[start : start + len(change_to)] = change_to
        yield Fault(name, must.split("/")[0], (must,), put_together(file), "verify")


def data_order_faults() -> Iterator[Fault]:
    """Several faults of parts: the first part that is wrong, and of that the first clause in w4-container 7.6."""

    def wrong(name: str, *musts: str, changes: Mapping[int, bytes], bad_digest: int | None = None) -> Fault:
        """changes: bytes to write, by their place in the data section. bad_digest: a part whose digest is wrong."""
        file = make([tensor("w", (3, 37), "int4z", 32), tensor("x", (3, 5), "int8", 32)], {"config.json": b"{}"})
        assert [offset for offset, _ in file.places] == [0, 64, 384, 448, 512, 640]
        for at, change in changes.items():
            file.section[at : at + len(change)] = change

        def spoil(digests: list[bytes]) -> None:
            if bad_digest is not None:
                digests[bad_digest] = bytes(32)

        return Fault(name, musts[0].split("/")[0], musts, put_together(file, part_digests=spoil), "verify")

    infinite, padding = b"\x00\x7c", b"\1"
    yield wrong("padding-then-digest-of-next", "4.5/1", "5.1/1", changes={64 + 4 * 3: b"\0"}, bad_digest=2)
    yield wrong("digest-then-scale", "5.1/1", "4.6/1", changes={384: infinite}, bad_digest=2)
    yield wrong("gap-then-padding", "4.3/1", "4.5/1", changes={448 + 3: padding, 448 + 32: padding})
    yield wrong("scale-then-padding", "4.6/1", "4.5/1", changes={384 + 2 * 3: padding, 384 + 2 * 17: infinite})
    yield wrong("gap-of-blob-then-digest", "4.3/1", "5.1/1", changes={2: b" "}, bad_digest=1)
    yield wrong("scale-of-padding-row", "4.6/1", "4.5/1", changes={384 + 2 * 3: infinite})
    yield wrong("zero-point-of-padding-row", "4.6/2", "4.5/1", changes={448 + 15: b"\x10"})
