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
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_rl.errors import TokenError
from agent_rl.tokens.render import ChatTemplate
from agent_rl.tokens.vocabulary import Vocabulary
from agent_rl.types import JsonObject

_USER, _ASSISTANT, _CALL, _NEW = "qzxuserzxq", "qzxassistantzxq", "qzxcall{}zxq", "qzxnew{}zxq"
_ID, _NAME = "qzxid{:04d}", "qzxtool"  # nine letters and digits, which every template takes
_WILDCARD = re.compile(r"qzxid\d{4}|qzxtool")
_SYSTEM_ROLES = ("system", "developer")
_SYSTEM: JsonObject = {"role": "system", "content": "qzxsystemzxq"}
_TOOL, _OTHER_TOOL = (
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in (_NAME, "qzxother")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBridge:
    """No safe extension of the parent's ids; ``reason`` says why, for the branch's fork_reason."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tail:
    """The text after the assistant's sentinel; ``own`` is how much of it the turn itself has."""

    text: str
    own: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """A boundary token of the gap."""

    offset: int
    token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seam:
    """What a shape of new messages looks like after an assistant turn.

    ``gap`` is the text between the assistant's own text and the first new content, ``marks`` are
    its boundary tokens, ``end`` is the one that ends a turn. A turn that the model did not end
    itself goes on at ``insert``. The latter two are None where they cannot be told. ``tools`` are
    those to render with; the request's own ones only if it ``needs_tools``.
    """

    gap: str
    marks: tuple[_Mark, ...]
    end: _Mark | None
    insert: _Mark | None
    tools: tuple[JsonObject, ...]
    needs_tools: bool
    needs_system: bool
    needs_names: bool

    def sampled(self, last_id: int, is_end: bool) -> _Mark | None:
        """The mark that the model sampled last: an end, or one the template writes before it."""
        for mark in self.marks:
            is_before_end = self.end is not None and mark.offset < self.end.offset
            if mark.token_id == last_id and (is_end or is_before_end):
                return mark
        return None

    def place(self, mark: _Mark, tail: str) -> int | None:
        """Where the mark stands in a real tail, None if the tail is not that of this seam.

        Ids and names of tool calls may differ: the gap of a trial has made-up ones.
        """
        if _WILDCARD.search(self.gap) is None:
            return mark.offset if tail.startswith(self.gap) else None
        before, after = self.gap[: mark.offset], self.gap[mark.offset :]
        found = re.match(f"({_pattern(before)}){_pattern(after)}", tail)
        return found.end(1) if found else None


class TemplateBridge:
    """Bridges for one chat template; seams are found once for each shape.

    Args:
        end_ids: tokens that end a turn when the model samples them.
    """

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
        tools: Sequence[JsonObject] | None,
        kwargs: Mapping[str, Any],
        history: Sequence[JsonObject],
    ) -> tuple[int, ...] | NoBridge:
        """Ids after the parent's prompt + output, up to where the next turn is sampled."""
        calls = _calls_for(new_messages, history)
        has_system = history[0].get("role") in _SYSTEM_ROLES if history else None
        has_tools = tools is not None and len(tools) > 0
        seam = self._seam(new_messages, has_tools, has_system, kwargs)
        if isinstance(seam, NoBridge):
            return seam
        if seam.needs_names and any(call["function"]["name"] == _NAME for call in calls):
            return NoBridge(reason="the template repeats the names of tool calls, not known here")
        dummy = [*([_SYSTEM] if seam.needs_system else []), *_turn(calls), *new_messages]
        try:
            text = self._template.text(dummy, tools if seam.needs_tools else seam.tools, kwargs)
            tail = text[_end_of_own_text(text, calls) :]
        except (TokenError, _UnsafeError) as error:
            return NoBridge(reason=str(error))
        return self._encode_tail(tail, seam, parent_ids[-1])

    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant's turn, after text and after a tool call."""
        text = self._seam([{"role": "user"}], False, None, {})
        call = self._seam([{"role": "tool"}], True, None, {})
        ends = [seam.end for seam in (text, call) if isinstance(seam, _Seam)]
        return tuple(dict.fromkeys(end.token_id for end in ends if end is not None))

    def _encode_tail(self, tail: str, seam: _Seam, last_id: int) -> tuple[int, ...] | NoBridge:
        sampled = seam.sampled(last_id, last_id in self._end_ids)
        if sampled is None and last_id in self._end_ids:
            name = self._vocabulary.text_of(last_id)
            return NoBridge(reason=f"the turn ended with {name}, which the template omits")
        mark = sampled or seam.insert
        if mark is None:
            return NoBridge(reason="the turn has no end, and the template's end mark is not clear")
        place = seam.place(mark, tail)
        if place is None:
            return NoBridge(reason="what the template writes after a turn depends on its messages")
        ids = self._vocabulary.encode(tail[place:])
        if ids[:1] != [mark.token_id]:
            return NoBridge(reason="the text after the turn is not encoded at a token boundary")
        return tuple(ids[1:] if sampled is not None else ids)

    def _seam(
        self,
        new_messages: Sequence[JsonObject],
        has_tools: bool,
        has_system: bool | None,
        kwargs: Mapping[str, Any],
    ) -> _Seam | NoBridge:
        roles = [str(message.get("role")) for message in new_messages]
        key = json.dumps([roles, has_tools, has_system, kwargs], sort_keys=True, default=str)
        seam = self._seams.get(key)
        if seam is None:
            try:
                seam = self._find_seam(roles, has_tools, has_system, kwargs)
            except (TokenError, _UnsafeError) as error:
                seam = NoBridge(reason=str(error))
            self._seams[key] = seam
        return seam

    def _find_seam(
        self,
        roles: list[str],
        has_tools: bool,
        has_system: bool | None,
        kwargs: Mapping[str, Any],
    ) -> _Seam:
        """Try the shape with sentinels; without knowledge of a system message, both ways."""
        if not roles:
            raise _UnsafeError("there are no new messages")
        if "assistant" in roles:
            raise _UnsafeError("the new messages hold an assistant turn that was not sampled here")
        trial = _Trial(self._template, roles, kwargs)
        tools = [_TOOL] if has_tools else None
        tail = trial.tail(tools, bool(has_system))
        if has_system is None and self._takes_system() and trial.differs(tail, tools, True):
            raise _UnsafeError("the text after a turn depends on the system message")
        gap = tail.text[: tail.text.index(_NEW.format(0))]
        marks = self._marks(gap)
        end = self._end_mark(marks, min(tail.own, len(gap)), trial.text_between_calls(tools))
        is_other_without_tools = has_tools and trial.differs(tail, None, bool(has_system))
        starts = marks[:1] if marks and marks[0].offset == 0 else ()
        return _Seam(
            gap=gap,
            marks=marks,
            end=end,
            # After a tool call the model has written what closes it; only the end is missing.
            insert=end if "tool" in roles else next(iter(starts), None),
            tools=(_TOOL,) if is_other_without_tools else (),
            needs_tools=is_other_without_tools
            and trial.differs(tail, [_OTHER_TOOL], bool(has_system)),
            needs_system=bool(has_system) and trial.differs(tail, tools, False),
            needs_names=_NAME in tail.text,
        )

    def _takes_system(self) -> bool:
        try:
            self._template.text([_SYSTEM, {"role": "user", "content": _USER}])
        except TokenError:
            return False
        return True

    def _marks(self, gap: str) -> tuple[_Mark, ...]:
        """Boundary tokens in the gap, in order."""
        marks = []
        offset = 0
        for token_id in self._vocabulary.encode(gap):
            if token_id not in self._vocabulary.boundaries:
                continue
            text = self._vocabulary.text_of(token_id)
            offset = gap.find(text, offset)
            if offset < 0:
                break
            marks.append(_Mark(offset=offset, token_id=token_id))
            offset += len(text)
        return tuple(marks)

    def _end_mark(self, marks: tuple[_Mark, ...], own: int, between: str) -> _Mark | None:
        """The end-of-text token in the turn's own text, else the last special token there.

        What stands ``between`` two calls closes a call and not the turn. A turn without any end
        (GLM) is ended by the token that opens what follows it.
        """
        inside = [mark for mark in marks if mark.offset < own]
        eos = [mark for mark in inside if mark.token_id == self._vocabulary.eos_id]
        special = [
            mark
            for mark in inside
            if mark.token_id in self._vocabulary.special
            and self._vocabulary.text_of(mark.token_id) not in between
        ]
        following = [mark for mark in marks if mark.offset == own]
        return next(iter([*eos[-1:], *special[-1:], *following]), None)


