"""Tokenizer: text to token ids and back, from the files that travel inside a container.

The rule about BOS. `adds_bos`: whether a text starts with the BOS token by the model's own convention.
`add_bos_token` of tokenizer_config.json decides where it is given, else what the post-processor of tokenizer.json does.
`encode` puts one BOS at the start or none, never two; it adds no other special token. Special tokens that the
text spells: `settle_special_tokens`.

Ids become text by the decoder of tokenizer.json, step by step (w4conv.runtime.detokenize). Joined, the pieces equal
the text of the tokenizers package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from tokenizers import AddedToken

from w4conv.errors import InputError, UsageError
from w4conv.files.blobs import json_object, place
from w4conv.runtime.detokenize import StreamDecoder
from w4conv.runtime.package_tokenizer import PackageTokenizer, package_errors
from w4conv.runtime.tokenizer_file import token_ids

# Tokens by which chat models end a turn. A model may name only one of them as its EOS, or none.
END_OF_TURN: Final = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "<|return|>", "<|call|>",
)  # fmt: skip
MAX_PIECE_NBYTES: Final = 1 << 28  # of text that a token becomes
SPECIAL_TOKENS: Final = ("parse", "text")
SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def settle_special_tokens(given: str | None) -> str:
    """How special tokens that a text spells are read: "parse" (the default), as those tokens; "text", as characters.

    Everything that makes tokens of a text takes the word, and asks here. Raises UsageError.
    """
    word = "parse" if given is None else given
    if word not in SPECIAL_TOKENS:
        raise UsageError(f"special-tokens is {word!r}, expected {' or '.join(SPECIAL_TOKENS)}")
    return word


class Tokenizer:
    """Built from the blobs of a container or a source.

    n_tokens: size of the vocabulary with added tokens; the model may have more logits than that.
    bos_id: the BOS token, or None. adds_bos: see the module's text.
    special_tokens: name -> token text ("bos_token" -> "<s>"), what chat templates see.
    """

    def __init__(self, blobs: Mapping[str, bytes]) -> None:
        """Raises InputError when there is no tokenizer, or one that cannot be read."""
        if "tokenizer.json" not in blobs:
            raise InputError(
                "there is no tokenizer.json inside, so text cannot become tokens; inspect and verify (without --ppl) "
                "work without it, and Model.logits takes token ids. Put tokenizer.json beside the weights and convert "
                "again"
            )
        self.where = place(blobs, "tokenizer.json")
        self._tokenizer = PackageTokenizer(blobs["tokenizer.json"], self.where)
        self._ids = {
            kind: [token_ids(blobs, name, f"{kind}_token_id") for name in ("config.json", "generation_config.json")]
            for kind in ("bos", "eos")
        }
        self._settings = json_object(blobs, "tokenizer_config.json")
        self._map = json_object(blobs, "special_tokens_map.json")
        self.longest_token = MAX_PIECE_NBYTES // self._tokenizer.decoding_growth // 4
        special = {t.content for t in self._tokenizer.added.values() if t.special}
        self._settings_where = place(blobs, "tokenizer_config.json")
        self._add_tokens(self._settings_where)
        # In the package a token once special stays special.
        self._special_texts = special | {t.content for t in self._tokenizer.added.values() if t.special}
        self._special_ids = {i for i, t in self._tokenizer.added.items() if t.content in self._special_texts}
        self.n_tokens = self._tokenizer.n_tokens
        self.bos_id = self._named_id("bos")
        self.adds_bos = self._adds_bos()
        self.special_tokens = self._special_tokens()

    def encode(self, text: str, *, add_bos: bool | None = None, special_tokens: str | None = None) -> list[int]:
        """Token ids of `text`. add_bos: None follows the model's convention. special_tokens: `settle_special_tokens`.

        Raises UsageError when a BOS is asked for and the model has none.
        """
        ids = self._tokenizer.encode(text, as_text=settle_special_tokens(special_tokens) == "text")
        if add_bos is None:
            add_bos = self.adds_bos
        if not add_bos:
            return ids
        if self.bos_id is None:
            raise UsageError("a BOS token was asked for, but this tokenizer names none")
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def encode_masked(self, text: str, masks: Mapping[str, str]) -> list[int]:
        """Ids of a text, without a BOS. masks: private character -> the text of a special token, to be read as text."""
        return self._tokenizer.encode_masked(text, masks, self._special_texts)

    def special_ids(self, ids: Iterable[int]) -> list[int]:
        """The special tokens among `ids`."""
        return [i for i in ids if i in self._special_ids]

    def special_texts(self) -> list[str]:
        """Texts of special tokens, longest first."""
        return sorted(filter(None, self._special_texts), key=lambda text: (-len(text), text))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` as a text of its own, without special tokens."""
        stream = self.stream()
        return "".join([*(stream.push(i) for i in ids), stream.finish()])

    def stream(self, *, after: Iterable[int] = ()) -> TokenStream:
        """Streaming text of tokens. after: the tokens before them, such as those of a prompt that they continue."""
        return TokenStream(self, after)

    def id(self, token: str) -> int | None:
        """The id of a token, by its text."""
        return self._tokenizer.id(token)

    @property
    def decoder(self) -> Mapping[str, Any] | None:
        """`decoder` of tokenizer.json."""
        found: Mapping[str, Any] | None = self._tokenizer.decoder
        return found

    def text_token(self, token_id: int) -> str | None:
        """The token of an id for the decoder; None for special tokens and for ids beyond the vocabulary."""
        token = self._tokenizer.token(token_id)
        return None if token in self._special_texts else token

    def token_text(self, token_id: int) -> str:
        """A token as the vocabulary has it; "<id 7>" for an id beyond it."""
        token = self._tokenizer.token(token_id)
        return f"<id {token_id}>" if token is None else token

    def stop_ids(self, *, chat: bool = False) -> frozenset[int]:
        """Every token that ends a generation: all EOS tokens the files name; with `chat`, the ends of a turn too."""
        ids = {i for named in self._ids["eos"] for i in named if i >= 0}
        named = self._named_id("eos")
        if named is not None:
            ids.add(named)
        if chat:
            found = {token: self._tokenizer.id(token) for token in END_OF_TURN}
            if found["<|return|>"] is not None:  # gpt-oss: a turn has several messages, each with an end of its own
                del found["<|end|>"]
            ids |= {i for i in found.values() if i is not None and i in self._special_ids}
        return frozenset(ids)

    def _add_tokens(self, where: str) -> None:
        """What tokenizer_config.json says of added tokens counts, as in transformers; named special tokens are added.

        Raises InputError for a token that would not get the id it is said to have.
        """
        known = self._tokenizer.added
        found: dict[int, AddedToken] = {}
        decoder = self._settings.get("added_tokens_decoder")
        if not isinstance(decoder, dict | None):
            raise InputError(f"{where}: added_tokens_decoder is no object of tokens by id")
        for key, value in (decoder or {}).items():
            if not (key.isascii() and key.isdecimal() and len(key) < 10 and _token_text(value)):
                raise InputError(f"{where}: added_tokens_decoder: {key[:20]!r} is no id with a token")
            found[int(key)] = _added_token(value, special=False)
        named = {token.content for token in (known | found).values()}
        for name in SPECIAL_NAMES:
            for value in (self._settings.get(name), self._map.get(name)):
                token_id = self._tokenizer.id(_token_text(value) or "")
                if token_id is not None and _token_text(value) not in named:
                    found.setdefault(token_id, _added_token(value, special=True))
        changed = {i: token for i, token in sorted(found.items()) if _flags(token) != _flags(known.get(i))}
        if changed:
            self._tokenizer.add(list(changed.values()))
        for token_id, token in changed.items():
            got = self._tokenizer.id(token.content)
            if got != token_id:
                raise InputError(
                    f"{where}: the added token {token.content!r} is said to be {token_id}, but after the "
                    f"tokens of tokenizer.json it is {got}. The two do not belong together"
                )

    def _named_id(self, kind: str) -> int | None:
        for source in (self._settings, self._map):
            token = _token_text(source.get(f"{kind}_token"))
            token_id = None if token is None else self._tokenizer.id(token)
            if token_id is not None:
                return int(token_id)
        return next((i for ids in self._ids[kind] for i in ids if i >= 0), None)

    def _adds_bos(self) -> bool:
        if self.bos_id is None:
            return False
        setting = self._settings.get("add_bos_token")
        if not isinstance(setting, bool | None):
            raise InputError(f"{self._settings_where}: add_bos_token is {str(setting)[:20]}, expected true or false")
        if setting is not None:
            return setting
        return self.bos_id == self._tokenizer.first_id()

    def _special_tokens(self) -> dict[str, str]:
        out: dict[str, str] = {}
        more = [name for name in self._settings if name.endswith("_token")]  # such as "image_token"
        for name in dict.fromkeys((*SPECIAL_NAMES, *more)):
            token = _token_text(self._settings.get(name)) or _token_text(self._map.get(name))
            if token is not None:
                out[name] = token
        for kind in ("bos", "eos"):  # where only ids are known
            token_id = self._named_id(kind)
            token = None if token_id is None else self._tokenizer.token(token_id)
            if token is not None:
                out.setdefault(f"{kind}_token", token)
        return out


