"""export: a `.w4` container out to what other engines read."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from w4conv.arguments import path_of
from w4conv.commands.options import refuse_idle
from w4conv.container import open_container
from w4conv.errors import InputError, UsageError
from w4conv.exports import DEFAULT_SHARD_SIZE, DTYPES, FORMATS, STACKED, plan_of
from w4conv.exports.model import ExportModel
from w4conv.exports.plan import Options, Plan
from w4conv.exports.report import ExportReport, make_report
from w4conv.files.overlap import refuse_origin, refuse_overlap
from w4conv.progress import Progress, Silent
from w4conv.sizes import nbytes_of


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: str,
    dtype: str | None = None,
    max_shard_size: str | int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the container `path` as `out` in another format.

    to: one of FORMATS; "gguf" is a file ("-" is standard output), the others are directories, in the layout of
    Hugging Face but for "onnx". dtype: "f16", "bf16" or "f32", for tensors that the format does not hold coded; None is
    the default of the format. max_shard_size: most bytes of tensors in one safetensors file ("500MB", or a
    number; None is 5GB).
    dry_run: plan and check everything but values, write nothing.

    The report says of every kind of tensor whether its float32 values are those of the container; rounding is measured,
    not assumed. The output appears whole under its name or not at all; the same container and options give the same
    bytes. Raises UsageError, InputError (a damaged container, a model or tokenizer that the format cannot hold, a value
    beyond the range of dtype), OutputError.
    """
    started = time.perf_counter()
    path, out = path_of(path, "path"), path_of(out, "out")
    if to not in FORMATS:
        raise UsageError(f"unknown format {to!r}; choose one of {', '.join(FORMATS)}")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    values = {"to": to, "dtype": dtype, "max_shard_size": max_shard_size, "out": out, "overwrite": overwrite}
    refuse_idle("export", values)
    shard_size = DEFAULT_SHARD_SIZE if max_shard_size is None else max_shard_size
    options = Options(to, dtype, nbytes_of(shard_size, "max-shard-size"))
    refuse_overlap([out], container=path)
    with open_container(path) as container:
        refuse_origin(out, container.provenance, container.source_digests)
        model = ExportModel(container)
        if model.stacks and to not in STACKED:
            raise InputError(
                f"{path}: {model.stacks[0]} holds the matrices of all experts in one tensor, for which {to} has no "
                f"place. {model.spec.architecture} can be exported to {' and '.join(STACKED)}"
            )
        plan = plan_of(model, options)
        if dtype is not None:
            refuse_idle("export", values | {"has_floats": _depends_on_dtype(model, options, plan)})
        plan.check(out, overwrite=overwrite)
        if not dry_run:
            plan.write(out, overwrite=overwrite, progress=progress or Silent())
        return make_report(container, plan, out, seconds=None if dry_run else time.perf_counter() - started)


def _depends_on_dtype(model: ExportModel, options: Options, plan: Plan) -> bool:
    """Whether another dtype would give another export."""
    other = "f16" if options.dtype == "f32" else "f32"
    try:
        otherwise = plan_of(model, replace(options, dtype=other))
    except (InputError, UsageError):
        return True
    return _types(plan) != _types(otherwise)


def _types(plan: Plan) -> list[str]:
    return [output.dtype for tensor in plan.tensors for output in tensor.outputs]
