"""Conversations to prompts, by the model's own Jinja template, off the event loop.

Only the operator's template runs, never a caller's; callers give values. A render has a limit on time and on output;
the waiter is released at the limit, and the thread ends at the template's next piece of output.

Names of special tokens in messages stay plain text; see marks.py. To continue the final message, a mark is put behind
its text before rendering and the output is cut at that mark: whatever the template does to the turn's end, the prompt
ends with the given text.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jinja2

from tokenloom.common.errors import InvalidArgument, ResourceExhausted, SetupError
from tokenloom.tokenizer.assets import DEFAULT_TEMPLATE
from tokenloom.tokenizer.domain import ChatInput, ChatMessage
from tokenloom.tokenizer.encoder import Segment
from tokenloom.tokenizer.jinja_env import make_environment
from tokenloom.tokenizer.marks import SpecialNames, free_marks, strings_in, unescaped
from tokenloom.tokenizer.metrics import RENDER_SECONDS
from tokenloom.tokenizer.validation import encodable, shortened

# fmt: off
OWNED_NAMES = frozenset(
    (
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize",
        "chat_template", "conversation", "return_dict", "return_tensors", "padding", "truncation", "max_length",
        "raise_exception", "strftime_now", "namespace", "range", "dict", "lipsum", "cycler", "joiner", "self",
        "loop", "caller", "varargs", "kwargs",
    )
)
# fmt: on
"""Values for a template that are the engine's to give, not the caller's."""
_NUM_THREADS = 2
_MAX_WAITING = 256
_RETRY_AFTER_S = 1.0
_TOOL_USE_TEMPLATE = "tool_use"
_MAX_MESSAGE_CHARS = 1000
_MAX_NAME_CHARS = 100


@dataclass(frozen=True)
class Rendered:
    """A prompt; its segments joined are its text."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """The template's output."""
        return "".join(segment.text for segment in self.segments)


