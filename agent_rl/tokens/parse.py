"""Sampled ids -> content, reasoning and tool calls, all at once or while they arrive.

There is one reader for both: ``parse`` feeds everything and finishes, a stream feeds chunks. What
the chunks show, joined, is what the whole shows; nothing is shown that could still turn out to be
a tag, a stop string or half a character. Ids are never encoded again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from agent_rl.errors import ConfigError
from agent_rl.tokens.decode import Detokenizer, partial_length
from agent_rl.tokens.json_text import skip_space
from agent_rl.tokens.messages import normal_tools
from agent_rl.tokens.tool_formats import ParsedToolCall, Reading, ToolFormat
from agent_rl.tokens.vocabulary import Vocabulary
from agent_rl.types import JsonObject, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The tags around reasoning. ``is_forced``: an answer begins inside, whatever the prompt."""

    open: str = "<think>"
    close: str = "</think>"
    is_forced: bool = False


_SPACE = " \t\r\n"
ANY_SPACE = "".join(char for char in map(chr, range(0x3001)) if char.isspace())
_THINK = ReasoningFormat()
# Names that SGLang (`--reasoning-parser`) and vLLM use; all of them write <think> tags.
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": _THINK,
    "qwen3": _THINK,
    "glm45": _THINK,
    "nemotron_v3": _THINK,
    "deepseek_r1": ReasoningFormat(is_forced=True),
    "deepseek-r1": ReasoningFormat(is_forced=True),
    "qwen3-thinking": ReasoningFormat(is_forced=True),
    "mistral": ReasoningFormat(open="[THINK]", close="[/THINK]"),
}


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of that name.

    Raises:
        ConfigError: an unknown name; the message lists the known ones.
    """
    if name not in REASONING_FORMATS:
        known = ", ".join(sorted(REASONING_FORMATS))
        raise ConfigError(f"reasoning_parser is {name!r}; it must be auto, none or one of: {known}")
    return REASONING_FORMATS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedMessage:
    """A completion as a message. ``reasoning_content`` is None where no reasoning was opened."""

    content: str = ""
    reasoning_content: str | None = None
    tool_calls: tuple[ParsedToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDelta:
    """What one chunk adds. A tool call is shown when it is complete, so never an invented one."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ParsedToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning_content or self.tool_calls)


class _Phase(Enum):
    START = auto()
    REASONING = auto()
    CONTENT = auto()


@dataclass(slots=True)
class Edge:
    """Cuts whitespace off the ends of a text that arrives in pieces."""

    start_chars: str
    end_chars: str
    held: str = ""

    def show(self, text: str) -> str:
        text = self.held + text
        if self.start_chars:
            text = text.lstrip(self.start_chars)
            self.start_chars = "" if text else self.start_chars
        shown = text.rstrip(self.end_chars) if self.end_chars else text
        self.held = text[len(shown) :]
        return shown


