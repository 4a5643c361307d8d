"""The `w4conv` command: wiring only. Each command has a file, and loads the rest of the package when it is called."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer
import typer.core
import typer.main

from w4conv import __version__
from w4conv.cli import _errors, _output, _streams
from w4conv.commands.options import refuse_idle
from w4conv.errors import UsageError

EPILOG = """\
\b
Exit codes:
    0  done
    1  a check did not hold, or diff found differences
    2  usage: impossible or contradictory options
    3  input missing, corrupt or unsupported
    4  output could not be written
    5  internal error
  130  interrupted

\b
Results go to standard output, everything else to standard
error. W4CONV_DEBUG=1 shows tracebacks, W4CONV_ISA forces
an ISA tier.

\b
Examples:
  w4conv quantize SmolLM2-135M/ smol.w4
  w4conv inspect smol.w4
  w4conv verify smol.w4 --against SmolLM2-135M/
  w4conv diff smol.w4 other.w4 --source SmolLM2-135M/
  w4conv run smol.w4 -p 'Once upon a time'
  w4conv export smol.w4 smol.gguf --to gguf
"""


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """A command that says so when a file is shortened under it. All but inspect, which touches headers only."""

    @functools.wraps(command)
    def call(*args: object, **options: object) -> None:
        from w4conv import kernels

        kernels.explain_sigbus()
        command(*args, **options)

    return call


class _Command(typer.core.TyperCommand):
    """A command each of whose options acts, or is refused."""

    def invoke(self, ctx: Any) -> Any:
        given = {name for name in ctx.params if ctx.get_parameter_source(name).name == "COMMANDLINE"}
        for name, value in ctx.params.items():
            if "" in (value if isinstance(value, list | tuple) else [value]) and (self.name, name) != ("run", "prompt"):
                what = next(
                    p.opts[0] if p.param_type_name == "option" else p.make_metavar(ctx)
                    for p in self.params
                    if p.name == name
                )
                raise UsageError(
                    f"{what} is empty. Give it a value, or leave it out; in a script, see the variable it comes from"
                )
        refuse_idle(str(self.name), ctx.params, given)
        return super().invoke(ctx)


app = typer.Typer(
    name="w4conv",
    epilog=EPILOG,
    rich_markup_mode=None,  # plain help: no boxes, right in any width and in a file
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order of the help. Each has a file here with a function of its name, EPILOG, and REPORT, the class of what
# --json writes (docs/contributing.md, Adding things).
COMMANDS: Final = ("quantize", "calibrate", "inspect", "verify", "diff", "run", "export", "bench", "cat")
for name in COMMANDS:
    module = importlib.import_module(f"w4conv.cli.{name}")
    command = getattr(module, name)
    app.command(epilog=module.EPILOG, cls=_Command)(command if name == "inspect" else _guarded(command))


def _show_version(value: bool) -> None:
    if not value:
        return
    from w4conv import kernels

    used = kernels.isa_tier()
    tiers = ", ".join(kernels.isa_tiers())
    _output.write(f"w4conv {__version__}\nISA tiers: {tiers}; in use: {used}\nbuild: {kernels.build_info()}\n")
    raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Version, ISA tiers and build")
    ] = False,
) -> None:
    """Convert language-model checkpoints to .w4, a memory-mapped 4-bit container, and prove the result."""
    if context.invoked_subcommand is None:
        _output.write(context.get_help() + "\n", stream=sys.stderr)
        raise typer.Exit(_errors.USAGE)


def main() -> None:
    """Entry point: runs one command and exits with its code."""
    # numpy's BLAS has nothing to do here, and its threads spin when they start: 60 ms where the cores are wanted.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _streams.settle()
    try:
        code = _run(sys.argv[1:])
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # reported before, or a reader that is gone
                _streams.abandon(stream)
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    try:
        _streams.handle_signals(_terminate)
        command = typer.main.get_command(app)
        if "_W4CONV_COMPLETE" in os.environ:
            command.main(prog_name="w4conv")  # a shell asks for completions; exits
        # Not command.main(): it has messages and exit codes of its own.
        with command.make_context("w4conv", arguments) as context:
            command.invoke(context)
        return 0
    except typer.Exit as exit_:
        return exit_.exit_code
    except KeyboardInterrupt as interrupt:
        _errors.print_message("note", str(interrupt) or "interrupted")
        return _errors.INTERRUPTED
    except BrokenPipeError:  # no error: the reader has had enough
        _streams.abandon(sys.stdout)
        return 0
    except Exception as error:
        return _errors.report(error)


def _terminate(number: int, _frame: object) -> None:
    """SIGTERM and SIGHUP clean up as an exception does: temporary files go."""
    sys.exit(128 + number)
