"""What is added and not yet everywhere: tests/adding.py names each place that is still missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import adding
import pytest

import w4conv

ROOT = Path(__file__).parents[2]
COMMAND = '''\
"""`w4conv dummy`."""

from __future__ import annotations

from w4conv.cli import _output
from w4conv.cli._options import Json

REPORT = ("w4conv.commands.dummy", "Dummy")
EPILOG = "Examples:\\n  w4conv dummy\\n"


def dummy(json: Json = False) -> None:
    """Answer."""
    from w4conv.commands.dummy import dummy as answer

    if json:
        _output.write_json("dummy", answer())
'''
USE_CASE = '''\
"""dummy: an answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dummy:
    """n: the answer."""

    n: int


def dummy() -> Dummy:
    return Dummy(42)
'''


def test_every_name_is_everywhere() -> None:
    assert adding.missing() == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy in which something may be added."""
    package = Path(w4conv.__file__).parent  # with the native module
    for folder in (package, ROOT / "native"):
        shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "formats").symlink_to(ROOT / "formats")
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("decisions", "*.svg"))
    (tmp_path / "tests" / "cli").mkdir(parents=True)
    for folder in ("differential", "golden", "reference_forward"):
        (tmp_path / "tests" / folder).symlink_to(ROOT / "tests" / folder)
    for test in (ROOT / "tests" / "cli").glob("test_*_command.py"):
        (tmp_path / "tests" / "cli" / test.name).touch()
    shutil.copy(ROOT / "tests" / "adding.py", tmp_path / "tests")
    return tmp_path


def python(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True)


def missing(tree: Path) -> list[str]:
    done = python(tree, "tests/adding.py")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def insert(file: Path, before: str, text: str) -> None:
    content = file.read_text()
    assert content.count(before) == 1
    file.write_text(content.replace(before, text + before))


def test_a_new_scheme(tree: Path) -> None:
    """One line registers it; by itself, it says where else it has to be."""
    line = '    Kind("dummy4", 4, takes_integers=True, is_calibrated=True),\n'
    insert(tree / "w4conv" / "scheme.py", '    Kind("int4o"', line)
    found = missing(tree)
    assert all(text.startswith("scheme dummy4: ") for text in found)
    for place in (
        "formats/w4-codes.md", "formats/w4-index.schema.json", "formats/c/w4_reader.h", "formats/vectors/writer.py",
        "formats/vectors/valid", "native", "docs/formats.md", "w4conv/quantization/reference.py", "SCHEME_WORDS",
        "docs/numerics.md",
    ):  # fmt: skip
        assert sum(place in text for text in found) == 1, place
    assert len(found) == 10
    # Until the kernels know it they refuse, and nothing takes it for another scheme.
    code = (
        "import numpy as np; from w4conv import kernels; from w4conv.scheme import QuantScheme;"
        "kernels.quantize_rtn(np.ones((16, 32), np.float32), 'F32', QuantScheme('dummy4', 32, 'f16'))"
    )
    assert "no kernels for scheme dummy4" in python(tree, "-c", code).stderr


def test_a_new_activation(tree: Path) -> None:
    line = '    Activation("relu2", ("relu2",), linear_in_up=True),\n'
    insert(tree / "w4conv" / "models" / "activations.py", '    Activation("gelu_tanh"', line)
    found = missing(tree)
    assert [text.split(",")[0].split(": ", 1)[1] for text in found] == [
        "native: the name in the bindings", "w4conv/models/spec.py", "w4conv/exports/onnx_graph.py"
    ]  # fmt: skip


def test_a_new_architecture(tree: Path) -> None:
    """A file and a line in FAMILIES: a config of it is read."""
    models = tree / "w4conv" / "models"
    (models / "dummy.py").write_text(
        (models / "llama.py").read_text().replace("Llama", "Dummy").replace("llama", "dummy")
    )
    insert(models / "__init__.py", "    gemma2,\n    gemma3,", "    dummy,\n")
    insert(models / "__init__.py", "    llama, mistral,", "    dummy,\n")
    found = missing(tree)
    assert all(text.startswith("architecture DummyForCausalLM: ") for text in found)
    assert len(found) == 4
    code = "from w4conv.models import check_architecture; check_architecture({'architectures': ['DummyForCausalLM']})"
    assert python(tree, "-c", code).returncode == 0


def test_a_new_command(tree: Path) -> None:
    """Each piece that is put in its place is no longer named; at the end none is."""
    package = tree / "w4conv"
    (package / "commands" / "dummy.py").write_text(USE_CASE)
    found = missing(tree)
    assert all(text.startswith("command dummy: ") for text in found)
    assert len(found) == 9  # all but the use case
    (package / "cli" / "dummy.py").write_text(COMMAND)
    found = missing(tree)
    assert [text.split(": ", 1)[1].split(",")[0].split(":")[0] for text in found] == [
        "w4conv/cli/main.py", "w4conv/commands/options.py", "docs/cli.md", "docs/json.md",
        "tests/cli/test_dummy_command.py",
    ]  # fmt: skip
    main = package / "cli" / "main.py"
    main.write_text(
        main.read_text().replace('COMMANDS: Final = ("quantize", ', 'COMMANDS: Final = ("quantize", "dummy", ')
    )
    insert(package / "commands" / "options.py", '    "inspect": {', '    "dummy": {"json": ALWAYS},\n')
    (tree / "tests" / "cli" / "test_dummy_command.py").touch()
    for module, page in (("_reference", "cli.md"), ("_schemas", "json.md")):
        (tree / "docs" / page).write_text(python(tree, "-m", f"w4conv.cli.{module}").stdout)
    assert missing(tree) == []
    assert '"n": 42' in python(tree, "-m", "w4conv", "dummy", "--json").stdout


def test_a_command_without_its_file_is_an_error_at_import(tree: Path) -> None:
    main = tree / "w4conv" / "cli" / "main.py"
    main.write_text(
        main.read_text().replace('COMMANDS: Final = ("quantize", ', 'COMMANDS: Final = ("quantize", "dummy", ')
    )
    assert "No module named 'w4conv.cli.dummy'" in python(tree, "-m", "w4conv", "--help").stderr


def test_a_new_tier(tree: Path) -> None:
    tiers = tree / "native" / "cmake" / "isa.cmake"
    tiers.write_text(tiers.read_text() + "\nset(W4CONV_FLAGS_dummy512 -mavx10)\n")
    found = missing(tree)
    assert all(text.startswith("ISA tier dummy512: native") for text in found)
    assert len(found) == 2
