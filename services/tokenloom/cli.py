"""The `tokenloom` command: one word says which program, the rest are its flags."""

from __future__ import annotations

import importlib
import sys

from tokenloom import __version__
from tokenloom.common.errors import SetupError
from tokenloom.common.stage import run_main

_PROGRAMS = {
    "serve": ("launcher.__main__", "all stages on this machine; start here"),
    "gateway": ("gateway.__main__", "HTTP in OpenAI's format"),
    "tokenizer": ("tokenizer.__main__", "text to tokens and back; the public gRPC API"),
    "scheduler": ("scheduler.__main__", "the engine core: batching plan and KV block table"),
    "executor": ("executor.__main__", "model, KV memory and sampling"),
    "record": ("replay.record", "write the scheduler's last steps into a file"),
    "replay": ("replay.__main__", "feed recorded steps to an executor and compare every token"),
    "conformance": ("conformance.__main__", "check an executor against the protocol"),
}
_STAGES = ("gateway", "tokenizer", "scheduler", "executor")


def main() -> None:
    """Run the program that the command line names; ends the process with its exit code."""
    word, flags = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    extra = word if word in _STAGES else "all"
    sys.exit(run_main(lambda: _run(word, flags), extra))


def _run(word: str, flags: list[str]) -> int:
    if word in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0
    if word in ("-V", "--version", "version"):
        sys.stdout.write(f"tokenloom {__version__}\n")
        return 0
    if word not in _PROGRAMS:
        raise SetupError(f"unknown program {word!r}; one of: {', '.join(_PROGRAMS)}")
    module, _ = _PROGRAMS[word]
    code: int = importlib.import_module(f"tokenloom.{module}").main(flags)
    return code


def _help() -> str:
    lines = [f"  {word:<12}{text}" for word, (_, text) in _PROGRAMS.items()]
    return "\n".join(
        [
            "usage: tokenloom PROGRAM [options]",
            "",
            "LLM inference as gRPC services, one per pipeline stage.",
            "",
            *lines,
            "",
            "tokenloom PROGRAM --help lists a program's options; each has a TOKENLOOM_* environment twin.",
            "",
        ]
    )
