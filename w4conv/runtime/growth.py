"""How much longer a tokenizer.json may make a text, by what it says: the tokenizers package itself has no bound.

A step that replaces, prepends or decomposes makes of a byte up to so many; steps one behind the other multiply. Five
that write a thousand characters for one would ask for more memory than there is, and the package would end the process.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from w4conv.errors import InputError

MAX_GROWTH: Final = 4096  # known tokenizers stay below 1,000, in the worst case that the steps allow

# Bytes of UTF-8 out for one in. Unicode 15, annex 15: NFC and NFD 3 times, NFKC and NFKD 11 times.
_NORMALIZERS: Final = {
    "NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2, "ByteLevel": 2, "BertNormalizer": 12, "Nmt": 1,
    "Strip": 1, "StripAccents": 1,
}  # fmt: skip
_UNKNOWN: Final = 16


def check_growth(settings: Mapping[str, Any], where: str) -> tuple[int, int]:
    """(bytes of text for a byte of text, bytes of answer for a byte of token) at most, of a tokenizer.json.

    Raises InputError, which begins with `where`, when one of them is over MAX_GROWTH.
    """
    encoding = math.prod(_normalizer(s) for s in _flat(settings.get("normalizer"), "normalizers"))
    encoding *= math.prod(_pre_tokenizer(s) for s in _flat(settings.get("pre_tokenizer"), "pretokenizers"))
    decoding = math.prod(_decoder(s) for s in _flat(settings.get("decoder"), "decoders"))
    framed = 1
    for step in _flat(settings.get("post_processor"), "processors"):
        framed = _post_processor(step, framed)
    for key, growth in (("normalizer and pre_tokenizer", encoding), ("decoder", decoding), ("post_processor", framed)):
        if growth > MAX_GROWTH:
            raise InputError(
                f"{where}: {key} may make a text more than {MAX_GROWTH:,} times as long, which no tokenizer needs: "
                "it is corrupt, or made to do harm"
            )
    return encoding, decoding


def _flat(step: Any, key: str) -> Iterator[Mapping[str, Any]]:
    if isinstance(step, dict) and isinstance(steps := step.get(key), list):
        for inner in steps:
            yield from _flat(inner, key)
    elif isinstance(step, dict):
        yield step


def _nbytes(text: object) -> int:
    return len(text.encode(errors="surrogatepass")) if isinstance(text, str) else 0


def _replace(step: Mapping[str, Any]) -> int:
    """Of a string, that for each time it may stand there; of an expression, one at every place."""
    pattern, content = step.get("pattern"), _nbytes(step.get("content"))
    found = _nbytes(pattern.get("String")) if isinstance(pattern, dict) else _nbytes(pattern)
    return max(1, -(-content // found)) if found else 1 + content


def _normalizer(step: Mapping[str, Any]) -> int:
    if "content" in step:  # not by its type, which the package can do without
        return _replace(step)
    if "prepend" in step:
        return 1 + _nbytes(step["prepend"])
    if "precompiled_charsmap" in step:
        return _precompiled(step["precompiled_charsmap"])
    return _NORMALIZERS.get(str(step.get("type")), _UNKNOWN)


def _precompiled(charsmap: object) -> int:
    """Its longest replacement. SentencePiece: u32 bytes of the trie | trie | replacements, each ended by a zero."""
    try:
        raw = base64.b64decode(charsmap if isinstance(charsmap, str) else "")
    except ValueError:
        return _UNKNOWN  # the package refuses it
    texts = raw[4 + int.from_bytes(raw[:4], "little") :]
    return max(1, *map(len, texts.split(b"\0")))


def _pre_tokenizer(step: Mapping[str, Any]) -> int:
    kind = step.get("type")
    if kind == "ByteLevel":
        return 3  # two for a byte, and a space in front
    return 1 + 4 if kind == "Metaspace" else 1


def _decoder(step: Mapping[str, Any]) -> int:
    return _replace(step) if "pattern" in step else 3 if step.get("type") in ("ByteLevel", "Metaspace") else 2


def _post_processor(step: Mapping[str, Any], n: int) -> int:
    """Tokens that a template makes of so many."""
    if "single" not in step:
        return n + 4
    most = 0
    special = step.get("special_tokens")
    for key in ("single", "pair"):
        total, pieces = 0, step.get(key)
        for piece in pieces if isinstance(pieces, list) else ():
            named = piece.get("SpecialToken") if isinstance(piece, dict) else None
            token = special.get(str(named.get("id"))) if isinstance(special, dict) and isinstance(named, dict) else None
            ids = token.get("ids") if isinstance(token, dict) else None
            total += len(ids) if isinstance(ids, list) else n
        most = max(most, total)
    return max(most, n)
