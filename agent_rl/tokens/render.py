"""Messages + tools -> text, through the tokenizer's own chat template.

What a template can take is found by rendering small probes once: whether it knows tools (else the
`hermes` form, see ``hermes``), arguments as mapping or text, an absent content, long tool-call
ids, the developer role. Rendering is the only thing done here; ids are made in ``format``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2

from agent_rl.errors import TokenError
from agent_rl.tokens import hermes
from agent_rl.tokens.dialect import template_environment
from agent_rl.tokens.messages import (
    arguments_text,
    arguments_value,
    normal_messages,
    normal_tools,
)
from agent_rl.tokens.piecewise import Piecewise
from agent_rl.types import JsonObject

# What a template, a renderer or a small apply_chat_template raises when it does not like its input.
REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    RecursionError,
)
_NAME, _KEY, _VALUE = "qzxname", "qzxkey", "qzxvalue"
_PROBE_TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "probe",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """A rendered request, and what one that goes on from it need not render again.

    ``normal`` are ``messages`` in the form that the template takes. However it goes on after the
    first ``num_fixed`` of those, their text stays the first ``fixed_size`` characters of ``text``.
    """

    text: str
    messages: Sequence[JsonObject] = ()
    normal: Sequence[JsonObject] = ()
    adapted: Sequence[JsonObject] = ()
    num_fixed: int = 0
    fixed_size: int = 0


class ChatTemplate:
    """The text that a tokenizer's template gives for a conversation.

    Args:
        tokenizer: has ``apply_chat_template``, or ``chat_template`` with the Jinja text.
        tool_form: "auto" finds out whether the template knows tools; "hermes" says it does not.
    """

    def __init__(self, tokenizer: Any, tool_form: str = "auto") -> None:
        self._tokenizer = tokenizer
        self._tool_form = tool_form
        source = getattr(tokenizer, "chat_template", None)
        self.source = json.dumps(source) if isinstance(source, dict) else str(source or "")
        apply = getattr(tokenizer, "apply_chat_template", None)
        # The usual way is taken by ourselves: transformers drops null content, which some
        # templates ask for, and copies every message. A tokenizer's own way is respected.
        is_usual = str(getattr(apply, "__module__", "transformers.")).startswith("transformers.")
        if is_usual and not self.source:
            raise TokenError("the tokenizer has no chat template; set tokenizer.chat_template")
        self._compiled: jinja2.Template | None = None
        self._pieces: Piecewise | None = None
        if is_usual and isinstance(source, str):
            environment = template_environment()
            try:
                self._compiled = environment.from_string(source)
                self._pieces = Piecewise.of(environment, source)
            except jinja2.TemplateError as error:
                raise TokenError(f"tokenizer.chat_template is not Jinja: {error}") from error

    def text(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The rendered conversation.

        Raises:
            TokenError: the template refuses it, or a content part is not text.
        """
        normal = normal_messages(messages, takes_images=self.takes_images)
        adapted, specs = self._adapted_all(normal, normal_tools(tools))
        return self._apply(adapted, specs, chat_template_kwargs or {}, add_generation_prompt)

    def rendering(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None,
        chat_template_kwargs: Mapping[str, Any],
        after: Rendering | None = None,
    ) -> Rendering:
        """``text`` of a prompt, at the cost of what is new since ``after``.

        Args:
            after: an earlier rendering with the same tools and ``chat_template_kwargs``.

        Raises:
            TokenError: see ``text``.
        """
        num_known = len(after.messages) if after is not None else 0
        if after is None or messages[:num_known] != after.messages:
            after, num_known = None, 0
        new = normal_messages(messages[num_known:], takes_images=self.takes_images, at=num_known)
        normal = [*(after.normal if after is not None else ()), *new]
        specs = normal_tools(tools)
        if after is not None and (self.knows_tools or not specs):
            own, specs = self._adapted_all(new, specs)
            adapted = [*after.adapted, *own]
        else:  # the hermes form joins results, also those of before and after
            adapted, specs = self._adapted_all(normal, specs)
        text, num_fixed, fixed_size = self._grown(adapted, specs, chat_template_kwargs, after)
        return Rendering(
            text=text,
            messages=messages,
            normal=normal,
            adapted=adapted,
            num_fixed=num_fixed,
            fixed_size=fixed_size,
        )

    def _grown(
        self,
        adapted: list[JsonObject],
        specs: list[JsonObject],
        kwargs: Mapping[str, Any],
        after: Rendering | None,
    ) -> tuple[str, int, int]:
        """The text, and the ``num_fixed`` and ``fixed_size`` of its rendering."""
        start = after.num_fixed if after is not None else 0
        if after is not None and adapted[:start] == after.adapted[:start]:
            kept = after.text[: after.fixed_size]
        else:
            start, kept = 0, ""
        if self._pieces is None:
            return self._apply(adapted, specs, kwargs, True), 0, 0
        with _refusing():
            variables = self._variables(adapted, specs, kwargs, True)
            tail = self._pieces.render(variables, start)
            num_fixed = len(adapted) - self._pieces.reach
            if tail is None or num_fixed < self._pieces.needs:
                return self._apply(adapted, specs, kwargs, True), 0, 0
            open_end = self._pieces.render(variables, num_fixed)
        if open_end is None:
            return kept + tail, 0, 0
        return kept + tail, num_fixed, len(kept) + len(tail) - len(open_end)

    def _adapted_all(
        self, normal: list[JsonObject], specs: list[JsonObject]
    ) -> tuple[list[JsonObject], list[JsonObject]]:
        """Messages and tools in the form this template takes."""
        if not self.knows_tools:
            normal, specs = hermes.without_tools(normal, specs), []
        return [self._adapted(message) for message in normal], specs

    @cached_property
    def knows_tools(self) -> bool:
        """Whether tools given to the template show up in its text."""
        if self._tool_form == "hermes":
            return False
        messages = [{"role": "user", "content": "hi"}]
        try:
            return _NAME in self._apply(messages, [_PROBE_TOOL], {}, True)
        except TokenError:
            return False

    @cached_property
    def takes_images(self) -> bool:
        return "image" in self.source

    @cached_property
    def has_developer(self) -> bool:
        return "developer" in self.source

    @property
    def identity(self) -> str:
        """A short hash of the template's text."""
        return hashlib.sha256(self.source.encode()).hexdigest()[:16]

    @cached_property
    def _call_form(self) -> tuple[bool, bool, bool]:
        """(arguments as text, no content as None, short ids): the first form that renders a call.

        A form counts only if the template writes the argument, and not as Python prints it.
        """
        for is_text, is_none, is_short in (
            (False, False, False),
            (False, False, True),
            (True, False, False),
            (False, True, False),
            (True, True, False),
            (True, True, True),
        ):
            form = (is_text, is_none, is_short)
            try:
                text = self._apply(_probe_call(form), [_PROBE_TOOL], {}, False)
            except TokenError:
                continue
            # A mapping printed by Python, {'x': 1}, is not what the model was trained on.
            if _VALUE in text and f"'{_KEY}'" not in text:
                return form
        return (False, False, False)

    @cached_property
    def _takes_text_arguments(self) -> bool:
        """Whether arguments that are no JSON object can be shown: some ask for their items."""
        messages = _probe_call(self._call_form)
        messages[1]["tool_calls"][0]["function"]["arguments"] = _VALUE
        try:
            return _VALUE in self._apply(messages, [_PROBE_TOOL], {}, False)
        except TokenError:
            return False

    def _adapted(self, message: JsonObject) -> JsonObject:
        """A normal message in the form this template takes."""
        role = message["role"]
        if role == "developer" and not self.has_developer:
            return {**message, "role": "system"}
        if "reasoning_content" in message and "thinking" in self.source:
            message = {**message, "thinking": message["reasoning_content"]}
        if not self.knows_tools or (role != "tool" and "tool_calls" not in message):
            return message
        message = _in_form(message, self._call_form)
        return message if self._takes_text_arguments else _with_mappings(message)

    def _apply(
        self,
        messages: list[JsonObject],
        tools: list[JsonObject],
        kwargs: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        with _refusing():
            if self._compiled is not None:
                variables = self._variables(messages, tools, kwargs, add_generation_prompt)
                return self._compiled.render(variables)
            options = {"tools": tools} if tools else {}
            text = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **options,
                **kwargs,
            )
        return str(text)

    def _variables(
        self,
        messages: list[JsonObject],
        tools: list[JsonObject],
        kwargs: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> JsonObject:
        """Raises TypeError where ``kwargs`` name one of ours; special tokens they may replace."""
        special = getattr(self._tokenizer, "special_tokens_map", None) or {}
        own = dict(
            messages=messages,
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
            **kwargs,
        )
        return {**special, **own}


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except REFUSALS as error:
        raise TokenError(f"the chat template refuses these messages: {error}") from error


def _probe_call(form: tuple[bool, bool, bool]) -> list[JsonObject]:
    call = {
        "id": "call_0123456789abcdef",
        "type": "function",
        "function": {"name": _NAME, "arguments": {_KEY: _VALUE}},
    }
    return [
        {"role": "user", "content": "hi"},
        _in_form({"role": "assistant", "content": "", "tool_calls": [call]}, form),
    ]


def _in_form(message: JsonObject, form: tuple[bool, bool, bool]) -> JsonObject:
    _, is_none, is_short = form
    message = dict(message)
    if "tool_calls" in message:
        message["tool_calls"] = [_call_in_form(call, form) for call in message["tool_calls"]]
        if is_none and message["content"] == "":
            message["content"] = None
    if is_short and "tool_call_id" in message:
        message["tool_call_id"] = _short_id(message["tool_call_id"])
    return message


def _call_in_form(call: JsonObject, form: tuple[bool, bool, bool]) -> JsonObject:
    is_text, _, is_short = form
    arguments = call["function"]["arguments"]
    adapted = arguments_text(arguments) if is_text else arguments_value(arguments)
    return {
        **call,
        "function": {**call["function"], "arguments": adapted},
        "id": _short_id(call["id"]) if is_short else call["id"],
    }


def _with_mappings(message: JsonObject) -> JsonObject:
    """Arguments that are no JSON object as the one argument "arguments", so that they are seen."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, Mapping):
            call = {**call, "function": {**call["function"], "arguments": {"arguments": arguments}}}
        calls.append(call)
    return {**message, "tool_calls": calls} if calls else message


def _short_id(tool_call_id: str) -> str:
    """Nine letters and digits, as Mistral's templates demand; the same for the same id."""
    if len(tool_call_id) == 9 and tool_call_id.isalnum():
        return tool_call_id
    return hashlib.sha256(tool_call_id.encode()).hexdigest()[:9]
