"""gpt-oss's channels, read where the tokenizer's own template writes them.

    analysis<|message|>hm<|end|> ... final<|message|>yes<|return|>    reasoning "hm", content "yes"

The parser of `renderers` is used without its renderer, which fetches a vocabulary of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_rl.tokens.family import message_of
from agent_rl.tokens.parse import ParsedMessage
from agent_rl.tokens.vocabulary import Vocabulary
from agent_rl.types import JsonObject


class Harmony:
    """Reads gpt-oss's channels where the tokenizer's own template writes them."""

    name = "harmony"
    _TOKENS = ("return", "call", "start", "end", "channel", "message", "constrain")

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary, ids: Mapping[str, int]) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        # The generation prompt ends inside the first message's header.
        self._header = [ids["start"], *vocabulary.encode("assistant")]

    @classmethod
    def of(cls, tokenizer: Any, vocabulary: Vocabulary) -> Harmony | None:
        """None where the vocabulary does not have the channels' tokens."""
        found = {name: vocabulary.id_of(f"<|{name}|>") for name in cls._TOKENS}
        ids = {name: token_id for name, token_id in found.items() if token_id is not None}
        return cls(tokenizer, vocabulary, ids) if len(ids) == len(cls._TOKENS) else None

    def end_ids(self) -> tuple[int, ...]:
        """``<|end|>`` closes one message of a turn and is no end."""
        return (self._ids["return"], self._ids["call"])

    def parse(
        self,
        output_ids: Sequence[int],
        tools: Sequence[JsonObject] | None,
        prompt_ids: Sequence[int] | None,
    ) -> ParsedMessage:
        from renderers.parsing import parse_gpt_oss

        ids = {f"{name}_id": token_id for name, token_id in self._ids.items()}
        whole = [*self._header, *output_ids]
        return message_of(parse_gpt_oss(self._tokenizer, whole, **ids), tools)
