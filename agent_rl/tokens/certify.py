"""What a tokenizer and its chat template can do exactly, tried out on a fixed battery.

Each feature is one small conversation: a prompt, an answer as the template itself writes it, and
what follows. "exact": prompt + sampled ids + bridge has the ids of the full render, and the parser
reads the answer back. "branch": there is no safe bridge, so such a turn starts a branch.
"unsupported": the template refuses it, or the parser cannot read what it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakKeyDictionary

from agent_rl.errors import TokenError
from agent_rl.tokens.bridge import NoBridge
from agent_rl.tokens.format import ChatFormat
from agent_rl.tokens.vocabulary import Tokenizer
from agent_rl.types import JsonObject, StopReason

Status = Literal["exact", "branch", "unsupported"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One line of the battery; ``reason`` says why it is not exact, or what to know."""

    name: str
    status: Status
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certification:
    """The battery's result for one tokenizer, template and choice of parsers."""

    tokenizer: str
    renderer: str
    tool_form: str
    reasoning: str
    stop_tokens: tuple[str, ...]
    features: tuple[Feature, ...]

    @property
    def is_multi_turn_exact(self) -> bool:
        """Whether ``concat`` keeps plain conversations in one row."""
        return all(self.feature(name).status == "exact" for name in ("plain", "multi-turn"))

    def feature(self, name: str) -> Feature:
        return next(feature for feature in self.features if feature.name == name)

    def summary(self) -> str:
        """One line for the log: counts, and the features that are not exact."""
        rest = [f"{item.name}: {item.status}" for item in self.features if item.status != "exact"]
        num_exact = len(self.features) - len(rest)
        counts = f"{num_exact} of {len(self.features)} features exact"
        return f"{self.tokenizer}: {counts}" + (f" ({'; '.join(rest)})" if rest else "")

    def table(self) -> str:
        """The whole result as text, one feature a line."""
        head = [
            ("tokenizer", self.tokenizer),
            ("renderer", self.renderer),
            ("tools", self.tool_form),
            ("reasoning", self.reasoning),
            ("stop tokens", " ".join(self.stop_tokens)),
        ]
        width = max(len(item.name) for item in self.features)
        lines = [f"{name:<{width}}  {value}" for name, value in head]
        lines += ["", f"{'feature':<{width}}  {'status':<11}  reason"]
        lines += [f"{f.name:<{width}}  {f.status:<11}  {f.reason}".rstrip() for f in self.features]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """``answer`` follows ``prompt``, then ``following``; ``stop_reason`` length cuts its end."""

    name: str
    prompt: list[JsonObject]
    answer: JsonObject
    following: list[JsonObject]
    tools: list[JsonObject] = field(default_factory=list)
    stop_reason: StopReason = "stop"


def certify(
    tokenizer: Tokenizer,
    *,
    renderer: str = "auto",
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
) -> Certification:
    """Try the battery, once for each tokenizer, template and options."""
    format = ChatFormat.of(
        tokenizer,
        renderer=renderer,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
    )
    found = _CACHE.get(format)
    if found is None:
        found = _CACHE[format] = Certification(
            tokenizer=str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__),
            renderer=format.renderer_name,
            tool_form=format.tool_form,
            reasoning=format.reasoning_name,
            stop_tokens=tuple(format.decode([end]) for end in format.stop_token_ids),
            features=tuple(_tried(format, case) for case in _cases()),
        )
    return found


_CACHE: WeakKeyDictionary[ChatFormat, Certification] = WeakKeyDictionary()


def _cases() -> list[_Case]:
    user: JsonObject = {"role": "user", "content": "How many apples are left?"}
    again: JsonObject = {"role": "user", "content": "And pears?"}
    system: JsonObject = {"role": "system", "content": "You count fruit."}
    text: JsonObject = {"role": "assistant", "content": "Three apples."}
    thought = {**text, "reasoning_content": "Five minus two."}
    emoji: JsonObject = {"role": "assistant", "content": "Drei Äpfel 🍎, 三个."}
    empty: JsonObject = {"role": "assistant", "content": ""}
    one, two = _calling(1), _calling(2)
    tools = [_TOOL]
    error = [{**_results(1)[0], "content": 'Error: no fruit "kiwi"\n  at line 1'}]
    return [
        _Case(name="plain", prompt=[user], answer=text, following=[again]),
        _Case(name="multi-turn", prompt=[user, text, again], answer=text, following=[user]),
        _Case(name="system", prompt=[system, user], answer=text, following=[again]),
        _Case(name="reasoning", prompt=[user], answer=thought, following=[again]),
        _Case(name="unicode", prompt=[user], answer=emoji, following=[again]),
        _Case(name="empty output", prompt=[user], answer=empty, following=[again]),
        _Case(
            name="length stop", prompt=[user], answer=text, following=[again], stop_reason="length"
        ),
        _Case(name="tool call", prompt=[user], answer=one, following=_results(1), tools=tools),
        _Case(name="parallel calls", prompt=[user], answer=two, following=_results(2), tools=tools),
        _Case(name="tool error", prompt=[user], answer=one, following=error, tools=tools),
        _Case(
            name="system + tools",
            prompt=[system, user],
            answer=one,
            following=_results(1),
            tools=tools,
        ),
        _Case(name="tools, then user", prompt=[user], answer=text, following=[again], tools=tools),
    ]


_TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "count_fruit",
        "description": "Count the fruit of one kind.",
        "parameters": {
            "type": "object",
            "properties": {"kind": {"type": "string"}},
            "required": ["kind"],
        },
    },
}
_KINDS = ("apple", "pear")


def _calling(count: int) -> JsonObject:
    calls = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": "count_fruit", "arguments": f'{{"kind": "{_KINDS[index]}"}}'},
        }
        for index in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _results(count: int) -> list[JsonObject]:
    return [
        {"role": "tool", "tool_call_id": f"call_{index}", "content": f"{index + 3}"}
        for index in range(count)
    ]


def _tried(format: ChatFormat, case: _Case) -> Feature:
    if case.name == "reasoning" and format.reasoning_name == "none":
        reason = "neither template nor vocabulary has reasoning tags"
        return Feature(name=case.name, status="unsupported", reason=reason)
    history = [*case.prompt, case.answer]
    try:
        prompt = format.render(case.prompt, case.tools)
        written = _written(format, case)
        full = format.template.text([*history, *case.following], case.tools)
    except TokenError as error:
        return Feature(name=case.name, status="unsupported", reason=str(error))
    output = _sampled(format, case, written)
    misread = _misread(format, case, prompt, output)
    if misread and written:
        return Feature(name=case.name, status="unsupported", reason=misread)
    bridge = format.bridge((*prompt, *output), case.following, case.tools, history=history)
    if isinstance(bridge, NoBridge):
        return Feature(name=case.name, status="branch", reason=bridge.reason)
    if [*prompt, *output, *bridge] == format.vocabulary.encode(full):
        return Feature(name=case.name, status="exact", reason=_remark(format, case))
    if full.endswith(format.decode(bridge)):
        remark = "keeps what the template drops from or adds to earlier turns"
        return Feature(name=case.name, status="exact", reason=remark)
    return Feature(name=case.name, status="branch", reason="the full render goes on differently")


def _written(format: ChatFormat, case: _Case) -> list[int]:
    """The answer as a model writes it after the generation prompt, with its end."""
    asking = format.vocabulary.encode(format.template.text(case.prompt, case.tools))
    closed = format.vocabulary.encode(
        format.template.text([*case.prompt, case.answer], case.tools, add_generation_prompt=False)
    )
    shared = next(
        (i for i, pair in enumerate(zip(asking, closed, strict=False)) if pair[0] != pair[1]),
        min(len(asking), len(closed)),
    )
    if str(case.prompt[-1]["content"]) not in format.decode(closed[:shared]):
        return []  # the template moves the prompt, which the bridge will say
    # A prompt may open reasoning that the template leaves out of a finished answer.
    closing = format.closing(format.decode(asking[shared:]))
    return [*format.vocabulary.encode(closing), *closed[shared:]]


def _sampled(format: ChatFormat, case: _Case, written: Sequence[int]) -> tuple[int, ...]:
    """What is written up to its first end token."""
    ends = [index for index, token_id in enumerate(written) if token_id in format.stop_token_ids]
    own = tuple(written[: ends[0]] if ends else written)
    if case.stop_reason == "length":
        return own
    if ends:
        return (*own, written[ends[0]])
    # The end is written with what follows (GLM), or by no one.
    text = format.template.text([*case.prompt, case.answer, *case.following], case.tools)
    after = format.vocabulary.encode(text.rpartition(format.decode(own))[2]) if own else []
    opener = next((id for id in after if id in format.stop_token_ids), format.stop_token_ids[0])
    return (*own, opener)


def _misread(format: ChatFormat, case: _Case, prompt: Sequence[int], output: Sequence[int]) -> str:
    """What the parser makes of the answer, where that is not the answer."""
    parsed = format.parse(output, tools=case.tools, stop_reason=case.stop_reason, prompt_ids=prompt)
    expected = [call["function"]["name"] for call in case.answer.get("tool_calls", ())]
    if [call.name for call in parsed.tool_calls] != expected:
        return f"{format.tool_form} does not read the template's calls; choose a tool_call_parser"
    if not expected and parsed.content.strip() != case.answer["content"]:
        return f"the answer is read as {parsed.content!r}"
    return ""


def _remark(format: ChatFormat, case: _Case) -> str:
    return (
        "hermes form, tools described in the system turn"
        if case.tools and format.is_fallback
        else ""
    )
