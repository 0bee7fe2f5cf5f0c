"""The exact next-turn prompt: what follows a sampled assistant turn, found by rendering a dummy.

    render  [user U, assistant A, *new messages]  with A an unmistakable sentinel
    text    ...U...A<|im_end|>\\n<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n
    tail            ^ what the template writes after A; it starts with the end-of-turn mark

The tail is encoded from its mark on, a special-token boundary, so the parent's ids stay as they
are. Was the mark sampled, it is left out; was it not (length, abort, stop string), it is context.
Never a guess: each shape of new messages is first tried with sentinels, and what cannot be shown
safe is a ``NoBridge`` with its reason. Reasoning that a template would drop from earlier turns
stays, because the engine has seen it: only text outside the assistant's turn must be stable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_rl.errors import TokenError
from agent_rl.tokens.render import ChatTemplate
from agent_rl.tokens.vocabulary import Vocabulary
from agent_rl.types import JsonObject

_USER, _ASSISTANT, _CALL, _NEW = "qzxuserzxq", "qzxassistantzxq", "qzxcall{}zxq", "qzxnew{}zxq"
_SYSTEM: JsonObject = {"role": "system", "content": "qzxsystemzxq"}
_TOOL: JsonObject = {
    "type": "function",
    "function": {"name": "qzxtool", "description": "", "parameters": {"type": "object"}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBridge:
    """No safe extension of the parent's ids; ``reason`` says why, for the branch's fork_reason."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seam:
    """What a shape of new messages looks like after an assistant turn.

    ``gap`` is the text between the assistant's own text and the first new content; ``marks`` are
    its boundary tokens as (offset, id); ``end`` is the mark that ends a turn the model did not
    end itself, None if it cannot be told.
    """

    gap: str
    marks: tuple[tuple[int, int], ...]
    end: tuple[int, int] | None
    needs_tools: bool
    needs_system: bool
    needs_names: bool


