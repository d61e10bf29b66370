"""The layers of the code base, held by a test (house rules; see the README's layout)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "services" / "tokenloom"
SERVICES = ("gateway", "tokenizer", "scheduler", "executor", "launcher")
MAY_USE_GRPC = ("servicer", "client", "stage", "readiness", "convert", "session", "pool", "http_errors")
IMPURE = ("asyncio", "time", "random", "secrets", "os", "io", "socket", "threading", "subprocess", "pathlib", "logging")
ENVIRONMENT = ("os.environ", "os.getenv", "os.putenv")
MAX_FUNCTION_LINES = 70
MAX_MAIN_LINES = 40
MAX_FILE_LINES = 500


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def is_pure(module: str) -> bool:
    top = module.split(".")[0]
    return module.startswith("tokenloom.scheduler.core") or (top in sys.stdlib_module_names and top not in IMPURE)


def violations(path: str, source: str) -> Iterator[str]:
    """What a file does that its place does not allow; `path` is relative to the package, with forward slashes."""
    tree = ast.parse(source)
    service = path.split("/")[0]
    for module in imported_modules(tree):
        top, _, rest = module.partition(".")
        if path.startswith("scheduler/core/") and not is_pure(module):
            yield f"the core imports {module}"
        if top in ("torch", "safetensors", "accelerate") and service != "executor":
            yield f"imports {module} outside the executor"
        other = rest.split(".")[0]
        if top == "tokenloom" and service in SERVICES and other in SERVICES and other != service:
            yield f"imports another service: {module}"
        if top == "grpc" and service not in ("common", "api") and not any(w in path for w in MAY_USE_GRPC):
            yield "imports grpc outside servicers, clients and common"
        if service == "common" and other in SERVICES:
            yield f"common imports a service: {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ENVIRONMENT and path != "common/config.py":
            yield f"line {node.lineno}: touches the environment"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{node.name} has {length} lines"
    limit = MAX_MAIN_LINES if path.endswith("__main__.py") else MAX_FILE_LINES
    if (lines := source.count("\n")) > limit:
        yield f"has {lines} lines, more than {limit}"


def test_every_file_keeps_to_its_layer() -> None:
    found = [
        f"{path}: {violation}"
        for file in sorted(SOURCE.rglob("*.py"))
        if not (path := file.relative_to(SOURCE).as_posix()).startswith("api/")
        for violation in violations(path, file.read_text())
    ]
    assert not found, "\n".join(found)


def test_the_check_sees_what_it_must_see() -> None:
    assert list(violations("scheduler/core/x.py", "import torch\n"))
    assert list(violations("scheduler/core/x.py", "import asyncio\n"))
    assert list(violations("scheduler/core/x.py", "from tokenloom.scheduler.engine import Engine\n"))
    assert list(violations("tokenizer/x.py", "import torch\n"))
    assert list(violations("gateway/x.py", "from tokenloom.scheduler.core.plan import SchedulerOutput\n"))
    assert list(violations("gateway/x.py", "import os\nos.environ['A']\n"))
    assert list(violations("gateway/formats.py", "import grpc\n"))
    assert not list(violations("scheduler/core/x.py", "import hashlib\n"))
