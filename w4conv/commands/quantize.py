"""quantize: a checkpoint in, a `.w4` container out, a block of rows at a time."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from w4conv import cpus
from w4conv.arguments import count, optional_count, path_of
from w4conv.calibration import builtin
from w4conv.calibration.experts import FewTokens
from w4conv.calibration.resolve import calibration_path, check_calibration, open_calibration, resolve_calibration
from w4conv.calibration.statistics import Statistics
from w4conv.commands.options import refuse_idle
from w4conv.conversion import defaults
from w4conv.conversion.declarations import settle_declarations
from w4conv.conversion.model import advising_generic, known_model, read_model
from w4conv.conversion.plan import ConversionPlan, calibrated_methods, known_method, make_plan
from w4conv.conversion.write import Written, write
from w4conv.errors import InputError, UsageError
from w4conv.files.blobs import parse_json_object
from w4conv.files.overlap import refuse_overlap
from w4conv.files.target import check_target
from w4conv.models import check_architecture
from w4conv.models.generic import GENERIC, matrix_role
from w4conv.models.spec import ModelSpec
from w4conv.progress import Progress, Silent
from w4conv.quantization.recipe import Rule, make_recipe, read_rules
from w4conv.sources import open_source
from w4conv.sources.base import Source
from w4conv.sources.reading import read_small


@dataclass(frozen=True, slots=True)
class SchemeTotal:
    """All tensors of one scheme; nbytes with scales, without padding between parts."""

    scheme: str
    n_tensors: int
    n_parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a conversion did, or with dry_run would do.

    input_nbytes: all source files. output_nbytes: the container, exact. bits_per_weight: tensors with scales and row
    padding, over all parameters. recipe: patterns and what they say, in order; with target_bpw, the first n_allocated
    are matrices and what was chosen for them. warnings: those of the notes that say where the source contradicts
    itself, and which reading was taken. few_tokens: layers with experts to which few calibration tokens were routed.
    seconds, mb_per_second (1e6 bytes of input) and digest are None after a
    dry run.
    """

    source: str
    source_kind: str
    out: str
    dry_run: bool
    architecture: str
    scheme: str
    group_size: int
    embeddings: str
    n_tensors: int
    n_parameters: int
    input_nbytes: int
    output_nbytes: int
    bits_per_weight: float
    schemes: tuple[SchemeTotal, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    method: str = "rtn"
    effort: int = 0
    recipe: tuple[tuple[str, Rule], ...] = ()
    target_bpw: str | None = None
    n_allocated: int = 0
    seconds: float | None = None
    mb_per_second: float | None = None
    digest: str | None = None
    few_tokens: tuple[FewTokens, ...] = ()


def quantize(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    effort: int | None = None,
    preset: str | None = None,
    scheme: str | None = None,
    group_size: int | str | None = None,
    embeddings: str | None = None,
    recipe: str | None = None,
    target_bpw: float | str | None = None,
    method: str | None = None,
    calibration: str | os.PathLike[str] | None = None,
    calibration_tokens: int | None = None,
    calibration_ctx: int | None = None,
    special_tokens: str | None = None,
    requantize: bool = False,
    threads: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    architecture: str | None = None,
    gptq_zero15: int | None = None,
    head: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert the checkpoint `src` (a Hugging Face directory or a GGUF file) to the container `out`.

    By itself: nl4 in groups of 32, calibrated on the set that comes with w4conv; a checkpoint in 4 bits, and a GGUF
    file of any types, whose very codes and scales schemes of the container hold, is kept. effort and preset say
    otherwise in one word (conversion/defaults.py has the tables); contradictions are refused.

    effort: 0 rounds to nearest, in seconds. 1 does so too, and gives each matrix groups by what its rounding loses. 2
    calibrates. 3 calibrates on four times as many tokens. None means 2 where a matrix gets fewer than 8 bits and the
    model can be run, else 0.
    preset: "smallest", "balanced" or "quality": scheme and group size.

    scheme: "w4a16" (symmetric int4), "int4z" (with zero points), "nl4", "nl3", "nf4", "fp4", "w8a16", "f16", "bf16",
    "f32" or "keep" for linear weights.
    group_size: 16, 32, 64, 128, 256, or "row" or 0; None means 32 for nl4 and nl3, else 128.
    embeddings: "int8", "int4", "int4z", "nl4", "nl3", "nf4", "fp4", "f16", "bf16", "f32" or "keep" for embedding and
    head; None means nl4 where linear weights are nl4 or nl3, int8 where they are rounded to other integers or levels,
    else as the scheme. Vectors keep the type they have.
    recipe: a TOML file, or the name of a recipe built in, that says what differs for which tensors
    (quantization/recipe.py); where it says nothing, the other options count.
    target_bpw: at most so many bits a weight, over all weights with scales. The scheme of each matrix for which no
    recipe names one is chosen from a menu by its loss (calibration/sensitivity.py). It replaces preset, scheme,
    group_size and embeddings.

    method: how linear weights are rounded. "rtn": to nearest. "search": with searched scales. "awq": the same, after
    channels are scaled by powers of two (quantization/folding.py). "gptq": with searched scales and GPTQ's column
    update. "best": the best of rtn, search and gptq for each matrix. None means what the effort says. A calibrated
    method keeps the result of rtn where its outputs are better on held-out sequences.

    calibration: of all methods but rtn. A calibration set is a UTF-8 text: calibration_tokens of it (8192, with effort
    3 32768) are used, in sequences of calibration_ctx (512, or what the model can take) spread over the text.
    "builtin", which is the default, is the set that comes with w4conv; a file of that name is "./builtin", or a Path.
    Or a file of statistics (`w4conv calibrate`), or an importance matrix of llama.cpp: then each matrix is rounded for
    its inputs in the source. gptq and best need statistics with second moments; without them None means awq. A mixture
    of experts needs a text: each expert is rounded for the tokens routed to it. special_tokens: "parse" (the default)
    or "text", how those that a text spells are read.

    requantize: agree that a checkpoint already quantized is rounded a second time where its codes cannot be kept; or
    give a scheme. GGUF files need no such word, the report says what was rounded again.

    architecture: "generic" converts the tensors of any model, known or not: matrices are linear weights unless their
    names say embedding or head, all else is kept. The container says so, and cannot be run.

    gptq_zero15: 16 or 0, what a stored zero point of 15 means in a GPTQ checkpoint; programs differ, so it is refused
    unless this says it. The container records it.

    head: "stored" takes lm_head.weight as the head whatever config.json says, "tied" the embedding; None does as
    transformers: a stored head that differs from the embedding is the head, an equal one is stored once where
    tie_word_embeddings says so. The container records it.

    threads: None for as many as this process may use. out: "-" is standard output. resume: go on after the last whole
    tensor of an interrupted conversion of this source with these options, and if this one is interrupted, leave it to
    be resumed; layers already written are run again to calibrate the rest, but not rounded again. dry_run: plan and
    check everything but the values, write
    nothing.

    The file appears whole under its name or not at all. The same source and options give the same bytes, resumed or
    not. What a killed conversion to `out` has left is removed, with a note.
    Raises UsageError, InputError (missing, damaged or unsupported source; NaN, infinity or overflow), OutputError.
    """
    started = time.perf_counter()
    values = dict(locals())
    src, out = path_of(src, "src"), path_of(out, "out")
    refuse_idle("quantize", values)
    rules = () if recipe is None else read_rules(recipe)
    effort = optional_count(effort, "effort", low=0)
    defaults.check_words(
        effort=effort, preset=preset, scheme=scheme, group_size=group_size, embeddings=embeddings, target=target_bpw,
        method=method, calibration=calibration, generic=architecture is not None,
    )  # fmt: skip
    target = None if target_bpw is None else _target(target_bpw, scheme, group_size, embeddings)
    if preset is not None and (bits := defaults.PRESETS[preset].target) is not None:
        target = Decimal(bits)
    word, size = defaults.coding(preset, scheme, group_size)
    make_recipe(word, group_size=size, embeddings=embeddings)  # a wrong word is an error before anything opens
    if method is not None:
        known_method(method)
    if architecture not in (None, GENERIC):
        raise UsageError(
            f"architecture {architecture!r} is not {GENERIC}; leave it out, and config.json names the model"
        )
    if architecture == GENERIC and (calibration is not None or method not in (None, "rtn")):
        raise UsageError("calibration runs the model, and an architecture that is generic cannot be run: leave one out")
    if gptq_zero15 is not None and (gptq_zero15 := count(gptq_zero15, "gptq-zero15")) not in (0, 16):
        raise UsageError(f"gptq-zero15 is {gptq_zero15}, expected 16 or 0")
    if head is not None and architecture == GENERIC:
        raise UsageError(
            "head says which matrix is the head, and an architecture that is generic has none: leave one out"
        )
    cpus.thread_count(threads)
    calibration_tokens = optional_count(calibration_tokens, "calibration-tokens", low=1)
    calibration_ctx = optional_count(calibration_ctx, "calibration-ctx", low=1)
    refuse_overlap([out], source=src, calibration=calibration_path(calibration), recipe=recipe if rules else None)
    generic = architecture == GENERIC
    given = None
    if calibration is not None:
        given = open_calibration(
            calibration, tokens=calibration_tokens, ctx=calibration_ctx, special_tokens=special_tokens,
            usual_tokens=defaults.TOKENS[effort or defaults.DEFAULT_EFFORT],
        )  # fmt: skip
    if not generic:
        _check_architecture(src)
    with open_source(src, raw=generic, gptq_zero15=gptq_zero15) as source:
        if gptq_zero15 is not None and source.gptq_zero15 is None:
            raise UsageError(
                f"gptq-zero15 says how GPTQ checkpoints are read, and {src} is {source.kind}: leave it out"
            )
        if not generic:
            known_model(source)  # else what follows would blame the tensors
            settle_declarations(source, head)
        if scheme is None:
            asked = (
                requantize
                or bool(effort)
                or any(word is not None for word in (preset, group_size, method, calibration, recipe, target_bpw))
            )
            word = _default_scheme(source, word, requantize=asked)
            if word == "keep":
                word, size = defaults.coding(None, word, group_size)
        made = make_recipe(word, group_size=size, embeddings=embeddings, rules=rules)
        progress = progress or Silent()
        model, notes = read_model(source, generic=generic)
        if effort is None:
            effort = defaults.effort_for(model, made, method=method, given=given is not None)
        if effort in defaults.TOKENS and given is None:
            if "tokenizer.json" not in source.blobs:
                raise InputError(
                    f"{src}: has no tokenizer.json, without which no calibration set can be read. Put it beside the "
                    "weights, or say --effort 0, which rounds to nearest"
                )
            given = open_calibration(
                builtin.NAME, tokens=calibration_tokens, ctx=calibration_ctx, special_tokens=special_tokens,
                usual_tokens=defaults.TOKENS[effort],
            )  # fmt: skip
        if given is not None and isinstance(model, ModelSpec):  # a generic one was refused above
            check_calibration(given, model)
        chosen = _method(method, given)
        calibrated_methods(model, made, chosen, with_text=given is not None)  # before a long text is read
        seen = None
        if given is not None and isinstance(model, ModelSpec):
            seen = resolve_calibration(given, source, model)
        plan = make_plan(
            source, model, made, method=chosen, calibration=seen, target=target, shared_out=effort == 1,
            head=head, notes=notes, threads=threads, progress=progress,
        )  # fmt: skip
        refuse_idle(
            "quantize", values | {"rounds_again": bool(plan.rounded_again), "calibrates": plan.calibration is not None}
        )
        check_target(out, plan.layout.file_nbytes, overwrite=overwrite)
        if dry_run:
            return _report(plan, out, effort)
        written = write(plan, out, overwrite=overwrite, resume=resume, threads=threads, progress=progress)
    return _report(plan, out, effort, written, seconds=time.perf_counter() - started)


def _default_scheme(source: Source, rounded: str, *, requantize: bool) -> str:
    """The scheme of a source where none is named: "keep", or `rounded`. requantize: an option already says that weights
    are to be rounded."""
    quantized = [t for t in source.tensors.values() if t.is_quantized and len(t.shape) >= 2]
    linear = [t for t in quantized if matrix_role(t.name) == "linear"]
    if not quantized or requantize:
        return rounded
    if linear and all(t.coding is not None and t.coding.bits == 4 for t in linear):
        return "keep"
    if source.kind == "gguf":
        return "keep" if linear and all(t.coding is not None for t in quantized) else rounded
    if not linear:
        first = quantized[0]
        keep = "--scheme w4a16 --embeddings keep to keep it, " if first.coding is not None else ""
        raise UsageError(
            f"{source.path}: {first.name} is quantized already ({first.stored_as}), linear weights are not. Give {keep}"
            f"--requantize to round everything to {rounded}, or --scheme keep to store all values exactly"
        )
    first = next(t for t in linear if t.coding is None or t.coding.bits != 4)
    kept = "as they are" if all(t.coding is not None for t in quantized) else "exactly, where need be as float32"
    raise UsageError(
        f"{source.path}: {first.name} is quantized already ({first.stored_as}), and no 4-bit scheme holds its values "
        f"exactly. Give --requantize to round them a second time to {rounded}, or --scheme keep to store them {kept}"
    )


def _check_architecture(src: Path) -> None:
    """Before anything else of a directory is read; an unreadable config is an error later."""
    path = src / "config.json"
    if path.is_file():
        with advising_generic(src):
            check_architecture(parse_json_object(read_small(path), str(path), allow_nan=True))


def _target(bpw: float | str, *others: object) -> Decimal:
    if any(word is not None for word in others):
        raise UsageError("target-bpw chooses the schemes: leave out scheme, group-size and embeddings, or use a recipe")
    try:
        target = Decimal(str(bpw))
    except ArithmeticError:
        target = Decimal("NaN")
    if not target.is_finite() or target <= 0:
        raise UsageError(f"target-bpw is {bpw!r}, expected a number of bits such as 4.5")
    return target.normalize()


def _method(method: str | None, calibration: object) -> str:
    """The method where the caller names none, and `calibration` is what is calibrated on."""
    chosen = ("rtn" if calibration is None else "best") if method is None else method
    if method is None and isinstance(calibration, Statistics) and not calibration.full:
        chosen = "awq"
    if chosen == "rtn" and calibration is not None:
        raise UsageError("method rtn makes no use of a calibration text: leave one of the two out")
    return chosen


def _report(
    plan: ConversionPlan, out: Path, effort: int, written: Written | None = None, *, seconds: float | None = None
) -> ConversionReport:
    tensors = list(plan.layout.tensors.values())
    totals: dict[str, SchemeTotal] = {}
    for t in tensors:
        old = totals.get(str(t.scheme), SchemeTotal(str(t.scheme), 0, 0, 0))
        totals[old.scheme] = SchemeTotal(
            old.scheme, old.n_tensors + 1, old.n_parameters + t.n_values, old.nbytes + t.nbytes
        )
    n_parameters = sum(t.n_values for t in tensors)
    input_nbytes = sum(plan.file_nbytes)
    return ConversionReport(
        source=str(plan.source.path),
        source_kind=plan.source.kind,
        out=str(out),
        dry_run=written is None,
        architecture=plan.model.architecture,
        scheme=plan.recipe.scheme,
        group_size=plan.recipe.group_size,
        embeddings=plan.recipe.embeddings,
        n_tensors=len(tensors),
        n_parameters=n_parameters,
        input_nbytes=input_nbytes,
        output_nbytes=plan.layout.file_nbytes,
        bits_per_weight=8 * sum(t.nbytes for t in tensors) / n_parameters,
        schemes=tuple(totals.values()),
        notes=(*plan.notes, *(written.notes if written else ())),
        warnings=plan.source.warnings,
        method=plan.method,
        effort=effort,
        recipe=plan.recipe.rules,
        target_bpw=None if plan.target is None else str(plan.target),
        n_allocated=plan.n_allocated,
        seconds=seconds,
        mb_per_second=input_nbytes / seconds / 1e6 if seconds else None,
        digest=None if written is None else written.digest,
        few_tokens=() if written is None else written.few_tokens,
    )