class TemplateBridge:
    """Bridges for one chat template; seams are found once for each shape."""

    def __init__(
        self, template: ChatTemplate, vocabulary: Vocabulary, end_ids: frozenset[int]
    ) -> None:
        self._template = template
        self._vocabulary = vocabulary
        self._end_ids = end_ids
        self._seams: dict[str, _Seam | NoBridge] = {}

    def extend(
        self,
        parent_ids: Sequence[int],
        new_messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        history: Sequence[JsonObject] = (),
    ) -> tuple[int, ...] | NoBridge:
        """Ids after the parent's prompt + output, up to where the next turn is sampled."""
        kwargs = chat_template_kwargs or {}
        calls = _calls_for(new_messages, history)
        has_system = history[0].get("role") in ("system", "developer") if history else None
        seam = self._seam(new_messages, calls, bool(tools), has_system, kwargs)
        if isinstance(seam, NoBridge):
            return seam
        if seam.needs_names and not history:
            return NoBridge(reason="the template repeats names of the parent's tool calls")
        dummy = [*([_SYSTEM] if seam.needs_system else []), *_turn(calls), *new_messages]
        try:
            text = self._template.text(dummy, tools if seam.needs_tools else None, kwargs)
            tail = text[_end_of_turn_text(text, calls) :]
        except (TokenError, _UnsafeError) as error:
            return NoBridge(reason=str(error))
        if not tail.startswith(seam.gap):
            return NoBridge(reason="what the template writes after a turn depends on its messages")
        return self._encode_tail(tail, seam, parent_ids[-1])

    def end_ids(self) -> tuple[int, ...]:
        """Tokens that the template writes directly after an assistant's text."""
        seam = self._seam([{"role": "user", "content": ""}], [], False, None, {})
        return () if isinstance(seam, NoBridge) or seam.end is None else (seam.end[1],)

    def _encode_tail(self, tail: str, seam: _Seam, last_id: int) -> tuple[int, ...] | NoBridge:
        is_ended = last_id in self._end_ids
        if is_ended:
            mark = next((mark for mark in seam.marks if mark[1] == last_id), None)
            if mark is None:
                name = self._vocabulary.text_of(last_id)
                return NoBridge(reason=f"the turn ended with {name}, which the template omits")
        elif seam.end is None:
            return NoBridge(reason="the turn has no end and the template's end mark is unknown")
        else:
            mark = seam.end
        ids = self._vocabulary.encode(tail[mark[0] :])
        if ids[:1] != [mark[1]]:
            return NoBridge(reason="the text after the turn is not encoded at a token boundary")
        return tuple(ids[1:] if is_ended else ids)

    def _seam(
        self,
        new_messages: Sequence[JsonObject],
        calls: list[JsonObject],
        has_tools: bool,
        has_system: bool | None,
        kwargs: Mapping[str, Any],
    ) -> _Seam | NoBridge:
        roles = [str(message.get("role")) for message in new_messages]
        key = json.dumps([roles, len(calls), has_tools, has_system, kwargs], default=str)
        seam = self._seams.get(key)
        if seam is None:
            seam = self._find_seam(roles, len(calls), has_tools, has_system, kwargs)
            self._seams[key] = seam
        return seam

    def _find_seam(
        self,
        roles: list[str],
        num_calls: int,
        has_tools: bool,
        has_system: bool | None,
        kwargs: Mapping[str, Any],
    ) -> _Seam | NoBridge:
        if not roles:
            return NoBridge(reason="there are no new messages")
        if "assistant" in roles:
            return NoBridge(reason="the new messages hold an assistant turn not sampled here")
        trial = _Trial(self._template, roles, num_calls, kwargs)
        try:
            tails = [
                trial.tail(tools=[_TOOL] if has_tools else None, has_system=has_system or False)
            ]
            if has_system is None and self._takes_system():
                tails.append(trial.tail(tools=[_TOOL] if has_tools else None, has_system=True))
        except (TokenError, _UnsafeError) as error:
            return NoBridge(reason=str(error))
        if len(set(tails)) > 1:
            return NoBridge(reason="the text after a turn depends on the system message")
        tail = tails[0]
        gap = tail[: tail.index(_NEW.format(0))]
        marks = self._marks(gap)
        return _Seam(
            gap=gap,
            marks=marks,
            end=self._end_mark(gap, marks, num_calls, kwargs),
            needs_tools=has_tools and trial.differs(tail, tools=None, has_system=bool(has_system)),
            needs_system=bool(has_system)
            and trial.differs(tail, tools=[_TOOL] if has_tools else None, has_system=False),
            needs_names="qzxtool" in tail,
        )

    def _takes_system(self) -> bool:
        try:
            self._template.text([_SYSTEM, {"role": "user", "content": _USER}])
        except TokenError:
            return False
        return True

    def _marks(self, gap: str) -> tuple[tuple[int, int], ...]:
        """Boundary tokens in the gap with their offsets, in order."""
        marks = []
        offset = 0
        for token_id in self._vocabulary.encode(gap):
            if token_id not in self._vocabulary.boundaries:
                continue
            text = self._vocabulary.text_of(token_id)
            offset = gap.find(text, offset)
            if offset < 0:
                break
            marks.append((offset, token_id))
            offset += len(text)
        return tuple(marks)

    def _end_mark(
        self,
        gap: str,
        marks: tuple[tuple[int, int], ...],
        num_calls: int,
        kwargs: Mapping[str, Any],
    ) -> tuple[int, int] | None:
        """After text: the mark that stands directly at its end. After calls: the same token."""
        if not num_calls:
            return marks[0] if marks and marks[0][0] == 0 else None
        plain = self._seam([{"role": "user", "content": ""}], [], False, None, kwargs)
        if isinstance(plain, NoBridge) or plain.end is None:
            return None
        end_id = plain.end[1]
        return next((mark for mark in marks if mark[1] == end_id), None)


