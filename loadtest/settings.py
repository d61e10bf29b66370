"""What a load test is told."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Settings:
    """Settings of a load test; `--help` says what each means."""

    url: str
    clients: int
    requests: int
    warmup: int
    prompt_tokens: int
    output_tokens: int
    shared_prefix_tokens: int
    seed: int
    model: str
    api_key: str
    timeout_s: float
    time_limit_s: float
    json_path: str

    @property
    def host(self) -> str:
        """The server's host."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """The server's port."""
        return urlsplit(self.url).port or (443 if self.is_tls else 80)

    @property
    def is_tls(self) -> bool:
        """The URL is https."""
        return urlsplit(self.url).scheme == "https"


def parse_settings(argv: Sequence[str]) -> Settings:
    """Read the command line; ends the program with a message and exit code 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest",
        description="Closed-loop load: each client sends its next request when the last has been answered. Prompts are "
        "seeded random words, unique behind a shared prefix; decoding is greedy and goes on to --output-tokens.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the stack's address")
    parser.add_argument("--allow-remote", action="store_true", help="let --url be another machine than this one")
    parser.add_argument("--clients", type=_positive, default=16, help="requests in flight")
    parser.add_argument("--requests", type=_positive, default=64, help="measured requests")
    parser.add_argument(
        "--warmup", type=_count, default=None, help="unmeasured requests before those; as many as --clients"
    )
    parser.add_argument("--prompt-tokens", type=_positive, default=128, help="words per prompt, about one token each")
    parser.add_argument("--output-tokens", type=_positive, default=128, help="tokens to generate per request")
    parser.add_argument("--shared-prefix-tokens", type=_count, default=0, help="words that all prompts begin with")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--model", default="", help="model to ask; empty: the one served")
    parser.add_argument("--api-key", default="", help="key to send")
    parser.add_argument("--timeout-s", type=_seconds, default=300.0, help="limit of a request, in seconds")
    parser.add_argument("--time-limit-s", type=_seconds, default=900.0, help="limit of the whole test, in seconds")
    parser.add_argument("--json", dest="json_path", default="", metavar="FILE", help="write the figures there too")
    given = vars(parser.parse_args(argv))
    allow_remote = given.pop("allow_remote")
    if given["warmup"] is None:
        given["warmup"] = given["clients"]
    settings = Settings(**given)
    if urlsplit(settings.url).scheme not in ("http", "https") or not settings.host:
        parser.error(f"--url: {settings.url!r} is no http:// address")
    if settings.host not in _LOOPBACK and not allow_remote:
        parser.error(f"--url: {settings.host} is not this machine; add --allow-remote if that is meant")
    if settings.shared_prefix_tokens >= settings.prompt_tokens:
        parser.error("--shared-prefix-tokens must be less than --prompt-tokens")
    return settings


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 0:
        raise ValueError
    return value


def _seconds(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise ValueError
    return value
