"""How byte-level tokenizers cut a text before their merges, under the names that GGUF has for it (tokenizer.ggml.pre).

GGUF says the name alone. The rules are those of the tokenizer.json that a name was made for; readers of GGUF may hold
an approximation of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from w4conv.sources.vocabulary import Json

GPT2_WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS: Final = r"\p{N}"
_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _ENDS
LLAMA3_WORDS: Final = _WORDS % r"\p{N}{1,3}"
QWEN2_WORDS: Final = _WORDS % r"\p{N}"
# Words are cut where small letters are followed by capitals.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%(end)s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%(end)s|%(digits)s"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
)
TEKKEN_WORDS: Final = _CASED % {"end": "", "digits": r"\p{N}"}
O200K_WORDS: Final = _CASED % {"end": f"{_CONTRACTIONS}?", "digits": r"\p{N}{1,3}"}


@dataclass(frozen=True, slots=True)
class Cut:
    """steps: regular expressions; each splits the pieces of the one before into matches and what is between them.

    whole_words: a piece that is a token is taken as it is, whatever the merges would make of it. nfc: the text is
    brought into Unicode form NFC first. adds_bos: where the file does not say whether the BOS token is added, it is.
    """

    steps: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> Json:
        """As tokenizer.json writes it; the last step turns bytes into letters."""
        words = self.steps[-1] == GPT2_WORDS  # the step to letters brings this rule along
        steps: list[Json] = [_json_of(step) for step in (self.steps[:-1] if words else self.steps)]
        steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words})
        return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


_LLAMA3: Final = Cut((LLAMA3_WORDS,), whole_words=True, adds_bos=True)
_DIGITS_GPT2: Final = Cut((DIGITS, GPT2_WORDS))
_QWEN2: Final = Cut((QWEN2_WORDS,))
_O200K: Final = Cut((O200K_WORDS,))
_CL100K: Final = Cut((LLAMA3_WORDS,))

# The first name of each rule is the one to write.
CUTS: Final[Mapping[str, Cut]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "exaone4"), Cut((GPT2_WORDS,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    "qwen2": Cut((QWEN2_WORDS,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN2),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _CL100K),
    "glm4": Cut((LLAMA3_WORDS,), whole_words=True),
    "tekken": Cut((TEKKEN_WORDS,), whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
    # What llama.cpp does where the name of the rule was not recorded; the model's own tokenizer may do otherwise.
    "default": Cut((r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def name_of(document: Mapping[str, Any]) -> str | None:
    """The name of the cut of a tokenizer.json with a byte-level BPE; None where it has none."""
    found = list(flat(document.get("pre_tokenizer"), "pretokenizers"))
    normalizers = [step.get("type") for step in flat(document.get("normalizer"), "normalizers")]
    if not found or found[-1].get("type") != "ByteLevel" or normalizers not in ([], ["NFC"]):
        return None
    steps = tuple(step for step in map(_regex_of, found) if step)
    whole_words = bool(document["model"].get("ignore_merges"))
    same = [name for name, cut in CUTS.items() if (cut.steps, cut.whole_words) == (steps, whole_words)]
    return next((name for name in same if CUTS[name].nfc == bool(normalizers)), same[0] if same else None)


def flat(step: object, members: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a part of tokenizer.json, sequences of sequences made one."""
    if isinstance(step, dict):
        if step.get("type") == "Sequence":
            for member in step.get(members) or ():
                yield from flat(member, members)
        else:
            yield step


def _json_of(step: str) -> Json:
    if step == DIGITS:
        return {"type": "Digits", "individual_digits": True}
    return {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}


def _regex_of(step: Mapping[str, Any]) -> str:
    """The step as `Cut` has it: "" where it cuts nothing, and what is in no cut where it is of another kind."""
    kind, unknown = step.get("type"), f"unknown {step}"
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return GPT2_WORDS if step.get("use_regex", True) else ""
    if kind == "Digits" and step.get("individual_digits"):
        return DIGITS
    regex = (step.get("pattern") or {}).get("Regex")
    if kind != "Split" or not isinstance(regex, str):
        return unknown
    if (step.get("behavior"), bool(step.get("invert"))) == ("Isolated", False):
        return regex
    # These match everything, so keeping the matches alone is the same as isolating them.
    kept = (step.get("behavior"), bool(step.get("invert"))) == ("Removed", True)
    return regex if kept and regex.endswith(_ENDS) else unknown
