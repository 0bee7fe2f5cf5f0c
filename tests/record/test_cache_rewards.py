"""Rewards of a conversation tree: who gets them, which attempts count, how they are discounted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fix_format import (
    Talk,
    answer_of,
    assistant,
    tool,
    user,
)

from agent_rl.record.cache import InteractionCache
from agent_rl.record.export import export_interactions


@pytest.mark.parametrize("order", [("c1", "c2"), ("c2", "c1")])
def test_retry_leaves_an_orphan(order: tuple[str, str]) -> None:
    """case B68: the answer that was never used is left out before discounting."""
    talk = Talk()
    outputs = {"c1": [21, 2], "c2": [20, 2]}
    for name in order:
        talk.say(name, [user("hi")], outputs[name])
    talk.say("c3", [user("hi"), assistant("a"), user("yo")], [24, 2])
    assert talk.cache.orphans == {"c1"}
    talk.cache.set_last_reward(1.0)
    rows = export_interactions(talk.cache, "individual", reward_discount=0.5)
    assert {name: row.reward for name, row in rows.items()} == {"c2": 0.5, "c3": 1.0}
    assert list(export_interactions(talk.cache, "concat")) == ["c3"]


def test_late_orphan_does_not_get_the_last_reward() -> None:
    """case B68: the slow first answer is recorded after the retry was already gone on from."""
    talk = Talk()
    slow = talk.plan([user("hi")])
    talk.say("c2", [user("hi")], [20, 2])
    talk.say("c3", [user("hi"), assistant("a"), user("yo")], [24, 2])
    late = slow.interaction(
        interaction_id="c1",
        model_response=answer_of(slow, [21, 2]),
        output_message_list=[assistant("b")],
    )
    talk.cache.append(late)
    talk.cache.set_last_reward(1.0)
    assert talk.cache["c3"].reward == 1.0 and talk.cache["c1"].reward is None


def test_asking_anew_after_going_on_is_no_retry() -> None:
    """An agent that starts over asks its first question again: that answer is its last one."""
    talk = Talk()
    talk.say("c1", [user("hi")], [20, 2])
    talk.say("c2", [user("hi"), assistant("a"), user("yo")], [24, 2])
    talk.say("c3", [user("hi")], [21, 2])
    assert talk.cache.orphans == frozenset()
    talk.cache.set_last_reward(1.0)
    assert talk.cache["c3"].reward == 1.0
    rows = export_interactions(talk.cache, "concat")
    assert {name: sum(row.to_row().loss_mask) for name, row in rows.items()} == {"c2": 4, "c3": 2}


def test_what_is_no_orphan() -> None:
    """Choices of one request, other tools, another temperature, a reward of its own."""
    talk = Talk()
    for name in ("c1", "c1/1"):
        talk.say(name, [user("hi")], [20, 2])
    assert talk.cache.orphans == frozenset()
    talk.say("c2", [user("hi")], [20, 2], tools=[tool("f")])
    talk.say("c3", [user("hi")], [20, 2], temperature=0.5)
    assert talk.cache.orphans == frozenset()
    talk.say("c4", [user("hi")], [21, 2])
    assert talk.cache.orphans == {"c1", "c1/1"}
    talk.cache.set_reward("c1", 0.0)
    assert talk.cache.orphans == {"c1/1"}


def test_orphans_are_fixed_by_the_discount() -> None:
    """case B68: nothing is dropped any more once its reward has been carried back."""
    talk = Talk()
    talk.say("c1", [user("hi")], [20, 2])
    talk.cache.set_last_reward(1.0)
    talk.cache.apply_reward_discount()
    talk.say("c2", [user("hi")], [21, 2])
    assert list(export_interactions(talk.cache, "individual")) == ["c1", "c2"]


def test_fresh_client_per_attempt() -> None:
    """case B70: a rerun records into its own cache, so only its three calls are exported."""
    first, second = Talk(), Talk()
    for talk, turns in ((first, 2), (second, 3)):
        messages = [user("hi")]
        for turn in range(turns):
            talk.say(f"c{turn}", messages, [20, 2])
            messages = [*messages, assistant("a"), user("yo")]
    assert len(export_interactions(second.cache, "individual")) == 3


def test_rewards() -> None:
    talk = Talk()
    with pytest.raises(RuntimeError, match="nothing is recorded"):
        talk.cache.set_last_reward(1.0)
    talk.say("c1", [user("hi")], [20, 2])
    talk.say("c2", [user("yo")], [20, 2])
    with pytest.raises(KeyError, match="'c9'"):
        talk.cache.set_reward("c9", 1.0)
    with pytest.raises(ValueError, match="finite"):
        talk.cache.set_reward("c1", float("nan"))
    completion = SimpleNamespace(id="c1", choices=[])
    with pytest.raises(TypeError, match=r"not by a SimpleNamespace; pass its id, completion"):
        talk.cache.set_reward(completion, 1.0)
    with pytest.raises(TypeError, match=r"not by a float; pass completion.id"):
        talk.cache.set_reward(1.0, "c1")
    talk.cache.set_reward("c1", 0.5)
    talk.cache.set_last_reward(True)
    assert talk.cache.total_reward == 1.5
    talk.cache.set_reward("c1", -1)
    assert talk.cache.total_reward == 0.0
    assert [talk.cache["c1"].reward, talk.cache["c2"].reward] == [-1.0, 1.0]


def test_rewards_by_id_and_last_win_in_the_order_they_are_set() -> None:
    """case B91: per id, last, both; the later call wins."""
    talk = Talk()
    talk.say("c1", [user("hi")], [20, 2])
    talk.say("c2", [user("hi"), assistant("a"), user("yo")], [20, 2])
    talk.cache.set_reward("c2", 0.2)
    talk.cache.set_last_reward(1.0)
    talk.cache.set_reward("c1", 0.1)
    rows = export_interactions(talk.cache, "individual")
    assert {name: row.reward for name, row in rows.items()} == {"c1": 0.1, "c2": 1.0}


def chain(rewards: list[float | None]) -> InteractionCache:
    talk = Talk()
    messages = [user("hi")]
    for index, reward in enumerate(rewards):
        talk.say(f"c{index}", messages, [20, 2])
        messages = [*messages, assistant("a"), user("yo")]
        if reward is not None:
            talk.cache.set_reward(f"c{index}", reward)
    return talk.cache


@pytest.mark.parametrize(
    ("rewards", "discount", "expected"),
    [
        ([0, 1.5, 2.5], 0.85, [3.08125, 3.625, 2.5]),
        ([None, None, 1.0], 0.9, [0.81, 0.9, 1.0]),
        ([0.5, None, 1.0], 0.5, [0.75, 0.5, 1.0]),
        ([1.0, None, None], 0.5, [1.0, 0.0, 0.0]),
    ],
)
def test_turn_discount(rewards: list[float | None], discount: float, expected: list[float]) -> None:
    """case B80: own rewards kept and later ones carried back; a second time is an error."""
    cache = chain(rewards)
    total = cache.total_reward
    cache.apply_reward_discount(discount)
    assert [one.reward for one in cache.values()] == pytest.approx(expected)
    assert cache.total_reward == total
    with pytest.raises(RuntimeError, match="once"):
        cache.apply_reward_discount(discount)


def test_discount_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        chain([1.0]).apply_reward_discount(1.5)
