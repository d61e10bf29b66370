"""How the two endpoints write a choice; what they share is in answers.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Protocol

from tokenloom.gateway.generation import Accepted, ChoiceUpdate, Finish, Position
from tokenloom.gateway.logprob_formats import CompletionLogprobs, EchoedPrompt, chat_logprobs, prompt_logprobs


class Format(Protocol):
    """An endpoint's way to write choices."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """The choice of the chunk that opens a choice; None if the endpoint has none."""

    def chunk(self, index: int, update: ChoiceUpdate) -> dict[str, Any]:
        """The choice of a chunk with text or details."""

    def last_chunk(self, index: int, finish: Finish) -> dict[str, Any]:
        """The choice of the chunk that closes a choice."""

    def whole(self, index: int, choice: ChoiceUpdate) -> dict[str, Any]:
        """A finished choice of an answer that is not streamed."""

    def extras(self, accepted: Accepted, choices: Sequence[ChoiceUpdate]) -> dict[str, Any]:
        """Further top-level fields of a whole answer (given its choices) or of a stream's first chunk (given none)."""

    def begin(self, accepted: Accepted, told_choices: Collection[int] = ()) -> None:
        """The request was taken; called once, before any other. Of `told_choices` something was told before."""


class ChatFormat:
    """Chat completions.

    Args:
        has_logprobs: the caller asked for logprobs.
        has_token_ids: the caller asked for token ids (vLLM's return_token_ids).
    """

    id_prefix: ClassVar[str] = "chatcmpl-"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, *, has_logprobs: bool = False, has_token_ids: bool = False) -> None:
        self._has_logprobs = has_logprobs
        self._has_token_ids = has_token_ids

    def begin(self, accepted: Accepted, told_choices: Collection[int] = ()) -> None:
        """Nothing to note."""

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """Opens with the role."""
        return _chat_chunk(index, {"role": "assistant", "content": ""}, None)

    def chunk(self, index: int, update: ChoiceUpdate) -> dict[str, Any]:
        """Goes on with content."""
        choice = _chat_chunk(index, {"content": update.text}, None)
        return self._with_details(choice, update)

    def last_chunk(self, index: int, finish: Finish) -> dict[str, Any]:
        """Closes with an empty delta."""
        return {**_chat_chunk(index, {}, finish.reason), "stop_reason": finish.stop_reason}

    def whole(self, index: int, choice: ChoiceUpdate) -> dict[str, Any]:
        """A choice with its message."""
        assert choice.finish is not None
        whole = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None,
            "finish_reason": choice.finish.reason,
            "stop_reason": choice.finish.stop_reason,
        }
        return self._with_details(whole, choice)

    def extras(self, accepted: Accepted, choices: Sequence[ChoiceUpdate]) -> dict[str, Any]:
        """The prompt's ids and logprobs."""
        extras: dict[str, Any] = {}
        if self._has_token_ids:
            extras["prompt_token_ids"] = accepted.prompts[0] if accepted.prompts else []
        if choices and choices[0].prompt_logprobs:
            extras["prompt_logprobs"] = prompt_logprobs(choices[0].prompt_logprobs)
        return extras

    def _with_details(self, choice: dict[str, Any], update: ChoiceUpdate) -> dict[str, Any]:
        if self._has_logprobs:
            choice["logprobs"] = chat_logprobs(update.logprobs)
        if self._has_token_ids:
            choice["token_ids"] = update.token_ids
        return choice


def _chat_chunk(index: int, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


class CompletionFormat:
    """Text completions.

    Args:
        has_logprobs: the caller asked for logprobs.
        has_token_ids: the caller asked for token ids.
        echo: the prompt's text, and its logprobs if asked for, come first.
        has_prompt_logprobs: the caller asked for vLLM's prompt_logprobs.
        num_choices: choices per prompt.
    """

    id_prefix: ClassVar[str] = "cmpl-"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def __init__(
        self,
        *,
        has_logprobs: bool = False,
        has_token_ids: bool = False,
        echo: bool = False,
        has_prompt_logprobs: bool = False,
        num_choices: int = 1,
    ) -> None:
        self._has_logprobs = has_logprobs
        self._has_token_ids = has_token_ids
        self._echo = echo
        self._has_prompt_logprobs = has_prompt_logprobs
        self._num_choices = num_choices
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._echoed_prompts: dict[int, EchoedPrompt] = {}
        self._unsent_prompts: dict[int, list[int]] = {}
        self._prompt_logprobs: list[Position] = []

    def begin(self, accepted: Accepted, told_choices: Collection[int] = ()) -> None:
        """Note the prompts' ids, which go out with each choice's first piece, and their lengths."""
        self._echoed_prompts = {i: EchoedPrompt(len(prompt)) for i, prompt in enumerate(accepted.prompts)}
        if self._has_token_ids:
            choices = enumerate(prompt for prompt in accepted.prompts for _ in range(self._num_choices))
            self._unsent_prompts = {index: ids for index, ids in choices if index not in told_choices}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """Text completions open with text."""
        return None

    def chunk(self, index: int, update: ChoiceUpdate) -> dict[str, Any]:
        """Goes on with text."""
        return self._with_details(
            {"index": index, "text": update.text, "logprobs": None, "finish_reason": None}, update
        )

    def last_chunk(self, index: int, finish: Finish) -> dict[str, Any]:
        """Closes with empty text, and with the logprobs that were held back."""
        ended = self._ended(index, finish)
        if (logprobs := self._logprobs.get(index)) is not None and logprobs.is_holding:
            ended["logprobs"] = logprobs.render(ChoiceUpdate(finish=finish))
        return ended

    @staticmethod
    def _ended(index: int, finish: Finish) -> dict[str, Any]:
        return {
            "index": index,
            "text": "",
            "logprobs": None,
            "finish_reason": finish.reason,
            "stop_reason": finish.stop_reason,
        }

    def whole(self, index: int, choice: ChoiceUpdate) -> dict[str, Any]:
        """A choice with its text. Choices come in order of their index."""
        assert choice.finish is not None
        if index % self._num_choices == 0:
            self._prompt_logprobs = choice.prompt_logprobs
        else:  # only the first choice of a prompt brings them
            choice.prompt_logprobs = self._prompt_logprobs
        whole: dict[str, Any] = {**self._ended(index, choice.finish), "text": choice.text}
        if self._has_prompt_logprobs:
            whole["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs)
        return self._with_details(whole, choice)

    def extras(self, accepted: Accepted, choices: Sequence[ChoiceUpdate]) -> dict[str, Any]:
        """Nothing: all is in the choices."""
        return {}

    def _with_details(self, choice: dict[str, Any], update: ChoiceUpdate) -> dict[str, Any]:
        if self._has_logprobs:
            choice["logprobs"] = self._render_logprobs(choice["index"], update)
        if self._has_token_ids:
            choice["token_ids"] = update.token_ids
            if choice["index"] in self._unsent_prompts:
                choice["prompt_token_ids"] = self._unsent_prompts.pop(choice["index"])
        return choice

    def _render_logprobs(self, index: int, update: ChoiceUpdate) -> dict[str, Any]:
        prompt = self._echoed_prompts.setdefault(index // self._num_choices, EchoedPrompt(0)) if self._echo else None
        if prompt is not None and index % self._num_choices == 0:
            prompt.add(update)
        return self._logprobs.setdefault(index, CompletionLogprobs(prompt)).render(update)
