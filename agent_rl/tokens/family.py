"""A model family that the `renderers` package writes by hand, behind our seams.

`renderers` knows the tokens of some thirty families exactly; it is used where the tokenizer's
``name_or_path`` is one of its models, or where the user names a family. Nothing is looked up over
the network. Its bridges keep earlier reasoning (``thinking_retention="all"``), as ours do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agent_rl.errors import ConfigError, TokenError
from agent_rl.tokens import json_text
from agent_rl.tokens.bridge import NoBridge
from agent_rl.tokens.messages import arguments_value, normal_messages, normal_tools
from agent_rl.tokens.parse import ParsedMessage
from agent_rl.tokens.render import REFUSALS, Rendering
from agent_rl.tokens.tool_formats import ParsedToolCall
from agent_rl.tokens.vocabulary import Vocabulary
from agent_rl.types import JsonObject

_KNOW_DEVELOPER = frozenset({"gpt-oss", "gemma4", "deepseek-v4"})
# Their renderer fetches a vocabulary of its own, so they are used only when named by the user.
_DOWNLOADS = frozenset({"gpt-oss"})
# Names that SGLang and vLLM use for the tool parsers of families.
ALIASES: Mapping[str, str] = {
    "deepseek_v3": "deepseek-v3",
    "deepseekv3": "deepseek-v3",
    "kimi_k2": "kimi-k2",
    "minimax": "minimax-m2",
    "minimax_m2": "minimax-m2",
}
# Their answers are text, maybe behind <think> tags, up to a token that opens the tool calls.
OPENS_WITH_TEXT = frozenset({"deepseek-r1", "deepseek-v3", "kimi-k2", "kimi-k2.5", "minimax-m2"})
# The families whose tool calls have one of our wire formats; ours also read them while streaming.
WIRE_FORMATS: Mapping[str, str] = {
    "qwen3": "hermes",
    "prime-qwen3": "hermes",
    "qwen3-vl": "hermes",
    "qwen3.5": "qwen3_coder",
    "qwen3.6": "qwen3_coder",
    "qwen3.8": "qwen3_coder",
    "nemotron-3": "qwen3_coder",
    "nemotron-3-ultra": "qwen3_coder",
    "nemotron-3.5": "qwen3_coder",
    "llama-3": "llama3_json",
    "glm-4.5": "glm",
    "glm-5": "glm",
    "glm-5.1": "glm",
    "glm-5.3": "glm",
}


def family_names() -> list[str]:
    from renderers.base import MODEL_RENDERER_MAP

    return sorted({*MODEL_RENDERER_MAP.values(), *WIRE_FORMATS})


def family_of(tokenizer: Any) -> str | None:
    """The family of a tokenizer whose name is that of a known model."""
    model = str(getattr(tokenizer, "name_or_path", None) or "")
    if model.count("/") != 1:
        return None  # a folder; known models are "owner/name", and the import takes half a second
    from renderers.base import MODEL_RENDERER_MAP

    name: str | None = MODEL_RENDERER_MAP.get(model)
    return None if name in _DOWNLOADS else name


class Family:
    """Renders, bridges and parses one family. Has what ``ChatTemplate`` has, and the bridge.

    Raises:
        ConfigError: the family is unknown, or the tokenizer lacks its special tokens.
    """

    knows_tools = True
    takes_images = False

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary, name: str) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._renderers: dict[str, Any] = {}
        self._openers: dict[str, list[int]] = {}
        try:
            self._default = self._renderer({})
        except (*REFUSALS, RuntimeError, OSError) as error:
            raise ConfigError(f"renderer {name!r} does not fit this tokenizer: {error}") from error
        # Where a template's own text is looked at for its options, a family lists them.
        self.source = " ".join(sorted(type(self._default.config).template_field_names()))

    @property
    def identity(self) -> str:
        return f"renderers:{self.name}"

    def end_ids(self) -> tuple[int, ...]:
        return tuple(self._default.get_stop_token_ids())

    def text(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """See ``ChatTemplate.text``."""
        ids = self._ids(messages, tools, chat_template_kwargs or {}, add_generation_prompt)
        return self._vocabulary.decode(ids)

    def rendering(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None,
        chat_template_kwargs: Mapping[str, Any],
        after: Rendering | None = None,
    ) -> Rendering:
        """See ``ChatTemplate.rendering``. A family is always rendered in full."""
        return Rendering(text=self.text(messages, tools, chat_template_kwargs))

    def extend(
        self,
        parent_ids: Sequence[int],
        new_messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None,
        kwargs: Mapping[str, Any],
        history: Sequence[JsonObject],
    ) -> tuple[int, ...] | NoBridge:
        """See ``TemplateBridge.extend``."""
        parent = list(parent_ids)
        start = self._completion_start(parent, kwargs)
        if start is None:
            return NoBridge(reason="the parent's prompt does not end with the generation prompt")
        try:
            bridged = self._renderer(kwargs).bridge_to_next_turn(
                parent[:start],
                parent[start:],
                [self._adapted(message) for message in normal_messages(new_messages)],
                tools=normal_tools(tools) or None,
            )
        except (*REFUSALS, TokenError) as error:
            return NoBridge(reason=f"the {self.name} renderer refuses: {error}")
        if bridged is None:
            return NoBridge(reason=f"the {self.name} renderer has no bridge for these messages")
        if list(bridged.token_ids[: len(parent)]) != parent:
            return NoBridge(reason="the turn ended with ids that the renderer leaves out")
        return tuple(bridged.token_ids[len(parent) :])

    def parse(
        self,
        output_ids: Sequence[int],
        tools: Sequence[JsonObject] | None,
        prompt_ids: Sequence[int] | None,
    ) -> ParsedMessage:
        prompt = list(prompt_ids) if prompt_ids is not None else None
        specs = normal_tools(tools) or None
        parsed = self._default.parse_response(list(output_ids), tools=specs, prompt_ids=prompt)
        return message_of(parsed, tools)

    def _ids(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None,
        kwargs: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> list[int]:
        normal = [self._adapted(message) for message in normal_messages(messages)]
        try:
            return list(
                self._renderer(kwargs).render_ids(
                    normal,
                    tools=normal_tools(tools) or None,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except REFUSALS as error:
            raise TokenError(f"the {self.name} renderer refuses these messages: {error}") from error

    def _renderer(self, kwargs: Mapping[str, Any]) -> Any:
        key = json.dumps(kwargs, sort_keys=True, default=str)
        if key not in self._renderers:
            self._renderers[key] = _new_renderer(self._tokenizer, self.name, kwargs)
        return self._renderers[key]

    def _adapted(self, message: JsonObject) -> JsonObject:
        if message["role"] == "developer" and self.name not in _KNOW_DEVELOPER:
            return {**message, "role": "system"}
        if "tool_calls" not in message:
            return message
        calls = [
            {**call, "function": {**call["function"], "arguments": arguments_value(arguments)}}
            for call in message["tool_calls"]
            for arguments in [call["function"]["arguments"]]
        ]
        return {**message, "tool_calls": calls}

    def _completion_start(self, parent: list[int], kwargs: Mapping[str, Any]) -> int | None:
        """Behind the last generation prompt: there the parent's output begins."""
        key = json.dumps(kwargs, sort_keys=True, default=str)
        if key not in self._openers:
            user = [{"role": "user", "content": "hi"}]
            closed = self._ids(user, None, kwargs, False)
            self._openers[key] = self._ids(user, None, kwargs, True)[len(closed) :]
        opener = self._openers[key]
        for start in range(len(parent) - len(opener), -1, -1):
            if parent[start] == opener[0] and parent[start : start + len(opener)] == opener:
                return start + len(opener)
        return None


