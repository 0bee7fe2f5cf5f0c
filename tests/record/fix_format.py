"""The FIX tokenizer and template of the handed bug cases, and recording by hand.

Ids: 0 pad, 1 im_start, 2 im_end (end of turn), 3 newline, 4 system, 5 user, 6 assistant, 7 tool,
8 <think>, 9 </think>, 20 "a", 21 "b", 22 "ab" (the encoder always merges), 23 "hi", 24 "yo".
A message is [1, role, 3, content, 2, 3]; the generation prompt is [1, 6, 3].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_rl.record.cache import InteractionCache
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.record.plan import PromptPlan
from agent_rl.tokens.bridge import NoBridge
from agent_rl.tokens.format import ChatFormat
from agent_rl.types import JsonObject, ModelResponse

WORDS = {
    **{"<|pad|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "\n": 3, "system": 4, "user": 5},
    **{"assistant": 6, "tool": 7, "<think>": 8, "</think>": 9, "<tool_call>": 10},
    **{"</tool_call>": 11, "ab": 22, "hi": 23, "yo": 24, "r1": 25, "r2": 26, "a": 20, "b": 21},
}
TEXTS = {number: text for text, number in WORDS.items()}
PROMPT = (1, 5, 3, 23, 2, 3, 1, 6, 3)  # [user "hi"]

FIX = (
    "{% if tools %}<|im_start|>system{{ '\n' }}{{ tools | tojson }}<|im_end|>{{ '\n' }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\n' }}"
    "{% if m.reasoning_content and true %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
T2 = FIX.replace("and true", "and false")  # drops reasoning from the history
T3 = FIX.replace("assistant{{ '\n' }}", "assistant{{ '\n' }}<think>")  # the prompt opens reasoning
# Consecutive tool results share one block, of the user's.
T4 = FIX.replace(
    "<|im_start|>{{ m.role }}{{ '\n' }}",
    "{% if m.role != 'tool' or messages[loop.index0 - 1].role != 'tool' %}"
    "<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}{{ '\n' }}{% endif %}",
).replace(
    "<|im_end|>{{ '\n' }}{% endfor %}",
    "{% if m.role != 'tool' or loop.last or messages[loop.index].role != 'tool' %}"
    "<|im_end|>{{ '\n' }}{% endif %}{% endfor %}",
)


class FixTokenizer:
    """Known words by id, anything else one id (100 + code point) for each character.

    ``encoded`` has every text that it was asked to encode.
    """

    eos_token_id, pad_token_id, bos_token_id = 2, 0, None
    all_special_ids = (0, 1, 2, 8, 9, 10, 11)

    def __init__(self, chat_template: str) -> None:
        self.chat_template = chat_template
        self.encoded: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(text)
        ids = []
        while text:
            word = next((word for word in WORDS if text.startswith(word)), text[0])
            ids.append(WORDS[word] if word in WORDS else 100 + ord(word))
            text = text[len(word) :]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(TEXTS[i] if i in TEXTS else chr(i - 100) for i in token_ids)


class Refusing:
    """A format that has no bridge for anything."""

    def __init__(self, fmt: ChatFormat) -> None:
        self._fmt = fmt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fmt, name)

    def bridge(self, *args: Any, **kwargs: Any) -> NoBridge:
        return NoBridge(reason="the template is not stable")


def fix_format(chat_template: str = FIX) -> ChatFormat:
    return ChatFormat.of(FixTokenizer(chat_template))


def rendered(messages: Sequence[JsonObject], tools: Any = None) -> tuple[int, ...]:
    return fix_format().render(messages, tools)


def user(text: str) -> JsonObject:
    return {"role": "user", "content": text}


def assistant(text: Any = None, **keys: Any) -> JsonObject:
    return {"role": "assistant", "content": text, **keys}


def call(call_id: str, name: str = "f", arguments: Any = '{"x": 1}') -> JsonObject:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def tool(name: str) -> JsonObject:
    function = {"name": name, "parameters": {"type": "object", "properties": {}}}
    return {"type": "function", "function": function}


def answer_of(plan: PromptPlan, output: Sequence[int], **fields: Any) -> ModelResponse:
    """Log-probs -0.1, -0.2, ... and version 0, unless ``fields`` say otherwise."""
    defaults: dict[str, Any] = {
        "input_tokens": plan.input_ids,
        "output_tokens": tuple(output),
        "output_logprobs": [-0.1 * (i + 1) for i in range(len(output))],
        "output_versions": [0] * len(output),
        "stop_reason": "stop",
    }
    return ModelResponse(**{**defaults, **fields})


@dataclass
class Talk:
    """Records calls in one cache: ``Talk().say("c1", [user("hi")], [20, 2])``."""

    style: Any = "concat"
    fmt: Any = field(default_factory=fix_format)
    cache: InteractionCache = field(default_factory=InteractionCache)

    def plan(self, messages: Sequence[Any], tools: Any = None) -> PromptPlan:
        return self.cache.plan(messages, tools, self.fmt, self.style)

    def say(
        self,
        name: str,
        messages: Sequence[Any],
        output: Sequence[int],
        message: JsonObject | None = None,
        *,
        tools: Any = None,
        temperature: float = 1.0,
        **fields: Any,
    ) -> InteractionWithTokenLogpReward:
        """``message`` is the answer as the agent gets it; by default what the ids spell."""
        plan = self.plan(messages, tools)
        interaction = plan.interaction(
            interaction_id=name,
            model_response=answer_of(plan, output, **fields),
            output_message_list=[message or assistant(self.fmt.parse(output).content)],
            temperature=temperature,
        )
        self.cache.append(interaction)
        return interaction
