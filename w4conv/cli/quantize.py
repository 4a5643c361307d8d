"""`w4conv quantize IN OUT`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from w4conv.cli import _output
from w4conv.cli._errors import print_message
from w4conv.cli._options import Json, SpecialTokens, Threads, one_of
from w4conv.cli._progress import progress_bar
from w4conv.files.streams import is_stdout
from w4conv.scheme import GROUP_WORDS, SCHEME_WORDS, TENSOR_WORDS

if TYPE_CHECKING:
    from w4conv.commands.quantize import ConversionReport

RECIPES = ("small", "values", "mixed")
PRESETS = ("smallest", "balanced", "quality")
CALIBRATED = ("w4a16", "int4z", "nl4", "nl3", "nf4", "fp4")
METHODS = ("rtn", "search", "awq", "gptq", "best")
EMBEDDINGS = ("int8", *(word for word in TENSOR_WORDS if word != "int8"))
REPORT = ("w4conv.commands.quantize", "ConversionReport")
EPILOG = """\
\b
Examples:
  w4conv quantize SmolLM2-135M/ smol.w4
  w4conv quantize model.gguf model.w4 --group-size 64
  w4conv quantize in/ out.w4 --scheme nf4 --group-size 64
  w4conv quantize in/ out.w4 --effort 0
  w4conv quantize in/ out.w4 --preset quality --effort 3
  w4conv quantize in/ out.w4 --calibration book.txt
  w4conv quantize in/ out.w4 --scheme w4a16 --effort 0
  w4conv quantize in/ out.w4 --recipe mine.toml
  w4conv quantize in/ out.w4 --target-bpw 4.5
  w4conv quantize in/ out.w4 --dry-run
  w4conv quantize in/ - | ssh host 'cat > out.w4'

\b
Recipes: a name below, or a TOML file that ends in .toml
  small   embedding and head in int4, group 32: the
          smallest file
  values  8 bits for v_proj, a small matrix that suffers
          most
  mixed   8 bits for v_proj and down_proj

\b
In a file, patterns of names, or the roles embedding, head
and linear, say what differs from the options; the last
pattern that matches counts, for each key by itself:
  [tensors]
  embedding = {scheme = "int4", group = 32}
  "*.layers.0.*" = {scheme = "int8", method = "rtn"}
