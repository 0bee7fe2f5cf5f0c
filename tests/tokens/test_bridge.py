"""Bridges: the next prompt extends prompt + output exactly, or there is a reason why not."""

from __future__ import annotations

from typing import Any

import pytest

from agent_rl.tokens.bridge import NoBridge
from agent_rl.tokens.format import ChatFormat

USER_HI = {"role": "user", "content": "hi"}
USER_YO = {"role": "user", "content": "yo"}
RESULTS = [
    {"role": "tool", "tool_call_id": "c1", "content": "R1"},
    {"role": "tool", "tool_call_id": "c2", "content": "R2"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
YO_PROMPT = (1, 5, 3, 24, 2, 3, 1, 6, 3)


def extended(format: ChatFormat, output: tuple[int, ...], new: list[Any]) -> tuple[int, ...]:
    """Prompt "hi" + output + bridge."""
    parent = format.render([USER_HI]) + output
    bridge = format.bridge(parent, new)
    assert not isinstance(bridge, NoBridge), bridge.reason
    return parent + bridge


def test_sampled_ids_stay_and_the_separator_is_context(fix: Any) -> None:
    """Case B2 and case B3: 20, 21 are not merged to 22; id 3 follows id 2."""
    expected = (1, 5, 3, 23, 2, 3, 1, 6, 3, 20, 21, 2, 3, *YO_PROMPT)
    assert extended(ChatFormat.of(fix()), (20, 21, 2), [USER_YO]) == expected


def test_three_tool_turns_equal_the_full_render(fix: Any) -> None:
    """Case B3."""
    format = ChatFormat.of(fix())
    messages: list[Any] = [USER_HI]
    ids = format.render(messages)
    for result in ("R1", "R2", "R1"):
        new = [{"role": "tool", "tool_call_id": "c", "content": result}]
        bridge = format.bridge((*ids, 20, 2), new)
        assert isinstance(bridge, tuple)
        ids = (*ids, 20, 2, *bridge)
        messages += [{"role": "assistant", "content": "a"}, *new]
    assert ids == format.render(messages)


@pytest.mark.parametrize("output", [(20, 21), ()])
def test_an_end_that_was_not_sampled_is_inserted(fix: Any, output: tuple[int, ...]) -> None:
    """Case B34 and case B45: after a length stop or an empty output id 2 is context."""
    expected = (1, 5, 3, 23, 2, 3, 1, 6, 3, *output, 2, 3, *YO_PROMPT)
    assert extended(ChatFormat.of(fix()), output, [USER_YO]) == expected


@pytest.mark.parametrize("output", [(20, 0), (20, 2, 0, 0), (0,)])
def test_a_turn_that_ends_with_pad_starts_a_branch(fix: Any, output: tuple[int, ...]) -> None:
    """Case B33: sampled ids are never cut, so the full render takes over; it has one 2 and no 0."""
    format = ChatFormat.of(fix())
    bridge = format.bridge(format.render([USER_HI]) + output, [USER_YO])
    assert isinstance(bridge, NoBridge)
    assert bridge.reason == "the turn ended with <|endoftext|>, which the template omits"
    answer = {"role": "assistant", "content": format.parse(output).content}
    rendered = format.render([USER_HI, answer, USER_YO])
    assert rendered == (
        1,
        5,
        3,
        23,
        2,
        3,
        1,
        6,
        3,
        *output[: output.index(0)][:1],
        2,
        3,
        *YO_PROMPT,
    )


def test_consecutive_tool_results_share_one_block(fix: Any) -> None:
    """Case B15."""
    bridge = extended(ChatFormat.of(fix("T4")), (20, 2), RESULTS)[-11:]
    assert bridge == (3, 1, 5, 3, 25, 26, 2, 3, 1, 6, 3)


def test_reasoning_opened_by_the_prompt_stands_once(fix: Any) -> None:
    """Case B6: 8, 20, 9, 21 in that order once, never an empty block 8, 9."""
    ids = extended(ChatFormat.of(fix("T3")), (20, 9, 21, 2), [USER_YO])
    assert ids == (1, 5, 3, 23, 2, 3, 1, 6, 3, 8, 20, 9, 21, 2, 3, *YO_PROMPT, 8)


def test_reasoning_that_the_template_would_drop_stays(fix: Any) -> None:
    """Case B5, concat: the engine has seen the reasoning, so the next prompt keeps it."""
    ids = extended(ChatFormat.of(fix("T2")), (8, 20, 9, 21, 2), [USER_YO])
    assert ids == (1, 5, 3, 23, 2, 3, 1, 6, 3, 8, 20, 9, 21, 2, 3, *YO_PROMPT)
