"""Checks of what a caller asked for. Fields are named as in OpenAI's interface, since that is where most callers sit.

`temperature`, the penalties and `top_p` have the ranges that OpenAI documents. Every comparison is written so that NaN
fails it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tokenloom.common.errors import InvalidArgument, NotFound, PermissionDenied
from tokenloom.tokenizer.domain import ChatInput, EngineInfo, GenerationRequest, Options, SamplingParams

MAX_PROMPTS = 1024
MAX_PROMPT_IDS = 1_000_000
MAX_CHOICES_PER_PROMPT = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_REQUEST_ID_CHARS = 256
MAX_CACHE_SALT_CHARS = 1024


def check_request(request: GenerationRequest, engine: EngineInfo, model: str) -> None:
    """Check everything that needs no tokens.

    Raises: NotFound for another model than `model`; PermissionDenied for a more urgent class than the caller may have;
        InvalidArgument naming the field.
    """
    options = request.options
    if options.model not in ("", model):
        raise NotFound(f"there is no model {shortened(options.model)}; this server has {model!r}", field="model")
    _check_class(request)
    if not isinstance(request.input, ChatInput):
        _require(len(request.input.prompts) > 0, "prompt", "at least one prompt is needed")
        _require(len(request.input.prompts) <= MAX_PROMPTS, "prompt", f"at most {MAX_PROMPTS} prompts are accepted")
    logprobs_field = "top_logprobs" if isinstance(request.input, ChatInput) else "logprobs"
    _check_sampling(options.sampling, engine, logprobs_field)
    _check_options(options, engine)
    _check_resumed(request)


def check_token_ids(ids: Sequence[int], engine: EngineInfo, field: str) -> None:
    """Raise InvalidArgument naming the first id that is not in the vocabulary."""
    if ids and max(ids) >= engine.vocab_size:
        bad = next(i for i in ids if i >= engine.vocab_size)
        raise InvalidArgument(f"token id {bad} is not below the vocabulary size {engine.vocab_size}", field=field)


def check_prompt(ids: Sequence[int], engine: EngineInfo, field: str) -> None:
    """Raise InvalidArgument if a prompt has no tokens or leaves no room for one more."""
    _require(len(ids) > 0, field, "the prompt has no tokens")
    check_prompt_length(len(ids), engine.max_model_len, field)


def check_prompt_length(num_tokens: int, max_model_len: int, field: str, at_least: str = "") -> None:
    """Raise InvalidArgument if a prompt leaves no room for one more token; `at_least` stands before its length."""
    _require(
        num_tokens + 1 <= max_model_len,
        field,
        f"the prompt has {at_least}{num_tokens} tokens; "
        f"the context of {max_model_len} tokens must hold it and at least one more",
    )


def checked_ids(ids: Sequence[int], engine: EngineInfo, field: str) -> array[int]:
    """A prompt of ids as an array; its length is checked first, since looking at millions of ids takes long.

    Raises: InvalidArgument if it is no prompt.
    """
    check_prompt(ids, engine, field)
    checked = array("I", ids)
    check_token_ids(checked, engine, field)
    return checked


def check_num_prompt_ids(prompts: Sequence[str | Sequence[int]]) -> None:
    """Raise InvalidArgument if the prompts that are ids have too many of them together."""
    total = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
    message = f"the prompts have {total} tokens together; at most {MAX_PROMPT_IDS} are accepted"
    _require(total <= MAX_PROMPT_IDS, "prompt", message)


def check_resumed_ids(ids: Sequence[int], max_tokens: int | None, engine: EngineInfo) -> None:
    """Raise InvalidArgument if a resumed choice has more ids than it may generate, or ids that are no tokens.

    As many as it may is right: its end may have been lost.
    """
    limit = engine.max_model_len if max_tokens is None else max_tokens
    message = f"a choice has {len(ids)} ids already; the prompt and max_tokens leave room for {limit}"
    _require(len(ids) <= limit, "resume_token_ids", message)
    check_token_ids(ids, engine, "resume_token_ids")


def check_num_skipped(num_tokens: int, max_tokens: int | None, engine: EngineInfo) -> None:
    """Raise InvalidArgument if a client that is back has more tokens of a choice than it may generate."""
    limit = engine.max_model_len if max_tokens is None else max_tokens
    message = f"a choice has {num_tokens} tokens already; the prompt and max_tokens leave room for {limit}"
    _require(num_tokens <= limit, "num_skipped_tokens", message)


def encodable(text: str, max_chars: int) -> str:
    """A caller's text, cut if it is long, as protobuf takes it: JSON may hold halves of surrogate pairs."""
    return text[:max_chars].encode("utf-8", "backslashreplace").decode()


def shortened(text: str, max_chars: int = 100) -> str:
    """A caller's text for an error message: quoted, and cut if it is long."""
    return repr(text) if len(text) <= max_chars else f"{text[:max_chars]!r}..."


