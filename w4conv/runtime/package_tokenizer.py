"""The tokenizers package on a tokenizer.json, with only the tokens that a text can need.

Building all of a large vocabulary takes the package 0.3 to 1.3 seconds, which is longer than the first token takes. BPE
joins what stands side by side, so that a token with bytes in a row that the text does not have can neither come out of
it nor be a step on the way. The first short texts are encoded without such tokens, which gives the same ones; long
texts, and files that are not plain BPE, have the whole vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as _Package

from w4conv import _native
from w4conv.errors import InputError
from w4conv.runtime.growth import check_growth
from w4conv.runtime.tokenizer_file import TokenizerFile

MAX_ID: Final = 2**32 - 1  # of the package
MAX_TEXT_NBYTES: Final = 1 << 30  # as the model gets it
_PIECE: Final = 1 << 12  # characters
ALIASES: Final = 0xF0000  # the first of characters that stand for special tokens; no text should have them
_FEW: Final = 4  # texts, after which the whole vocabulary pays
_SHORT: Final = 1 << 14  # characters of a text that is worth it
_UNSEEN: Final = "\0unseen"  # stands for any character that a text does not have


class PackageTokenizer:
    """document: a tokenizer.json. Methods raise InputError where the package cannot take it.

    added: id -> added token.
    decoder: the value of that key of the document.
    """

    def __init__(self, document: bytes, where: str = "tokenizer.json") -> None:
        self._document, self._where = document, where
        self._later: list[AddedToken] = []
        self._n_texts = 0
        self._parts: _Parts | None
        file = TokenizerFile(document, where)
        self._growth, self.decoding_growth = check_growth(file.settings, where)
        self._whole_words = file.model.get("ignore_merges") is True
        self._parts, small = _parts_of(file, where)
        self._base = small or self._whole

    def add(self, tokens: Sequence[AddedToken]) -> None:
        """Those that the vocabulary lacks get the ids behind it, in this order."""
        self._later += tokens
        if self._parts is None:
            _add(self._base, tokens, self._where)
        else:
            self._parts.add(token.content for token in tokens)
            self._base = _build(self._parts.document(), self._later, self._where)
            vars(self).pop("_whole", None)

    @property
    def added(self) -> dict[int, AddedToken]:
        tokens: dict[int, AddedToken] = self._base.get_added_tokens_decoder()
        return tokens

    @property
    def n_tokens(self) -> int:
        """Size of the vocabulary with added tokens."""
        if self._parts is not None:
            return len(self._parts)
        return int(self._base.get_vocab_size(with_added_tokens=True))

    @functools.cached_property
    def decoder(self) -> Any:
        return None if self._base.decoder is None else json.loads(self._base.decoder.__getstate__())

    def token(self, token_id: int) -> str | None:
        if not 0 <= token_id <= MAX_ID:
            return None
        token: str | None = self._base.id_to_token(token_id)
        return self._parts.id_to_token(token_id) if token is None and self._parts is not None else token

    def id(self, token: str) -> int | None:
        return self._base.token_to_id(token) if self._parts is None else self._parts.token_to_id(token)

    def first_id(self) -> int | None:
        """What the post-processor puts before a text, or the first token of one."""
        with package_errors(self._where, "cannot be used"):
            ids: list[int] = self._base.encode("a", add_special_tokens=True).ids
        return ids[0] if ids else None

    def encode(self, text: str, *, as_text: bool = False) -> list[int]:
        """Ids of a text, without what the post-processor adds. as_text: special tokens that it spells are text."""
        self._check_length(text)
        with package_errors(self._where, "cannot be used"):
            package = self._for(text, as_text)
            package.encode_special_tokens = as_text
            ids: list[int] = package.encode(text, add_special_tokens=False).ids
        return ids

    def encode_masked(self, text: str, masks: Mapping[str, str], special: Collection[str]) -> list[int]:
        """Ids of a text in which the characters of `masks` stand for what is text, though it spells special tokens.

        The special tokens that the text spells itself get names of their own, which are found where none are special.
        """
        added = self.added
        names = {text: chr(ALIASES + i) for i, text in enumerate(sorted(special))}
        longest_first = sorted((t.content for t in added.values() if t.content), key=len, reverse=True)
        text = re.sub("|".join(map(re.escape, longest_first)), lambda m: names.get(m[0], m[0]), text)
        text = "".join(masks.get(c, c) for c in text)
        self._check_length(text)
        package = _build(self._document, self._later, self._where)
        flags = {
            t.content: {"lstrip": t.lstrip, "rstrip": t.rstrip, "single_word": t.single_word} for t in added.values()
        }
        package.add_tokens([AddedToken(name, normalized=False, **flags[content]) for content, name in names.items()])
        package.encode_special_tokens = True
        with package_errors(self._where, "cannot be used"):
            ids: list[int] = package.encode(text, add_special_tokens=False).ids
        real = {package.token_to_id(name): self.id(content) for content, name in names.items()}
        return [i if (known := real.get(i)) is None else known for i in ids]

    def _check_length(self, text: str) -> None:
        """Refuse a text that the normalizer makes too long; looked at piece by piece where it might."""
        if len(text) * 4 * self._growth <= MAX_TEXT_NBYTES or self._base.normalizer is None:
            return
        left = MAX_TEXT_NBYTES
        with package_errors(self._where, "cannot be used"):
            for i in range(0, len(text), _PIECE):
                left -= len(self._base.normalizer.normalize_str(text[i : i + _PIECE]))
                if left < 0:
                    raise InputError(
                        f"{self._where}: its normalizer makes more than {MAX_TEXT_NBYTES >> 20} MiB of a text of "
                        f"{len(text):,} characters"
                    )

    @functools.cached_property
    def _whole(self) -> _Package:
        return _build(self._document, self._later, self._where)

    def _for(self, text: str, as_text: bool) -> _Package:
        """A tokenizer that encodes this text as the whole one does."""
        self._n_texts += 1
        if self._parts is None or "_whole" in vars(self) or self._n_texts > _FEW or len(text) > _SHORT:
            return self._whole
        # The text as the model gets it, from normalizer and pre-tokenizer: one of all its characters and of no merges.
        characters = {*text, *pre_tokenizers.ByteLevel.alphabet(), "▁"}
        cutter = _build(self._parts.document(), self._later, self._where)
        vocab = {token: i for i, token in enumerate([_UNSEEN, *characters])}
        cutter.encode_special_tokens = as_text
        cutter.model = models.BPE(vocab=vocab, merges=[], unk_token=_UNSEEN)
        seen = cutter.encode(text, add_special_tokens=False).tokens
        if _UNSEEN in seen or self._parts.may_differ(seen, self._whole_words):
            return self._whole
        return _build(self._parts.document("".join(seen)), self._later, self._where)


class _Parts:
    """A vocabulary of byte pairs, and documents with parts of it. Ids are those of the whole."""

    def __init__(self, vocabulary: _native.Vocabulary, kept: Iterable[str], *, drops: bool) -> None:
        """drops: characters that the vocabulary lacks are left out of a text, so that others come to stand in a row."""
        self._vocabulary = vocabulary
        self._drops = drops
        self._kept = set(kept)
        self._more: dict[str, int] = {}

    def add(self, tokens: Iterable[str]) -> None:
        """To be in every document; those that the vocabulary lacks get the ids behind it."""
        for token in tokens:
            if self.token_to_id(token) is None:
                self._more[token] = len(self)
            self._kept.add(token)

    def document(self, seen: str = "a") -> bytes:
        """With all tokens that BPE can make of `seen`."""
        return self._vocabulary.shortened(seen, self._kept, json.dumps(self._more)[1:-1])

    def may_differ(self, seen: Sequence[str], whole_words: bool) -> bool:
        """Whether a document with parts may encode a text otherwise than the whole. For the sake of their ids, it has
        the added tokens among its own, so that a character, or a word, may be taken for one of them.

        seen: the characters of the text, and the added tokens found in it. whole_words: a word that the vocabulary has
        is a token without merges.
        """
        unknown = {c for c in seen if len(c) == 1 and self._vocabulary.id(c) is None}
        if unknown and (self._drops or not unknown.isdisjoint(self._more)):
            return True
        text = "".join(c if len(c) == 1 else "\0" for c in seen) if whole_words else ""
        return any(token in text for token in self._more if len(token) > 1)

    def __len__(self) -> int:
        return len(self._vocabulary) + len(self._more)

    def token_to_id(self, token: str) -> int | None:
        found = self._vocabulary.id(token)
        return self._more.get(token) if found is None else found

    def id_to_token(self, token_id: int) -> str | None:
        """Of the file's own."""
        found = self._vocabulary.token(token_id)
        return None if found is None else found.decode(errors="replace")


