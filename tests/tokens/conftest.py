"""Tokenizers and templates of the token tests: FIX of the bug cases, and the real small model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from families import FAMILIES

from agent_rl import small_model

FIX_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIX_TEMPLATES = {
    "FIX": FIX_TEMPLATE,
    # T2 drops the reasoning of assistant turns before the last user message.
    "T2": (
        "{% set ns = namespace(last=-1) %}{% for message in messages %}"
        "{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.reasoning_content and loop.index0 > ns.last %}"
        "<think>{{ message.reasoning_content }}</think>{% endif %}"
        "{{ message.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # T3 opens the reasoning in the generation prompt.
    "T3": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% set reasoning = message.reasoning_content %}"
        "{% if reasoning %}<think>{{ reasoning }}</think>{% endif %}"
        "{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
    ),
    # T4 puts consecutive tool results into one user block.
    "T4": (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for message in messages %}{% if message.role == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
        "<|im_start|>user\n{% endif %}"
        "{{ message.content }}"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
        "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "{% for call in message.tool_calls %}<tool_call>\n"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
        "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
_PIECES: dict[int, bytes] = {
    0: b"<|endoftext|>",
    1: b"<|im_start|>",
    2: b"<|im_end|>",
    3: b"\n",
    4: b"system",
    5: b"user",
    6: b"assistant",
    7: b"tool",
    8: b"<think>",
    9: b"</think>",
    10: b"<tool_call>",
    11: b"</tool_call>",
    20: b"a",
    21: b"b",
    22: b"ab",
    23: b"hi",
    24: b"yo",
    25: b"R1",
    26: b"R2",
    60: b"END",
    70: b"\xf0\x9f",
    71: b"\x99\x82",
}


class FixTokenizer:
    """The FIX tokenizer: pieces by longest match; bytes 100 + b for everything else."""

    eos_token_id = 2
    pad_token_id = 0
    all_special_ids = (0, 1, 2)
    added_tokens_decoder = dict.fromkeys([8, 9, 10, 11], type("Added", (), {"special": False})())

    def __init__(self, chat_template: str = FIX_TEMPLATE) -> None:
        self.chat_template = chat_template
        self.encoded: list[str] = []
        pieces = {piece: id for id, piece in _PIECES.items()}
        pieces.update({bytes([b]): 100 + b for b in range(256) if bytes([b]) not in pieces})
        self._ids = dict(sorted(pieces.items(), key=lambda item: -len(item[0])))
        self._pieces = {id: piece for piece, id in self._ids.items()}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        self.encoded.append(text)
        data = text.encode()
        ids = []
        while data:
            piece = next(piece for piece in self._ids if data.startswith(piece))
            ids.append(self._ids[piece])
            data = data[len(piece) :]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._pieces[id] for id in token_ids).decode(errors="replace")


@pytest.fixture
def fix() -> Callable[..., FixTokenizer]:
    """``fix("T2")`` -> the FIX tokenizer with that template."""
    return lambda name="FIX": FixTokenizer(FIX_TEMPLATES[name])


@pytest.fixture(params=sorted(FAMILIES))
def family_name(request: pytest.FixtureRequest) -> str:
    """Each of the public families in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def smollm() -> Any:
    """The real tokenizer of the small model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(small_model())
