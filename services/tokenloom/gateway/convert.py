"""Bodies and frames: the only gateway module that sees both HTTP's types and the wire's.

Way in: a body becomes a `SessionStart` with all that a retry needs (request id, seed), and `resumed` makes that retry
of it. Way out: the columns of a frame are dealt to their generations in one pass.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import orjson

from tokenloom.api.v1 import common_pb2, inference_pb2
from tokenloom.common.errors import from_proto
from tokenloom.gateway.event_ids import Told
from tokenloom.gateway.generation import Accepted, Finish, Generation, Logprob, Position, Usage
from tokenloom.gateway.model_info import ModelInfo
from tokenloom.gateway.openai_types import ChatBody, CompletionBody, GenerationBody, Message
from tokenloom.gateway.progress import ChoiceProgress, Progress
from tokenloom.gateway.sized_work import IDS_PER_ENTRY, Turns

_U64 = 2**64 - 1
# An entry takes about two microseconds, so others wait for about three milliseconds.
_MAX_ENTRIES_PER_TURN = 1500
_POSITIONS_PER_PORTION = 64
_IDS_AT_ONCE = 1 << 15
Start = inference_pb2.SessionStart  # made here, sent by the tokenizer client, opaque to what lies between
FINISH_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(frozen=True)
class CallContext:
    """What goes on with a body: the request's id, a seed if the caller sent none, the caller's key and trace.

    `told`: what a client had already that is back for the rest.
    """

    request_id: str
    default_seed: int
    key_digest: bytes
    trace: common_pb2.TraceContext
    told: Told | None = None


def chat_start(body: ChatBody, context: CallContext) -> Start:
    """The frame's form of a chat request; handle and remaining time are set when it is sent."""
    chat = inference_pb2.ChatRequest(
        messages=[_message(message) for message in body.messages],
        options=_options(body, body.num_logprobs, body.max_generated_tokens, context),
        continue_final_message=bool(body.continue_final_message),
    )
    if body.chat_template_kwargs:
        chat.template_kwargs_json = orjson.dumps(body.chat_template_kwargs).decode()
    if body.continue_final_message:
        chat.add_generation_prompt = False
    elif body.add_generation_prompt is not None:
        chat.add_generation_prompt = body.add_generation_prompt
    return Start(key_digest=context.key_digest, trace=context.trace, chat=chat)


def completion_start(body: CompletionBody, context: CallContext) -> Start:
    """The frame's form of a completion request; handle and remaining time are set when it is sent."""
    complete = inference_pb2.CompleteRequest(
        prompts=[_prompt(prompt) for prompt in body.prompt],
        options=_options(body, body.num_logprobs, body.max_generated_tokens, context),
        echo=bool(body.echo),
    )
    if body.echo and body.num_logprobs is not None:
        if body.prompt_logprobs is None:
            complete.options.sampling.num_prompt_logprobs = body.num_logprobs
        complete.options.return_token_ids = True  # the prompt's length tells when its logprobs are complete
    return Start(key_digest=context.key_digest, trace=context.trace, complete=complete)


def options_of(start: Start) -> inference_pb2.GenerationOptions:
    """The options of either kind of request, in place."""
    return start.chat.options if start.HasField("chat") else start.complete.options


def resumed(start: Start, progress: Progress) -> Start:
    """The start that goes on behind what was taken of a request: with ids instead of text, and as it was accepted.

    Behind tokens whose ids are not known it goes on by their numbers. Nothing changes for a request that was not
    accepted. Text that is still to be echoed stays text.
    """
    if not progress.acceptance:
        return start
    accepted = inference_pb2.Accepted.FromString(progress.acceptance)
    again = Start(key_digest=start.key_digest, trace=start.trace)
    options = options_of(start)
    num_choices = options.num_choices * max(1, len(start.complete.prompts))
    choices = [progress.choice(index) for index in range(num_choices)]
    if start.HasField("chat"):
        again.chat.tools_json.extend(start.chat.tools_json)
        again.chat.template_kwargs_json = start.chat.template_kwargs_json
        again.chat.prompt_token_ids.CopyFrom(accepted.prompts[0] if accepted.prompts else start.chat.prompt_token_ids)
    else:
        again.complete.echo = start.complete.echo
        must_echo = start.complete.echo and not all(choice.has_echo for choice in choices)
        is_told = bool(accepted.prompts) and not must_echo
        ids = [inference_pb2.Prompt(token_ids=prompt) for prompt in accepted.prompts] if is_told else ()
        again.complete.prompts.extend(ids or start.complete.prompts)
    target = again.chat.options if start.HasField("chat") else again.complete.options
    target.CopyFrom(options)
    target.sampling.CopyFrom(accepted.sampling)
    target.stop.CopyFrom(accepted.stop)
    _set_progress(target, choices, progress.has_all_ids)
    return again


