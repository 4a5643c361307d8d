"""Make the vectors of the `.w4` container, byte for byte the same on every machine.

python formats/vectors/make.py            write valid/, invalid/ and manifest.json; compat/ is only ever added to
python formats/vectors/make.py --check    compare what is there with what would be written
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from faults import data_faults, faults_of_1_1, header_faults, index_faults, order_faults, text_faults
from sound import example, released, valid
from writer import File, Index, digest, put_together

HERE = Path(__file__).parent
VERSIONS = ("1.0", "1.1")

# MUSTs that no file can break, since they bind programs; each has a test.
OBLIGATIONS = {
    "w4-container 1.6/1": "tests/conformance/test_c_reader.py::test_mutated_files",
    "w4-container 2.3/2": "tests/conformance/test_vectors.py::test_released_files_are_read",
    "w4-container 3.5/4": "tests/conformance/test_vectors.py::test_valid_files",
    "w4-container 3.5/5": "tests/unit/test_convert.py::test_the_record",
    "w4-container 6.2/1": "tests/unit/test_convert.py::test_bytes_depend_on_nothing_but_the_input",
    "w4-container 6.3/1": "tests/unit/test_container.py::test_the_writer_refuses_parts_out_of_turn",
    "w4-container 6.4/1": "tests/unit/test_convert.py::test_values_that_cannot_be_coded",
    "w4-container 7.1/1": "tests/conformance/test_vectors.py::test_invalid_files",
    "w4-container 7.2/1": "tests/conformance/test_vectors.py::test_invalid_files",
    "w4-container 7.3/1": "tests/conformance/test_vectors.py::test_streams",
    "w4-container 7.4/1": "tests/conformance/test_vectors.py::test_refusing_takes_little_memory",
    "w4-container 7.4/2": "tests/conformance/test_c_reader.py::test_mutated_files",
    "w4-container 7.5/1": "tests/conformance/test_vectors.py::test_padding_changes_no_value",
    "w4-codes 3.5/2": "tests/conformance/test_vectors.py::test_padding_changes_no_value",
    "w4-codes 6.4/1": "tests/unit/test_convert.py::test_values_that_cannot_be_coded",
}


def describe(raw: bytes, file: File) -> Index:
    """What a reader has to find in a valid file."""
    return {
        "nbytes": len(raw),
        "blake3": digest(raw).hex(),
        "conversion_digest": raw[-32:].hex(),
        "tensors": [
            {"name": t.entry["name"], "shape": t.entry["shape"], "scheme": t.entry["scheme"],
             "values_blake3": digest(t.values).hex()}
            for t in file.values
        ],
    }  # fmt: skip


def qualified(must: str) -> str:
    return f"w4-{must}" if " " in must else f"w4-container {must}"


def everything() -> dict[str, bytes]:
    """Path below this folder -> content, compat/ aside."""
    files: dict[str, bytes] = {}
    manifest: Index = {"format": f"w4-container {VERSIONS[-1]}", "valid": [], "invalid": [], "obligations": OBLIGATIONS}
    for name, about, file in [*valid(), ("worked-example", "the file of w4-container 8", example())]:
        path = f"valid/{name}.w4"
        files[path] = put_together(file)
        manifest["valid"].append({"file": path, "about": about, **describe(files[path], file)})
    makers = (header_faults, text_faults, index_faults, order_faults, data_faults, faults_of_1_1)
    for fault in [fault for maker in makers for fault in maker()]:
        path = f"invalid/{fault.clause}-{fault.name}.w4.gz"
        chapter, number = fault.clause.split(".")
        entry = {
            "file": path, "nbytes": len(fault.raw), "blake3": digest(fault.raw).hex(), "clause": fault.clause,
            "code": 100 * int(chapter) + int(number), "found_by": fault.found_by,
            "breaks": [qualified(must) for must in fault.breaks],
        }  # fmt: skip
        assert path not in files
        files[path] = fault.raw
        manifest["invalid"].append(entry)
    manifest["compat"] = []
    about = {
        "1.0": "a tensor of every scheme, with both kinds of scales",
        "1.1": "what is new: every scheme under scales of two levels, and in groups of 16",
    }
    for version in VERSIONS:
        kept = released(version)
        path = f"compat/{version}/every-scheme.w4"
        files[path] = put_together(kept)
        manifest["compat"].append({"file": path, "about": about[version], **describe(files[path], kept)})
    files["manifest.json"] = json.dumps(manifest, indent=1, ensure_ascii=True).encode() + b"\n"
    return files


def read(path: Path) -> bytes:
    """The content: files of invalid/ are compressed, since they are mostly zeros, or 4 MB of commas."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def differences(files: Mapping[str, bytes]) -> list[str]:
    """What is missing, different or left over on disk."""
    found = {p.relative_to(HERE).as_posix() for kind in ("valid", "invalid") for p in (HERE / kind).rglob("*")}
    wrong = [f"{path}: no longer made" for path in sorted(found - files.keys())]
    for path, content in files.items():
        if not (HERE / path).exists():
            wrong.append(f"{path}: missing")
        elif read(HERE / path) != content:
            wrong.append(f"{path}: differs")
    return wrong


def main() -> int:
    files = everything()
    if "--check" in sys.argv[1:]:
        wrong = differences(files)
        sys.stdout.write(("\n".join(wrong) or f"{len(files)} files are as made") + "\n")
        return 1 if wrong else 0
    for old in [p for kind in ("valid", "invalid") for p in (HERE / kind).glob("*")]:
        if old.relative_to(HERE).as_posix() not in files:
            old.unlink()
    for path, content in files.items():
        if (HERE / path).exists() and (path.startswith("compat/") or read(HERE / path) == content):
            continue  # what was released stays as it is; another zlib may compress to other bytes
        (HERE / path).parent.mkdir(parents=True, exist_ok=True)
        (HERE / path).write_bytes(gzip.compress(content, mtime=0) if path.endswith(".gz") else content)
    sys.stdout.write(f"{len(files)} files\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