class TokenStream:
    """Joined, the pieces equal `Tokenizer.decode` of all ids; after others, what they add to the text of these.

    Raises InputError where the tokenizers package cannot follow the decoder of the file.
    """

    def __init__(self, tokenizer: Tokenizer, after: Iterable[int]) -> None:
        self._token, self._where, self._longest = tokenizer.text_token, tokenizer.where, tokenizer.longest_token
        with package_errors(self._where, "cannot be used"):
            context = (token for token in map(self._token, after) if token is not None)
            self._decoder = StreamDecoder(tokenizer.decoder, context)

    def push(self, token_id: int) -> str:
        """Text that no later token can change; may be empty."""
        token = self._token(token_id)
        if token is None:
            return ""
        if len(token) > self._longest:
            raise InputError(
                f"{self._where}: token {token_id} has {len(token):,} characters, and its decoder adds more"
            )
        with package_errors(self._where, "cannot be used"):
            return self._decoder.push(token)

    def finish(self) -> str:
        """The remaining text."""
        with package_errors(self._where, "cannot be used"):
            return self._decoder.finish()


def _added_token(value: object, *, special: bool) -> AddedToken:
    """From a string, or an object that may say more. special: where it does not say it."""
    settings = value if isinstance(value, dict) else {}
    flags = {name: settings.get(name) is True for name in ("lstrip", "rstrip", "single_word", "normalized")}
    return AddedToken(_token_text(value) or "", special=settings.get("special", special) is True, **flags)


def _flags(token: AddedToken | None) -> tuple[object, ...]:
    if token is None:
        return ()
    return token.content, token.special, token.lstrip, token.rstrip, token.single_word, token.normalized


def _token_text(value: object) -> str | None:
    """A special token as its text: tokenizer_config.json writes it as a string or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
