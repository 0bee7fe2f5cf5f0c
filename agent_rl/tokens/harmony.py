"""gpt-oss's channels, read where the tokenizer's own template writes them.

    analysis<|message|>hm<|end|> ... final<|message|>yes<|return|>    reasoning "hm", content "yes"

The parser of `renderers` is used without its renderer, which fetches a vocabulary of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_rl.tokens.decode import Detokenizer
from agent_rl.tokens.family import message_of
from agent_rl.tokens.parse import ANY_SPACE, Edge, MessageDelta, ParsedMessage
from agent_rl.tokens.vocabulary import Vocabulary
from agent_rl.types import JsonObject, StopReason


class Harmony:
    """Reads gpt-oss's channels where the tokenizer's own template writes them."""

    name = "harmony"
    _TOKENS = ("return", "call", "start", "end", "channel", "message", "constrain")

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary, ids: Mapping[str, int]) -> None:
        self._tokenizer = tokenizer
        self.ids = ids
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
        return (self.ids["return"], self.ids["call"])

    def parse(
        self,
        output_ids: Sequence[int],
        tools: Sequence[JsonObject] | None,
        prompt_ids: Sequence[int] | None,
    ) -> ParsedMessage:
        from renderers.parsing import parse_gpt_oss

        ids = {f"{name}_id": token_id for name, token_id in self.ids.items()}
        whole = [*self._header, *output_ids]
        return message_of(parse_gpt_oss(self._tokenizer, whole, **ids), tools)


class HarmonyPreview:
    """Shows bodies on the channels analysis and final while they arrive, up to the first call."""

    def __init__(self, vocabulary: Vocabulary, harmony: Harmony) -> None:
        self._vocabulary = vocabulary
        self._ids = harmony.ids
        self._header: list[int] | None = []  # None: inside a body
        self._is_over = False
        self._source = Detokenizer(vocabulary, (), ())
        self._num_shown = 0
        self._texts = {"analysis": "", "final": ""}
        self._edges = {name: Edge(ANY_SPACE, ANY_SPACE) for name in self._texts}
        self._channel = ""

    def feed(self, token_ids: Sequence[int]) -> MessageDelta:
        before = self.message
        for token_id in token_ids:
            if not self._is_over:
                self._read(token_id)
        after = self.message
        return MessageDelta(
            content=after.content[len(before.content) :],
            reasoning_content=(after.reasoning_content or "")[
                len(before.reasoning_content or "") :
            ],
        )

    def finish(self, stop_reason: StopReason) -> MessageDelta:
        return MessageDelta()

    @property
    def message(self) -> ParsedMessage:
        texts = self._texts
        return ParsedMessage(content=texts["final"], reasoning_content=texts["analysis"] or None)

    def _read(self, token_id: int) -> None:
        ids = self._ids
        if token_id == ids["return"]:
            self._is_over = True
        elif token_id == ids["message"] and self._header is not None:
            self._begin(self._vocabulary.decode(self._header))
        elif token_id in (ids["start"], ids["end"], ids["call"]):
            self._source.finish()
            self._show()
            self._header = []
        elif self._header is not None:
            self._header.append(token_id)
        else:
            self._source.feed([token_id])
            self._show()

    def _begin(self, header: str) -> None:
        """A call, or a channel that is not known, is left to the parser, and so is the rest."""
        channel = header.rpartition("<|channel|>")[2].strip()
        self._is_over = channel not in self._texts
        self._channel, self._header = channel, None
        self._source, self._num_shown = Detokenizer(self._vocabulary, (), ()), 0

    def _show(self) -> None:
        if self._channel:
            text = self._source.text[self._num_shown :]
            self._num_shown = len(self._source.text)
            self._texts[self._channel] += self._edges[self._channel].show(text)
