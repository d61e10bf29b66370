"""One request in flight: what is fixed before the first send, its choices, their events, its end."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import secrets
import time
import uuid
from collections.abc import Sequence

from tokenloom.common.errors import Cancelled, DeadlineExceeded, FailedPrecondition, TokenloomError
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
from tokenloom.tokenizer.events import TIME_IS_UP, Accepted, ChoiceFinished, Completed, Delta, EventSink
from tokenloom.tokenizer.metrics import PROMPT_TOKENS
from tokenloom.tokenizer.stop_strings import StopStrings
from tokenloom.tokenizer.validation import check_num_skipped, check_resumed_ids

_RESUMED_IDS_AT_ONCE = 64
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
        self._prompts: tuple[Sequence[int], ...] = ()
        self._accepted: Accepted | None = None
        self._is_accepted = False
        self._choices: list[Choice] = []
        self._num_open = 0
        self._to_echo: set[int] = set()

    @property
    def scoped_id(self) -> str:
        """The request id as the engine knows it."""
        return self.request.scoped_id(self.request_id)

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        return self.request.num_choices

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; 0 until they are known."""
        return sum(len(prompt) for prompt in self._prompts)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def deadline_s(self) -> float | None:
        """Monotonic time at which its time is up; None: never."""
        limit_s = self.request.remaining_time_s
        return None if limit_s is None else self._started_at_s + limit_s

    def is_late(self, margin_s: float = 0.0) -> bool:
        """Its time is up, or will be in `margin_s` seconds."""
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s - margin_s

    @property
    def duration_s(self) -> float:
        """Time since the request came in."""
        return time.monotonic() - self._started_at_s

    async def prepare(self, prompts: tuple[Sequence[int], ...], trace: Trace) -> None:
        """Fix everything that is sent, once: seed, defaults, one submission per choice; take resumed choices' ids.

        Raises: InvalidArgument if a resumed choice has more ids than it may, or ids that are none.
        """
        options, info = self.request.options, self._info
        self._prompts = prompts
        sampling = _with_defaults(options.sampling, info.default_sampling)
        longest = info.max_model_len - min(len(prompt) for prompt in prompts)
        max_tokens = min(options.stop.max_tokens or longest, longest)
        min_tokens = min(options.stop.min_tokens, max_tokens)  # what is told may be sent again
        stop = dataclasses.replace(options.stop, max_tokens=max_tokens, min_tokens=min_tokens)
        told = prompts if self.request.wants_prompt_ids else ()
        self._accepted = Accepted(
            self.request_id, int(time.time()), self._model_id, sampling.seed or 0, told, sampling, stop
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
            self._choices.append(Choice(self, rules, submission))
            self._choices[-1].num_cached_tokens = options.num_cached_tokens.get(index)
            self._skip(self._choices[-1])
        for choice, ids in zip(self._choices, options.resume_token_ids, strict=False):
            await self._resume(choice, ids)
        self._num_open = sum(choice.is_open for choice in self._choices)
        if isinstance(self.request.input, CompleteInput) and self.request.input.echo:  # a resumed choice had it
            self._to_echo = {choice.index for choice in self._choices if choice.is_open and not choice.num_tokens}
        PROMPT_TOKENS.inc(self.num_prompt_tokens)

    async def _resume(self, choice: Choice, ids: Sequence[int]) -> None:
        """Give a choice the ids that its reader has, a few at a time: other requests go on in between."""
        check_resumed_ids(ids, choice.submission.stop.max_tokens, self._info)
        if choice.index in self.request.options.finished_choices:
            choice.set_ended(ids)
            return
        for start in range(0, len(ids), _RESUMED_IDS_AT_ONCE):
            choice.resume(ids[start : start + _RESUMED_IDS_AT_ONCE])
            await asyncio.sleep(0)

    def _skip(self, choice: Choice) -> None:
        """Let a choice say nothing of the tokens that its reader counted."""
        options = self.request.options
        num_tokens = options.num_skipped_tokens.get(choice.index, 0)
        check_num_skipped(num_tokens, choice.submission.stop.max_tokens, self._info)
        if options.num_skipped_tokens and choice.index in options.finished_choices:
            choice.set_ended((), num_tokens)
        else:
            choice.skip(num_tokens)

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
        salt, highest = options.cache_salt, request.caller.highest_class
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
            priority_class=highest if options.priority_class is None else options.priority_class,
            tenant=request.caller.tenant,
            cache_salt=f"{request.caller.tenant}/{salt}" if request.caller.is_isolated else salt,
            trace=trace,
            submitted_at_s=self._started_at_s - (request.age_s or 0.0),
            deadline_s=self.deadline_s,
            is_resubmitted=request.age_s is not None,
            is_resumable=options.resumable,
        )

    def submit(self, earlier: ActiveRequest | None = None) -> None:
        """Put all choices in flight; those that their ids complete end at once.

        Args:
            earlier: a request with the same id, whose choices go on for this one. If this one is refused, the earlier
                one has lost nothing.

        Raises: DeadlineExceeded if its time is up, and the engine need not see it; FailedPrecondition if `earlier` has
            other prompts; as `EngineClient.submit`.
        """
        if self.is_late():
            raise DeadlineExceeded(TIME_IS_UP)
        if earlier is not None and not earlier.done.done() and earlier._prompts != self._prompts:
            raise FailedPrecondition("the request id is in use for other prompts", field="request_id")
        for choice in self._choices:
            if not choice.end_if_complete():
                choice.handle = self._engine.submit(choice)
        if earlier is not None:
            earlier._hand_over({choice.submission.request_id for choice in self._choices if choice.handle})
        if self._num_open == 0 and not self.done.done():  # only the usage was not told
            self._complete()

    def fail(self, error: TokenloomError) -> None:
        """End the request badly."""
        if not self.done.done():
            self.done.set_exception(error)

    def _hand_over(self, taken_ids: set[str]) -> None:
        """End this request because a later one has its id; the choices that it took go on, the others are cancelled."""
        for choice in self._choices:
            if choice.is_open and choice.submission.request_id in taken_ids:
                choice.is_open = False
                self._engine.forget(choice.handle)
        self.leave("taken_over", may_return=True)
        self.fail(Cancelled("a later call with the same request id took this one over", reason="TAKEN_OVER"))

    def leave(self, why: str, *, may_return: bool) -> None:
        """Give up what has not ended.

        Args:
            may_return: the client of a resumable request may come back for it.
        """
        if self.done.done() and not self.done.cancelled():
            self.done.exception()  # may be set after the waiter had gone
        for choice in self._choices:
            if choice.is_open:
                choice.is_open = False
                if may_return and self.request.options.resumable:
                    self._engine.detach(choice.handle)
                else:
                    self._engine.cancel(choice.handle, why)

    # --- what choices report ---

    def on_choice_started(self, choice: Choice) -> None:
        """Tell Accepted, once, and the prompt's text before the choice's own if it is to be echoed."""
        if self.done.done():
            return
        self._tell_accepted()
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
            self._complete()

    def on_choice_failed(self, error: TokenloomError) -> None:
        """One choice's failure is the request's."""
        self.fail(error)

    def _tell_accepted(self) -> None:
        if not self._is_accepted:
            self._is_accepted = True
            assert self._accepted is not None
            self._sink.put(self._accepted)

    def _complete(self) -> None:
        self._tell_accepted()
        self._sink.put(self._usage())
        self.done.set_result(None)

    def _prompt_text(self, choice: Choice) -> str:
        assert isinstance(self.request.input, CompleteInput)
        prompt = self.request.input.prompts[choice.index // self.request.options.num_choices]
        return prompt if isinstance(prompt, str) else decode_whole(self._assets.tokenizer, prompt, False)

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