class MessageReader:
    """Reads one completion. Feed ids as they come, then ``finish``; ``message`` is all so far.

    Args:
        end_ids: tokens without text: ends of turn and padding.
        reasoning: None reads reasoning tags as content.
        tool_format: what tool calls look like. Without ``tools`` they are content, marks and all.
        prompt_ids: what the completion follows, where known.
        opening: space that the template itself writes before the text of an answer. A completion
            that begins with it has it from there; in the message it would be written twice.
        is_reasoning: the prompt ended inside reasoning.
        is_trimmed: no space is shown around reasoning and content.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        end_ids: Iterable[int],
        reasoning: ReasoningFormat | None = None,
        tool_format: ToolFormat | None = None,
        tools: Sequence[JsonObject] | None = None,
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] | None = None,
        opening: str = "",
        is_reasoning: bool = False,
        is_trimmed: bool = False,
    ) -> None:
        tags = (reasoning.open, reasoning.close) if reasoning else ()
        markers = (*tags, *(tool_format.markers if tool_format else ()))
        self._source = Detokenizer(vocabulary, markers, end_ids, prompt_ids or ())
        self._reasoning = reasoning
        self._format = tool_format if tools is not None and len(tools) else None
        self._tools = {tool["function"]["name"]: tool["function"] for tool in normal_tools(tools)}
        self._stop = tuple(text for text in stop if text)
        self._opening = opening
        self._is_reasoning = is_reasoning or (reasoning is not None and reasoning.is_forced)
        self._phase = _Phase.CONTENT if reasoning is None else _Phase.START
        self._place = 0
        self._searched = 0
        self._cut: int | None = None
        self._is_trimmed = is_trimmed
        self._thoughts = Edge("\n", "\n")
        self._content = Edge("", _SPACE if self._format else "")
        if is_trimmed:
            self._thoughts = Edge(ANY_SPACE, ANY_SPACE)
            self._content = Edge(ANY_SPACE, ANY_SPACE)
        self._has_reasoned = False
        self._has_content = False
        self._parts: list[MessageDelta] = []

    def feed(self, token_ids: Sequence[int]) -> MessageDelta:
        """Append sampled ids; returns what can be shown now."""
        self._source.feed(token_ids)
        return self._advance(is_final=False, is_cut=False)

    def finish(self, stop_reason: StopReason = "stop") -> MessageDelta:
        """No more ids will come; returns the rest."""
        self._source.finish()
        return self._advance(is_final=True, is_cut=stop_reason in ("length", "abort"))

    @property
    def message(self) -> ParsedMessage:
        whole = _joined(self._parts)
        return ParsedMessage(
            content=whole.content,
            reasoning_content=whole.reasoning_content if self._has_reasoned else None,
            tool_calls=whole.tool_calls,
        )

    def _advance(self, *, is_final: bool, is_cut: bool) -> MessageDelta:
        num_before = len(self._parts)
        end = self._visible_end(is_final)
        if self._phase is _Phase.START:
            self._start(end, is_final)
        if self._phase is _Phase.REASONING:
            self._read_reasoning(end, is_final)
        if self._phase is _Phase.CONTENT and self._is_opened(end, is_final):
            self._read_content(end, is_final, is_cut)
        return _joined(self._parts[num_before:])

    def _visible_end(self, is_final: bool) -> int:
        """Up to the first stop string, or to where one may have begun."""
        text = self._source.text
        if self._cut is None and self._stop:
            start = max(0, self._searched - max(map(len, self._stop)) + 1)
            found = [place for stop in self._stop if (place := text.find(stop, start)) >= 0]
            self._cut = min(found, default=None)
            self._searched = len(text)
        if self._cut is not None:
            return self._cut
        held = [partial_length(text, stop, len(text)) for stop in self._stop]
        return len(text) - (0 if is_final else max(held, default=0))

    def _start(self, end: int, is_final: bool) -> None:
        """Reasoning begins at once or not at all: by its tag, or because the prompt opened it."""
        assert self._reasoning is not None, "without a format the phase starts at content"
        opener = self._reasoning.open
        place = skip_space(self._source.text, 0)
        is_opened = place < end and self._source.is_at(opener, place)
        may_open = place >= end or self._source.num_held(opener, end) == end - place
        if not is_opened and may_open and not is_final:
            return
        self._has_reasoned = is_opened or self._is_reasoning
        self._phase = _Phase.REASONING if self._has_reasoned else _Phase.CONTENT
        self._place = place + len(opener) if is_opened else 0

    def _read_reasoning(self, end: int, is_final: bool) -> None:
        assert self._reasoning is not None, "without a format the phase starts at content"
        closer = self._reasoning.close
        closed = self._source.find(closer, self._place, end)
        shown = closed
        if closed < 0:
            shown = end if is_final else end - self._source.num_held(closer, end)
        text = self._thoughts.show(self._source.text[self._place : shown])
        self._add(MessageDelta(reasoning_content=text))
        self._place = shown
        if closed >= 0:
            self._place += len(closer)
            self._phase = _Phase.CONTENT
            self._content.start_chars = ANY_SPACE if self._is_trimmed else "\n"

    def _is_opened(self, end: int, is_final: bool) -> bool:
        """Skip the template's own space; false while it is not clear whether it is there."""
        if self._place == 0 and self._opening:
            text = self._source.text[:end]
            if not is_final and len(text) < len(self._opening) and self._opening.startswith(text):
                return False
            self._place = len(self._opening) if text.startswith(self._opening) else 0
            self._opening = ""
        return True

    def _read_content(self, end: int, is_final: bool, is_cut: bool) -> None:
        while self._format is not None:
            reading = Reading(
                source=self._source,
                end=end,
                is_final=is_final,
                is_cut=is_cut,
                has_content=self._has_content,
                tools=self._tools,
            )
            scan = self._format.scan(reading, self._place)
            if scan.resume == self._place:
                break
            self._show(scan.content_end)
            if scan.calls:
                self._content.held = ""  # space between text and a call belongs to neither
                self._has_content = True
                self._add(MessageDelta(tool_calls=scan.calls))
            self._place = scan.resume
        if self._format is None:
            self._show(end)
        if is_final and not self._has_calls and not self._is_trimmed:
            self._add(MessageDelta(content=self._content.held))
            self._content.held = ""

    @property
    def _has_calls(self) -> bool:
        return any(part.tool_calls for part in self._parts)

    def _show(self, end: int) -> None:
        text = self._content.show(self._source.text[self._place : end])
        self._has_content = self._has_content or bool(text)
        self._add(MessageDelta(content=text))
        self._place = end

    def _add(self, part: MessageDelta) -> None:
        if part:
            self._parts.append(part)


def _joined(parts: Sequence[MessageDelta]) -> MessageDelta:
    return MessageDelta(
        content="".join(part.content for part in parts),
        reasoning_content="".join(part.reasoning_content for part in parts),
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
    )
