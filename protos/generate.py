"""Generates the Python code of the protos; the only generator.

    python protos/generate.py            write services/tokenloom/api/v1
    python protos/generate.py --check    fail if what is checked in is not what this would write

The output is checked in, so that users need no compiler; `--check` runs in CI. It must run with the pinned versions
below, since the generated code depends on them.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.metadata
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OUT = ROOT.parent / "services"
PACKAGE = Path("tokenloom/api/v1")
PINNED = {"grpcio-tools": "1.85.1", "mypy-protobuf": "5.1.0"}


def generate(out: Path) -> None:
    """Write the generated modules and their type stubs below `out`."""
    import grpc_tools
    from grpc_tools import protoc

    protos = sorted(str(p.relative_to(ROOT)) for p in (ROOT / PACKAGE).glob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    scripts = Path(sys.executable).parent
    args = [
        "protoc",
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
        f"-I{ROOT}",
        f"-I{well_known}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet,only_async:{out}",
    ]
    if protoc.main([*args, *protos]) != 0:
        raise SystemExit("protoc failed")
    for stub in (out / PACKAGE).glob("*_pb2_grpc.py*"):
        if "class " not in stub.read_text():
            stub.unlink()  # protoc writes empty service modules for files without a service


def differing(fresh: Path, checked_in: Path) -> list[str]:
    """Names of files that are missing, superfluous or different in `checked_in`."""
    names = {p.name for d in (fresh, checked_in) for p in d.glob("*_pb2*.py*")}
    _, mismatch, errors = filecmp.cmpfiles(fresh, checked_in, sorted(names), shallow=False)
    return sorted([*mismatch, *errors])


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Generate the Python code of the protos.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    for name, want in PINNED.items():
        have = importlib.metadata.version(name)
        if have != want:
            raise SystemExit(f"{name} {have} is installed; the generated code is made with {want}: make setup")
    if not check:
        generate(OUT)
        return
    with tempfile.TemporaryDirectory() as fresh:
        generate(Path(fresh))
        if stale := differing(Path(fresh) / PACKAGE, OUT / PACKAGE):
            sys.exit(f"stale: {', '.join(stale)}; run python protos/generate.py")


if __name__ == "__main__":
    main()
