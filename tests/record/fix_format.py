"""The FIX tokenizer and template of the handed bug cases as a ChatFormat, and recording by hand.

Ids: 0 pad, 1 im_start, 2 im_end (end of turn), 3 newline, 4 system, 5 user, 6 assistant, 7 tool,
8 <think>, 9 </think>, 20 "a", 21 "b", 22 "ab" (the encoder always merges), 23 "hi", 24 "yo".
A message is [1, role, 3, content, 2, 3]; the generation prompt is [1, 6, 3].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_rl.record.cache import InteractionCache, PromptPlan
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.types import JsonObject, ModelResponse, StopReason

ROLES = {"system": 4, "user": 5, "assistant": 6, "tool": 7}
WORDS = {"ab": 22, "hi": 23, "yo": 24, "r1": 25, "r2": 26, "a": 20, "b": 21}
TEXTS = {number: text for text, number in WORDS.items()} | {2: "", 0: ""}
PROMPT = (1, 5, 3, 23, 2, 3, 1, 6, 3)  # [user "hi"]


def encode(text: str) -> list[int]:
    """Known words by id, anything else one id (100 + code point) for each character."""
    ids = []
    while text:
        word = next((word for word in WORDS if text.startswith(word)), text[0])
        ids.append(WORDS[word] if word in WORDS else 100 + ord(word))
        text = text[len(word) :]
    return ids


def decode(ids: Sequence[int]) -> str:
    return "".join(TEXTS[number] if number in TEXTS else chr(number - 100) for number in ids)


@dataclass(frozen=True)
class Refusal:
    reason: str


@dataclass
class FixFormat:
    """``strips_reasoning``: template T2. ``can_bridge``: False refuses every bridge."""

    strips_reasoning: bool = False
    can_bridge: bool = True
    encoded: list[str] = field(default_factory=list)
    stop_token_ids: tuple[int, ...] = (2, 0)

    def render(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        ids = [4, *self._encode(str(tools))] if tools else []
        for message in messages:
            ids += self._message(message)
        return (*ids, 1, 6, 3)

    def bridge(
        self,
        parent_ids: Sequence[int],
        stop_reason: StopReason,
        new_messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> tuple[int, ...] | Refusal:
        if not self.can_bridge:
            return Refusal("the template is not stable")
        ids = [3] if parent_ids[-1] == 2 else [2, 3]
        for message in new_messages:
            ids += self._message(message)
        return (*ids, 1, 6, 3)

    def _message(self, message: JsonObject) -> list[int]:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        thought = message.get("reasoning_content")
        span = []
        if thought and not self.strips_reasoning:
            span = [8, *self._encode(thought), 9]
        calls = [str(call) for call in message.get("tool_calls") or ()]
        return [1, ROLES[message["role"]], 3, *span, *self._encode(content + "".join(calls)), 2, 3]

    def _encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        return encode(text)


def user(text: str) -> JsonObject:
    return {"role": "user", "content": text}


def assistant(text: str | None, **keys: Any) -> JsonObject:
    return {"role": "assistant", "content": text, **keys}


def call(call_id: str, name: str = "f", arguments: str = '{"x": 1}') -> JsonObject:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def answer_of(plan: PromptPlan, output: Sequence[int], **fields: Any) -> ModelResponse:
    """Log-probs -0.1, -0.2, ... and version 0, unless ``fields`` say otherwise."""
    return ModelResponse(
        input_tokens=plan.input_ids,
        output_tokens=tuple(output),
        output_logprobs=fields.pop("output_logprobs", [-0.1 * (i + 1) for i in range(len(output))]),
        output_versions=fields.pop("output_versions", [0] * len(output)),
        stop_reason=fields.pop("stop_reason", "stop"),
        **fields,
    )


@dataclass
class Talk:
    """Records calls in one cache: ``talk.say("c1", [user("hi")], [20, 2])``."""

    style: Any = "concat"
    fmt: Any = field(default_factory=FixFormat)
    cache: InteractionCache = field(default_factory=InteractionCache)

    def plan(self, messages: Sequence[Any], **options: Any) -> PromptPlan:
        return self.cache.plan(
            messages,
            options.get("tools"),
            self.fmt,
            self.style,
            options.get("chat_template_kwargs"),
        )

    def say(
        self,
        name: str,
        messages: Sequence[Any],
        output: Sequence[int],
        message: JsonObject | None = None,
        *,
        tools: Sequence[JsonObject] | None = None,
        temperature: float = 1.0,
        **fields: Any,
    ) -> InteractionWithTokenLogpReward:
        """``message`` is the answer as read from the ids; by default their text."""
        plan = self.plan(messages, tools=tools)
        interaction = plan.interaction(
            interaction_id=name,
            model_response=answer_of(plan, output, **fields),
            output_message_list=[message or assistant(decode(output))],
            temperature=temperature,
        )
        self.cache.append(interaction)
        return interaction
