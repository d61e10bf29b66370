"""The layers of the code base, held by a test (house rules; see the README's layout)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "services" / "tokenloom"
SERVICES = ("gateway", "tokenizer", "scheduler", "executor", "launcher", "replay", "conformance")
# What the pure core may import: nothing with a clock, I/O, randomness, threads or an environment.
PURE = {
    *("__future__", "abc", "array", "bisect", "collections", "contextlib", "dataclasses", "enum", "functools"),
    *("hashlib", "heapq", "itertools", "math", "operator", "struct", "sys", "typing"),
}
MAY_USE_GRPC = (
    "servicer",
    "client",
    "stage",
    "readiness",
    "convert",
    "session",
    "pool",
    "http_errors",
    "tokenizer_pool",
)
IMPURE_CALLS = ("open", "__import__", "exec", "eval", "input", "print")
# What makes channels and servers, with their limits (common/), and the only files that may call it.
MAKES_CHANNELS = ("insecure_channel", "secure_channel", "grpc.server", "aio.server")
CHANNEL_MAKERS = ("common/channel.py", "common/grpc_server.py")
ENVIRONMENT = ("os.environ", "os.getenv", "os.putenv")
MAX_FUNCTION_LINES = 70
MAX_MAIN_LINES = 40
MAX_FILE_LINES = 500


def imported_modules(tree: ast.AST, path: str) -> Iterator[str]:
    """Full names of what a file imports; `from a import b` counts as a and as a.b."""
    package = ["tokenloom", *path.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def violations_of_layers(path: str, tree: ast.AST) -> Iterator[str]:
    service, stem = path.split("/")[0], Path(path).stem
    for module in imported_modules(tree, path):
        top, *rest = module.split(".")
        if (
            path.startswith("scheduler/core/")
            and top not in PURE
            and not f"{module}.".startswith("tokenloom.scheduler.core.")
        ):
            yield f"the core imports {module}"
        if top in ("torch", "safetensors", "accelerate") and service != "executor":
            yield f"imports {module} outside the executor"
        other = rest[0] if top == "tokenloom" and rest else ""
        if other in SERVICES and other != service and service != "cli.py":
            yield f"imports another service: {module}"
        if top == "grpc" and service not in ("common", "api") and not stem.endswith(MAY_USE_GRPC):
            yield "imports grpc outside servicers, clients and common"
        if module in ENVIRONMENT and path != "common/config.py":
            yield f"imports {module}"


def violations(path: str, source: str) -> Iterator[str]:
    """What a file does that its place does not allow; `path` is relative to the package, with forward slashes."""
    tree = ast.parse(source)
    yield from violations_of_layers(path, tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ENVIRONMENT and path != "common/config.py":
            yield f"line {node.lineno}: touches the environment"
        if isinstance(node, ast.Call) and path.startswith("scheduler/core/") and ast.unparse(node.func) in IMPURE_CALLS:
            yield f"line {node.lineno}: the core calls {ast.unparse(node.func)}"
        if (
            isinstance(node, ast.Call)
            and path not in CHANNEL_MAKERS
            and ast.unparse(node.func).endswith(MAKES_CHANNELS)
        ):
            yield f"line {node.lineno}: makes a channel or a server outside common/"
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


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("scheduler/core/x.py", "import torch"),
        ("scheduler/core/x.py", "import asyncio"),
        ("scheduler/core/x.py", "import datetime"),
        ("scheduler/core/x.py", "from time import monotonic"),
        ("scheduler/core/x.py", "from tokenloom.scheduler.engine import Engine"),
        ("scheduler/core/x.py", "from .. import engine"),
        ("scheduler/core/x.py", "open('file')"),
        ("scheduler/core/x.py", "__import__('torch')"),
        ("tokenizer/x.py", "import torch"),
        ("gateway/x.py", "from tokenloom.scheduler.core.plan import SchedulerOutput"),
        ("gateway/x.py", "from tokenloom import executor"),
        ("gateway/x.py", "from ..scheduler import engine"),
        ("gateway/x.py", "import os\nos.environ['A']"),
        ("gateway/x.py", "from os import environ"),
        ("gateway/formats.py", "import grpc"),
        ("common/x.py", "import tokenloom.executor"),
        ("tokenizer/x_client.py", "import grpc\ngrpc.aio.insecure_channel('a')"),
        ("executor/servicer.py", "import grpc\ngrpc.aio.server()"),
        ("gateway/__main__.py", "\n" * 60),
        ("gateway/x.py", "def f():\n" + "    pass\n" * 80),
    ],
)
def test_the_check_sees_what_it_must_see(path: str, source: str) -> None:
    assert list(violations(path, source))


def test_the_check_lets_good_files_pass() -> None:
    assert not list(violations("scheduler/core/x.py", "import hashlib\nfrom tokenloom.scheduler.core import plan\n"))
    assert not list(violations("gateway/tokenizer_client.py", "import grpc\nfrom tokenloom.common import errors\n"))


def test_the_readme_has_no_gap_and_names_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert "@@" not in text
    for name in re.findall(r"`((?:gateway|tokenizer|scheduler|executor)/[\w/]+\.py)`", text):
        assert (SOURCE / name).is_file(), name
    for name in re.findall(r"`((?:protos|services|tests|loadtest)/[\w/.]+)`", text):
        assert (ROOT / name).exists(), name
