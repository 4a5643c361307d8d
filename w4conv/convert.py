"""quantize: a checkpoint in, a `.w4` container out, a block of rows at a time."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv import __version__, codes, kernels
from w4conv.calibration import CalibrationText, Calibrator, read_calibration
from w4conv.container import STDOUT, Journal, Layout, TensorPlan, Writer, check_target, open_target, plan, stamp
from w4conv.digests import FileDigests
from w4conv.errors import InputError, UsageError
from w4conv.models import parse_config
from w4conv.models.spec import ModelSpec
from w4conv.progress import Progress, Silent
from w4conv.quantization.allocation import MENU, Item, allocate
from w4conv.quantization.calibrated import DAMPING_PERCENTS, METHODS, Solution
from w4conv.quantization.generic import GENERIC, GenericModel, Inventory, generic_model
from w4conv.quantization.recipe import CALIBRATED, Recipe, Rule, is_calibrated, make_recipe, read_rules
from w4conv.runtime.tokenizer import highest_ids
from w4conv.scheme import TILE_ROWS, QuantScheme
from w4conv.sensitivity import Sensitivity
from w4conv.sources import open_source
from w4conv.sources.base import CodedRows, Source

TOOL: Final = f"w4conv {__version__}"
BLOCK_NBYTES: Final = 1 << 25  # of source values held at a time
HEAD: Final = "lm_head.weight"
# Buffers that old checkpoints carry and that follow from the config.
HARMLESS: Final = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", ".attn.masked_bias")

Array = npt.NDArray[np.generic]


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
    are matrices and what was chosen for them. seconds, mb_per_second (1e6 bytes of input) and digest are None after a
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
    method: str = "rtn"
    recipe: tuple[tuple[str, Rule], ...] = ()
    target_bpw: str | None = None
    n_allocated: int = 0
    seconds: float | None = None
    mb_per_second: float | None = None
    digest: str | None = None


def quantize(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    scheme: str | None = None,
    group_size: int | str | None = None,
    embeddings: str | None = None,
    recipe: str | None = None,
    target_bpw: float | str | None = None,
    method: str | None = None,
    calibration: str | os.PathLike[str] | None = None,
    calibration_tokens: int = 16384,
    calibration_ctx: int = 512,
    requantize: bool = False,
    threads: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    architecture: str | None = None,
    gptq_zero15: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert the checkpoint `src` (a Hugging Face directory or a GGUF file) to the container `out`.

    scheme: "w4a16" (symmetric int4), "int4z" (with zero points), "nf4", "fp4", "w8a16", "f16", "bf16", "f32" or "keep"
    for linear weights; None means keep for a checkpoint in 4 bits whose very codes and scales a scheme of the container
    holds, else w4a16. group_size: 32, 64, 128 (default), 256, or "row".
    embeddings: "int8", "int4", "int4z", "nf4", "fp4", "f16", "bf16", "f32" or "keep" for embedding and head; None means
    int8 where linear weights are rounded to integers or levels, else as the scheme. Vectors keep the type they have.
    recipe: a TOML file, or the name of a recipe built in, that says what differs for which tensors
    (quantization/recipe.py); where it says nothing, the other options count.
    target_bpw: bits a weight, over all weights with scales, that the container shall have at most: the scheme of each
    matrix for which no recipe names one is chosen from a menu, by how much the model loses with it (sensitivity.py). It
    takes the place of scheme, group_size and embeddings.

    method: how linear weights are rounded: "rtn" (to nearest), "search" (scales searched), "gptq" (scales searched,
    each column rounded with the errors of those before it in mind), or "best" (of all, for each matrix); None means
    best with calibration, else rtn. All but rtn need calibration, a text on which activations are observed:
    calibration_tokens of it in sequences of calibration_ctx, spread over the text. They keep what rtn makes of a matrix
    where its outputs are nearer to the source's on sequences held out.

    requantize: agree that a checkpoint already quantized is rounded a second time where its codes cannot be kept; or
    give a scheme. GGUF files need no such word, the report says what was rounded again.

    architecture: "generic" converts the tensors of any model, known or not: matrices are linear weights unless their
    names say embedding or head, all else is kept. The container says so, and cannot be run.

    gptq_zero15: 16 or 0, what a stored zero point of 15 means in a GPTQ checkpoint; programs differ, so it is refused
    unless this says it. The container records it.

    threads: None for as many as this process may use. out: "-" is standard output. resume: go on after the last whole
    tensor of an interrupted conversion of this source with these options, and if this one is interrupted, leave it to
    be resumed; calibration starts again. dry_run: plan and check everything but the values, write
    nothing.

    The file appears whole under its name or not at all. The same source and options give the same bytes, resumed or
    not. What a killed conversion to `out` has left is removed, with a note.
    Raises UsageError, InputError (missing, damaged or unsupported source; NaN, infinity or overflow), OutputError.
    """
    started = time.perf_counter()
    src, out = Path(src), Path(out)
    rules = () if recipe is None else read_rules(recipe)
    target = None if target_bpw is None else _target(target_bpw, scheme, group_size, embeddings)
    if scheme is not None:  # a wrong word is told before anything is opened
        make_recipe(scheme, group_size=group_size or 128, embeddings=embeddings)
    if architecture not in (None, GENERIC):
        raise UsageError(
            f"architecture {architecture!r} is not {GENERIC}; leave it out, and config.json names the model"
        )
    if architecture == GENERIC and calibration is not None:
        raise UsageError("calibration runs the model, and an architecture that is generic cannot be run: leave one out")
    if gptq_zero15 not in (None, 0, 16):
        raise UsageError(f"gptq-zero15 is {gptq_zero15}, expected 16 or 0")
    if threads is not None and threads < 1:
        raise UsageError(f"threads is {threads}, expected 1 or more")
    if resume and out == STDOUT:
        raise UsageError("what was sent to standard output cannot be resumed. Name a file, or leave out --resume")
    _refuse_out_in_source(src, out)
    generic = architecture == GENERIC
    with open_source(src, raw=generic, gptq_zero15=gptq_zero15) as source:
        _refuse_same_file(source, out)
        if gptq_zero15 is not None and source.gptq_zero15 is None:
            raise UsageError(
                f"gptq-zero15 says how GPTQ checkpoints are read, and {src} is {source.kind}: leave it out"
            )
        if scheme is None:
            asked = requantize or any(
                word is not None for word in (group_size, method, calibration, recipe, target_bpw)
            )
            scheme = _default_scheme(source, requantize=asked)
        made = make_recipe(scheme, group_size=group_size or 128, embeddings=embeddings, rules=rules)
        text = None if calibration is None else (Path(calibration), calibration_tokens, calibration_ctx)
        progress = progress or Silent()
        conversion = _Conversion(
            source,
            made,
            _method(method, calibration),
            text,
            target,
            generic=generic,
            threads=threads,
            progress=progress,
        )
        check_target(out, conversion.layout.file_nbytes, overwrite=overwrite)
        if dry_run:
            return conversion.report(out)
        digest, notes = conversion.write(out, overwrite=overwrite, resume=resume, threads=threads, progress=progress)
    return conversion.report(out, notes=notes, seconds=time.perf_counter() - started, digest=digest)