def _set_progress(
    options: inference_pb2.GenerationOptions, choices: Sequence[ChoiceProgress], has_all_ids: bool
) -> None:
    for field in ("resume_token_ids", "num_skipped_tokens", "finished_choices", "num_cached_tokens"):
        options.ClearField(field)
    for index, choice in enumerate(choices):
        if has_all_ids:
            options.resume_token_ids.add(ids=choice.token_ids)
        else:
            options.num_skipped_tokens[index] = choice.num_tokens
        if choice.is_finished:
            options.finished_choices.append(index)
        if choice.num_cached_tokens is not None:
            options.num_cached_tokens[index] = choice.num_cached_tokens


def _options(
    body: GenerationBody, num_logprobs: int | None, max_tokens: int | None, context: CallContext
) -> inference_pb2.GenerationOptions:
    options = inference_pb2.GenerationOptions(
        model=body.model or "",
        sampling=_sampling(body, num_logprobs, context.default_seed),
        stop=common_pb2.StopConditions(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens or 0,
            stop_token_ids=body.stop_token_ids,
            ignore_eos=bool(body.ignore_eos),
        ),
        stop_strings=body.stop,
        include_stop_string=bool(body.include_stop_str_in_output),
        num_choices=body.num_choices,
        skip_special_tokens=body.skip_special_tokens,
        priority_class=body.priority,
        cache_salt=body.cache_salt or "",
        request_id=context.request_id,
        return_token_ids=bool(body.return_token_ids),
        resumable=bool(body.resumable),
    )
    for index, told in context.told.choices.items() if context.told else ():
        options.num_skipped_tokens[index] = told.num_tokens
        if told.num_cached_tokens:
            options.num_cached_tokens[index] = told.num_cached_tokens
        if told.is_finished:
            options.finished_choices.append(index)
    return options


def _sampling(body: GenerationBody, num_logprobs: int | None, default_seed: int) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        seed=default_seed if body.seed is None else body.seed & _U64,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
    )


def _message(message: Message) -> inference_pb2.ChatMessage:
    calls = [
        inference_pb2.ToolCall(id=call.id, name=call.function.name, arguments_json=call.function.arguments)
        for call in message.tool_calls or ()
    ]
    return inference_pb2.ChatMessage(
        role="tool" if message.role == "function" else message.role,  # its name before OpenAI's tools
        content=message.text,
        name=message.name or "",
        tool_calls=calls,
        tool_call_id=message.tool_call_id or "",
    )


def _prompt(prompt: str | list[int]) -> inference_pb2.Prompt:
    if isinstance(prompt, str):
        return inference_pb2.Prompt(text=prompt)
    token_ids = inference_pb2.TokenIds()
    for start in range(0, len(prompt), _IDS_AT_ONCE):  # others wait for the interpreter while a list is taken in
        token_ids.ids.extend(prompt[start : start + _IDS_AT_ONCE])
    return inference_pb2.Prompt(token_ids=token_ids)


def num_choices_of(start: Start) -> int:
    """Choices of all prompts."""
    num_prompts = len(start.complete.prompts) if start.HasField("complete") else 1
    return max(1, options_of(start).num_choices) * num_prompts