def message_of(parsed: Any, tools: Sequence[JsonObject] | None) -> ParsedMessage:
    """A message of `renderers`. Malformed calls, and all calls without tools, are content."""
    has_tools = tools is not None and len(tools) > 0
    calls = [_exact_call(attempt) if has_tools else None for attempt in parsed.tool_calls]
    pairs = zip(parsed.tool_calls, calls, strict=True)
    raw = [attempt.raw for attempt, call in pairs if call is None]
    return ParsedMessage(
        content="\n".join([*([parsed.content] if parsed.content else []), *raw]),
        reasoning_content=parsed.reasoning_content,
        tool_calls=tuple(call for call in calls if call is not None),
    )


def _new_renderer(tokenizer: Any, name: str, kwargs: Mapping[str, Any]) -> Any:
    from renderers.base import create_renderer, merge_chat_template_kwargs
    from renderers.configs import config_from_name

    kind = type(config_from_name(name))
    try:
        config = merge_chat_template_kwargs(kind(thinking_retention="all"), kwargs)
    except ValueError:
        # The caller's kwargs say how long reasoning is kept: that is theirs to decide.
        config = merge_chat_template_kwargs(kind(), kwargs)
    return create_renderer(tokenizer, config)


def _exact_call(attempt: Any) -> ParsedToolCall | None:
    """A well-formed call, with the sampled JSON text of its arguments where there is one."""
    if attempt.status != "ok" or not attempt.name or not json_text.is_unicode(attempt.name):
        return None
    arguments = attempt.arguments
    start = attempt.raw.find("{")
    members = json_text.object_members(attempt.raw, start, len(attempt.raw)) if start >= 0 else None
    if members is not None:
        whole = attempt.raw[start : members[1]]
        for text in (members[0].get("arguments"), members[0].get("parameters"), whole):
            if text is not None and json.loads(text) == arguments:
                return ParsedToolCall(attempt.name, text)
    if not isinstance(arguments, str):
        arguments = json_text.dump(arguments or {})
    return ParsedToolCall(attempt.name, arguments) if json_text.is_object(arguments) else None