def _default_scheme(source: Source, *, requantize: bool) -> str:
    """What a source gets when no scheme is named. requantize: an option already says that weights are to be rounded."""
    quantized = [t for t in source.tensors.values() if t.is_quantized and len(t.shape) >= 2]
    linear = [t for t in quantized if "layers." in t.name]
    if not quantized or requantize:
        return "w4a16"
    if linear and all(t.coding is not None and t.coding.bits == 4 for t in linear):
        return "keep"
    if source.kind == "gguf":
        return "w4a16"
    first = next((t for t in linear if t.coding is None or t.coding.bits != 4), quantized[0])
    kept = "as they are" if all(t.coding is not None for t in quantized) else "exactly, where need be as float32"
    raise UsageError(
        f"{source.path}: {first.name} is quantized already ({first.stored_as}), and no 4-bit scheme holds its values "
        f"exactly. Give --requantize to round them a second time to w4a16, or --scheme keep to store them {kept}"
    )


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
    chosen = method or ("rtn" if calibration is None else "best")
    _known_method(chosen)
    if chosen == "rtn" and calibration is not None:
        raise UsageError("method rtn makes no use of a calibration text: leave one of the two out")
    if chosen != "rtn" and calibration is None:
        raise UsageError(f"method {chosen} needs a text to calibrate on: name one with --calibration")
    return chosen


