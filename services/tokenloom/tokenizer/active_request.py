"""One request in flight: what is fixed before the first send, its choices, their events, its end."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import secrets
import time
import uuid
from collections.abc import Sequence

from tokenloom.common.errors import Cancelled, InvalidArgument, TokenloomError
from tokenloom.tokenizer.assets import TokenizerAssets
from tokenloom.tokenizer.choice import Choice, ChoiceRules
from tokenloom.tokenizer.detokenizer import decode_whole
from tokenloom.tokenizer.domain import (
    CompleteInput,
    EngineInfo,
    GenerationRequest,
    SamplingParams,
    StopConditions,
    Submission,
    Trace,
)
from tokenloom.tokenizer.engine_client import EngineClient
from tokenloom.tokenizer.events import Accepted, ChoiceFinished, Completed, Delta, EventSink
from tokenloom.tokenizer.metrics import PROMPT_TOKENS
from tokenloom.tokenizer.stop_strings import StopStrings

_SEED_DOMAIN = b"tokenloom/choice-seed"


class ActiveRequest:
    """One request in flight; the owner of its choices.

    Args:
        sink: gets its events.
        info: what the engine said of itself.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sink: EventSink,
        info: EngineInfo,
        engine: EngineClient,
        assets: TokenizerAssets,
        model_id: str,
    ) -> None:
        self.request = request
        self.request_id = request.options.request_id or f"req-{uuid.uuid4().hex}"
        self.num_reserved = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sink = sink
        self._info = info
        self._engine = engine
        self._assets = assets
        self._model_id = model_id
        self._started_at_s = time.monotonic()
        self._accepted: Accepted | None = None
        self._is_accepted = False
        self._choices: list[Choice] = []
        self._num_open = 0
        self._to_echo: set[int] = set()

    @property
    def scoped_id(self) -> str:
        """The request id as the engine knows it; tenants cannot meet each other's."""
        tenant = self.request.caller.tenant
        return f"{tenant}/{self.request_id}" if tenant else self.request_id

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        num_prompts = len(self.request.input.prompts) if isinstance(self.request.input, CompleteInput) else 1
        return self.request.options.num_choices * num_prompts

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; 0 until they are known."""
        return sum(len(prompt) for prompt in self._prompts)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(len(choice.token_ids) for choice in self._choices)

    @property
    def duration_s(self) -> float:
        """Time since the request came in."""
        return time.monotonic() - self._started_at_s

    def prepare(self, prompts: tuple[Sequence[int], ...], trace: Trace) -> None:
        """Fix everything that is sent, once: seed, defaults, one submission per choice.

        Raises: InvalidArgument if resumed choices do not match.
        """
        options, info = self.request.options, self._info
        resumed = options.resume_token_ids
        if resumed and len(resumed) != self.num_choices:
            message = f"{len(resumed)} lists of ids for {self.num_choices} choices"
            raise InvalidArgument(message, field="resume_token_ids")
        sampling = _with_defaults(options.sampling, info.default_sampling)
        longest = info.max_model_len - min(len(prompt) for prompt in prompts)
        stop = dataclasses.replace(options.stop, max_tokens=min(options.stop.max_tokens or longest, longest))
        self._accepted = Accepted(
            self.request_id, int(time.time()), self._model_id, sampling.seed or 0, prompts, sampling, stop
        )
        rules = ChoiceRules(
            tokenizer=self._assets.tokenizer,
            skipped_token_ids=self._assets.special_token_ids if options.skip_special_tokens else frozenset(),
            end_token_ids=frozenset(stop.stop_token_ids) | (frozenset() if stop.ignore_eos else info.eos_token_ids),
            stop_strings=StopStrings(options.stop_strings, options.include_stop_string),
            return_token_ids=options.return_token_ids,
        )
        for index in range(self.num_choices):
            submission = self._submission(index, prompts[index // options.num_choices], sampling, stop, trace)
            self._choices.append(Choice(self, rules, submission, resumed[index] if resumed else ()))
        self._num_open = len(self._choices)
        if isinstance(self.request.input, CompleteInput) and self.request.input.echo:  # a resumed choice had it
            self._to_echo = {i for i in range(self.num_choices) if not (resumed and resumed[i])}
        PROMPT_TOKENS.inc(sum(len(prompt) for prompt in prompts))

    def _submission(
        self,
        index: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        stop: StopConditions,
        trace: Trace,
    ) -> Submission:
        """One choice. Only the first choice of a prompt brings the prompt's logprobs."""
        request, options = self.request, self.request.options
        is_first = index % options.num_choices == 0
        room = self._info.max_model_len - len(prompt)
        salt = options.cache_salt
        return Submission(
            request_id=f"{self.scoped_id}:{index}",
            group_id=self.scoped_id,
            choice_index=index,
            prompt_token_ids=prompt,
            sampling=dataclasses.replace(
                sampling,
                seed=child_seed(sampling.seed or 0, index),
                num_prompt_logprobs=sampling.num_prompt_logprobs if is_first else None,
            ),
            stop=dataclasses.replace(stop, max_tokens=min(stop.max_tokens or room, room)),
            priority_class=options.priority_class,
            tenant=request.caller.tenant,
            cache_salt=f"{request.caller.tenant}/{salt}" if request.caller.is_isolated else salt,
            trace=trace,
            submitted_at_s=self._started_at_s,
            deadline_s=None if request.remaining_time_s is None else self._started_at_s + request.remaining_time_s,
            is_resumed=bool(options.resume_token_ids),
            is_resumable=options.resumable,
        )

    def submit(self) -> None:
        """Put all choices in flight; those that their ids complete end at once."""
        for choice in self._choices:
            if not choice.end_if_complete():
                choice.handle = self._engine.submit(choice)

    def fail(self, error: TokenloomError) -> None:
        """End the request badly."""
        if not self.done.done():
            self.done.set_exception(error)

    def hand_over(self) -> None:
        """End this request because a later one has its id; the engine's choices go on for that one."""
        for choice in self._choices:
            if choice.is_open:
                choice.is_open = False
                self._engine.forget(choice.handle)
        self.fail(Cancelled("a later call with the same request id took this one over", reason="TAKEN_OVER"))

    def cancel_open(self, why: str) -> None:
        """Give up what has not ended."""
        if self.done.done() and not self.done.cancelled():
            self.done.exception()  # may be set after the waiter had gone
        for choice in self._choices:
            if choice.is_open:
                choice.is_open = False
                self._engine.cancel(choice.handle, why)

    # --- what choices report ---

    def on_choice_started(self, choice: Choice) -> None:
        """Tell Accepted, once, and the prompt's text before the choice's own if it is to be echoed."""
        if self.done.done():
            return
        if not self._is_accepted:
            self._is_accepted = True
            assert self._accepted is not None
            self._sink.put(self._accepted)
        if choice.index in self._to_echo:
            self._to_echo.discard(choice.index)
            self._sink.put(Delta(choice.index, text=self._prompt_text(choice)))

    def on_choice_delta(self, delta: Delta) -> None:
        """Pass it on."""
        if not self.done.done():
            self._sink.put(delta)

    def on_choice_finished(self, choice: Choice, finished: ChoiceFinished) -> None:
        """Pass it on; with the last one the request is complete."""
        if finished.stop_string and choice.handle:
            self._engine.finish(choice.handle, len(choice.token_ids))
        if self.done.done():
            return
        self._sink.put(finished)
        self._num_open -= 1
        if self._num_open == 0:
            self._sink.put(self._usage())
            self.done.set_result(None)

    def on_choice_failed(self, error: TokenloomError) -> None:
        """One choice's failure is the request's."""
        self.fail(error)

    def _prompt_text(self, choice: Choice) -> str:
        assert isinstance(self.request.input, CompleteInput)
        prompt = self.request.input.prompts[choice.index // self.request.options.num_choices]
        return prompt if isinstance(prompt, str) else decode_whole(self._assets.tokenizer, prompt, False)

    @property
    def _prompts(self) -> tuple[Sequence[int], ...]:
        return self._accepted.prompts if self._accepted is not None else ()

    def _usage(self) -> Completed:
        """Prompts count once, whatever the number of their choices."""
        firsts = self._choices[:: self.request.options.num_choices]
        return Completed(
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_cached_tokens=sum(choice.num_cached_tokens or 0 for choice in firsts),
        )


def child_seed(seed: int, choice_index: int) -> int:
    """The seed of one choice: 64 bits of SHA-256 over the request's seed and the choice's index, little endian."""
    content = _SEED_DOMAIN + seed.to_bytes(8, "little") + choice_index.to_bytes(4, "little")
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")


def _with_defaults(asked: SamplingParams, model: SamplingParams) -> SamplingParams:
    """Fill in what the caller left out: the model's own default, else the neutral value; a random seed."""

    def first(*values: float | None) -> float:
        return next(value for value in values if value is not None)

    return dataclasses.replace(
        asked,
        temperature=first(asked.temperature, model.temperature, 1.0),
        top_p=first(asked.top_p, model.top_p, 1.0),
        top_k=int(first(asked.top_k, model.top_k, 0)),
        min_p=first(asked.min_p, model.min_p, 0.0),
        repetition_penalty=first(asked.repetition_penalty, model.repetition_penalty, 1.0),
        seed=secrets.randbits(63) if asked.seed is None else asked.seed,
    )
