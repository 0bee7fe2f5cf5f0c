"""Reads a completion in a wire format that is not ours, and shows what it can while it arrives.

The family's own parser takes whole completions, so its word counts at the end. Until then a
``Preview`` shows text that the parser will show too: plain text before anything special. What was
shown stays; a parser that sees it otherwise adds its calls only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from agent_rl.tokens.parse import MessageDelta, MessageReader, ParsedMessage
from agent_rl.tokens.vocabulary import Vocabulary
from agent_rl.types import JsonObject, StopReason


class FamilyParser(Protocol):
    """Reads a whole completion: a ``Family``, or ``harmony.Harmony``."""

    def parse(
        self,
        output_ids: Sequence[int],
        tools: Sequence[JsonObject] | None,
        prompt_ids: Sequence[int] | None,
    ) -> ParsedMessage: ...


class Preview(Protocol):
    """Shows the beginning of a message."""

    def feed(self, token_ids: Sequence[int]) -> MessageDelta: ...

    def finish(self, stop_reason: StopReason) -> MessageDelta: ...

    @property
    def message(self) -> ParsedMessage: ...


class TextPreview:
    """Reasoning and text up to the first token that is neither text, a reasoning tag nor an end."""

    def __init__(
        self, reader: MessageReader, vocabulary: Vocabulary, ordinary: Sequence[int | None]
    ) -> None:
        self._reader = reader
        self._marks = vocabulary.boundaries - frozenset(ordinary)
        self._is_over = False

    def feed(self, token_ids: Sequence[int]) -> MessageDelta:
        if self._is_over:
            return MessageDelta()
        marks = [index for index, id in enumerate(token_ids) if id in self._marks]
        self._is_over = bool(marks)
        return self._reader.feed(token_ids[: marks[0]] if marks else token_ids)

    def finish(self, stop_reason: StopReason) -> MessageDelta:
        return self._reader.finish(stop_reason)

    @property
    def message(self) -> ParsedMessage:
        return self._reader.message


class FamilyReader:
    """The same surface as ``MessageReader``. Without a preview all is shown at the end."""

    def __init__(
        self,
        family: FamilyParser,
        preview: Preview | None,
        *,
        tools: Sequence[JsonObject] | None,
        stop: Sequence[str],
        prompt_ids: Sequence[int] | None,
    ) -> None:
        self.message = ParsedMessage()
        self._family = family
        self._preview = preview
        self._tools = tools
        self._stop = stop
        self._prompt_ids = prompt_ids
        self._ids: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> MessageDelta:
        self._ids += token_ids
        return MessageDelta() if self._preview is None else self._preview.feed(token_ids)

    def finish(self, stop_reason: StopReason = "stop") -> MessageDelta:
        shown = whole = ParsedMessage()
        if self._preview is not None:
            shown = self._preview.message
            self._preview.finish(stop_reason)
            whole = self._preview.message
        parsed = self._parsed()
        # Asked of the whole, so that the answer does not depend on how the ids were fed.
        if not _extends(parsed, whole):
            parsed = replace(whole, tool_calls=parsed.tool_calls)
        self.message = parsed
        return MessageDelta(
            content=parsed.content[len(shown.content) :],
            reasoning_content=(parsed.reasoning_content or "")[
                len(shown.reasoning_content or "") :
            ],
            tool_calls=parsed.tool_calls,
        )

    def _parsed(self) -> ParsedMessage:
        parsed = self._family.parse(self._ids, self._tools, self._prompt_ids)
        content = parsed.content.rstrip("\ufffd")
        cuts = [place for stop in self._stop if stop and (place := content.find(stop)) >= 0]
        return ParsedMessage(
            content=content[: min(cuts, default=len(content))],
            reasoning_content=parsed.reasoning_content,
            tool_calls=parsed.tool_calls,
        )


def _extends(whole: ParsedMessage, shown: ParsedMessage) -> bool:
    reasoning, begun = whole.reasoning_content or "", shown.reasoning_content or ""
    return whole.content.startswith(shown.content) and reasoning.startswith(begun)
