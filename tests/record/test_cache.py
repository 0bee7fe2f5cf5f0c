"""The conversation tree: who is whose parent, and which ids are sent."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fix_format import (
    PROMPT,
    T2,
    Talk,
    answer_of,
    assistant,
    call,
    fix_format,
    rendered,
    tool,
    user,
)
from pydantic import BaseModel

from agent_rl.record.export import export_interactions
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.types import JsonObject


def test_second_turn_extends_the_sampled_ids() -> None:
    """case B2: 20, 21 stay as sampled although the encoder would merge them to 22."""
    talk = Talk()
    talk.say("c1", [user("hi")], [20, 21, 2])
    c2 = talk.say("c2", [user("hi"), assistant("ab"), user("yo")], [24, 2])
    sent = (*PROMPT, 20, 21, 2, 3, 1, 5, 3, 24, 2, 3, 1, 6, 3)
    assert c2.tokens == (*sent, 24, 2)
    assert c2.parent is talk.cache["c1"] and c2.fork_reason is None
    assert not any("ab" in text for text in talk.fmt.tokenizer.encoded)


def test_separators_are_context_at_every_boundary() -> None:
    """case B3: three tool turns give the same ids as the template over the whole conversation."""
    talk = Talk()
    messages: list[JsonObject] = [user("hi")]
    for turn in range(3):
        talk.say(f"c{turn}", messages, [20, 2])
        messages += [assistant("a"), {"role": "tool", "content": "r1", "tool_call_id": "t"}]
    last = talk.say("c3", messages, [20, 2])
    assert last.tokens == (*rendered(messages), 20, 2)
    assert list(last.to_row().loss_mask).count(1) == 8
    assert [last.to_row().loss_mask[i] for i in (9, 10, 11)] == [1, 1, 0]


@pytest.mark.parametrize(
    "replay",
    [
        assistant("", tool_calls=[call("t1")]),
        {"role": "assistant", "tool_calls": [call("t1")]},
        assistant(None, tool_calls=[call("t1")]),
        assistant(None, tool_calls=[call("t1")], refusal=None, audio=None, annotations=[]),
    ],
)
def test_parent_is_found_whatever_empty_content_looks_like(replay: JsonObject) -> None:
    """case B11: one row in all four variants."""
    talk = Talk()
    c1 = talk.say("c1", [user("hi")], [20, 2], assistant(None, tool_calls=[call("t1")]))
    result = {"role": "tool", "tool_call_id": "t1", "content": "r1"}
    assert talk.say("c2", [user("hi"), replay, result], [21, 2]).parent is c1
    assert list(export_interactions(talk.cache, "concat")) == ["c2"]


class Message(BaseModel):
    role: str
    content: str | None = None
    refusal: str | None = None


@pytest.mark.parametrize(
    "replay",
    [
        Message(role="assistant", content="a"),
        Message(role="assistant", content="a").model_dump(exclude_none=True),
        {"content": "a", "role": "assistant"},
    ],
)
def test_message_objects_and_dicts_are_the_same(replay: Any) -> None:
    """case B12: the object, its dump, a hand-written dict; also inside a tuple."""
    talk = Talk()
    c1 = talk.say("c1", [user("hi")], [20, 2])
    c2 = talk.say("c2", (user("hi"), replay, user("yo")), [24, 2])
    assert c2.parent is c1
    assert list(c2.to_row().loss_mask).count(1) == 4


def test_a_bare_string_is_an_error() -> None:
    """case B12: the error names the index."""
    with pytest.raises(TypeError, match=r"messages\[1\]"):
        Talk().plan([user("hi"), "a"])


def test_dropped_reasoning_keeps_the_link() -> None:
    """case B14: same parent in concat; in hf the ids differ, both rows stay and get rewards."""
    history = [user("hi"), assistant("b"), user("yo")]
    for style, parent in (("concat", "c1"), ("hf", None)):
        talk = Talk(style)
        talk.say("c1", [user("hi")], [8, 20, 9, 21, 2], assistant("b", reasoning_content="a"))
        c2 = talk.say("c2", history, [24, 2])
        assert c2.history is talk.cache["c1"]
        assert (c2.parent and c2.parent.interaction_id) == parent
        talk.cache.set_last_reward(1.0)
        talk.cache.apply_reward_discount(0.5)
        rewards = [row.reward for row in export_interactions(talk.cache, "individual").values()]
        assert rewards == [0.5, 1.0]


def test_template_that_strips_reasoning() -> None:
    """case B5: individual rows have their real prompts; nothing is masked to zero silently."""
    talk = Talk("hf", fix_format(T2))
    answer = assistant("b", reasoning_content="a")
    talk.say("c1", [user("hi")], [8, 20, 9, 21, 2], answer)
    c2 = talk.say("c2", [user("hi"), answer, user("yo")], [24, 2])
    sent = (*PROMPT, 21, 2, 3, 1, 5, 3, 24, 2, 3, 1, 6, 3)
    assert c2.tokens == (*sent, 24, 2)
    assert c2.parent is None
    assert c2.fork_reason == "tokens differ: at index 9 of the 14 tokens of c1"
    rows = export_interactions(talk.cache, "individual")
    assert [sum(row.to_row().loss_mask) for row in rows.values()] == [5, 2]


def test_failed_call_leaves_nothing() -> None:
    """case B19: planned but never appended; the retry extends c1."""
    talk = Talk()
    c1 = talk.say("c1", [user("hi")], [20, 2])
    history = [user("hi"), assistant("a"), user("yo")]
    talk.plan(history)
    assert list(export_interactions(talk.cache, "concat")) == ["c1"]
    assert list(export_interactions(talk.cache, "individual")) == ["c1"]
    assert c1.is_leaf
    c3 = talk.say("c3", history, [24, 2])
    assert c3.parent is c1 and not c1.is_leaf
    assert list(export_interactions(talk.cache, "individual")) == ["c1", "c3"]


def test_length_stop_inserts_an_untrained_end() -> None:
    """case B34: the end of turn that was not sampled is context without log-prob."""
    talk = Talk()
    talk.say("c1", [user("hi")], [20, 21], stop_reason="length")
    c2 = talk.say("c2", [user("hi"), assistant("ab"), user("yo")], [24, 2])
    assert c2.tokens[9:16] == (20, 21, 2, 3, 1, 5, 3)
    row = c2.to_row()
    assert list(row.loss_mask[9:16]) == [1, 1, 0, 0, 0, 0, 0]
    assert row.logprobs[11] == 0.0 and row.versions[11] == -1
    assert sum(row.loss_mask) == 4


@pytest.mark.parametrize(
    ("output", "joined"),
    [
        ([20, 0], (20, 2, 3)),
        ([20, 2, 0, 0], (20, 2, 3)),
        ([20, 2], (20, 2, 3)),
        ([2], (2, 3)),
        ([0], (2, 3)),
        ([], (2, 3)),
    ],
)
def test_output_ends_with_pad(output: list[int], joined: tuple[int, ...]) -> None:
    """case B33: exactly one end of turn before the separator and no pad inside.

    Where a sampled pad is not in the next prompt, the ids differ: the turns are two branches.
    """
    talk = Talk()
    c1 = talk.say("c1", [user("hi")], output)
    c2 = talk.say("c2", [user("hi"), assistant("a" if 20 in output else ""), user("yo")], [24, 2])
    assert c2.tokens == (*PROMPT, *joined, 1, 5, 3, 24, 2, 3, 1, 6, 3, 24, 2)
    is_extended = 0 not in output
    assert (c2.parent is c1) is is_extended
    assert (c2.fork_reason is None) is is_extended
    rows = export_interactions(talk.cache, "concat").values()
    assert sum(sum(row.to_row().loss_mask) for row in rows) == len(output) + 2


def test_control_tokens_in_tool_text_are_not_trained() -> None:
    """case B17: the mask comes from recorded positions, not from a search for ids."""
    talk = Talk()
    talk.say("c1", [user("hi")], [20, 2])
    evil = {"role": "tool", "content": "x", "tool_call_id": "t"}
    plan = talk.plan([user("hi"), assistant("a"), evil])
    forged = (*plan.input_ids, 2, 3, 1, 6, 3, 22, 2, 3, 1, 6, 3)
    hand = InteractionWithTokenLogpReward(
        interaction_id="c2",
        messages=[user("hi"), assistant("a"), evil],
        output_message_list=[assistant("a")],
        model_response=answer_of(plan, [20, 2], input_tokens=forged),
        parent=plan.parent,
        chat_template_type="concat",
    )
    talk.cache.append(hand)
    mask = list(hand.to_row().loss_mask)
    assert [i for i, m in enumerate(mask) if m] == [9, 10, len(mask) - 2, len(mask) - 1]


@pytest.mark.parametrize("swapped", [False, True])
def test_two_tool_results_in_either_order(swapped: bool) -> None:
    """case B22: both calls of one message are answered; the parent is found."""
    talk = Talk()
    message = assistant("a", tool_calls=[call("t1", "f"), call("t2", "g", '{"y": 2}')])
    c1 = talk.say("c1", [user("hi")], [20, 2], message, tools=[tool("f"), tool("g")])
    results = [
        {"role": "tool", "tool_call_id": "t1", "content": "r1"},
        {"role": "tool", "tool_call_id": "t2", "content": "r2"},
    ]
    second = [user("hi"), message, *(reversed(results) if swapped else results)]
    c2 = talk.say("c2", second, [20, 2], tools=[tool("f"), tool("g")])
    assert c2.parent is c1
    third = [*second, assistant("a"), user("yo")]
    assert talk.say("c3", third, [20, 2], tools=[tool("f"), tool("g")]).parent is c2


@pytest.mark.parametrize("rewritten", [(False, True, False), (True, False, True)])
def test_ids_that_a_framework_rewrites_now_and_then(rewritten: tuple[bool, ...]) -> None:
    """The same conversation, whether a request carries our call ids or made-up ones."""
    talk = Talk()
    history: list[Any] = [user("hi")]
    made_up: list[Any] = [user("hi")]
    parent = talk.say("c0", history, [20, 2], assistant("a", tool_calls=[call("t0")]))
    for turn, is_rewritten in enumerate(rewritten):
        for messages, name in ((history, f"t{turn}"), (made_up, f"x{turn}")):
            result = {"role": "tool", "tool_call_id": name, "content": "r1"}
            messages += [assistant("a", tool_calls=[call(name)]), result]
        answer = assistant("a", tool_calls=[call(f"t{turn + 1}")])
        sent = made_up if is_rewritten else history
        child = talk.say(f"c{turn + 1}", list(sent), [20, 2], answer)
        assert child.parent is parent and child.fork_reason is None
        parent = child
    assert len(export_interactions(talk.cache, "concat")) == 1


def test_arguments_with_unicode_stay_as_sampled() -> None:
    """case B27: a framework re-dumps the arguments; the next prompt has the sampled ids."""
    talk = Talk()
    sampled = [10, *talk.fmt.vocabulary.encode('{"q": "中🙂", "n": 12345678901234567890}'), 11, 2]
    arguments = '{"q": "中🙂", "n": 12345678901234567890}'
    message = assistant(None, tool_calls=[call("t1", "f", arguments)])
    c1 = talk.say("c1", [user("hi")], sampled, message, tools=[tool("f")])
    again = '{"n":12345678901234567890,"q":"\\u4e2d\\ud83d\\ude42"}'
    for call_id in ("t1", "rewritten"):
        replay = assistant(None, tool_calls=[call(call_id, "f", again)])
        result = {"role": "tool", "tool_call_id": call_id, "content": "r1"}
        plan = talk.plan([user("hi"), replay, result], [tool("f")])
        assert plan.parent is c1
        assert plan.input_ids[: c1.num_tokens] == c1.tokens


def test_interactions_made_by_hand_are_linked_by_their_messages() -> None:
    cache = Talk().cache
    messages = [user("hi"), assistant("a"), user("yo")]
    for name, prompt in (("c1", messages[:1]), ("c2", messages[:1]), ("c3", messages)):
        cache.append(
            InteractionWithTokenLogpReward(
                interaction_id=name, messages=prompt, output_message_list=[assistant("a")]
            )
        )
    assert cache.orphans == {"c1"}


def test_sub_agents_interleave() -> None:
    """case B71: two system prompts give two rows, every output once."""
    talk = Talk()
    threads = {name: [{"role": "system", "content": name}, user("hi")] for name in "AB"}
    for index, name in enumerate("ABABA"):
        talk.say(f"{name}{index}", threads[name], [20, 2])
        threads[name] = [*threads[name], assistant("a"), user("yo")]
    rows = export_interactions(talk.cache, "concat")
    assert {name: sum(row.to_row().loss_mask) for name, row in rows.items()} == {"B3": 4, "A4": 6}
    assert all(interaction.fork_reason is None for interaction in talk.cache.values())


async def test_concurrent_calls_keep_their_own_pairs() -> None:
    """case B73: 20 calls finish in random order; "last" is the one recorded last."""
    talk = Talk()
    dice = random.Random(0)

    async def one(number: int) -> None:
        plan = talk.plan([user(f"q{number}")])
        await asyncio.sleep(dice.random() / 100)
        talk.cache.append(
            plan.interaction(
                interaction_id=f"c{number}",
                model_response=answer_of(plan, [1000 + number, 2]),
                output_message_list=[assistant(str(number))],
            )
        )

    await asyncio.gather(*(one(number) for number in range(20)))
    assert len(talk.cache) == 20
    for number in range(20):
        interaction = talk.cache[f"c{number}"]
        assert interaction.tokens[-2:] == (1000 + number, 2)
        assert interaction.messages == [user(f"q{number}")]
    talk.cache.set_last_reward(1.0)
    rewards = [interaction.reward for interaction in talk.cache.values()]
    assert rewards == [None] * 19 + [1.0]


def test_threads_may_record_at_once() -> None:
    talk = Talk()

    def one(number: int) -> None:
        messages = [user(f"q{number}")]
        for turn in range(5):
            talk.say(f"c{number}.{turn}", messages, [20, 2])
            messages = [*messages, assistant("a"), user("yo")]
            talk.cache.set_reward(f"c{number}.{turn}", 1.0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(20)))
    assert len(talk.cache) == 100 and talk.cache.total_reward == 100.0
    assert len(export_interactions(talk.cache, "concat")) == 20


def test_ids_are_unique() -> None:
    talk = Talk()
    talk.say("c1", [user("hi")], [20, 2])
    with pytest.raises(ValueError, match="already recorded"):
        talk.say("c1", [user("yo")], [20, 2])
    assert len(talk.cache) == 1


def test_an_answer_to_another_prompt_is_refused() -> None:
    plan = Talk().plan([user("hi")])
    with pytest.raises(ValueError, match="not the one it was sent"):
        plan.interaction(
            interaction_id="c1",
            model_response=answer_of(plan, [20], input_tokens=(1, 2)),
            output_message_list=[],
        )