async def deliver(
    frame: inference_pb2.SessionResponse,
    find: Callable[[int], Generation | None],
    is_given_back: Callable[[inference_pb2.SessionFailed], bool],
) -> tuple[list[int], list[int]]:
    """Deal a frame's parts to their generations, in field order. Within a large frame others get to run.

    Args:
        frame: what one or more engine steps brought.
        find: the generation of a handle; None if it is gone (cancelled while the frame was under way).
        is_given_back: this failure does not end the request: it goes on, perhaps elsewhere.

    Returns: handles of requests that ended, and of those that were given back.
    """
    turns = Turns(_MAX_ENTRIES_PER_TURN)
    for accepted in frame.accepted:
        await turns.next(sum(len(prompt.ids) for prompt in accepted.accepted.prompts) // IDS_PER_ENTRY)
        if (generation := find(accepted.handle)) and not generation.is_accepted:
            told = _accepted(accepted.accepted, generation.wants_prompts)
            generation.accept(told, accepted.accepted.SerializeToString())
    await _deliver_outputs(frame.outputs, find, turns)
    for end in frame.choices_finished:
        if generation := find(end.handle):
            generation.finish_choice(end.finished.choice_index, _finish(end.finished))
    ended: list[int] = []
    given_back: list[int] = []
    for completed in frame.completed:
        ended.append(completed.handle)
        if generation := find(completed.handle):
            generation.complete(_usage(completed.usage))
    for failed in frame.failed:
        if is_given_back(failed):
            given_back.append(failed.handle)
            continue
        ended.append(failed.handle)
        if generation := find(failed.handle):
            generation.fail(from_proto(failed.error))
    return ended, given_back


async def _deliver_outputs(
    outputs: inference_pb2.TextOutputs, find: Callable[[int], Generation | None], turns: Turns
) -> None:
    """Deal rows, each with its details: a handler that gets to run sees them together, unless they fill a turn alone.

    So an event of a resumable stream tells all of its tokens: tokenizers tell no more than 512 logprobs at once.
    """
    details: dict[tuple[int, int, int], list[_Details]] = {}
    for extra in outputs.extras:
        delta = extra.delta
        if delta.HasField("num_cached_tokens") and (generation := find(extra.handle)):
            generation.progress.choice(delta.choice_index).num_cached_tokens = delta.num_cached_tokens
        if delta.token_ids or delta.logprobs or delta.prompt_logprobs:
            key = (extra.handle, delta.choice_index, delta.first_token_index)
            details.setdefault(key, []).extend(_portions(delta))
    ids, at = array("I", outputs.token_ids), 0
    columns = (outputs.handles, outputs.choice_indexes, outputs.first_token_indexes, outputs.num_tokens, outputs.texts)
    for handle, choice_index, first_token_index, num_tokens, text in zip(*columns, strict=True):
        portions = details.pop((handle, choice_index, first_token_index), [])
        num_entries = sum(portion.num_entries for portion in portions)
        is_small = num_entries <= _MAX_ENTRIES_PER_TURN
        await turns.next(1 + (num_entries if is_small else portions[0].num_entries))
        if generation := find(handle):
            generation.add_text(choice_index, text, first_token_index, num_tokens, ids[at : at + num_tokens])
        at += num_tokens
        for number, portion in enumerate(portions):
            if number and not is_small:
                await turns.next(portion.num_entries)
            if generation := find(handle):
                prompt_logprobs = _positions(portion.prompt_logprobs)
                generation.add_details(choice_index, portion.token_ids, _positions(portion.logprobs), prompt_logprobs)


@dataclass(slots=True)
class _Details:
    """A few positions of a delta."""

    token_ids: list[int]
    logprobs: Sequence[inference_pb2.TokenLogprobs]
    prompt_logprobs: Sequence[inference_pb2.TokenLogprobs]

    @property
    def num_entries(self) -> int:
        return sum(1 + len(position.top) for position in (*self.logprobs, *self.prompt_logprobs))


def _portions(delta: inference_pb2.Delta) -> list[_Details]:
    """A delta's details, a few positions each; all ids are in the first one."""
    num_positions = max(len(delta.logprobs), len(delta.prompt_logprobs), 1)
    starts = range(0, num_positions, _POSITIONS_PER_PORTION)
    return [
        _Details(
            [] if start else list(delta.token_ids),
            delta.logprobs[start : start + _POSITIONS_PER_PORTION],
            delta.prompt_logprobs[start : start + _POSITIONS_PER_PORTION],
        )
        for start in starts
    ]


def _positions(positions: Iterable[inference_pb2.TokenLogprobs]) -> list[Position]:
    return [
        Position(token=_logprob(position.token), top=[_logprob(entry) for entry in position.top])
        for position in positions
    ]


def _logprob(proto: inference_pb2.TokenLogprob) -> Logprob:
    return Logprob(token_id=proto.token_id, text=proto.text, utf8=proto.utf8, value=proto.logprob)


def _accepted(proto: inference_pb2.Accepted, wants_prompts: bool) -> Accepted:
    prompts = [list(prompt.ids) for prompt in proto.prompts] if wants_prompts else []
    return Accepted(model=proto.model, prompts=prompts)


def _finish(proto: inference_pb2.ChoiceFinished) -> Finish:
    reason = FINISH_REASONS.get(proto.reason, "stop")
    if proto.stop_string:
        return Finish(reason, proto.stop_string)
    return Finish(reason, proto.stop_token_id if proto.HasField("stop_token_id") else None)


def model_info(proto: inference_pb2.Model) -> ModelInfo:
    """A model that a tokenizer listed."""
    return ModelInfo(proto.id, proto.created_s, proto.max_model_len)


def _usage(proto: inference_pb2.Usage) -> Usage:
    return Usage(
        num_prompt_tokens=proto.num_prompt_tokens,
        num_generated_tokens=proto.num_generated_tokens,
        num_cached_tokens=proto.num_cached_tokens,
    )
