"""The plan of a conversion: source and recipe in, layout and provenance of the container out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, Final

from w4conv import __version__, codes
from w4conv.calibration.channel_scaling import METHOD as AWQ
from w4conv.calibration.channel_scaling import ChannelScaling
from w4conv.calibration.resolve import Calibration
from w4conv.calibration.sensitivity import Sensitivity, source_nbytes
from w4conv.calibration.statistics import HEAD as HEAD_HOOK
from w4conv.calibration.statistics import Statistics, observe
from w4conv.container import Layout, TensorPlan, plan
from w4conv.errors import InputError, UsageError
from w4conv.models.generic import GENERIC, GenericModel, Inventory
from w4conv.models.spec import ModelSpec, TensorSpec, stacks_of
from w4conv.progress import Progress, Silent
from w4conv.quantization.allocation import MENU, Item, allocate
from w4conv.quantization.calibrated import DAMPING_PERCENT, METHODS
from w4conv.quantization.folding import FoldedSource, Folding
from w4conv.quantization.recipe import Recipe, Rule, is_calibrated
from w4conv.scheme import KINDS
from w4conv.sources.base import Source

TOOL: Final = f"w4conv {__version__}"


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """One source planned by one recipe.

    source: with scaled channels, where `folding` says so (AWQ). model: its tensors. recipe: with n_allocated rules of
    target_bpw in front. method: for the record; methods: calibrated matrix -> its method. coded: names of tensors whose
    codes and scales are kept; rounded_again: of quantized ones that are rounded. notes: for the user and the record.
    file_nbytes: of each source file. layout: of the whole file.
    """

    source: Source
    model: Inventory
    recipe: Recipe
    method: str
    methods: Mapping[str, str]
    calibration: Calibration | None
    target: Decimal | None
    n_allocated: int
    folding: Folding | None
    coded: frozenset[str]
    rounded_again: frozenset[str]
    notes: tuple[str, ...]
    file_nbytes: tuple[int, ...]
    layout: Layout

    def spec(self) -> ModelSpec:
        """The model, where it is run."""
        return _runnable(self.model)


def make_plan(
    source: Source,
    model: Inventory,
    recipe: Recipe,
    *,
    method: str,
    calibration: Calibration | None = None,
    target: Decimal | None = None,
    head: str | None = None,
    notes: Sequence[str] = (),
    threads: int | None = None,
    progress: Progress | None = None,
) -> ConversionPlan:
    """Decide what every tensor becomes. Without target and awq no value is read; with them, and a text, the model runs.

    model, notes: of `read_model`. target: bits a weight, at most. head: the caller's word, for the record.
    Raises UsageError for options that contradict each other, InputError.
    """
    planner = _Planner(
        source, model, recipe, method, calibration, [*source.notes, *notes], threads, progress or Silent()
    )
    planner.check()
    chosen = [] if target is None else planner.allocate(target)
    folding = planner.fold()
    tensors = planner.tensors()
    method = "keep" if planner.coded and method == "rtn" else method
    file_nbytes = tuple(file.stat().st_size for file in source.files)
    record = planner.record(tensors, method=method, file_nbytes=file_nbytes, head=head, target=target, folding=folding)
    blobs = {name: source.blobs[name] for name in sorted(source.blobs)}
    return ConversionPlan(
        source=planner.source,
        model=model,
        recipe=planner.recipe,
        method=method,
        methods=planner.methods,
        calibration=calibration,
        target=target,
        n_allocated=len(chosen),
        folding=folding,
        coded=frozenset(planner.coded),
        rounded_again=frozenset(planner.rounded_again),
        notes=tuple(planner.notes),
        file_nbytes=file_nbytes,
        layout=plan(tensors, blobs, record),
    )


def _runnable(model: Inventory) -> ModelSpec:
    assert isinstance(model, ModelSpec)
    return model


class _Planner:
    """The steps of make_plan, and their results."""

    def __init__(
        self, source: Source, model: Inventory, recipe: Recipe, method: str, calibration: Calibration | None,
        notes: list[str], threads: int | None, progress: Progress,
    ) -> None:  # fmt: skip
        self.source, self.model, self.recipe = source, model, recipe
        self.notes = notes
        self.coded: set[str] = set()
        self.rounded_again: set[str] = set()
        self._method, self._calibration = method, calibration
        self._threads, self._progress = threads, progress
        self._choose(recipe)

    def _choose(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._choices = recipe.choices(self.model)
        self.methods = calibrated_methods(self.model, recipe, self._method, with_text=self._calibration is not None)

    def check(self) -> None:
        if isinstance(self._calibration, Statistics):
            self._check_statistics(self._calibration)

    def spec(self) -> ModelSpec:
        return _runnable(self.model)

    def _check_statistics(self, statistics: Statistics) -> None:
        statistics.check(self.source, self.spec())
        if any(t.layer is None and t.name in self.methods for t in self.model.tensors()):
            statistics.at_hook(None, HEAD_HOOK)  # raises where it has none
        for name, method in self.methods.items():
            if "gptq" in METHODS[method] and not statistics.full:
                raise UsageError(
                    f"method {method} for {name} needs second moments, and {statistics.path} has none: make it with "
                    "`w4conv calibrate --full`, or choose search or awq"
                )

    def allocate(self, target: Decimal) -> list[tuple[str, Rule]]:
        """Rules in front of those of the recipe: a scheme for each matrix to which the recipe gives none."""
        tensors = self.model.tensors()
        free = [t for t in tensors if not self._choices[t.name].explicit]
        if not free:
            raise UsageError("the recipe says the scheme of every matrix, so there is nothing to choose for target-bpw")
        stacks = stacks_of(free)
        sizes = {
            stack[0].name: tuple(sum(sum(codes.part_sizes(s, t.shape).values()) for t in stack) for s in MENU)
            for stack in stacks
        }
        names = {t.name for t in free}
        taken = sum(
            sum(codes.part_sizes(self._choices[t.name].coding(self.source.tensors[t.name].dtype), t.shape).values())
            for t in tensors if t.name not in names
        )  # fmt: skip
        n_parameters = sum(math.prod(t.shape) for t in tensors)
        least, most = (Decimal(8 * (taken + sum(s[i] for s in sizes.values()))) / n_parameters for i in (0, -1))
        if not least <= target <= most:
            low, high = least.quantize(Decimal("0.001"), ROUND_CEILING), most.quantize(Decimal("0.001"), ROUND_FLOOR)
            raise UsageError(
                f"target-bpw {target} is out of reach: from {MENU[0]} to {MENU[-1]} this model has {low} to "
                f"{high} bits a weight"
            )
        self._progress.start(sum(source_nbytes(self.source, t) for t in free))
        sensitivity = Sensitivity(self.source, stacks, MENU, threads=self._threads, advance=self._progress.advance)
        if self._calibration is None:
            losses, by = sensitivity.from_weights(), "the error of their weights"
        elif isinstance(self._calibration, Statistics):
            losses, by = sensitivity.from_statistics(self._calibration), "the error of their outputs by the statistics"
        else:
            losses = sensitivity.from_calibration_set(self.spec(), self._calibration.sequences)
            by = "what they lose on the text"
        budget = int(target * n_parameters / 8) - taken
        chosen = allocate([Item(name, sizes[name], losses[name]) for name in sizes], budget)
        self.notes.append(f"schemes of {len(free)} matrices chosen for {target} bits a weight, by {by}")
        whole = {stack[0].name: len(stack) for stack in stacks_of(tensors)}
        rules = []
        for stack in stacks:
            scheme = MENU[chosen[stack[0].name]]
            patterns = [t.name for t in stack]
            if 1 < len(stack) == whole.get(stack[0].name):
                patterns = [_pattern(stack[0])]
            rules += [(pattern, Rule(scheme.kind, scheme.group_size)) for pattern in patterns]
        self._choose(replace(self.recipe, rules=(*rules, *self.recipe.rules)))
        return rules

    def fold(self) -> Folding | None:
        """Scale the channels of the source for the matrices that are rounded by AWQ."""
        tensors = [t for t in self.model.tensors() if self.methods.get(t.name) == AWQ and t.role == "linear"]
        if not tensors:
            return None
        schemes = {t.name: self._choices[t.name].coding(self.source.tensors[t.name].dtype) for t in tensors}
        self._progress.start(sum(math.prod(t.shape) for t in tensors))
        scaling = ChannelScaling(
            self.source, self.spec(), schemes, threads=self._threads, advance=self._progress.advance
        )
        if isinstance(self._calibration, Statistics):
            folding = scaling.find(self._calibration.layers(self.spec()))
        else:
            assert self._calibration is not None
            seen = observe(self.source, self.spec(), self._calibration.sequences, full=True, threads=self._threads)
            folding = scaling.find(seen)
        self.notes.append(
            f"awq: channels scaled by powers of two at {len(folding.exponents)} places of {self.spec().n_layers} "
            "layers, folded exactly into what comes before"
        )
        self.source = FoldedSource(self.source, folding)
        return folding

    def _fail(self, message: str) -> InputError:
        return InputError(f"{self.source.path}: {message}")

    def tensors(self) -> list[TensorPlan]:
        """Every tensor of the model with its scheme; notes on those rounded a second time."""
        out = []
        again: dict[str, list[str]] = {}
        for t in self.model.tensors():
            name, found = t.name, self.source.tensors[t.name]
            choice = self._choices[name]
            coding = choice.coding(found.dtype)
            if found.coding is not None and choice.keeps:
                coding = found.coding
                self.coded.add(name)
            elif found.is_quantized and len(t.shape) >= 2:
                self.rounded_again.add(name)
                again.setdefault(f"{found.stored_as} as {coding}", []).append(name)
            out.append(TensorPlan(name, t.shape, coding, found.stored_as))
        for change, names in again.items():
            exact = change.endswith(" as f32")
            what = "stored as float32, exactly" if exact else "rounded a second time"
            self.notes.append(f"quantized already and {what}: {len(names)} tensors, {change}")
        return out

    def record(
        self, tensors: list[TensorPlan], *, method: str, file_nbytes: Sequence[int], head: str | None,
        target: Decimal | None, folding: Folding | None,
    ) -> dict[str, Any]:  # fmt: skip
        """The provenance: without paths, hosts and times, so that the bytes depend on none of them."""
        for file in self.source.files:
            if not _is_text(file.name):
                raise self._fail(f"the name of {file.name} is not UTF-8, and cannot be recorded. Rename the file")
        files = zip(self.source.files, file_nbytes, strict=True)
        record: dict[str, Any] = {
            "tool": TOOL,
            "method": method,
            "scheme": self.recipe.scheme,
            "embeddings": self.recipe.embeddings,
            "source": {
                "kind": self.source.kind,
                "files": [{"name": file.name, "nbytes": nbytes} for file, nbytes in files],
            },
            "notes": self.notes.copy(),
        }
        if not all(t.scheme.is_float for t in tensors):
            record["group_size"] = self.recipe.group_size
        if isinstance(self.model, GenericModel):
            record["architecture"] = GENERIC
        if head is not None:
            record["head"] = head
        if self.source.gptq_zero15 is not None:
            record["gptq_zero15"] = self.source.gptq_zero15
        if self.recipe.rules:
            record["recipe"] = self.recipe.record()
        if target is not None:
            record["target_bpw"] = str(target)
        if folding is not None:
            record["folding"] = folding.record()
        if self._calibration is not None:
            record["calibration"] = self._calibration.record() | {"damping_percent": DAMPING_PERCENT}
        return record


def calibrated_methods(model: Inventory, recipe: Recipe, default: str, *, with_text: bool) -> dict[str, str]:
    """Calibrated matrix -> its method. Raises UsageError for a method that is unknown or does not apply."""
    methods = {}
    choices = recipe.choices(model)
    has_experts = isinstance(model, ModelSpec) and model.experts is not None
    for t in model.tensors():
        choice = choices[t.name]
        method = known_method(default if choice.method is None else choice.method)
        if method == AWQ and has_experts and with_text:
            raise UsageError(
                f"method awq scales channels of dense models, and {model.architecture} is a mixture of experts: choose "
                "best, gptq or search"
            )
        if with_text and is_calibrated(t.role, choice.kind, tied_head=model.tied_head):
            methods[t.name] = method
        elif choice.method is not None and method != "rtn":
            if not with_text:
                raise UsageError(
                    f"recipe: method {method} for {t.name} needs a calibration set: name it with --calibration"
                )
            raise UsageError(
                f"recipe: method {method} for {t.name}, {t.role} as {choice.kind}; calibrated are linear weights "
                f"as {', '.join(kind for kind in KINDS if KINDS[kind].is_calibrated)}, and heads in 4 bits"
            )
    if with_text and not methods:
        raise UsageError(f"scheme {recipe.scheme} keeps linear weights as floats, so there is nothing to calibrate")
    return methods


def known_method(method: str) -> str:
    if method not in METHODS:
        raise UsageError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    return method


def _pattern(t: TensorSpec) -> str:
    """Of the names of that part of all experts of the layer."""
    before, _, after = t.name.rpartition(f".{t.expert}.")
    return f"{before}.*.{after}"


def _is_text(name: str) -> bool:
    """Whether a file name is UTF-8; Python has other bytes as surrogates."""
    return not any("\ud800" <= c <= "\udfff" for c in name)
