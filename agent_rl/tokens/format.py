"""ChatFormat: one tokenizer with its template and parsers, both ways.

Messages become prompt ids (``render``, and ``bridge`` for the next turn of a recorded one), and
sampled ids become a message (``parse``, ``decoder``). A format is built once for each tokenizer and
choice of options; it is immutable and shared by all sessions. Knows neither engines nor records.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from agent_rl.errors import ConfigError, TokenError
from agent_rl.tokens import tool_parsers
from agent_rl.tokens.bridge import NoBridge, TemplateBridge
from agent_rl.tokens.family import (
    ALIASES,
    OPENS_WITH_TEXT,
    WIRE_FORMATS,
    Family,
    family_names,
    family_of,
)
from agent_rl.tokens.family_reader import FamilyReader, Preview, TextPreview
from agent_rl.tokens.harmony import Harmony, HarmonyPreview
from agent_rl.tokens.parse import (
    MessageReader,
    ParsedMessage,
    ReasoningFormat,
    reasoning_format,
)
from agent_rl.tokens.render import ChatTemplate
from agent_rl.tokens.tool_formats import ToolFormat
from agent_rl.tokens.vocabulary import Tokenizer, Vocabulary, require_tokenizer
from agent_rl.types import JsonObject, StopReason

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_agent_rl_formats"
_PROBE: list[JsonObject] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
]


class _Formats(dict[Any, Any]):
    """Kept on the tokenizer itself, so both die together; copies and pickles start empty."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (_Formats, ())