class _UnsafeError(Exception):
    """A trial shows that the template does not simply go on after the turn."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """One shape of new messages, rendered with sentinels in every place."""

    template: ChatTemplate
    roles: list[str]
    kwargs: Mapping[str, Any]

    def tail(self, tools: list[JsonObject] | None, has_system: bool) -> _Tail:
        """What follows the assistant's sentinel.

        Raises:
            _UnsafeError: new content is missing, repeated, out of order or stands before the turn;
                or the text before the turn changes.
        """
        new = _dummy_messages(self.roles)
        calls = _calls_for(new, ())
        prompt = [*([_SYSTEM] if has_system else []), *_turn(calls)]
        text = self.template.text([*prompt, *new], tools, self.kwargs)
        asked = self.template.text(prompt[:-1], tools, self.kwargs, add_generation_prompt=False)
        asking = self.template.text(prompt[:-1], tools, self.kwargs)
        stable = _common_prefix(asked, asking)
        if _USER not in stable or not text.startswith(stable):
            raise _UnsafeError("the template changes the earlier prompt when messages follow")
        start = _end_of_own_text(text, calls)
        places = [text.find(_NEW.format(index)) for index in range(len(new))]
        is_once = all(text.count(_NEW.format(index)) == 1 for index in range(len(new)))
        if not is_once or places != sorted(places) or places[0] < start:
            raise _UnsafeError("the template drops, repeats or moves the new messages")
        closed = self.template.text(prompt, tools, self.kwargs, add_generation_prompt=False)
        own = _common_prefix(closed[_end_of_own_text(closed, calls) :], text[start:])
        return _Tail(text=text[start:], own=len(own))

    def text_between_calls(self, tools: list[JsonObject] | None) -> str:
        """What the template writes from the end of one tool call into the next."""
        if "tool" not in self.roles:
            return ""
        calls = _calls_for(_dummy_messages(["tool", "tool"]), ())
        try:
            text = self.template.text(_turn(calls), tools, self.kwargs)
        except TokenError:
            return ""
        between, second, _ = text.partition(_CALL.format(0))[2].partition(_CALL.format(1))
        return between if second else ""

    def differs(self, tail: _Tail, tools: list[JsonObject] | None, has_system: bool) -> bool:
        try:
            return self.tail(tools, has_system).text != tail.text
        except (TokenError, _UnsafeError):
            return True


def _calls_for(
    new_messages: Sequence[JsonObject], history: Sequence[JsonObject]
) -> list[JsonObject]:
    """The tool calls that the new results answer; names are made up where they are not known."""
    known = (history[-1].get("tool_calls") if history else None) or ()
    names = {str(call.get("id")): (call.get("function") or {}).get("name") for call in known}
    results = [message for message in new_messages if message.get("role") == "tool"]
    calls = []
    for index, result in enumerate(results):
        call_id = str(result.get("tool_call_id") or _ID.format(index))
        name = names.get(call_id) or result.get("name") or _NAME
        function = {"name": name, "arguments": {"qzxkey": _CALL.format(index)}}
        calls.append({"id": call_id, "type": "function", "function": function})
    return calls


def _dummy_messages(roles: list[str]) -> list[JsonObject]:
    messages = []
    num_results = 0
    for index, role in enumerate(roles):
        message = {"role": role, "content": _NEW.format(index)}
        if role == "tool":
            message["tool_call_id"] = _ID.format(num_results)
            num_results += 1
        messages.append(message)
    return messages


def _turn(calls: list[JsonObject]) -> list[JsonObject]:
    """One user message and the assistant's answer, with or without tool calls."""
    answer: JsonObject = {"role": "assistant", "content": "" if calls else _ASSISTANT}
    if calls:
        answer["tool_calls"] = calls
    return [{"role": "user", "content": _USER}, answer]


def _end_of_own_text(text: str, calls: list[JsonObject]) -> int:
    """Where the assistant's own text ends: behind its (last) sentinel."""
    sentinel = _CALL.format(len(calls) - 1) if calls else _ASSISTANT
    start = text.find(sentinel)
    if start < 0:
        raise _UnsafeError("the template does not show the whole assistant turn")
    return start + len(sentinel)


def _pattern(gap: str) -> str:
    return _WILDCARD.sub(r"[^\\s<>\"'{}\\[\\]]{1,256}?", re.escape(gap))


def _common_prefix(left: str, right: str) -> str:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return left[:index]
    return min(left, right, key=len)
