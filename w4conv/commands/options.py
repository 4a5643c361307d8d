"""When each option of each command acts. One that would have no effect is an error, not a silence.

`COMMANDS` names every option under its name in Python; where nothing more is said, it always acts. The rest say what
has to be so. Some know it from the other options alone; those marked `found` from what a command has found, which it
passes on under that name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from w4conv.errors import UsageError
from w4conv.scheme import DEFAULT_GROUP_SIZE, FLOAT_KINDS, KINDS

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Need:
    """acts: of all the values; an absent one reads as None. why: completes "--option has no effect ..."."""

    acts: Callable[[Values], bool]
    why: str


def found(key: str, why: str) -> Need:
    """Acts unless the command has found that `key` is not so."""
    return Need(lambda values: values.get(key) is not False, why)


def refuse_idle(command: str, values: Values, given: Collection[str] | None = None) -> None:
    """Raise UsageError for the first option that was given and has no effect.

    values: options by name, and what has been found. given: names of the options on the command line; by default those
    with a value other than None, False and their default.
    """
    for name, needs in COMMANDS[command].items():
        unsaid = (None, False, DEFAULTS.get(name))
        if name in given if given is not None else values.get(name) not in unsaid:
            for need in needs:
                if not need.acts(values):
                    raise UsageError(f"--{FLAGS.get(name, name.replace('_', '-'))} has no effect {need.why}")


def has_integers(kinds: Iterable[str]) -> bool:
    """Whether any of the codings of a model's tensors meets activations as integers."""
    return any(KINDS[kind].takes_integers for kind in kinds)


def _is_file(name: str) -> Callable[[Values], bool]:
    """Whether an output is a file or a directory: not absent, not standard output, a pipe or a device."""

    def check(values: Values) -> bool:
        from w4conv.files.overlap import known  # with what every command would load else
        from w4conv.files.streams import is_stdout

        out = values.get(name)
        if out is None or is_stdout(out):
            return False
        return known(Path.is_file, out) or known(Path.is_dir, out) or not known(Path.exists, out)

    return check


def _has(*names: str) -> Callable[[Values], bool]:
    return lambda values: any(values.get(name) not in (None, False) for name in names)


def _lacks(name: str) -> Callable[[Values], bool]:
    return lambda values: not values.get(name)


def _codes_linear(values: Values) -> bool:
    return values.get("scheme") not in WITHOUT_GROUPS or _has("recipe")(values)


def _has_groups(values: Values) -> bool:
    return _codes_linear(values) or values.get("embeddings") not in (None, *WITHOUT_GROUPS)


def _measures(values: Values) -> bool:
    return _has("ppl", "kld", "layers", "plot")(values)


DEFAULTS: Final = {"group_size": DEFAULT_GROUP_SIZE, "activations": "int16", "kv": "f16"}
WITHOUT_GROUPS: Final = (*FLOAT_KINDS, "keep")
FLAGS: Final = {"n": "tokens", "prompt_file": "file", "all_": "all", "as_csv": "csv", "markdown": "md"}
ALWAYS: Final = ()

_REPLACES = (Need(_is_file("out"), "where OUT is no file: there is nothing to replace. Leave it out"),)
_TEXT = (Need(_has("text"), "without --text: it says how perplexity is measured"),)
_PERPLEXITY = (Need(_measures, "without --ppl or --kld: it says how perplexity is measured"),)
_CALIBRATES = (found("calibrates", "as nothing is calibrated: it cuts the calibration set. Leave it out"),)
_INTEGERS = found("has_integers", "as no weights are integers: activations stay floats. Leave it out")
_DRAWS = (Need(lambda v: v.get("temperature") != 0, "at temperature 0 (greedy), which draws nothing: set one"),)
_LISTED = (Need(_lacks("json"), "with --json, which lists every tensor. Leave it out"),)

