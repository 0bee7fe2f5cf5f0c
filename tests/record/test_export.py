"""Which interactions become rows, and which tokens each row trains."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fix_format import FIX, T2, Talk, assistant, fix_format, user
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.errors import ExportError
from agent_rl.record.cache import InteractionCache
from agent_rl.record.export import export_interactions
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.record.rows import pad_concat
from agent_rl.types import ModelResponse


def fork() -> Talk:
    """c1 -> c2 and c1 -> c3, each with a user message of its own."""
    talk = Talk()
    talk.say("c1", [user("hi")], [20, 2])
    for name, text in (("c2", "yo"), ("c3", "hi")):
        talk.say(name, [user("hi"), assistant("a"), user(text)], [21, 21, 2])
    return talk


def num_trained(cache: InteractionCache, style: str, shared: str = "once") -> dict[str, int]:
    rows = export_interactions(cache, style, shared=shared)  # type: ignore[arg-type]
    return {name: sum(row.to_row().loss_mask) for name, row in rows.items()}


def test_fork_trains_the_shared_turn_once_or_each_time() -> None:
    """case B77: the shared prefix counts once; the row counts are those of the rows themselves."""
    cache = fork().cache
    assert num_trained(cache, "individual") == {"c1": 2, "c2": 3, "c3": 3}
    assert num_trained(cache, "concat") == {"c2": 5, "c3": 3}
    assert num_trained(cache, "concat", "each") == {"c2": 5, "c3": 5}
    rows = export_interactions(cache, "concat")
    sizes = [row.to_tensor_dict()["attention_mask"].sum().item() for row in rows.values()]
    assert sizes == [row.num_tokens for row in rows.values()] == [24, 24]


def test_untrained_shared_tokens_have_no_logprob_or_version() -> None:
    row = export_interactions(fork().cache, "concat")["c3"].to_row()
    assert list(row.loss_mask[9:11]) == [0, 0]
    assert list(row.logprobs[9:11]) == [0.0, 0.0] and list(row.versions[9:11]) == [-1, -1]


def test_exported_rows_are_copies() -> None:
    """case B79: what a workflow writes on a row stays there; a later reward shows next time."""
    cache = fork().cache
    cache.set_last_reward(1.0)
    rows = export_interactions(cache, "individual")
    rows["c3"].reward, rows["c3"].original_reward, rows["c3"].rollout_reward = -1.0, 1.0, 1.0
    cache.set_reward("c1", 0.5)
    again = export_interactions(cache, "individual")
    assert {name: row.reward for name, row in again.items()} == {"c1": 0.5, "c2": None, "c3": 1.0}
    assert again["c3"].original_reward is None
    assert again["c3"].parent is cache["c1"]


def test_step_rewards_stay_beside_the_last() -> None:
    """case B79: the penalty of the first step is in its own row."""
    talk = Talk()
    talk.say("c1", [user("hi")], [20, 2])
    talk.say("c2", [user("hi"), assistant("a"), user("yo")], [24, 2])
    talk.cache.set_reward("c1", -0.2)
    talk.cache.set_last_reward(1.0)
    rows = export_interactions(talk.cache, "individual")
    assert [row.reward for row in rows.values()] == [-0.2, 1.0]
    assert talk.cache.total_reward == pytest.approx(0.8)


def test_incomplete_interactions_are_left_out() -> None:
    cache = fork().cache
    cache.append(InteractionWithTokenLogpReward(interaction_id="x", messages=[user("external")]))
    assert "x" not in export_interactions(cache, "individual")
    assert "x" in cache


def test_nothing_recorded_is_no_rows() -> None:
    assert export_interactions(InteractionCache(), "individual", reward_discount=1.0) == {}
    assert export_interactions(InteractionCache(), "concat") == {}


def test_typed_errors() -> None:
    cache = fork().cache
    with pytest.raises(ExportError, match="'individual' or 'concat'"):
        export_interactions(cache, "tree")  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="'once' or 'each'"):
        export_interactions(cache, "concat", shared="twice")  # type: ignore[arg-type]
    talk = Talk("hf")
    talk.say("c1", [user("hi")], [20, 2])
    with pytest.raises(ExportError, match="chat_template_type='concat'"):
        export_interactions(talk.cache, "concat", reward_discount=0.5)
    assert export_interactions(talk.cache, "individual", reward_discount=0.5)["c1"].reward == 0.0


def test_second_discount_is_refused() -> None:
    cache = fork().cache
    cache.set_last_reward(1.0)
    export_interactions(cache, "individual", reward_discount=0.5)
    assert export_interactions(cache, "individual")["c1"].reward == 0.25
    with pytest.raises(RuntimeError, match="once"):
        export_interactions(cache, "individual", reward_discount=0.5)


def test_merged_row_is_not_cut_to_the_limit_of_a_turn() -> None:
    """case B43: three turns of 4 sampled tokens with tool texts of 5 in between."""
    talk = Talk()
    messages = [user("hi")]
    for turn in range(3):
        talk.say(f"c{turn}", messages, [20, 21, 20, 2])
        result = {"role": "tool", "tool_call_id": "t", "content": "r1r2r1r2r1"}
        messages = [*messages, assistant("aba"), result]
    (row,) = export_interactions(talk.cache, "concat").values()
    mask = list(row.to_row().loss_mask)
    assert sum(mask) == 12
    assert mask[9:] == [1] * 4 + [0] * 14 + [1] * 4 + [0] * 14 + [1] * 4


def test_end_of_turn_that_equals_pad_is_trained() -> None:
    """case B44: masks come from positions; only padding is 0, whatever its id."""
    rows: list[Any] = []
    for prompt, output in (((1, 5, 2), (20, 2)), ((1,), (21, 22, 23, 2)), ((1, 5), (2,))):
        response = ModelResponse(
            input_tokens=prompt,
            output_tokens=output,
            output_logprobs=(-0.1,) * len(output),
            output_versions=(0,) * len(output),
            stop_reason="stop",
        )
        one = InteractionWithTokenLogpReward(interaction_id="c", model_response=response)
        rows.append(one.to_tensor_dict())
    batch: Any = pad_concat(rows)
    assert batch["loss_mask"].tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0, 0, 1, 0, 0]]
    assert batch["attention_mask"].int().tolist() == [[1] * 5, [1] * 5, [1, 1, 1, 0, 0]]


def grow(seed: int, size: int, style: str = "concat") -> Talk:
    """A random tree: each call goes on from a random earlier one, or starts anew; some are retries.

    Outputs are random ids, mostly no canonical encoding; some are empty, cut or end with a pad.
    """
    dice = random.Random(seed)
    talk = Talk(style, fix_format(dice.choice((FIX, T2))))
    open_ends: list[list[dict[str, object]]] = [[user("hi")]]
    for number in range(size):
        messages = dice.choice(open_ends)
        output = [dice.choice((20, 21, 22, 24)) for _ in range(dice.randrange(5))]
        end = dice.choice(([2], [2], [], [0], [2, 0]))
        text = talk.fmt.parse(output).content
        thought = {"reasoning_content": "a"} if dice.random() < 0.3 else {}
        one = talk.say(
            f"c{number}",
            messages,
            [*([8, 20, 9] if thought else []), *output, *end],
            assistant(text, **thought),
            stop_reason="stop" if end else "length",
        )
        follow = dice.choice(("hi", "yo", "a", "b"))
        open_ends.append([*messages, *one.output_message_list, user(follow)])
        if dice.random() < 0.2:
            open_ends.append([user(follow * 3)])
    return talk


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), size=st.integers(1, 14))
def test_every_sampled_token_is_trained_exactly_once(seed: int, size: int) -> None:
    talk = grow(seed, size)
    complete = talk.cache.complete
    sampled = sum(one.path.num_output for one in complete)
    assert len(complete) + len(talk.cache.orphans) == size
    for style in ("individual", "concat"):
        assert sum(num_trained(talk.cache, style).values()) == sampled
    each = num_trained(talk.cache, "concat", "each")
    assert sum(each.values()) >= sampled


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9), size=st.integers(1, 14), style=st.sampled_from(("hf", "concat")))
def test_every_prompt_extends_its_parent_or_says_why_not(seed: int, size: int, style: str) -> None:
    talk = grow(seed, size, style)
    assert sum(num_trained(talk.cache, "individual").values()) == sum(
        one.path.num_output for one in talk.cache.complete
    )
    for one in talk.cache.values():
        response = one.model_response
        assert response is not None
        prompt = response.input_tokens
        assert one.tokens == prompt + response.output_tokens
        if one.parent is not None:
            assert prompt[: one.parent.num_tokens] == one.parent.tokens
        if one.history is not None and one.parent is not one.history:
            assert one.fork_reason is not None
        row = one.as_row(0).to_row()
        ones = [index for index, bit in enumerate(row.loss_mask) if bit]
        line = list(reversed(list(one.path.line())))
        spans = [index for path in line for index in range(path.num_prompt, len(path))]
        assert ones == spans
        assert [row.logprobs[i] for i in ones] == pytest.approx(
            [value for path in line for value in path.logprobs]
        )
