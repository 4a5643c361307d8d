"""What `quantize` does where little is said: a preset says which coding, an effort how weights are rounded to it.

| preset   | linear weights, embedding and head | bits a weight, with scales |
|----------|------------------------------------|----------------------------|
| smallest | nl3 and nl4, as --target-bpw 4.05  | 4.05                       |
| balanced | nl4, groups of 32: the default     | about 4.3                  |
| quality  | nl4, groups of 16                  | about 4.5                  |

| effort | method | calibration set                       | tokens | groups                                       |
|--------|--------|---------------------------------------|--------|----------------------------------------------|
| 0      | rtn    | none                                  |        | as the preset or the options say             |
| 1      | rtn    | none                                  |        | shared out by the error of the weights       |
| 2      | best   | the one built in, or --calibration    | 8192   | as the preset or the options say             |
| 3      | best   | the one built in, or --calibration    | 32768  | as the preset or the options say             |

By itself the effort is 2 where a matrix gets fewer than 8 bits, else 0. What is said twice, and differently, is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from w4conv.errors import UsageError
from w4conv.models.spec import ModelSpec
from w4conv.quantization.recipe import Recipe, is_calibrated
from w4conv.scheme import DEFAULT_GROUP_SIZE, KINDS, SCHEME_WORDS


@dataclass(frozen=True, slots=True)
class Preset:
    """target: bits a weight, by which schemes are chosen for each matrix; None where all have this one."""

    scheme: str
    group_size: int
    target: str | None = None


PRESETS: Final = {"smallest": Preset("nl4", 32, "4.05"), "balanced": Preset("nl4", 32), "quality": Preset("nl4", 16)}
DEFAULT_PRESET: Final = "balanced"
TOKENS: Final = {2: 8192, 3: 32768}  # of the calibration set, by effort
DEFAULT_EFFORT: Final = 2
USUAL_GROUPS: Final = {"nl4": 32, "nl3": 32}  # of schemes with other groups than DEFAULT_GROUP_SIZE
WIDE_GROUPS: Final = ("256", "row", "0")  # that integer schemes alone have
CALIBRATED_EFFORTS: Final = tuple(TOKENS)


def check_words(
    *, effort: int | None, preset: str | None, scheme: str | None, group_size: object, embeddings: str | None,
    target: object, method: str | None, calibration: object, generic: bool,
) -> None:  # fmt: skip
    """Raise UsageError where two options contradict each other."""
    if preset is not None:
        if preset not in PRESETS:
            raise UsageError(f"unknown preset {preset!r}; choose one of {', '.join(PRESETS)}")
        of_scheme = [("scheme", scheme), ("group-size", group_size), ("target-bpw", target)]
        if PRESETS[preset].target is not None:
            of_scheme.append(("embeddings", embeddings))
        for name, value in of_scheme:
            if value is not None:
                raise UsageError(f"preset {preset} chooses scheme and groups, and so does {name}: leave one out")
    if effort is None:
        return
    if not 0 <= effort <= max(TOKENS):
        raise UsageError(f"effort is {effort}, expected 0 to {max(TOKENS)}")
    if effort in CALIBRATED_EFFORTS:
        if method == "rtn":
            raise UsageError(f"effort {effort} calibrates, and method rtn does not: leave one out")
        if generic:
            raise UsageError(
                f"effort {effort} calibrates, which runs the model, and an architecture that is generic cannot be run: "
                "leave one out"
            )
        return
    if calibration is not None:
        raise UsageError(f"effort {effort} takes no calibration set: leave out calibration, or say effort 2 or 3")
    if method not in (None, "rtn"):
        raise UsageError(f"effort {effort} rounds to nearest, and method {method} calibrates: leave one out")
    if effort == 1:
        for name, value in (("scheme", scheme), ("group-size", group_size), ("embeddings", embeddings)):
            if value is not None:
                raise UsageError(
                    f"effort 1 chooses the groups of each matrix, and {name} says them: leave it out, or say effort 0"
                )
    elif target is not None or (preset is not None and PRESETS[preset].target is not None):
        word = "target-bpw" if target is not None else f"preset {preset}"
        raise UsageError(f"{word} chooses schemes by sensitivity, and effort 0 looks at none: say effort 1, 2 or 3")


def coding(preset: str | None, scheme: str | None, group_size: int | str | None) -> tuple[str, int | str]:
    """Word of the scheme and group size, where no codes are kept. A scheme that the caller names has its own usual
    groups."""
    chosen = PRESETS[preset or DEFAULT_PRESET]
    if scheme is not None:
        usual = USUAL_GROUPS.get(scheme, DEFAULT_GROUP_SIZE)
    else:
        scheme, usual = chosen.scheme, chosen.group_size
        if group_size is not None and str(group_size) in WIDE_GROUPS:
            raise UsageError(
                f"group size {group_size} is beyond {scheme}, the usual scheme: name one that has it, such as w4a16"
            )
    return scheme, usual if group_size is None else group_size


def effort_for(model: object, recipe: Recipe, *, method: str | None, given: bool) -> int:
    """The effort where none is named. given: whether a calibration set is."""
    if method == "rtn" or not isinstance(model, ModelSpec):
        return 0
    if given or method is not None or any(rule.method not in (None, "rtn") for _, rule in recipe.rules):
        return DEFAULT_EFFORT
    choices = recipe.choices(model)
    few_bits = any(
        is_calibrated(t.role, choices[t.name].kind, tied_head=model.tied_head) and KINDS[choices[t.name].kind].bits < 8
        for t in model.tensors()
    )
    return DEFAULT_EFFORT if few_bits else 0


assert all(preset.scheme in SCHEME_WORDS for preset in PRESETS.values())