# fmt: off
COMMANDS: Final[Mapping[str, Mapping[str, tuple[Need, ...]]]] = {
    "quantize": {
        "effort": ALWAYS, "preset": ALWAYS,
        "scheme": ALWAYS,
        "group_size": (Need(_has_groups, "as nothing is coded in groups. Leave it out, or choose another scheme"),),
        "embeddings": ALWAYS,
        "head": ALWAYS,
        "recipe": ALWAYS,
        "target_bpw": ALWAYS,
        "method": (Need(_codes_linear, "as no linear weights are rounded. Leave it out, or choose another scheme"),),
        "calibration": ALWAYS,
        "calibration_tokens": _CALIBRATES,
        "calibration_ctx": _CALIBRATES,
        "special_tokens": (Need(_has("calibration"), "without --calibration: it says how that text is read"),),
        "requantize": (found("rounds_again", "as nothing in IN that is quantized already is rounded. Leave it out"),),
        "threads": (
            Need(
                lambda v: not v.get("dry_run") or _has("target_bpw", "calibration", "effort")(v),
                "with --dry-run, which computes nothing. Leave it out",
            ),
        ),
        "overwrite": _REPLACES,
        "resume": (
            Need(_lacks("dry_run"), "with --dry-run, which writes nothing. Leave one of them out"),
            Need(_is_file("out"), "where OUT is no file: what was sent to standard output cannot be resumed"),
        ),
        "architecture": ALWAYS,
        "gptq_zero15": ALWAYS,  # an error where IN is no GPTQ checkpoint
        "dry_run": ALWAYS,
        "json": ALWAYS,
    },
    "calibrate": {
        "out": ALWAYS, "full": ALWAYS, "tokens": ALWAYS, "ctx": ALWAYS, "special_tokens": ALWAYS, "threads": ALWAYS,
        "overwrite": _REPLACES, "json": ALWAYS,
    },
    "inspect": {"tensors": _LISTED, "json": ALWAYS},
    "verify": {
        "against": ALWAYS,
        "ppl": ALWAYS,
        "kld": ALWAYS,
        "layers": ALWAYS,
        "plot": ALWAYS,
        "text": _PERPLEXITY,
        "ctx": _PERPLEXITY,
        "convention": _PERPLEXITY,
        "chunks": _PERPLEXITY,
        "special_tokens": _PERPLEXITY,
        "max_ppl_increase": (
            *_PERPLEXITY,
            Need(_has("against"), "without --against: it compares with the source"),
        ),
        "min_sqnr": (Need(_has("against"), "without --against: it compares with the source"),),
        "activations": (*_PERPLEXITY, _INTEGERS),
        "kv": _PERPLEXITY,
        "threads": (
            Need(
                lambda v: _measures(v) or _has("against")(v),
                "without --against or --ppl: digests are checked by one thread. Leave it out",
            ),
            found("is_container", "where an export is verified, by one thread. Leave it out"),
        ),
        "json": ALWAYS,
    },
    "diff": {"source": ALWAYS, "all_": _LISTED, "json": ALWAYS},
    "run": {
        "prompt": ALWAYS, "prompt_file": ALWAYS, "n": ALWAYS, "chat": ALWAYS,
        "chat_template": (Need(_has("chat"), "without --chat: it chooses a template"),),
        "special_tokens": ALWAYS,
        "temperature": ALWAYS, "top_k": _DRAWS,
        "top_p": _DRAWS, "min_p": _DRAWS, "seed": _DRAWS, "repetition_penalty": ALWAYS, "presence_penalty": ALWAYS,
        "frequency_penalty": ALWAYS, "logit_bias": ALWAYS, "stop": ALWAYS,
        "logprobs": (Need(_has("json"), "without --json: it is part of that"),),
        "ctx": ALWAYS, "lookup": ALWAYS, "kv": ALWAYS,
        "kv_memory": ALWAYS, "activations": (_INTEGERS,), "threads": ALWAYS, "stats": ALWAYS, "json": ALWAYS,
    },
    "export": {
        "to": ALWAYS,
        "dtype": (found("has_floats", "as no tensor and no setting of this export depends on it. Leave it out"),),
        "max_shard_size": (
            Need(lambda v: v.get("to") not in ("gguf", "onnx"), "on this format, which has no shards. Leave it out"),
        ),
        "overwrite": _REPLACES,
        "dry_run": ALWAYS,
        "json": ALWAYS,
    },
    "bench": {
        "shape": ALWAYS,
        "schemes": (
            Need(
                lambda v: _has("shape")(v) or any(not str(path).endswith(".w4") for path in v.get("inputs") or ()),
                "on .w4 files, which are measured as they are. Leave it out, or name a checkpoint or a --shape",
            ),
        ),
        "prompt": ALWAYS,
        "n": ALWAYS,
        "rounds": ALWAYS,
        "context": ALWAYS,
        "text": ALWAYS,
        "ctx": _TEXT,
        "chunks": _TEXT,
        "special_tokens": _TEXT,
        "activations": (_INTEGERS,),
        "kv": ALWAYS,
        "threads": ALWAYS,
        "html": ALWAYS,
        "overwrite": (Need(_is_file("html"), "without --html FILE: there is nothing to replace. Leave it out"),),
        "json": ALWAYS,
        "as_csv": ALWAYS,
        "markdown": ALWAYS,
    },
    "cat": {
        "out": ALWAYS,
        "overwrite": _REPLACES,
        "json": ALWAYS,
    },
}
# fmt: on
