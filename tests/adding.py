"""Where a scheme, an activation, an architecture, a command and an ISA tier have to be named.

`python tests/adding.py` lists what lacks. The names come from where each is registered: w4conv/scheme.py,
w4conv/models/activations.py, w4conv/models/__init__.py, w4conv/cli/main.py, native/cmake/isa.cmake.
docs/contributing.md explains each place.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]


def missing() -> list[str]:
    """A line for each place that lacks a name."""
    from w4conv.models import FAMILIES
    from w4conv.models.activations import ACTIVATIONS
    from w4conv.scheme import KINDS

    found = [line for kind in KINDS for line in missing_of_scheme(kind)]
    found += [line for name in ACTIVATIONS for line in missing_of_activation(name)]
    architectures = [item for family in FAMILIES for item in family.ARCHITECTURES.items()]
    found += [line for name, model_type in architectures for line in missing_of_architecture(name, model_type)]
    found += [line for name in sorted(commands()) for line in missing_of_command(name)]
    return found + [line for name in tiers() for line in missing_of_tier(name)]


def read(path: str) -> str:
    file = ROOT / path
    return file.read_text() if file.is_file() else ""


def native() -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / "native").rglob("*")):
        if path.suffix in (".cpp", ".h"):
            yield path, path.read_text()


def unmet(what: str, places: dict[str, bool]) -> list[str]:
    return [f"{what}: {place}" for place, there in places.items() if not there]


def missing_of_scheme(kind: str) -> list[str]:
    from w4conv.scheme import KINDS

    rows = [line for line in read("formats/w4-codes.md").splitlines() if line.startswith("| `")]
    facts = KINDS[kind]
    places = {
        "formats/w4-codes.md, the table of 2.1": any(f"`{kind}`" in row for row in rows),
        "formats/w4-index.schema.json, the schemes": kind in _enums(json.loads(read("formats/w4-index.schema.json"))),
        "formats/c/w4_reader.h, the names of schemes": f'"{kind}"' in read("formats/c/w4_reader.h"),
        "formats/vectors/writer.py, BITS": f'"{kind}": {facts.bits}' in read("formats/vectors/writer.py"),
        "formats/vectors/valid, a vector": f'"{kind}"' in read("formats/vectors/manifest.json")
        or any(f'"scheme":"{kind}"'.encode() in file.read_bytes() for file in (ROOT / "formats").rglob("*.w4")),
        "native: the name in the bindings": any(
            f'"{kind}"' in text for path, text in native() if "bindings" in path.parts
        ),
        "docs/formats.md": kind in read("docs/formats.md"),
    }
    if facts.is_rounded_to and not facts.is_float:
        places["w4conv/quantization/reference.py, how values are rounded"] = _is_rounded(kind)
        places["w4conv/scheme.py, SCHEME_WORDS: a word of --scheme"] = _has_word(kind)
    if facts.takes_integers:
        places["docs/numerics.md, section 2"] = kind in read("docs/numerics.md")
    return unmet(f"scheme {kind}", places)


def _enums(node: object) -> set[object]:
    """All words that a JSON Schema lists."""
    if isinstance(node, dict):
        return set(node.get("enum", [])) | {word for member in node.values() for word in _enums(member)}
    return {word for member in node for word in _enums(member)} if isinstance(node, list) else set()


def _is_rounded(kind: str) -> bool:
    from w4conv.quantization import reference
    from w4conv.scheme import KINDS, QuantScheme

    if KINDS[kind].has_shifts:
        return True  # kernels.quantize_rtn rounds to every such grid

    ways: tuple[Callable[..., object], ...] = (reference.quantize_rtn, reference.quantize_codes)
    for way in ways:
        try:
            way(np.ones((1, 32), np.float32), QuantScheme(kind, 32, "f16"))
        except ValueError:
            continue
        return True
    return False


def _has_word(kind: str) -> bool:
    from w4conv.scheme import SCHEME_WORDS

    return any(kind == linear for linear, _ in SCHEME_WORDS.values())


def missing_of_activation(name: str) -> list[str]:
    onnx = read("w4conv/exports/onnx_graph.py") + read("w4conv/exports/onnx.py")
    places = {
        "native: the name in the bindings": any(
            f'"{name}"' in text for path, text in native() if "bindings" in path.parts
        ),
        "w4conv/models/spec.py, ModelSpec.activation": f'"{name}"' in read("w4conv/models/spec.py"),
        "w4conv/exports/onnx_graph.py, its nodes, or NO_NODES of onnx.py": f'"{name}"' in onnx,
    }
    return unmet(f"activation {name}", places)


def missing_of_architecture(name: str, model_type: str) -> list[str]:
    places = {
        "tests/differential/test_families.py, NAMES and MORE": name in read("tests/differential/test_families.py"),
        "docs/architectures.md, which that test writes": name in read("docs/architectures.md"),
        "tests/golden/checkpoints.py, a checkpoint": f'"{name}"' in read("tests/golden/checkpoints.py"),
        "tests/reference_forward/config.py, its row": f'"{model_type}"' in read("tests/reference_forward/config.py"),
    }
    return unmet(f"architecture {name}", places)


def commands() -> set[str]:
    """Every name that stands in one of the places: a forgotten registration is found too."""
    from w4conv.cli.main import COMMANDS
    from w4conv.commands import options

    files = {path.stem for folder in ("cli", "commands") for path in (ROOT / "w4conv" / folder).glob("[a-z]*.py")}
    return (files - {"main", "options"}) | set(COMMANDS) | set(options.COMMANDS)


def missing_of_command(name: str) -> list[str]:
    from w4conv.cli.main import COMMANDS
    from w4conv.commands import options

    module = f"w4conv.cli.{name}"
    cli = importlib.import_module(module) if importlib.util.find_spec(module) else None
    pages = (f"## w4conv {name}\n", read("docs/cli.md")), (f"## w4conv.{name}/", read("docs/json.md"))
    places = {
        "w4conv/cli/main.py, COMMANDS": name in COMMANDS,
        f"w4conv/cli/{name}.py": cli is not None,
        f"w4conv/cli/{name}.py, the function {name}": callable(getattr(cli, name, None)),
        f"w4conv/cli/{name}.py, EPILOG with examples": "Examples:" in getattr(cli, "EPILOG", ""),
        f"w4conv/cli/{name}.py, REPORT: what --json writes": hasattr(cli, "REPORT"),
        f"w4conv/commands/{name}.py, the use case": (ROOT / "w4conv" / "commands" / f"{name}.py").is_file(),
        "w4conv/commands/options.py, when each option acts": name in options.COMMANDS,
        "docs/cli.md: python -m w4conv.cli._reference > docs/cli.md": pages[0][0] in pages[0][1],
        "docs/json.md: python -m w4conv.cli._schemas > docs/json.md": pages[1][0] in pages[1][1],
        f"tests/cli/test_{name}_command.py": (ROOT / "tests" / "cli" / f"test_{name}_command.py").is_file(),
    }
    return unmet(f"command {name}", places)


def tiers() -> list[str]:
    return re.findall(r"set\(W4CONV_FLAGS_(\w+)", read("native/cmake/isa.cmake"))


def missing_of_tier(name: str) -> list[str]:
    """What compiles it, and what chooses it; tests/native runs on every tier that the build and the CPU have."""
    table = re.compile(rf"\bk{name}kernels\b|\b{name}::kKernels\b", re.IGNORECASE)
    texts = list(native())
    places = {
        f"native/src/kernels/{name}.cpp": any(path.name == f"{name}.cpp" for path, _ in texts),
        "native/src/dispatch.cpp, its table and what it asks of the CPU": any(
            path.name == "dispatch.cpp" and table.search(text) for path, text in texts
        ),
    }
    return unmet(f"ISA tier {name}", places)


if __name__ == "__main__":
    for line in missing():
        print(line)
