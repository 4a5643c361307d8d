"""What a conversion is going to write: source and recipe in, the layout of the container and its provenance out."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from pathlib import Path
from typing import Any, Final

from w4conv import __version__, codes
from w4conv.calibration.channel_scaling import METHOD as AWQ
from w4conv.calibration.channel_scaling import ChannelScaling
from w4conv.calibration.sensitivity import Sensitivity
from w4conv.calibration.statistics import HEAD as HEAD_HOOK
from w4conv.calibration.statistics import Statistics, observe
from w4conv.calibration.text import CTX, TOKENS, CalibrationSet, read_calibration
from w4conv.container import Layout, TensorPlan, plan
from w4conv.errors import InputError, UsageError
from w4conv.files.blobs import config_of, parse_json_object
from w4conv.models import parse_config
from w4conv.models.generic import GENERIC, GenericModel, Inventory, generic_model
from w4conv.models.spec import ModelSpec
from w4conv.progress import Progress
from w4conv.quantization.allocation import MENU, Item, allocate
from w4conv.quantization.calibrated import DAMPING_PERCENT, METHODS
from w4conv.quantization.folding import FoldedSource, Folding
from w4conv.quantization.recipe import CALIBRATED, Recipe, Rule, is_calibrated
from w4conv.runtime.chat import ChatTemplate, templates_of
from w4conv.runtime.tokenizer import Tokenizer
from w4conv.runtime.tokenizer_file import TokenizerFile, token_ids
from w4conv.sources.base import Source
from w4conv.sources.reading import read_small

TOOL: Final = f"w4conv {__version__}"
# Buffers that old checkpoints carry and that follow from the config.
HARMLESS: Final = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", ".attn.masked_bias")


class ConversionPlan:
    """One source planned by one recipe. Creating it checks everything but the values; for target_bpw and awq it reads
    them, and with calibration runs the model.

    layout: of the whole file. recipe: with the rules that target_bpw, if given, has added in front, n_allocated.
    method: the word for the record; methods: matrix -> its own, of those that are calibrated, on `calibration`.
    coded: names of tensors whose codes and scales are taken as they are. notes: for the user and the record.
    file_nbytes: of each source file. source: with its channels scaled where AWQ has it so; folding: how.
    """

    def __init__(
        self, source: Source, recipe: Recipe, method: str,
        calibration: tuple[Path, int | None, int | None] | Statistics | None, target: Decimal | None, *,
        generic: bool, head: str | None, threads: int | None, progress: Progress,
    ) -> None:  # fmt: skip
        """calibration: the text, and how many tokens of it in sequences of how many; or statistics."""
        self.source = source
        self.recipe = recipe
        self.head = head
        self.notes = list(source.notes)
        self.coded: set[str] = set()
        self.rounded_again: set[str] = set()
        config = self._config()
        self.model: Inventory
        if generic:
            self.model = generic_model(config, ((name, t.shape) for name, t in source.tensors.items()))
            self.notes.append(
                "architecture generic: matrices are linear weights unless their names say embedding or head; "
                "what is written cannot be run"
            )
        else:
            try:
                self.model = parse_config(config)
            except InputError as error:
                raise self._fail(f"{error}. With --architecture generic it is converted, but cannot be run") from None
            self._check_vocabulary(self.model)
        self._check_sidecars(None if generic else self.spec())
        self._choices = recipe.choices(self.model)
        self.methods = self._calibrated(method, with_text=calibration is not None)
        self.calibration: CalibrationSet | Statistics | None = None
        if isinstance(calibration, Statistics):
            self.calibration = calibration
        elif calibration is not None:
            path, tokens, ctx = calibration
            self.calibration = read_calibration(
                path,
                source.blobs,
                self.spec(),
                tokens=TOKENS if tokens is None else tokens,
                ctx=CTX if ctx is None else ctx,
            )
        self._check_source()
        if isinstance(self.calibration, Statistics):
            self._check_statistics(self.calibration)
        self.target, self.n_allocated = target, 0
        if target is not None:
            chosen = self._allocate(target, threads, progress)
            self.n_allocated = len(chosen)
            self.recipe = replace(recipe, rules=(*chosen, *recipe.rules))
            self._choices = self.recipe.choices(self.model)
            self.methods = self._calibrated(method, with_text=calibration is not None)
        self.folding = self._fold(threads, progress)
        if self.folding is not None:
            self.source = FoldedSource(source, self.folding)
        tensors = self._plan_tensors()
        self.method = "keep" if self.coded and method == "rtn" else method
        self.file_nbytes = [file.stat().st_size for file in source.files]
        blobs = {name: source.blobs[name] for name in sorted(source.blobs)}
        self.layout: Layout = plan(tensors, blobs, self._provenance(tensors))

    def _calibrated(self, default: str, *, with_text: bool) -> dict[str, str]:
        """Matrix -> its method, of those that are calibrated."""
        methods = {}
        for t in self.model.tensors():
            choice = self._choices[t.name]
            method = known_method(default if choice.method is None else choice.method)
            if with_text and is_calibrated(t.role, choice.kind, tied_head=self.model.tied_head):
                methods[t.name] = method
            elif choice.method is not None and method != "rtn":
                if not with_text:
                    raise UsageError(
                        f"recipe: method {method} for {t.name} needs a calibration set: name it with --calibration"
                    )
                raise UsageError(
                    f"recipe: method {method} for {t.name}, {t.role} as {choice.kind}; calibrated are linear weights "
                    f"as {', '.join(CALIBRATED)}, and heads in 4 bits"
                )
        if with_text and not methods:
            raise UsageError(
                f"scheme {self.recipe.scheme} keeps linear weights as floats, so there is nothing to calibrate"
            )
        return methods

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

    def _allocate(self, target: Decimal, threads: int | None, progress: Progress) -> list[tuple[str, Rule]]:
        """A rule for each matrix that no rule of the recipe codes."""
        tensors = self.model.tensors()
        free = [t for t in tensors if not self._choices[t.name].explicit]
        if not free:
            raise UsageError("the recipe says the scheme of every matrix, so there is nothing to choose for target-bpw")
        sizes = {t.name: tuple(sum(codes.part_sizes(s, t.shape).values()) for s in MENU) for t in free}
        taken = sum(
            sum(codes.part_sizes(self._choices[t.name].coding(self.source.tensors[t.name].dtype), t.shape).values())
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
        progress.start(sum(self.source.tensors[t.name].nbytes or math.prod(t.shape) * 2 for t in free))
        sensitivity = Sensitivity(self.source, free, MENU, threads=threads, advance=progress.advance)
        if self.calibration is None:
            losses, by = sensitivity.from_weights(), "the error of their weights"
        elif isinstance(self.calibration, Statistics):
            losses, by = sensitivity.from_statistics(self.calibration), "the error of their outputs by the statistics"
        else:
            losses = sensitivity.from_calibration_set(self.spec(), self.calibration.sequences)
            by = "what they lose on the text"
        budget = int(target * n_parameters / 8) - taken
        chosen = allocate([Item(t.name, sizes[t.name], losses[t.name]) for t in free], budget)
        self.notes.append(f"schemes of {len(free)} matrices chosen for {target} bits a weight, by {by}")
        return [(name, Rule(MENU[i].kind, MENU[i].group_size)) for name, i in chosen.items()]

    def _fold(self, threads: int | None, progress: Progress) -> Folding | None:
        """Channels scaled for the matrices that are rounded by AWQ."""
        tensors = [t for t in self.model.tensors() if self.methods.get(t.name) == AWQ and t.role == "linear"]
        if not tensors:
            return None
        schemes = {t.name: self._choices[t.name].coding(self.source.tensors[t.name].dtype) for t in tensors}
        progress.start(sum(math.prod(t.shape) for t in tensors))
        scaling = ChannelScaling(self.source, self.spec(), schemes, threads=threads, advance=progress.advance)
        if isinstance(self.calibration, Statistics):
            folding = scaling.find(self.calibration.layers(self.spec()))
        else:
            assert self.calibration is not None
            seen = observe(self.source, self.spec(), self.calibration.sequences, full=True, threads=threads)
            folding = scaling.find(seen)
        self.notes.append(
            f"awq: channels scaled by powers of two at {len(folding.exponents)} places of {self.spec().n_layers} "
            "layers, folded exactly into what comes before"
        )
        return folding

    def _check_vocabulary(self, spec: ModelSpec) -> None:
        """A tokenizer may have fewer tokens than the model, or special ones beyond those of a text model."""
        try:
            file = TokenizerFile(self.source.blobs.get("tokenizer.json", b"{}"))
        except InputError:  # the next check tells
            return
        own, added = file.highest_id, max(file.added, default=-1)
        if own >= spec.vocab_size:
            raise self._fail(
                f"tokenizer.json has tokens up to {own}, but the model only {spec.vocab_size}: it belongs to another "
                "model. Put the right one beside the weights, or take it away to convert without a tokenizer"
            )
        if added >= spec.vocab_size:
            self.notes.append(
                f"tokenizer.json adds tokens up to {added}, but the model has only {spec.vocab_size}: a text with "
                "those beyond cannot be run"
            )

    def _check_sidecars(self, spec: ModelSpec | None) -> None:
        """What is carried can be used; notes what of it has no effect. spec: None where the model is not known."""
        blobs = self.source.blobs
        tokenizer = None
        if "tokenizer.json" in blobs:
            try:
                tokenizer = Tokenizer(blobs)
            except InputError as error:
                raise self._fail(f"{error}. Mend the file, or take it away to convert without a tokenizer") from None
        for name in ("config.json", "generation_config.json"):
            for key in ("bos_token_id", "eos_token_id"):
                try:
                    ids = token_ids(blobs, name, key)
                except InputError as error:
                    raise self._fail(str(error)) from None
                if spec is not None and (beyond := [i for i in ids if not 0 <= i < spec.vocab_size]):
                    self.notes.append(
                        f"{name}: {key} names {beyond[0]}, but the model's tokens are 0 to {spec.vocab_size - 1}: it "
                        "has no effect"
                    )
        try:
            templates = templates_of(blobs)
        except InputError as error:
            raise self._fail(str(error)) from None
        for name, template in templates.items():
            with ChatTemplate(template) as compiled:
                try:
                    compiled.check()
                except InputError as error:
                    self.notes.append(f"The chat template {name!r} cannot be used: {error}")
        listed = self.source.path / "added_tokens.json"
        if tokenizer is not None and self.source.path.is_dir() and os.path.lexists(listed):
            added = parse_json_object(read_small(listed), str(listed))
            if other := [token for token, i in added.items() if tokenizer.id(token) != i]:
                known = tokenizer.id(other[0])
                self.notes.append(
                    f"added_tokens.json is left aside: it says that {other[0]!r} is token {added[other[0]]}, "
                    f"tokenizer.json that it is {'none' if known is None else known}. Where it is right, save the "
                    "tokenizer anew (in transformers: tokenizer.save_pretrained)"
                )

    def spec(self) -> ModelSpec:
        """The model, where it is run."""
        assert isinstance(self.model, ModelSpec)
        return self.model

    def _fail(self, message: str) -> InputError:
        return InputError(f"{self.source.path}: {message}")

    def _config(self) -> Mapping[str, object]:
        return config_of(self.source.blobs)

    def _check_source(self) -> None:
        """That the source has every tensor that the model needs; notes what of the source is left out."""
        needed = {t.name: t for t in self.model.tensors()}
        stored = self.source.tensors
        missing = [name for name in needed if name not in stored]
        if missing:
            raise self._fail(f"the model needs tensors that are missing: {_some(missing)}. Fetch the checkpoint again")
        extra = [name for name in stored if name not in needed]
        if zeros := [name for name in extra if name.endswith(".bias") and not self.source.read(name).any()]:
            extra = [name for name in extra if name not in zeros]
            self.notes.append(
                f"left out, as {self.model.architecture} has no such biases and all are zero: {_some(zeros)}"
            )
        if unknown := [name for name in extra if not name.endswith(HARMLESS)]:
            raise self._fail(
                f"tensors that {self.model.architecture} does not have: {_some(unknown)}. "
                "The config does not belong to these weights, or the model is of a kind not supported"
            )
        if extra:
            self.notes.append(f"left out, since the config says as much: {_some(sorted(extra))}")
        for name, t in needed.items():
            if stored[name].shape != t.shape:
                raise self._fail(f"{name}: shape is {stored[name].shape}, but the config asks for {t.shape}")

    def _plan_tensors(self) -> list[TensorPlan]:
        """Every tensor that the model needs, with its scheme; notes what is rounded a second time."""
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

    def _provenance(self, tensors: list[TensorPlan]) -> dict[str, Any]:
        """The record of how the file came to be: no paths, hosts or times, so that the bytes depend on none."""
        for file in self.source.files:
            if not _is_text(file.name):
                raise self._fail(f"the name of {file.name} is not UTF-8, and cannot be recorded. Rename the file")
        files = zip(self.source.files, self.file_nbytes, strict=True)
        record: dict[str, Any] = {
            "tool": TOOL,
            "method": self.method,
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
        if self.head is not None:
            record["head"] = self.head
        if self.source.gptq_zero15 is not None:
            record["gptq_zero15"] = self.source.gptq_zero15
        if self.recipe.rules:
            record["recipe"] = self.recipe.record()
        if self.target is not None:
            record["target_bpw"] = str(self.target)
        if self.folding is not None:
            record["folding"] = self.folding.record()
        if self.calibration is not None:
            record["calibration"] = self.calibration.record() | {"damping_percent": DAMPING_PERCENT}
        return record


def known_method(method: str) -> str:
    if method not in METHODS:
        raise UsageError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    return method


def _is_text(name: str) -> bool:
    """Not so of names with bytes that are not UTF-8, which Python has as surrogates."""
    return not any("\ud800" <= c <= "\udfff" for c in name)


def _some(names: list[str]) -> str:
    """The first few of a list, and how many more there are."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
