"""A prompt rendered from where the one before it stays as it is: the same text as in full."""

from __future__ import annotations

from typing import Any

import pytest
from families import FAMILIES, family_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.errors import TokenError
from agent_rl.tokens.dialect import template_environment
from agent_rl.tokens.format import ChatFormat
from agent_rl.tokens.piecewise import Piecewise
from agent_rl.tokens.render import ChatTemplate, Rendering

LOOP = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
NOT_PIECEWISE = {
    *("deepseek_r1", "deepseek_v3", "glm_4_5", "gpt_oss", "mistral_3", "nemotron_3"),
    *("qwen3", "qwen3_coder", "qwen3_thinking"),
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}


def pieces(source: str) -> Piecewise | None:
    return Piecewise.of(template_environment(), source)


class Bare:
    """A tokenizer of which only the template is looked at."""

    def __init__(self, chat_template: str) -> None:
        self.chat_template = chat_template


def new_turn() -> st.SearchStrategy[list[dict[str, Any]]]:
    """What one turn adds: an answer with what follows it."""
    text = st.text(alphabet="ab <>|\n{}%é", max_size=6)
    call = {"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    def turn(said: str, asked: str, num_calls: int) -> list[dict[str, Any]]:
        if not num_calls:
            return [{"role": "assistant", "content": said}, {"role": "user", "content": asked}]
        answer = {"role": "assistant", "content": said, "tool_calls": [call] * num_calls}
        result = {"role": "tool", "tool_call_id": "abcdef123", "content": asked}
        return [answer, *[result] * num_calls]

    return st.builds(turn, text, text, st.integers(0, 2))


def in_full(template: Any, messages: list[dict[str, Any]], tools: Any) -> str | None:
    try:
        return str(template.text(messages, tools))
    except TokenError:
        return None


def in_steps(
    template: Any, messages: list[dict[str, Any]], tools: Any, after: Rendering | None
) -> Rendering | None:
    try:
        rendering: Rendering = template.rendering(messages, tools, {}, after)
    except TokenError:
        return None
    return rendering


@pytest.mark.parametrize("family_name", sorted(FAMILIES))
@settings(max_examples=12, deadline=None)
@given(turns=st.lists(new_turn(), max_size=5), has_system=st.booleans(), has_tools=st.booleans())
def test_each_turn_has_the_text_of_the_full_render(
    family_name: str, turns: list[list[dict[str, Any]]], has_system: bool, has_tools: bool
) -> None:
    template = ChatFormat.of(family_tokenizer(family_name)).template
    tools = [TOOL] if has_tools else None
    system = [{"role": "system", "content": "S"}] if has_system else []
    messages: list[dict[str, Any]] = [*system, {"role": "user", "content": "hi"}]
    rendering = None
    for new in turns:
        rendering = in_steps(template, messages, tools, rendering)
        assert in_full(template, messages, tools) == (rendering and rendering.text)
        messages = [*messages, *new]


def test_which_families_are_rendered_in_steps() -> None:
    """The rest scan all messages, or carry something from one to the next."""
    templates = {name: family_tokenizer(name).chat_template for name in FAMILIES}
    assert {name for name, source in templates.items() if pieces(source) is None} == NOT_PIECEWISE


def test_a_turn_renders_only_what_is_new() -> None:
    """The text of what stays fixed is not made again: here it was exchanged."""
    template = ChatTemplate(Bare(LOOP))
    messages = [{"role": "user", "content": "a"}]
    first = template.rendering(messages, None, {})
    assert (first.text, first.num_fixed, first.fixed_size) == ("[a]", 1, 3)
    marked = Rendering(
        text="(A)", messages=first.messages, normal=first.normal, adapted=first.adapted,
        num_fixed=1, fixed_size=3,
    )  # fmt: skip
    longer = [*messages, {"role": "assistant", "content": "b"}]
    assert template.rendering(longer, None, {}, marked).text == "(A)[b]"
    edited = [{"role": "user", "content": "x"}, *longer[1:]]
    assert template.rendering(edited, None, {}, marked).text == "[x][b]"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | length }}" + LOOP,
        "{% for m in messages %}{{ messages[-1].content }}{% endfor %}",
        "{% for m in messages %}{{ loop.length }}{% endfor %}",
        "{% for m in messages %}{{ loop.revindex }}{% endfor %}",
        "{% for m in messages %}{{ messages[loop.index0 * 0].content }}{% endfor %}",
        "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
        "{% set n = namespace(k=0) %}{% for m in messages %}{% set n.k = n.k + 1 %}{{ n.k }}"
        "{% endfor %}",
        "{% macro f(n) %}{% set n.k = n.k + 1 %}{{ n.k }}{% endmacro %}"
        "{% set n = namespace(k=0) %}{% for m in messages %}{{ f(n) }}{% endfor %}",
        "{% set c = cycler('a', 'b') %}{% for m in messages %}{{ c.next() }}{% endfor %}",
        "{{ strftime_now('%S') }}" + LOOP,
        "{% for m in messages %}{% if m.content == 'b' %}{% break %}{% endif %}{% endfor %}",
        "{% set last = messages[-1] %}" + LOOP,
        "{% set all = messages %}{% for m in messages %}{{ all | length }}{% endfor %}",
        "{% if messages %}" + LOOP + "{% endif %}",
        LOOP + LOOP,
        "no loop",
    ],
)
def test_a_template_that_looks_further_is_rendered_in_full(source: str) -> None:
    assert pieces(source) is None
    template = ChatTemplate(Bare(source))
    messages = [{"role": "user", "content": "a"}]
    longer = [*messages, {"role": "user", "content": "b"}, {"role": "user", "content": "c"}]
    before = template.rendering(messages, None, {})
    assert before.num_fixed == 0
    assert template.rendering(longer, None, {}, before).text == template.text(longer)


def test_a_first_message_that_looks_at_the_last_is_noticed() -> None:
    """``messages[loop.index0 - 1]`` is ``messages[-1]`` in the first turn of the loop."""
    source = "{% for m in messages %}{{ messages[loop.index0 - 1].content }}{% endfor %}"
    template = ChatTemplate(Bare(source))
    messages = [{"role": "user", "content": name} for name in "abc"]
    first = template.rendering(messages[:2], None, {})
    assert (first.text, first.num_fixed) == ("ba", 0)
    assert template.rendering(messages, None, {}, first).text == "cab"


def test_kwargs_cannot_name_what_a_template_is_given() -> None:
    template = ChatTemplate(Bare(LOOP))
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(TokenError, match="multiple values"):
            template.rendering([{"role": "user", "content": "a"}], None, {name: []})