def _known_method(method: str) -> str:
    if method not in METHODS:
        raise UsageError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    return method


def _refuse_out_in_source(src: Path, out: Path) -> None:
    if out == STDOUT:
        return
    source, target = src.resolve(), out.resolve()
    if target == source:
        raise UsageError(f"{out} is the source itself. Name another output")
    if source.is_dir() and target.is_relative_to(source):
        raise UsageError(f"{out} lies inside the source {src}. Write outside of it")


def _refuse_same_file(source: Source, out: Path) -> None:
    """A link may lead from the output to a file of the source."""
    if out == STDOUT or not out.exists():
        return
    for file in source.files:
        if out.samefile(file):
            raise UsageError(f"{out} is {file.name} of the source. Name another output")


class _Conversion:
    """One source planned by one recipe."""

    def __init__(
        self, source: Source, recipe: Recipe, method: str, calibration: tuple[Path, int, int] | None,
        target: Decimal | None, *, generic: bool, threads: int | None, progress: Progress,
    ) -> None:  # fmt: skip
        """calibration: the text, and how many tokens of it in sequences of how many."""
        self._source = source
        self._recipe = recipe
        self._notes = list(source.notes)
        self._coded: set[str] = set()  # names of tensors whose codes and scales are taken as they are
        config = self._config()
        self._model: Inventory
        if generic:
            self._model = generic_model(config, ((name, t.shape) for name, t in source.tensors.items()))
            self._notes.append(
                "architecture generic: matrices are linear weights unless their names say embedding or head; "
                "what is written cannot be run"
            )
        else:
            try:
                self._model = parse_config(config)
            except InputError as error:
                raise self._fail(f"{error}. With --architecture generic it is converted, but cannot be run") from None
            self._check_vocabulary(self._model)
        self._choices = recipe.choices(self._model)
        self._methods = self._calibrated(method, with_text=calibration is not None)
        self._text: CalibrationText | None = None
        if calibration is not None:
            path, tokens, ctx = calibration
            self._text = read_calibration(path, source.blobs, self._spec(), tokens=tokens, ctx=ctx)
        self._check_source()
        self._target, self._n_allocated = target, 0
        if target is not None:
            chosen = self._allocate(target, threads, progress)
            self._n_allocated = len(chosen)
            self._recipe = replace(recipe, rules=(*chosen, *recipe.rules))
            self._choices = self._recipe.choices(self._model)
            self._methods = self._calibrated(method, with_text=calibration is not None)
        tensors = self._plan_tensors()
        self._method = "keep" if self._coded and method == "rtn" else method
        self._file_nbytes = [file.stat().st_size for file in source.files]
        blobs = {name: source.blobs[name] for name in sorted(source.blobs)}
        self.layout: Layout = plan(tensors, blobs, self._provenance(tensors))

    def _calibrated(self, default: str, *, with_text: bool) -> dict[str, str]:
        """Matrix -> its method, of those that are calibrated."""
        methods = {}
        for t in self._model.tensors():
            choice = self._choices[t.name]
            method = _known_method(choice.method or default)
            if with_text and is_calibrated(t.role, choice.kind, tied_head=self._model.tied_head):
                methods[t.name] = method
            elif choice.method is not None and method != "rtn":
                if not with_text:
                    raise UsageError(f"recipe: method {method} for {t.name} needs a text: name it with --calibration")
                raise UsageError(
                    f"recipe: method {method} for {t.name}, {t.role} as {choice.kind}; calibrated are linear weights "
                    f"as {' or '.join(CALIBRATED)}, and heads as int4"
                )
        if with_text and not methods:
            raise UsageError(
                f"scheme {self._recipe.scheme} rounds no linear weights to integers, so there is nothing to calibrate"
            )
        return methods

    def _allocate(self, target: Decimal, threads: int | None, progress: Progress) -> list[tuple[str, Rule]]:
        """A rule for each matrix that no rule of the recipe codes."""
        tensors = self._model.tensors()
        free = [t for t in tensors if not self._choices[t.name].explicit]
        if not free:
            raise UsageError("the recipe says the scheme of every matrix, so there is nothing to choose for target-bpw")
        sizes = {t.name: tuple(sum(codes.part_sizes(s, t.shape).values()) for s in MENU) for t in free}
        taken = sum(
            sum(codes.part_sizes(self._choices[t.name].coding(self._source.tensors[t.name].dtype), t.shape).values())
            for t in tensors if t.name not in sizes
        )  # fmt: skip
        n_parameters = sum(math.prod(t.shape) for t in tensors)
        least, most = (Decimal(8 * (taken + sum(s[i] for s in sizes.values()))) / n_parameters for i in (0, -1))
        if not least <= target <= most:
            low, high = least.quantize(Decimal("0.001"), ROUND_CEILING), most.quantize(Decimal("0.001"), ROUND_FLOOR)
            raise UsageError(
                f"target-bpw {target} is out of reach: from {MENU[0]} to {MENU[-1]} this model has {low} to "
                f"{high} bits a weight"
            )
        progress.start(sum(self._source.tensors[t.name].nbytes or math.prod(t.shape) * 2 for t in free))
        sensitivity = Sensitivity(self._source, free, MENU, threads=threads, advance=progress.advance)
        losses = (
            sensitivity.from_weights() if self._text is None
            else sensitivity.from_text(self._spec(), self._text.sequences)
        )  # fmt: skip
        budget = int(target * n_parameters / 8) - taken
        chosen = allocate([Item(t.name, sizes[t.name], losses[t.name]) for t in free], budget)
        by = "the error of their weights" if self._text is None else "what they lose on the text"
        self._notes.append(f"schemes of {len(free)} matrices chosen for {target} bits a weight, by {by}")
        return [(name, Rule(MENU[i].kind, MENU[i].group_size)) for name, i in chosen.items()]

    def _check_vocabulary(self, spec: ModelSpec) -> None:
        """A tokenizer may have fewer tokens than the model, or special ones beyond those of a text model."""
        own, added = highest_ids(self._source.blobs.get("tokenizer.json", b""))
        if own >= spec.vocab_size:
            raise self._fail(
                f"tokenizer.json has tokens up to {own}, but the model only {spec.vocab_size}: it belongs to another "
                "model. Put the right one beside the weights, or take it away to convert without a tokenizer"
            )
        if added >= spec.vocab_size:
            self._notes.append(
                f"tokenizer.json adds tokens up to {added}, but the model has only {spec.vocab_size}: a text with "
                "those beyond cannot be run"
            )

    def _spec(self) -> ModelSpec:
        """The model, where it is run."""
        assert isinstance(self._model, ModelSpec)
        return self._model

    def _fail(self, message: str) -> InputError:
        return InputError(f"{self._source.path}: {message}")

    def _config(self) -> Mapping[str, object]:
        try:
            config = json.loads(self._source.blobs["config.json"])
        except (ValueError, RecursionError) as error:
            raise self._fail(f"config.json is not JSON: {error}") from error
        if not isinstance(config, Mapping):
            raise self._fail("config.json is not a JSON object")
        return config

    def _check_source(self) -> None:
        """That the source has every tensor that the model needs; notes what of the source is left out."""
        needed = {t.name: t for t in self._model.tensors()}
        stored = self._source.tensors
        missing = [name for name in needed if name not in stored]
        if missing:
            raise self._fail(f"the model needs tensors that are missing: {_some(missing)}. Fetch the checkpoint again")
        extra = [name for name in stored if name not in needed]
        if self._model.tied_head and HEAD in extra:
            extra.remove(HEAD)
            self._note_tied_head()
        if zeros := [name for name in extra if name.endswith(".bias") and not self._source.read(name).any()]:
            extra = [name for name in extra if name not in zeros]
            self._notes.append(
                f"left out, as {self._model.architecture} has no such biases and all are zero: {_some(zeros)}"
            )
        if unknown := [name for name in extra if not name.endswith(HARMLESS)]:
            raise self._fail(
                f"tensors that {self._model.architecture} does not have: {_some(unknown)}. "
                "The config does not belong to these weights, or the model is of a kind not supported"
            )
        if extra:
            self._notes.append(f"left out, since the config says as much: {_some(sorted(extra))}")
        for name, t in needed.items():
            if stored[name].shape != t.shape:
                raise self._fail(f"{name}: shape is {stored[name].shape}, but the config asks for {t.shape}")

    def _plan_tensors(self) -> list[TensorPlan]:
        """Every tensor that the model needs, with its scheme; notes what is rounded a second time."""
        out = []
        again: dict[str, list[str]] = {}
        for t in self._model.tensors():
            name, found = t.name, self._source.tensors[t.name]
            choice = self._choices[name]
            coding = choice.coding(found.dtype)
            if found.coding is not None and choice.keeps:
                coding = found.coding
                self._coded.add(name)
            elif found.is_quantized and len(t.shape) >= 2:
                again.setdefault(f"{found.stored_as} as {coding}", []).append(name)
            out.append(TensorPlan(name, t.shape, coding, found.stored_as))
        for change, names in again.items():
            exact = change.endswith(" as f32")
            what = "stored as float32, exactly" if exact else "rounded a second time"
            self._notes.append(f"quantized already and {what}: {len(names)} tensors, {change}")
        return out

    def _note_tied_head(self) -> None:
        embedding = self._model.tensors()[0].name
        if self._equal(embedding, HEAD):
            self._notes.append(f"{HEAD} equals {embedding} and is stored once")
        else:
            self._notes.append(
                f"{HEAD} differs from {embedding}, but tie_word_embeddings in the config wins: it is left out"
            )

    def _equal(self, a: str, b: str) -> bool:
        first, second = self._source.tensors[a], self._source.tensors[b]
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        return all(
            np.array_equal(_bits(self._source.read(a, rows)), _bits(self._source.read(b, rows)))
            for rows in self._row_blocks(a)
        )

    def _provenance(self, tensors: list[TensorPlan]) -> dict[str, Any]:
        """The record of how the file came to be: no paths, hosts or times, so that the bytes depend on none."""
        files = zip(self._source.files, self._file_nbytes, strict=True)
        record: dict[str, Any] = {
            "tool": TOOL,
            "method": self._method,
            "scheme": self._recipe.scheme,
            "embeddings": self._recipe.embeddings,
            "source": {
                "kind": self._source.kind,
                "files": [{"name": file.name, "nbytes": nbytes} for file, nbytes in files],
            },
            "notes": self._notes.copy(),
        }
        if not all(t.scheme.is_float for t in tensors):
            record["group_size"] = self._recipe.group_size
        if isinstance(self._model, GenericModel):
            record["architecture"] = GENERIC
        if self._source.gptq_zero15 is not None:
            record["gptq_zero15"] = self._source.gptq_zero15
        if self._recipe.rules:
            record["recipe"] = self._recipe.record()
        if self._target is not None:
            record["target_bpw"] = str(self._target)
        if self._text is not None:
            record["calibration"] = self._text.record() | {"damping_percents": list(DAMPING_PERCENTS)}
        return record

    def write(
        self, out: Path, *, overwrite: bool, resume: bool, threads: int | None, progress: Progress
    ) -> tuple[str, tuple[str, ...]]:
        """(conversion digest, notes on the values)."""
        itemsize = {name: codes.VALUE_DTYPES[t.dtype.lower()].itemsize for name, t in self._source.tensors.items()}
        progress.start(sum(t.n_values * itemsize[t.name] for t in self.layout.tensors.values()))
        calibrator = self._calibrator(threads, progress)
        n_underflowed = n_tensors = n_kept = 0
        sources = stamp(self._source.files)
        with (
            FileDigests(self._source.files) as digests,
            open_target(out, self.layout.file_nbytes, overwrite=overwrite, resume=resume) as target,
        ):
            writer = Writer(target, self.layout, log=Journal(target, self.layout, sources))
            for name, info in self.layout.tensors.items():
                if name != writer.due:
                    n_kept += 1
                    if name not in self._methods:  # those are solved again
                        progress.advance(info.n_values * itemsize[name], name)
                    continue
                if calibrator is not None and name in self._methods:
                    n = _write_solution(writer, name, calibrator.take(name))
                else:
                    n = self._write_tensor(writer, name, info.scheme, threads, progress)
                n_underflowed += n
                n_tensors += n > 0
            digest = writer.finish(digests.result())
            left = target.removed
        notes = []
        if calibrator is not None:
            notes.append(calibrator.note())
        if left:
            notes.append("what an interrupted conversion had left was removed")
        if n_kept:
            notes.append(f"resumed: {n_kept} tensors were complete already; notes on values are about the others")
        if n_underflowed:
            notes.append(
                f"{n_underflowed} groups in {n_tensors} tensors hold values so small that their FP16 scale is zero: "
                "they became zeros"
            )
        return digest, tuple(notes)

    def _calibrator(self, threads: int | None, progress: Progress) -> Calibrator | None:
        if self._text is None:
            return None
        return Calibrator(
            self._source, self._spec(), self.layout, self._text, self._methods, threads=threads, solved=progress.advance
        )

    def _write_tensor(
        self, writer: Writer, name: str, scheme: QuantScheme, threads: int | None, progress: Progress
    ) -> int:
        """Convert one tensor; returns the number of groups whose scale underflowed."""
        stored = self._source.tensors[name]
        if len(stored.shape) < 2:
            values = self._source.read(name)
            self._check_finite(name, values, stored.dtype)
            writer.write(name, "values", values)
            progress.advance(values.nbytes, name)
            return 0
        if name in self._coded:
            self._write_coded(writer, name, scheme, progress)
            return 0
        rest: dict[str, list[Array]] = {}
        n_underflowed = 0
        for rows, values in self._blocks(name):
            try:
                if scheme.is_float:
                    writer.write(name, "values", kernels.pack_float(values, stored.dtype, scheme, threads=threads))
                else:
                    packed = kernels.quantize_rtn(values, stored.dtype, scheme, threads=threads)
                    parts = packed.parts()
                    writer.write(name, "codes", parts.pop("codes"))
                    for kind, part in parts.items():
                        rest.setdefault(kind, []).append(part)
                    n_underflowed += packed.n_underflowed
            except kernels.BadValueError as error:
                raise self._bad_value(name, error.reason, (rows.start + error.row, error.column)) from None
            progress.advance(values.nbytes, name)
        for kind, blocks in rest.items():
            writer.write(name, kind, np.concatenate(blocks))
        return n_underflowed

    def _write_coded(self, writer: Writer, name: str, scheme: QuantScheme, progress: Progress) -> None:
        """Codes and scales as the source has them."""
        rest: dict[str, list[Array]] = {"scales": [], "zero_points": []}
        for rows, coded in self._coded_blocks(name):
            if not np.isfinite(coded.scales).all():
                row, group = np.argwhere(~np.isfinite(coded.scales))[0].tolist()
                raise self._fail(f"{name}: the scale of group {group} of row {rows.start + row} is NaN or infinite")
            parts = codes.pack_matrix(scheme, coded.codes, coded.scales, coded.zero_points)
            writer.write(name, "codes", parts.pop("codes"))
            for kind, part in parts.items():
                rest[kind].append(part)
            progress.advance(coded.codes.size * codes.VALUE_DTYPES["f32"].itemsize, name)
        for kind, blocks in rest.items():
            if blocks:
                writer.write(name, kind, np.concatenate(blocks, axis=1))

    def _coded_blocks(self, name: str) -> Iterator[tuple[slice, CodedRows]]:
        """Rows of a matrix, or the whole of each matrix of a stack, as the source has them coded."""
        shape = self._source.tensors[name].shape
        if len(shape) == 2:
            yield from ((rows, self._source.read_coded(name, rows)) for rows in self._row_blocks(name))
            return
        for i in range(shape[0]):
            yield slice(0, shape[1]), self._source.read_coded(name, slice(i, i + 1)).matrix(0)

    def _blocks(self, name: str) -> Iterator[tuple[slice, Array]]:
        """Rows of a matrix, or of each matrix of a stack, with their values."""
        if len(self._source.tensors[name].shape) == 2:
            yield from ((rows, self._source.read(name, rows)) for rows in self._row_blocks(name))
            return
        for i in range(self._source.tensors[name].shape[0]):
            stack = self._source.read(name, slice(i, i + 1))
            for matrix in stack.reshape(-1, *stack.shape[-2:]):
                yield from ((rows, np.ascontiguousarray(matrix[rows])) for rows in self._row_blocks(name))

    def _row_blocks(self, name: str) -> Iterator[slice]:
        """Slices of the rows of a matrix, whole tiles of bounded size."""
        stored = self._source.tensors[name]
        n_rows, n_columns = stored.shape[-2:]
        row_nbytes = max(n_columns * codes.VALUE_DTYPES[stored.dtype.lower()].itemsize, 1)
        step = max(BLOCK_NBYTES // row_nbytes // TILE_ROWS, 1) * TILE_ROWS
        return (slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step))

    def _check_finite(self, name: str, values: Array, dtype: str) -> None:
        as_float = codes.bf16_to_f32(values.astype(np.uint16)) if dtype == "BF16" else values.astype(np.float32)
        bad = np.argwhere(~np.isfinite(as_float))
        if len(bad):
            at = tuple(bad[0].tolist())
            raise self._bad_value(name, "NaN" if np.isnan(as_float[at]) else "infinity", at)

    def _bad_value(self, name: str, reason: str, at: tuple[int, ...]) -> InputError:
        place = f"row {at[0]}, column {at[1]}" if len(at) == 2 else f"element {at[0] if at else 0}"
        advice = "Fetch the checkpoint again; if it is so at its origin, it is broken"
        if "beyond" in reason:
            advice = "Choose a scheme with more range: bf16, f32 or keep"
        return self._fail(f"{name}: {reason} at {place}. {advice}")

    def report(
        self, out: Path, *, notes: tuple[str, ...] = (), seconds: float | None = None, digest: str | None = None
    ) -> ConversionReport:
        tensors = list(self.layout.tensors.values())
        totals: dict[str, SchemeTotal] = {}
        for t in tensors:
            old = totals.get(str(t.scheme), SchemeTotal(str(t.scheme), 0, 0, 0))
            totals[old.scheme] = SchemeTotal(
                old.scheme, old.n_tensors + 1, old.n_parameters + t.n_values, old.nbytes + t.nbytes
            )
        n_parameters = sum(t.n_values for t in tensors)
        input_nbytes = sum(self._file_nbytes)
        return ConversionReport(
            source=str(self._source.path),
            source_kind=self._source.kind,
            out=str(out),
            dry_run=digest is None,
            architecture=self._model.architecture,
            scheme=self._recipe.scheme,
            group_size=self._recipe.group_size,
            embeddings=self._recipe.embeddings,
            n_tensors=len(tensors),
            n_parameters=n_parameters,
            input_nbytes=input_nbytes,
            output_nbytes=self.layout.file_nbytes,
            bits_per_weight=8 * sum(t.nbytes for t in tensors) / n_parameters,
            schemes=tuple(totals.values()),
            notes=(*self._notes, *notes),
            method=self._method,
            recipe=self._recipe.rules,
            target_bpw=None if self._target is None else str(self._target),
            n_allocated=self._n_allocated,
            seconds=seconds,
            mb_per_second=input_nbytes / seconds / 1e6 if seconds else None,
            digest=digest,
        )


def _write_solution(writer: Writer, name: str, solution: Solution) -> int:
    writer.write(name, "codes", solution.codes)
    writer.write(name, "scales", solution.scales)
    return solution.n_underflowed


def _bits(values: Array) -> Array:
    """Unsigned integers of the same size, which compare by their bytes: NaN equals itself, -0.0 is not 0.0."""
    return values.view(f"u{values.itemsize}")


def _some(names: list[str]) -> str:
    """The first few of a list, and how many more there are."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