class ChatTemplate:
    """Renders conversations for all requests of the stage.

    Args:
        sources: Jinja sources by name; empty if the model has none.
        special_tokens: named special tokens, given to the template.
        special_token_texts: names that stay plain text in messages; empty lets callers write special tokens.
        timeout_s: how long a caller waits for one render.
        max_output_chars: longest output.

    Raises: SetupError if a template is no Jinja.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        special_token_texts: tuple[str, ...] = (),
        *,
        timeout_s: float = 5.0,
        max_output_chars: int = 16 << 20,
    ) -> None:
        environment = make_environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise SetupError(f"the model's chat template is broken: {error}") from None
        self._special_tokens = dict(special_tokens)
        self._special_names = SpecialNames(special_token_texts)
        self._timeout_s = timeout_s
        self._max_output_chars = max_output_chars
        self._num_waiting = 0
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="chat-template")
        self._absent_content = self._probe_absent_content()

    async def render(self, chat: ChatInput) -> Rendered:
        """The prompt of a conversation.

        Raises: InvalidArgument in the caller's terms, with the template's own message if it refuses the conversation
            or takes too long; ResourceExhausted if too many conversations wait.
        """
        if self._num_waiting >= _MAX_WAITING:
            raise ResourceExhausted("too many conversations wait to be rendered", retry_after_s=_RETRY_AFTER_S)
        self._num_waiting += 1
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await loop.run_in_executor(self._pool, self.render_now, chat)
        except TimeoutError:
            raise self._too_slow() from None
        finally:
            self._num_waiting -= 1

    def render_now(self, chat: ChatInput) -> Rendered:
        """As `render`, in the calling thread."""
        started_s = time.monotonic()
        template = self._template_for(chat)
        is_open = _is_generation_prompt_added(chat)
        try:
            inputs: dict[str, Any] = {
                "messages": [self._message_dict(message, i) for i, message in enumerate(chat.messages)],
                "tools": [_parsed_object(text, f"tools[{i}]") for i, text in enumerate(chat.tools_json)] or None,
                **self._checked_kwargs(chat.template_kwargs_json),
            }
            strings = list(strings_in(inputs))
            marks = free_marks(strings)
            inputs = self._special_names.marked(inputs, strings, marks)
        except RecursionError:
            raise InvalidArgument("tools or values are nested too deeply", field="messages") from None
        if chat.continue_final_message:
            inputs["messages"][-1]["content"] += marks.cut
        values = {**self._special_tokens, "documents": None, **inputs, "add_generation_prompt": is_open}
        text = self._run(template, values, started_s)
        if chat.continue_final_message:
            text = _cut(text, marks.cut)
        RENDER_SECONDS.observe(time.monotonic() - started_s)
        return Rendered(tuple(marks.segments(text)))

    def close(self) -> None:
        """Stop the threads; running renders are given up."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _template_for(self, chat: ChatInput) -> jinja2.Template:
        if chat.tools_json and _TOOL_USE_TEMPLATE in self._templates:
            return self._templates[_TOOL_USE_TEMPLATE]
        template = self._templates.get(DEFAULT_TEMPLATE)
        if template is None:
            raise InvalidArgument("this model has no chat template; use completions", field="messages")
        return template

    def _run(self, template: jinja2.Template, values: Mapping[str, Any], started_s: float) -> str:
        """The template's output, within the limits."""
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in template.generate(values):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > self._max_output_chars:
                    raise InvalidArgument(f"the prompt exceeds {self._max_output_chars} characters", field="messages")
                if time.monotonic() - started_s > self._timeout_s:
                    raise self._too_slow()
        except InvalidArgument:
            raise
        except Exception as error:  # templates are code: what they raise is their answer to this conversation
            message = encodable(str(error), _MAX_MESSAGE_CHARS) or type(error).__name__
            raise InvalidArgument(f"chat template: {message}", field="messages", reason="CHAT_TEMPLATE") from None
        return "".join(pieces)

    def _too_slow(self) -> InvalidArgument:
        return InvalidArgument(f"the chat template took more than {self._timeout_s:g} s", field="messages")

    def _message_dict(self, message: ChatMessage, index: int) -> dict[str, Any]:
        """A turn as templates know it; arguments of tool calls are parsed, since templates print them as JSON."""
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.content is None:
            if message.role != "assistant":
                raise InvalidArgument("content is missing", field=f"messages[{index}].content")
            turn["content"] = self._absent_content if message.tool_calls else ""
        if message.name:
            turn["name"] = message.name
        if message.tool_call_id:
            turn["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": _arguments(call.arguments_json)},
                }
                for call in message.tool_calls
            ]
        return turn

    def _checked_kwargs(self, text: str) -> dict[str, Any]:
        """The caller's values for the template; names that are not the caller's to give are refused."""
        if not text:
            return {}
        kwargs = _parsed_object(text, "chat_template_kwargs")
        for name in kwargs:
            if name in OWNED_NAMES or name in self._special_tokens or name.startswith("_") or not name.isidentifier():
                field = f"chat_template_kwargs.{encodable(name, _MAX_NAME_CHARS)}"
                raise InvalidArgument(f"{shortened(name)} cannot be set", field=field)
        return kwargs

    def _probe_absent_content(self) -> str | None:
        """How the template wants an assistant turn without content: None if it can tell, else the empty text.

        Some templates test `content is none`; others join the content to text, which fails on None or prints it.
        """
        template = self._templates.get(_TOOL_USE_TEMPLATE) or self._templates.get(DEFAULT_TEMPLATE)
        if template is None:
            return ""
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "b"},
        ]
        values = {**self._special_tokens, "messages": messages, "tools": None, "add_generation_prompt": True}
        try:
            return "" if "None" in self._run(template, values, time.monotonic()) else None
        except InvalidArgument:
            return ""


def _is_generation_prompt_added(chat: ChatInput) -> bool:
    """Whether a new assistant turn is opened; checks what `continue_final_message` needs."""
    if not chat.messages:
        raise InvalidArgument("at least one message is needed", field="messages")
    if not chat.continue_final_message:
        return chat.add_generation_prompt is not False
    if chat.add_generation_prompt:
        raise InvalidArgument(
            "continue_final_message and add_generation_prompt exclude each other", field="continue_final_message"
        )
    last = chat.messages[-1]
    if last.role != "assistant" or last.content is None:
        raise InvalidArgument(
            "continue_final_message needs a last message of the assistant with content", field="continue_final_message"
        )
    return False


def _parsed_object(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{field} is no JSON", field=field) from None
    if not isinstance(value, dict):
        raise InvalidArgument(f"{field} is no JSON object", field=field)
    return value


def _arguments(text: str) -> Any:
    """Arguments of a call: parsed, or as the model wrote them if it left them unfinished."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


def _cut(text: str, mark: str) -> str:
    """The text before the mark that ends the final message."""
    text = unescaped(text, mark)
    if (end := text.rfind(mark)) < 0:
        raise InvalidArgument("the chat template leaves the final message out", field="continue_final_message")
    return text[:end]
