"""The rules of the house that a machine can hold: which way imports run, and what stays out of `import w4conv`."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import w4conv

PACKAGE = Path(w4conv.__file__).parent
# Rooms, and the modules beside them, lowest first. A room imports from itself and from what stands before it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("arrays", "errors", "progress"),
    ("arguments", "elementary", "scheme", "sizes", "workers"),
    ("codes", "cpus"),
    ("files",),
    ("kernels", "models"),
    ("container", "sources"),
    ("quantization",),
    ("runtime",),
    ("measure",),
    ("calibration",),
    ("conversion", "exports"),
    ("commands",),
    ("cli",),
    ("__main__",),
)


PAGE = Path(__file__).parents[2] / "docs/architecture.md"
BEGIN, END = "<!-- rooms: written by tests/unit/test_house.py -->", "<!-- end -->"


def rank(room: str) -> int:
    return next(i for i, rooms in enumerate(LAYERS) if room in rooms)


def subject(room: str) -> str:
    """The first sentence of its docstring."""
    path = PACKAGE / room / "__init__.py" if (PACKAGE / room).is_dir() else PACKAGE / f"{room}.py"
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    return " ".join(first.split()).split(". ")[0].removesuffix(".")


def table() -> str:
    """The rooms, highest first; those of one layer stand side by side."""
    lines = ["| layer | room | what it holds |", "|---|---|---|"]
    for layer in range(len(LAYERS) - 1, -1, -1):
        for room in LAYERS[layer]:
            name = f"{room}/" if (PACKAGE / room).is_dir() else f"{room}.py"
            lines.append(f"| {layer} | `{name}` | {subject(room)} |")
    return "\n".join(lines)


def imports() -> Iterator[tuple[str, str, str]]:
    """(file, its room, a room or outside package that it imports)."""
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        room = relative.parts[0].removesuffix(".py")
        if room == "__init__":
            continue  # names the public API, lazily
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                submodules = [f"{node.module}.{alias.name}" for alias in node.names]
                names = submodules if node.module == "w4conv" else [node.module]
            for name in names:
                parts = name.split(".")
                yield str(relative), room, parts[1] if parts[0] == "w4conv" and len(parts) > 1 else f":{parts[0]}"


def test_imports_run_one_way() -> None:
    checked = 0
    for file, room, target in imports():
        if target.startswith((":", "__")) or target in ("_native", room):
            continue
        assert rank(target) < rank(room), f"{file} imports {target}, which does not lie below {room}"
        checked += 1
    assert checked > 50


def test_every_room_has_a_layer_and_a_subject() -> None:
    found = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    rooms = [room for rooms in LAYERS for room in rooms]
    assert sorted(rooms) == sorted(found - {"__init__", "__pycache__"})
    assert [room for room in rooms if not subject(room)] == []


def test_the_table_of_rooms() -> None:
    page = PAGE.read_text()
    assert BEGIN in page
    assert page.split(BEGIN)[1].split(END)[0].strip() == table(), "run: python tests/unit/test_house.py"


def module_imports() -> dict[str, set[str]]:
    """Module -> modules of the package that it imports, for types only too. Without the package itself, whose names
    are lazy."""
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inside = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                names |= {full if full in modules else node.module for full in inside.values()}
        found[module] = (names & set(modules)) - {module, "w4conv"}
    return found


def test_no_circle_of_imports() -> None:
    edges = module_imports()
    assert len(edges) > 100
    graphlib.TopologicalSorter(edges).prepare()  # raises CycleError, which names one


@pytest.mark.parametrize("library", ["typer", "tqdm", "click"])
def test_terminal_libraries_stay_in_cli(library: str) -> None:
    users = {room for _, room, target in imports() if target == f":{library}"}
    assert users <= {"cli"}


def test_who_imports_the_native_module() -> None:
    users = {(room, file) for file, room, target in imports() if target == "_native" and room != "kernels"}
    assert {file for _, file in users} == {
        "runtime/native_model.py",
        "runtime/package_tokenizer.py",
        "runtime/tokenizer_file.py",
    }


def test_no_private_name_crosses_rooms() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("w4conv"):
                continue
            names = [*(node.module or "").split(".")[1:], *(alias.name for alias in node.names)]
            if (node.module or "").split(".")[1:2] == [room] or names[:1] == [room]:
                continue
            private = [n for n in names if n.startswith("_") and n not in ("_native", "__version__")]
            assert not private, f"{path.relative_to(PACKAGE)} imports {private} of another room"


def test_the_api_loads_without_the_command_line() -> None:
    code = (
        "import sys, w4conv; w4conv.quantize, w4conv.open, w4conv.verify, w4conv.Model;"
        "print([m for m in ('typer', 'tqdm', 'click', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_functions_of_the_api_stay_functions() -> None:
    """A submodule of the same name would take a function's place as soon as something imports it."""
    import w4conv.cli.main  # imports everything below it

    for name in ("quantize", "verify", "open", "Model"):
        assert callable(getattr(w4conv, name)), name
        assert not (PACKAGE / name).exists()
        assert not (PACKAGE / f"{name}.py").exists()


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")