def _parts_of(file: TokenizerFile, where: str) -> tuple[_Parts, _Package] | tuple[None, None]:
    """And a tokenizer with hardly any of them. None where the package needs the whole document."""
    try:
        vocabulary, model, added = file.vocabulary, file.model, file.settings["added_tokens"]
        if vocabulary is None or vocabulary.n_ids > len(vocabulary):
            return None, None
        plain = model["type"] == "BPE" and not any(
            model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix")
        )
        # A vocabulary that has one of those would take it for a word where it is only a part of one.
        if not plain or any(token["single_word"] for token in added):
            return None, None
        byte_tokens, unknown = [f"<0x{byte:02X}>" for byte in range(256)], model.get("unk_token")
        has_bytes = bool(model.get("byte_fallback")) and all(vocabulary.id(token) is not None for token in byte_tokens)
        parts = _Parts(vocabulary, [*byte_tokens, unknown or ""], drops=unknown is None and not has_bytes)
        parts.add(token["content"] for token in added)
        if any(parts.token_to_id(token["content"]) != token["id"] for token in added):
            return None, None
        return parts, _build(parts.document(), [], where)
    except (TypeError, LookupError, InputError):
        return None, None  # the package says what is wrong with it


def _build(document: bytes, later: Sequence[AddedToken], where: str) -> _Package:
    with package_errors(where, "cannot be read"):
        package = _Package.from_str(document.decode())
    package.no_truncation()
    package.no_padding()
    if getattr(package.model, "dropout", None):
        package.model.dropout = None  # a training aid; encoding is the same every time
    _add(package, later, where)
    return package


def _add(package: _Package, tokens: Iterable[AddedToken], where: str) -> None:
    with package_errors(where, "cannot be used"):
        for special, group in itertools.groupby(tokens, key=lambda token: token.special):
            (package.add_special_tokens if special else package.add_tokens)(list(group))


@contextmanager
def package_errors(where: str, what: str) -> Iterator[None]:
    """Errors of the tokenizers package, when a tokenizer.json is read or later, as InputError."""
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        # The package panics on some inputs; its PanicException is no Exception, and has no name to import.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise InputError(f"{where} {what} by the tokenizers package: {error}") from None
        raise