"""


def quantize(
    source: Annotated[str, typer.Argument(metavar="IN", help="Hugging Face directory or GGUF file")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The .w4 file to write; - for standard output")],
    effort: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=3,
            metavar="0..3",
            help="0 rounds to nearest, in seconds; 1 too, with groups where they count; 2 calibrates; 3 does so on "
            "four times the tokens [default: 2, or 0 where nothing gets fewer than 8 bits]",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(PRESETS),
            help="Scheme and groups in one word: about 4.05, 4.3 or 4.5 bits a weight [default: balanced]",
            autocompletion=one_of(PRESETS),
        ),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEME",
            help=f"Coding of linear weights: {', '.join(SCHEME_WORDS)} [default: keep where IN has codes that can be "
            "kept, else nl4]",
            autocompletion=one_of(SCHEME_WORDS),
        ),
    ] = None,
    group_size: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(GROUP_WORDS),
            help="Weights that share a scale [default: 32 for nl4 and nl3, else 128]",
            autocompletion=one_of(GROUP_WORDS),
        ),
    ] = None,
    embeddings: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEME",
            help=f"Coding of embedding and head: {', '.join(EMBEDDINGS)} [default: int8, or as the scheme where that "
            "is nl4, a float type or keep; nl4 for nl3]",
            autocompletion=one_of(EMBEDDINGS),
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.toml|NAME",
            help="Other schemes, groups or methods for some tensors (see below)",
            autocompletion=one_of(RECIPES),
        ),
    ] = None,
    target_bpw: Annotated[
        str | None,
        typer.Option(
            metavar="BITS",
            help="Choose the scheme of each matrix so that the whole has at most so many bits a weight and loses least",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(METHODS),
            help="How linear weights are rounded [default: best, or rtn with an effort below 2]",
            autocompletion=one_of(METHODS),
        ),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="builtin|TEXT|STATS",
            help="Calibration set: builtin, which comes with w4conv (./builtin is a file); UTF-8 text of the kind that "
            "the model will read; or statistics of one, by w4conv calibrate or llama-imatrix [default: builtin, where "
            "the effort calibrates]",
        ),
    ] = None,
    calibration_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens of the text to use, spread over the whole [default: 8192; 32768 with --effort 3]",
        ),
    ] = None,
    calibration_ctx: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Tokens of a sequence [default: 512, or what the model can take]"),
    ] = None,
    special_tokens: SpecialTokens = None,
    requantize: Annotated[
        bool,
        typer.Option("--requantize", help="Round to nl4 what IN has quantized already and cannot be kept exactly"),
    ] = False,
    threads: Threads = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists")] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on where an interrupted conversion to OUT stopped; the same bytes result"),
    ] = False,
    architecture: Annotated[
        str | None,
        typer.Option(
            metavar="generic",
            help="Convert the matrices of any model; what is written cannot be run",
            autocompletion=one_of(("generic",)),
        ),
    ] = None,
    gptq_zero15: Annotated[
        int | None,
        typer.Option(
            "--gptq-zero15",
            metavar="16|0",
            help="What a stored zero point of 15 means in a GPTQ checkpoint of version 1",
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="stored|tied",
            help="The head: lm_head.weight as stored, or the embedding [default: as transformers]",
            autocompletion=one_of(("stored", "tied")),
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Plan and check everything but values; write no file")
    ] = False,
    json: Json = False,
) -> None:
    """Convert a checkpoint to a .w4 container.

    Weights get 4 bits and, for 32 of them, a scale and a shift (nl4), calibrated on a text that comes with w4conv.
    --effort 0 is quick. Or: symmetric int4 (w4a16), int4 with a zero point (int4z), the 8 levels of nl3, the 16 of nf4
    or fp4, or int8 (w8a16), with a scale for each group. Biases, norms and other vectors keep their type. The same
    input and options give the same bytes. OUT appears whole or not at all: it grows as OUT.partial. What a killed
    conversion left of that is removed by the next one, or continued with --resume.

    The report goes to standard output, or to standard error when OUT is -.
    """
    from w4conv.commands.quantize import quantize as convert

    try:
        with progress_bar() as progress:
            report = convert(
                source,
                out,
                effort=effort,
                preset=preset,
                scheme=scheme,
                group_size=group_size,
                embeddings=embeddings,
                recipe=recipe,
                target_bpw=target_bpw,
                method=method,
                calibration=calibration,
                calibration_tokens=calibration_tokens,
                calibration_ctx=calibration_ctx,
                special_tokens=special_tokens,
                requantize=requantize,
                threads=threads,
                overwrite=overwrite,
                resume=resume,
                architecture=architecture,
                gptq_zero15=gptq_zero15,
                head=head,
                dry_run=dry_run,
                progress=progress,
            )
    except KeyboardInterrupt:
        left = "what was sent is incomplete" if is_stdout(out) else f"{out} was not written"
        if resume and not is_stdout(out):
            left = f"{out} is not complete; --resume goes on"
        raise KeyboardInterrupt(f"interrupted; {left}") from None
    for warning in report.warnings:
        print_message("warning", warning)
    stream = _output.report_stream(out)
    if json:
        _output.write_json("quantize", report, stream=stream)
    else:
        _output.write(as_text(report), stream=stream)


def as_text(report: ConversionReport) -> str:
    verb = "would write" if report.dry_run else "wrote"
    name = _output.output_path(report.out)
    ratio = report.output_nbytes / report.input_nbytes if report.input_nbytes else 0.0
    pairs = [
        (verb, f"{name}, {_output.nbytes(report.output_nbytes)}"),
        ("from", f"{report.source} ({report.source_kind}), {_output.nbytes(report.input_nbytes)}"),
        ("model", f"{report.architecture}, {_output.count(report.n_parameters)} parameters"),
        ("size", f"{ratio:.1%} of the source, {report.bits_per_weight:.3f} bits a weight"),
    ]
    if report.seconds is not None and report.mb_per_second is not None:
        pairs.append(("time", f"{report.seconds:.2f} s, {report.mb_per_second:.0f} MB/s of source"))
    if report.digest is not None:
        pairs.append(("digest", report.digest))
    pairs += [("note", note) for note in report.notes]
    pairs += [("hint", hint) for hint in hints(report)]
    rows = [
        (t.scheme, f"{t.n_tensors:,}", _output.count(t.n_parameters), _output.nbytes(t.nbytes)) for t in report.schemes
    ]
    if report.target_bpw is not None:
        pairs += allocation(report)
    return _output.facts(pairs) + "\n" + _output.table(("scheme", "tensors", "parameters", "size"), rows)


def hints(report: ConversionReport) -> list[str]:
    """What a user may want to know before it is needed elsewhere."""
    found = []
    if report.method == "rtn" and report.effort < 2 and report.scheme in CALIBRATED:
        found.append("--effort 2 calibrates: it takes longer and loses less (docs/accuracy.md)")
    if report.scheme in ("nl4", "nl3"):
        found.append(
            f"exports of {report.scheme} hold its values as floats; --scheme w4a16 has exact ones (docs/formats.md)"
        )
    return found


def allocation(report: ConversionReport) -> list[tuple[str, str]]:
    """What --target-bpw has chosen: how many matrices of each kind have which scheme."""
    found: dict[str, dict[str, int]] = {}
    for name, rule in report.recipe[: report.n_allocated]:
        part = found.setdefault(name.removesuffix(".weight").rpartition(".")[2], {})
        word = f"{rule.scheme}/g{rule.group}"
        part[word] = part.get(word, 0) + 1
    return [
        (part, ", ".join(f"{n} {word}" for word, n in sorted(counts.items(), key=lambda item: -item[1])))
        for part, counts in found.items()
    ]