def _check_sampling(params: SamplingParams, engine: EngineInfo, logprobs_field: str) -> None:
    _range(params.temperature, "temperature", 0, 2)
    _range(params.top_p, "top_p", 0, 1)
    _range(params.min_p, "min_p", 0, 1)
    _range(params.presence_penalty, "presence_penalty", -2, 2)
    _range(params.frequency_penalty, "frequency_penalty", -2, 2)
    penalty = params.repetition_penalty
    _require(penalty is None or 0 < penalty <= 1e6, "repetition_penalty", f"{penalty} is not above 0")
    max_logprobs = min(MAX_LOGPROBS, engine.max_num_logprobs)
    _range(params.num_logprobs, logprobs_field, 0, max_logprobs)
    _range(params.num_prompt_logprobs, "prompt_logprobs", 0, max_logprobs)
    _require(
        len(params.logit_bias) <= MAX_LOGIT_BIASES, "logit_bias", f"at most {MAX_LOGIT_BIASES} entries are accepted"
    )
    check_token_ids(list(params.logit_bias), engine, "logit_bias")
    for token_id, bias in params.logit_bias.items():
        _range(bias, f"logit_bias.{token_id}", -100, 100)


def _check_options(options: Options, engine: EngineInfo) -> None:
    _range(options.num_choices, "n", 1, MAX_CHOICES_PER_PROMPT)
    stop = options.stop
    _require(stop.max_tokens is None or stop.max_tokens >= 1, "max_tokens", "max_tokens must be at least 1")
    if stop.max_tokens is not None:
        _require(stop.min_tokens <= stop.max_tokens, "min_tokens", "min_tokens is above max_tokens")
    _require(
        len(stop.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
        "stop_token_ids",
        f"at most {MAX_STOP_TOKEN_IDS} stop tokens are accepted",
    )
    check_token_ids(stop.stop_token_ids, engine, "stop_token_ids")
    _require(
        len(options.stop_strings) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} stop strings are accepted"
    )
    for text in options.stop_strings:
        _require(bool(text), "stop", "a stop string is empty")
        _require(
            len(text) <= MAX_STOP_STRING_CHARS, "stop", f"a stop string exceeds {MAX_STOP_STRING_CHARS} characters"
        )
    _require(not options.has_grammar, "response_format", "constrained output is not supported by this version")
    _require(
        len(options.request_id) <= MAX_REQUEST_ID_CHARS,
        "request_id",
        f"a request id has at most {MAX_REQUEST_ID_CHARS} characters",
    )
    _require(
        len(options.cache_salt) <= MAX_CACHE_SALT_CHARS,
        "cache_salt",
        f"a cache salt has at most {MAX_CACHE_SALT_CHARS} characters",
    )


def _check_class(request: GenerationRequest) -> None:
    """The class asked for is none that the caller's key may not have."""
    asked, highest = request.options.priority_class, request.caller.highest_class
    if asked is not None and asked < highest:
        message = f"priority is {asked}; this key's highest class is {highest}, and lower numbers are more urgent"
        raise PermissionDenied(message, field="priority", reason="PRIORITY_TOO_HIGH")


def _check_resumed(request: GenerationRequest) -> None:
    """The lists' number, and which choices had ended; ids are checked when each list is used."""
    resumed, finished = request.options.resume_token_ids, request.options.finished_choices
    num_choices = request.num_choices
    message = f"{len(resumed)} lists of ids for {num_choices} choices"
    _require(len(resumed) in (0, num_choices), "resume_token_ids", message)
    _check_skipped(request)
    is_known = bool(resumed) or finished <= request.options.num_skipped_tokens.keys()
    _require(is_known, "finished_choices", "choices had ended, but neither ids nor numbers of their tokens are given")
    last = max(finished, default=0)
    _require(last < num_choices, "finished_choices", f"there is no choice {last}")


def _check_skipped(request: GenerationRequest) -> None:
    """Only a resumable request can be gone on with by numbers alone, and only if all that it depends on is given."""
    options = request.options
    skipped = options.num_skipped_tokens
    if not skipped:
        return
    field = "num_skipped_tokens"
    _require(options.resumable, field, "only of a request that is resumable")
    _require(not options.resume_token_ids, field, "not together with resume_token_ids")
    _require(bool(options.request_id), "request_id", "a client that is back gives the request's id")
    _require(options.sampling.seed is not None, "seed", "a client that is back gives the seed that it was told")
    _require(max(skipped) < request.num_choices, field, f"there is no choice {max(skipped)}")


def _range(value: float | None, field: str, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidArgument(f"{field} is {value:g}; accepted are {low:g} to {high:g}", field=field)


def _require(holds: bool, field: str, message: str) -> None:
    if not holds:
        raise InvalidArgument(message, field=field)