class ChatFormat:
    """How one tokenizer writes and reads conversations. Use ``ChatFormat.of``."""

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        *,
        renderer: str = "auto",
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> ChatFormat:
        """The format for a tokenizer, built at the first call with these options.

        Args:
            tokenizer: of Hugging Face, or any object with these methods and a chat template.
            renderer: "auto" is the family (see ``family``) that knows the tokenizer's model and
                agrees with its chat template, else the template. "template" is always the template;
                "hermes" too, with tools in the `hermes` form. Otherwise the name of a family.
            tool_call_parser: "auto", "none", a format of ``tool_parsers``, a family, or the name
                that SGLang or vLLM has for one of them.
            reasoning_parser: "auto", "none" or a name of ``parse.REASONING_FORMATS``.

        Raises:
            ConfigError: an unknown name.
            TokenError: the tokenizer has no chat template.
            WrongTypeError: it is no tokenizer, but its path, say.
        """
        require_tokenizer(tokenizer)
        # Not by getattr: a wrapper that passes attributes on is a tokenizer of its own.
        own: dict[str, Any] = getattr(tokenizer, "__dict__", {})
        formats = own.get(_ATTRIBUTE)
        if formats is None:
            formats = own[_ATTRIBUTE] = _Formats()
        template = getattr(tokenizer, "chat_template", None)
        template = template if isinstance(template, str) else id(template)
        key = (template, renderer, tool_call_parser, reasoning_parser)
        found: ChatFormat | None = formats.get(key)
        if found is None:
            found = formats[key] = cls(tokenizer, renderer, tool_call_parser, reasoning_parser)
        return found

    def __init__(
        self, tokenizer: Tokenizer, renderer: str, tool_call_parser: str, reasoning_parser: str
    ) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer)
        self._family = self._chosen_family(renderer)
        self.template: ChatTemplate | Family = self._family or ChatTemplate(
            tokenizer, "hermes" if renderer == "hermes" else "auto"
        )
        self._reader = self._chosen_reader(tool_call_parser)
        self._tool_format = self._chosen_tool_format(tool_call_parser)
        self._reasoning = self._chosen_reasoning(reasoning_parser)
        eos, pad = self.vocabulary.eos_id, self.vocabulary.pad_id
        ends = [*self._template_ends(), eos, pad if self.vocabulary.pad_is_end else None]
        self.stop_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys(end for end in ends if end is not None)
        )
        self._end_ids = frozenset({*self.stop_token_ids, *([pad] if pad is not None else [])})
        self._bridge = self._bridge_with(self._end_ids)

    def render(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """The prompt's ids, from the whole conversation, with the generation prompt.

        Raises:
            TokenError: the template refuses the messages, or a content part is not supported.
        """
        return tuple(
            self.vocabulary.encode(self.template.text(messages, tools, chat_template_kwargs))
        )

    def bridge(
        self,
        parent_ids: Sequence[int],
        new_messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        history: Sequence[JsonObject] = (),
    ) -> tuple[int, ...] | NoBridge:
        """Ids that lead from the parent's prompt + output to the next turn, or why there are none.

        Args:
            parent_ids: the parent's prompt ids and output ids; they are never changed. They tell
                how the output ended: an end mark that is not the last id is inserted.
            new_messages: what the conversation has after the parent's output.
            tools, chat_template_kwargs: unchanged since the parent, or it is not its child.
            history: the conversation up to and including the parent's output, where known. Only
                its first and last message are looked at; some templates need them.
        """
        if self._is_cut_in_reasoning(parent_ids):
            return NoBridge(reason="the turn was cut inside its reasoning")
        kwargs = chat_template_kwargs or {}
        return self._bridge.extend(parent_ids, new_messages, tools, kwargs, history)

    def parse(
        self,
        output_ids: Sequence[int],
        *,
        tools: Sequence[JsonObject] | None = None,
        stop_reason: StopReason = "stop",
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] | None = None,
    ) -> ParsedMessage:
        """The message that sampled ids spell.

        Without ``tools`` tool calls are content. ``prompt_ids`` says exactly whether the prompt
        ended inside reasoning; without it the template's usual generation prompt decides.
        """
        reader = self.decoder(tools=tools, stop=stop, prompt_ids=prompt_ids)
        reader.feed(output_ids)
        reader.finish(stop_reason)
        return reader.message

    def decoder(
        self,
        *,
        tools: Sequence[JsonObject] | None = None,
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] | None = None,
    ) -> MessageReader | FamilyReader:
        """Reads one completion while it arrives: ``feed(ids)``, ``finish(stop_reason)``."""
        if self._reader is not None:
            return FamilyReader(
                self._reader,
                self._preview(self._reader, stop, prompt_ids),
                tools=tools,
                stop=stop,
                prompt_ids=prompt_ids,
            )
        return MessageReader(
            self.vocabulary,
            end_ids=self._end_ids,
            reasoning=self._reasoning,
            tool_format=self._tool_format,
            tools=tools,
            stop=stop,
            prompt_ids=prompt_ids,
            opening=self._opening,
            is_reasoning=self._is_reasoning(prompt_ids),
        )

    def _preview(
        self, parser: Family | Harmony, stop: Sequence[str], prompt_ids: Sequence[int] | None
    ) -> Preview | None:
        """What may be shown before ``parser`` has read the whole; None where nothing is sure."""
        if isinstance(parser, Harmony):
            return HarmonyPreview(self.vocabulary, parser) if not stop else None
        if parser.name not in OPENS_WITH_TEXT:
            return None
        think = reasoning_format("think")
        opened = self.vocabulary.decode(prompt_ids[-16:]) if prompt_ids is not None else ""
        reader = MessageReader(
            self.vocabulary,
            end_ids=self._end_ids,
            reasoning=think,
            stop=stop,
            prompt_ids=prompt_ids,
            is_reasoning=_ends_open(opened, think),
            is_trimmed=True,
        )
        tags = [self.vocabulary.id_of(tag) for tag in (think.open, think.close)]
        return TextPreview(reader, self.vocabulary, [*tags, *self._end_ids])

    @property
    def is_fallback(self) -> bool:
        """Whether tools are written in the `hermes` form because the template knows none."""
        return not self.template.knows_tools

    @property
    def renderer_name(self) -> str:
        family = self._family
        return f"renderers: {family.name}" if family else f"chat template {self.template.identity}"

    @property
    def tool_form(self) -> str:
        """The wire format in which tool calls are read."""
        if self._reader is not None:
            return f"renderers: {self._reader.name}"
        name = self._tool_format.name if self._tool_format is not None else "none"
        return (
            f"{name} (described in the system turn: the template has no place for tools)"
            if self.is_fallback
            else name
        )

    @property
    def tool_format_name(self) -> str:
        """The name of our wire format, "none" where a family or nobody reads calls."""
        return self._tool_format.name if self._tool_format is not None else "none"

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The tags around reasoning, None where nothing or a family's parser reads them."""
        return self._reasoning if self._reader is None else None

    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether an answer to this prompt begins inside reasoning."""
        is_forced = self._reasoning is not None and self._reasoning.is_forced
        return is_forced or self._is_reasoning(prompt_ids)

    @property
    def reasoning_name(self) -> str:
        if self._reader is not None:
            return f"renderers: {self._reader.name}"
        return f"{self._reasoning.open}...{self._reasoning.close}" if self._reasoning else "none"

    def closing(self, opened: str) -> str:
        """What closes the reasoning that a generation prompt ending in ``opened`` has opened."""
        if self._reasoning is None or not _ends_open(opened, self._reasoning):
            return ""
        return f"{self._reasoning.close}\n\n"

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids with their special tokens, for people to read."""
        return self.vocabulary.decode(token_ids)

    def _is_cut_in_reasoning(self, parent_ids: Sequence[int]) -> bool:
        """Whether the parent ends, without an end mark, before its reasoning was closed.

        A family has its own rule. Where the tags are not tokens nobody can tell.
        """
        if self._family is not None or self._reasoning is None:
            return False
        opener = self.vocabulary.id_of(self._reasoning.open)
        closers = {self.vocabulary.id_of(self._reasoning.close), *self._end_ids}
        for token_id in reversed(parent_ids):
            if token_id in closers:
                return False
            if token_id == opener:
                return True
        return False

    def _is_reasoning(self, prompt_ids: Sequence[int] | None) -> bool:
        if self._reasoning is None:
            return False
        if prompt_ids is None:
            return self._opens_reasoning
        # Enough for any generation prompt; the prompt itself may be long.
        return _ends_open(self.vocabulary.decode(prompt_ids[-16:]), self._reasoning)

    @cached_property
    def _opening(self) -> str:
        """Space between the generation prompt and an answer: "ASSISTANT:" + " " + "yo"."""
        try:
            asking = self.template.text(_PROBE[:1])
            answered = self.template.text(_PROBE[:2], add_generation_prompt=False)
        except TokenError:
            return ""
        space = answered.removeprefix(asking).partition(_PROBE[1]["content"])[0]
        return space if answered.startswith(asking) and space.isspace() else ""

    @cached_property
    def _opens_reasoning(self) -> bool:
        """Whether the usual generation prompt ends with an open reasoning tag."""
        assert self._reasoning is not None, "asked only where there is a format"
        text = self.template.text([{"role": "user", "content": "hi"}])
        return _ends_open(text, self._reasoning)

    def _chosen_family(self, renderer: str) -> Family | None:
        if renderer in ("template", "hermes"):
            return None
        if renderer == "auto":
            return self._known_family()
        if renderer not in family_names():
            known = ", ".join(["auto", "hermes", "template", *family_names()])
            raise ConfigError(f"renderer is {renderer!r}; it must be one of: {known}")
        return Family(self.tokenizer, self.vocabulary, renderer)

    def _known_family(self) -> Family | None:
        """The family of a known model, unless the tokenizer was given another template."""
        name = family_of(self.tokenizer)
        if name is None:
            return None
        try:
            family = Family(self.tokenizer, self.vocabulary, name)
        except ConfigError as error:
            logger.warning("%s; its chat template is used", error)
            return None
        if getattr(self.tokenizer, "chat_template", None) is None:
            return family
        if ChatTemplate(self.tokenizer).text(_PROBE) == family.text(_PROBE):
            return family
        logger.warning("the chat template is not that of renderer %r and is used instead", name)
        return None

    def _chosen_reader(self, tool_call_parser: str) -> Family | Harmony | None:
        """What reads completions where none of our own formats does."""
        name = ALIASES.get(tool_call_parser, tool_call_parser)
        if name != "auto":
            is_ours = name in WIRE_FORMATS or name not in family_names()
            return None if is_ours else Family(self.tokenizer, self.vocabulary, name)
        if self._family is not None:
            return None if self._family.name in WIRE_FORMATS else self._family
        harmony = Harmony.of(self.tokenizer, self.vocabulary)
        name = tool_parsers.detect(self.template.source, self.template.knows_tools)
        if harmony is not None or name in tool_parsers.FORMATS:
            return harmony
        try:
            return Family(self.tokenizer, self.vocabulary, name)
        except ConfigError:
            return None  # the marks of that family, but not its vocabulary

    def _chosen_tool_format(self, name: str) -> ToolFormat | None:
        if name == "none" or self._reader is not None:
            return None
        if name == "auto" and self._family is not None:
            name = WIRE_FORMATS[self._family.name]
        if name == "auto":
            name = tool_parsers.detect(self.template.source, self.template.knows_tools)
            name = name if name in tool_parsers.FORMATS else "hermes"
        return tool_parsers.tool_format(WIRE_FORMATS.get(name, name))

    def _template_ends(self) -> tuple[int, ...]:
        if isinstance(self._reader, Harmony):
            return self._reader.end_ids()
        return self._bridge_with(frozenset()).end_ids()

    def _bridge_with(self, end_ids: frozenset[int]) -> TemplateBridge | Family:
        if isinstance(self.template, Family):
            return self.template
        return TemplateBridge(self.template, self.vocabulary, end_ids)

    def _chosen_reasoning(self, name: str) -> ReasoningFormat | None:
        if name == "none":
            return None
        if name != "auto":
            return reasoning_format(name)
        for format in (reasoning_format("think"), reasoning_format("mistral")):
            if format.close in self.template.source or self.vocabulary.id_of(format.close):
                return format
        return None


def _ends_open(prompt: str, reasoning: ReasoningFormat) -> bool:
    return prompt.rstrip().endswith(reasoning.open)