class _UnsafeError(Exception):
    """A trial shows that the template does not simply go on after the turn."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """One shape of new messages, rendered with sentinels in every place."""

    template: ChatTemplate
    roles: list[str]
    num_calls: int
    kwargs: Mapping[str, Any]

    def tail(self, *, tools: list[JsonObject] | None, has_system: bool) -> str:
        """The text after the assistant's sentinel.

        Raises:
            _UnsafeError: new content is missing, repeated, out of order or stands before the turn;
                or the text before the turn changes.
        """
        calls = [_dummy_call(i, f"call_qzx{i}", {}) for i in range(self.num_calls)]
        prompt: list[JsonObject] = [*([_SYSTEM] if has_system else []), *_turn(calls)[:-1]]
        new = _dummy_messages(self.roles, calls)
        text = self.template.text([*prompt, *_turn(calls)[-1:], *new], tools, self.kwargs)
        closed = self.template.text(prompt, tools, self.kwargs, add_generation_prompt=False)
        opened = self.template.text(prompt, tools, self.kwargs)
        stable = _common_prefix(closed, opened)
        if _USER not in stable or not text.startswith(stable):
            raise _UnsafeError("the template changes the earlier prompt when messages follow")
        start = _end_of_turn_text(text, calls)
        places = [text.find(_NEW.format(index)) for index in range(len(self.roles))]
        is_once = all(text.count(_NEW.format(index)) == 1 for index in range(len(self.roles)))
        if not is_once or places != sorted(places) or places[0] < start:
            raise _UnsafeError("the template drops, repeats or moves the new messages")
        return text[start:]

    def differs(self, tail: str, *, tools: list[JsonObject] | None, has_system: bool) -> bool:
        try:
            return self.tail(tools=tools, has_system=has_system) != tail
        except (TokenError, _UnsafeError):
            return True


def _calls_for(
    new_messages: Sequence[JsonObject], history: Sequence[JsonObject]
) -> list[JsonObject]:
    """The parent's tool calls that the new tool results answer; made up where not known."""
    results = [message for message in new_messages if message.get("role") == "tool"]
    if not results:
        return []
    known = history[-1].get("tool_calls") if history else None
    names = {
        str(call.get("id")): str((call.get("function") or {}).get("name")) for call in known or ()
    }
    return [
        _dummy_call(index, str(message.get("tool_call_id") or f"call_{index}"), names)
        for index, message in enumerate(results)
    ]


def _dummy_call(index: int, call_id: str, names: Mapping[str, str]) -> JsonObject:
    arguments = {"qzxkey": _CALL.format(index)}
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": names.get(call_id, "qzxtool"), "arguments": arguments},
    }


def _dummy_messages(roles: list[str], calls: list[JsonObject]) -> list[JsonObject]:
    ids = iter([call["id"] for call in calls])
    messages = []
    for index, role in enumerate(roles):
        message = {"role": role, "content": _NEW.format(index)}
        messages.append({**message, "tool_call_id": next(ids)} if role == "tool" else message)
    return messages


def _turn(calls: list[JsonObject]) -> list[JsonObject]:
    """One user message and the assistant's answer, with or without tool calls."""
    answer: JsonObject = {"role": "assistant", "content": "" if calls else _ASSISTANT}
    if calls:
        answer["tool_calls"] = calls
    return [{"role": "user", "content": _USER}, answer]


def _end_of_turn_text(text: str, calls: list[JsonObject]) -> int:
    """Where the assistant's own text ends: behind its (last) sentinel."""
    sentinel = _CALL.format(len(calls) - 1) if calls else _ASSISTANT
    start = text.find(sentinel)
    if start < 0:
        raise _UnsafeError("the template does not show the assistant's turn")
    return start + len(sentinel)


def _common_prefix(left: str, right: str) -> str:
    size = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    return left[:size]
