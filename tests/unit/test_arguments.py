"""What a caller gives is taken as it is or refused: never rounded, never "the default", the same everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import WORDS, make_llama_dir

import w4conv
from w4conv import kernels, quantize, verify
from w4conv.commands.bench import bench
from w4conv.commands.calibrate import calibrate
from w4conv.commands.cat import cat
from w4conv.commands.export import export
from w4conv.errors import UsageError
from w4conv.runtime.engine import Model
from w4conv.runtime.generation import TextStream, generate_text
from w4conv.runtime.layers import LayeredContainer
from w4conv.runtime.lookup import PromptLookup
from w4conv.runtime.sampling import Sampler, Sampling
from w4conv.runtime.tokenizer import Tokenizer

# What is no count anywhere, as a test's name and a value.
NO_COUNTS: dict[str, Any] = {
    "True": True, "False": False, "2.0": 2.0, "3.5": 3.5, "nan": float("nan"), "inf": float("inf"), "'4'": "4",
    "b'4'": b"4", "-1": -1, "-3": -3, "list": [4], "float64": np.float64(4), "bool_": np.bool_(True),
    "array": np.array([4]), "-2**70": -(2**70), "complex": 4j, "digits": -(10**5000), "object": object(),
}  # fmt: skip


class Place:
    """A container, its source, a text, and what counts are given to."""

    def __init__(self, root: Path) -> None:
        self.source = make_llama_dir(root / "hf")
        self.path, self.out, self.text = root / "m.w4", root / "out", root / "t.txt"
        self.text.write_text(WORDS * 60)
        quantize(self.source, self.path, group_size=32, effort=0, scheme="w4a16")
        self.model = Model(self.path, threads=1)

    def quantize(self, **options: Any) -> object:
        if "calibration" not in options:
            options = {"effort": 1 if "target_bpw" in options else 0} | options
        return quantize(self.source, self.out, dry_run=True, **options)

    def calibrated(self, **options: Any) -> object:
        return self.quantize(calibration=self.text, **{"calibration_tokens": 512, "calibration_ctx": 32} | options)

    def calibrate(self, **options: Any) -> object:
        return calibrate(self.source, self.text, self.out, **{"tokens": 512, "ctx": 32} | options)

    def verify(self, **options: Any) -> object:
        return verify(self.path, ppl=True, text=self.text, **{"ctx": 16, "chunks": 2} | options)

    def bench(self, **options: Any) -> object:
        with w4conv.open(self.path) as container:
            return bench([("m", container)], **{"n_prompt": 4, "n_tokens": 2, "rounds": 1} | options)

    def generate(self, **options: Any) -> object:
        return list(self.model.generate([1, 2], **{"max_tokens": 2} | options))

    def generate_text(self, **options: Any) -> object:
        tokenizer = Tokenizer(self.model.container.blobs)
        given = {"max_tokens": 2} | options
        return generate_text(TextStream(self.model, tokenizer, [1, 2], at_start=True, **given), on_piece=len)

    def truncate(self, n: Any) -> object:
        session = self.model.session()
        session.append([1, 2, 3])
        return session.truncate(n)


COUNTS: dict[str, Callable[[Place, Any], object]] = {
    "quantize threads": lambda p, n: p.quantize(threads=n, target_bpw=5.0),
    "quantize group_size": lambda p, n: p.quantize(group_size=n, scheme="w4a16"),
    "quantize calibration_tokens": lambda p, n: p.calibrated(calibration_tokens=n),
    "quantize calibration_ctx": lambda p, n: p.calibrated(calibration_ctx=n),
    "quantize gptq_zero15": lambda p, n: p.quantize(gptq_zero15=n),
    "calibrate tokens": lambda p, n: p.calibrate(tokens=n),
    "calibrate ctx": lambda p, n: p.calibrate(ctx=n),
    "calibrate threads": lambda p, n: p.calibrate(threads=n),
    "verify ctx": lambda p, n: p.verify(ctx=n),
    "verify chunks": lambda p, n: p.verify(chunks=n),
    "verify threads": lambda p, n: p.verify(threads=n),
    "verify threads alone": lambda p, n: verify(p.path, threads=n),
    "Model threads": lambda p, n: Model(p.path, threads=n),
    "Model ctx": lambda p, n: Model(p.path, ctx=n),
    "Model kv_memory": lambda p, n: Model(p.path, kv_memory=n),
    "layer threads": lambda p, n: LayeredContainer(p.model.container).layer(0, threads=n),
    "head threads": lambda p, n: LayeredContainer(p.model.container).head(threads=n),
    "generate max_tokens": lambda p, n: p.generate(max_tokens=n),
    "generate stop_ids": lambda p, n: p.generate(stop_ids=[n]),
    "generate prompt": lambda p, n: p.model.generate([1, n], max_tokens=1),
    "generate_text max_tokens": lambda p, n: p.generate_text(max_tokens=n),
    "generate_text lookup": lambda p, n: p.generate_text(lookup=n),
    "logits": lambda p, n: p.model.logits([1, n]),
    "append": lambda p, n: p.model.session().append((1, n)),
    "truncate": lambda p, n: p.truncate(n),
    "PromptLookup": lambda _, n: PromptLookup(n),
    "generate_text logprobs": lambda p, n: p.generate_text(logprobs=n),
    "Sampling top_k": lambda _, n: Sampling(temperature=1, top_k=n),
    "Sampling seed": lambda _, n: Sampling(temperature=1, seed=n),
    "Sampling bias": lambda _, n: Sampling(logit_bias={n: 1} if n.__hash__ else n),
    "Sampler choice": lambda _, n: Sampler(Sampling(), choice=n),
    "bench prompt": lambda p, n: p.bench(n_prompt=n),
    "bench tokens": lambda p, n: p.bench(n_tokens=n),
    "bench rounds": lambda p, n: p.bench(rounds=n),
    "bench context": lambda p, n: p.bench(context=n),
    "bench threads": lambda p, n: p.bench(threads=n),
    "kernels": lambda _, n: kernels.gemm_nt(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32), threads=n),
}
# Where 0 means something of its own; elsewhere it is refused too, and is never the default.
ZERO = ("quantize group_size", "quantize gptq_zero15", "generate max_tokens", "generate_text", "logits", "append",
        "truncate", "PromptLookup", "Sampl", "generate stop_ids", "generate prompt")  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("arguments"))
    yield place
    place.model.close()


@pytest.mark.parametrize("argument", COUNTS)
def test_what_is_no_count_is_refused(argument: str, place: Place) -> None:
    for words, value in NO_COUNTS.items():
        if argument == "quantize group_size" and words == "'4'":
            continue
        with pytest.raises(UsageError) as raised:  # noqa: PT012  # the second line says which one was taken
            COUNTS[argument](place, value)
            pytest.fail(f"{argument} took {words}")
        assert len(str(raised.value)) < 300
    if not argument.startswith(ZERO):
        with pytest.raises(UsageError, match=r"\b0\b"):
            COUNTS[argument](place, 0)


@pytest.mark.parametrize("argument", [name for name in COUNTS if "seed" not in name and "tokens" not in name])
def test_counts_are_bounded(argument: str, place: Place) -> None:
    """A Python integer has no limit; each number is bounded by its range, or by what it counts."""
    unbounded = ("quantize calibration", "verify chunks", "Model kv_memory", "Sampling seed", "bench rounds")
    for value in (2**63, 10**30, 10**5000):
        if not argument.startswith(unbounded):
            with pytest.raises(UsageError):
                COUNTS[argument](place, value)


GOOD: dict[str, tuple[str, int]] = {
    "threads": ("quantize threads", 2), "group": ("quantize group_size", 64), "row": ("quantize group_size", 0),
    "tokens": ("quantize calibration_tokens", 512), "ctx": ("verify ctx", 16), "model": ("Model ctx", 9),
    "ids": ("logits", 299), "id 0": ("append", 0), "stop": ("generate stop_ids", 7), "none": ("generate max_tokens", 0),
    "seed": ("Sampling seed", 2**31), "cut": ("truncate", 3), "chunks": ("verify chunks", 1),
}  # fmt: skip


KINDS_OF_INTEGERS = (int, np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64)


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, kind) for case in GOOD for kind in KINDS_OF_INTEGERS if kind is int or GOOD[case][1] <= np.iinfo(kind).max],
)
def test_every_kind_of_integer_is_a_count(case: str, kind: type, place: Place) -> None:
    argument, value = GOOD[case]
    COUNTS[argument](place, kind(value))


def test_group_size_zero_is_a_row(place: Place) -> None:
    report = quantize(place.source, place.out, group_size=0, dry_run=True, effort=0, scheme="w4a16")
    assert report.group_size == 0
    assert report == quantize(place.source, place.out, group_size="row", dry_run=True, effort=0, scheme="w4a16")
    assert report != quantize(place.source, place.out, dry_run=True, effort=0, scheme="w4a16")


@pytest.mark.parametrize("ids", [
    [1.5], [1, True], [None], ["1"], "12", b"12", 5, None, [[1, 2]], [1, [2]], {1: 2}, {1, 2}, [-1], [300], [2**63],
    bytearray(b"12"), frozenset({1, 2}),
    [10**5000], np.array([1.0]), np.array([True]), np.array([[1]]), np.array(3), np.array([2**63], np.uint64),
    np.array([1, 2], object), np.array(["1"]), [np.float32(1)], [np.array([1])], [],
], ids=[f"ids {i}" for i in range(28)])  # fmt: skip
def test_token_ids_that_are_none(ids: Any, place: Place) -> None:
    with pytest.raises(UsageError):
        place.model.logits(ids)
    session = place.model.session()
    session.append([1])
    with pytest.raises(UsageError):
        session.append(ids)
    assert session.n_tokens == 1


@pytest.mark.parametrize("ids", [
    (5, 6, 7), range(5, 8), np.array([5, 6, 7], np.uint8), np.array([5, 6, 7], np.int64)[::1], np.arange(15)[5:8],
    [np.int32(5), 6, np.uint64(7)], np.array([0, 5, 0, 6, 0, 7])[1::2], iter([5, 6, 7]), np.array([5, 6, 7], ">i4"),
], ids=lambda ids: f"{type(ids).__name__} {getattr(ids, 'dtype', '')}".strip())  # fmt: skip
def test_token_ids_of_every_kind(ids: Any, place: Place) -> None:
    assert place.model.logits(ids).tobytes() == place.model.logits([5, 6, 7]).tobytes()


class Bytes:
    def __fspath__(self) -> bytes:
        return b"m.w4"


NO_PATHS: tuple[Any, ...] = ("", b"m.w4", "a\0b", 5, 1.5, True, False, Bytes(), {}, "\0", b"", object())


def named(value: object) -> str:
    """An id without an address, so that every process has the same."""
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


@pytest.mark.parametrize("value", NO_PATHS, ids=named)
def test_what_is_no_path_is_refused(value: Any, place: Place) -> None:
    for call in (
        lambda: quantize(value, place.out),
        lambda: quantize(place.source, value),
        lambda: place.quantize(calibration=value),
        lambda: calibrate(place.source, value, place.out, tokens=512, ctx=32),
        lambda: calibrate(place.source, place.text, value, tokens=512, ctx=32),
        lambda: cat(place.path, "model.norm.weight", value),
        lambda: export(place.path, value, to="gguf"),
    ):
        with pytest.raises(UsageError, match="must be the path"):
            call()
    assert not place.out.exists()


@pytest.mark.parametrize("value", ["no", "False", "", 0, 1, None, [True], 0.0, "0", object()], ids=named)
def test_what_is_no_flag_overwrites_nothing(value: Any, place: Place) -> None:
    folder = place.path.parent / "folder"
    if not folder.exists():
        export(place.path, folder, to="safetensors")
    before = place.path.read_bytes(), (folder / "config.json").read_bytes()
    for call in (
        lambda: quantize(place.source, place.path, overwrite=value),
        lambda: export(place.path, folder, to="safetensors", overwrite=value),
        lambda: cat(place.path, "model.norm.weight", folder / "config.json", overwrite=value),
    ):
        with pytest.raises(UsageError, match="overwrite is"):
            call()
    assert before == (place.path.read_bytes(), (folder / "config.json").read_bytes())


@pytest.mark.parametrize("value", [True, "0.5", float("nan"), float("inf"), -0.1, None, [0.5], 10**400, np.bool_(True)])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
def test_what_is_no_number_is_refused(name: str, value: Any) -> None:
    if value == -0.1 and name in ("presence_penalty", "frequency_penalty"):
        assert getattr(Sampling(**{name: value}), name) == value  # a bonus
        return
    with pytest.raises(UsageError, match=name.replace("_", "-")):
        Sampling(**{"temperature": 1.0, name: value})


def test_samplers_take_numbers_of_every_kind() -> None:
    logits = np.arange(9, dtype=np.float32)
    plain = Sampler(Sampling(temperature=0.5, top_k=3, top_p=0.5, seed=1))(logits)
    of_numpy = Sampling(temperature=np.float32(0.5), top_k=np.int8(3), top_p=np.float64(0.5), seed=np.int64(1))  # type: ignore[arg-type]  # numbers of numpy
    assert Sampler(of_numpy)(logits) == plain


@pytest.mark.parametrize("words", ["", "none", 3, None])
def test_words_are_words(words: Any, place: Place) -> None:
    for given in ({"activations": words}, {"kv": words}):
        with pytest.raises(UsageError):
            Model(place.path, **given)
    if words is not None:
        for given in ({"method": words}, {"convention": words}):
            with pytest.raises(UsageError):
                place.quantize(**given) if "method" in given else place.verify(**given)


@pytest.mark.parametrize("value", [True, "x", float("nan"), float("-inf"), [1]])
def test_thresholds_are_numbers(value: Any, place: Place) -> None:
    with pytest.raises(UsageError, match="min-sqnr"):
        verify(place.path, against=place.source, min_sqnr=value)
    with pytest.raises(UsageError, match="max-ppl-increase"):
        verify(place.path, against=place.source, ppl=True, text=place.text, ctx=16, max_ppl_increase=value)
