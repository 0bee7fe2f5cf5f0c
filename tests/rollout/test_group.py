"""Rules R1 to R10 of grouped rollouts, with hand-worked numbers."""

from __future__ import annotations

import asyncio

import pytest
import torch

from agent_rl import workflow_context
from agent_rl.errors import EpisodeError, EpisodeTimeoutError, WorkflowContractError
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.group import GroupedRolloutWorkflow, as_rows
from agent_rl.rollout.workflow import RolloutWorkflow
from agent_rl.stats import tracker as stats_tracker
from agent_rl.types import RolloutGroup


def metrics(scope: str = "rollout") -> dict[str, float]:
    stats = stats_tracker.get(scope).export()
    return {
        key.removeprefix(f"{scope}/"): value
        for key, value in stats.items()
        if not key.endswith("__count")
    }


def counts_of_metrics(scope: str = "rollout") -> set[float]:
    stats = stats_tracker.get(scope).export()
    return {value for key, value in stats.items() if key.endswith("__count")}


@pytest.mark.parametrize(("group_size", "floor"), [(0, 1), (-1, 1), (4, 0), (4, 5)])
def test_sizes_out_of_range_are_refused(replay, group_size, floor) -> None:
    with pytest.raises(ValueError, match="group_size"):
        GroupedRolloutWorkflow(replay([]), group_size, min_usable_group_size=floor)


async def test_full_group_keeps_slot_order(replay, rows, engine) -> None:
    workflow = replay([rows(float(i)) for i in range(4)])
    result = await GroupedRolloutWorkflow(workflow, 4).arun_episode(engine, {})
    assert workflow.calls == 4
    assert result["input_ids"].shape == (4, 3)
    assert result["rewards"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert result["rollout_group"] == RolloutGroup(row_counts=(1, 1, 1, 1))


async def test_every_slot_gets_the_same_datum(replay, rows, engine) -> None:
    datum = {"question": "q"}
    seen = []
    workflow = replay([lambda data: seen.append(data) or rows(1.0)] * 3)
    await GroupedRolloutWorkflow(workflow, 3).arun_episode(engine, datum)
    assert seen == [datum] * 3


async def test_what_an_episode_does_to_its_datum_is_its_own(replay, rows, engine) -> None:
    datum = {"messages": [{"content": "q"}], "tags": ("a", ["b"])}
    seen = []

    def changing(data):
        seen.append((len(data["messages"]), list(data["tags"][1])))
        data["messages"].append({"content": "answer"})
        data["tags"][1].append("c")
        return rows(1.0)

    await GroupedRolloutWorkflow(replay([changing] * 3), 3).arun_episode(engine, datum)
    assert seen == [(1, ["b"])] * 3
    assert datum == {"messages": [{"content": "q"}], "tags": ("a", ["b"])}


async def test_unusable_slot_is_left_out_and_not_run_again(replay, rows, engine) -> None:
    """case B92: the actual count is the group's boundary."""
    workflow = replay([rows(1.0), None, rows(2.0), rows(3.0)])
    result = await GroupedRolloutWorkflow(workflow, 4).arun_episode(engine, {})
    assert workflow.calls == 4
    assert result["rewards"].tolist() == [1.0, 2.0, 3.0]
    assert result["rollout_group"].row_counts == (1, 1, 1)


async def test_several_rows_of_one_episode_count_once(replay, rows, engine) -> None:
    workflow = replay([rows(1.0, 2.0, 3.0, rollout_reward=3.0), rows(0.5)])
    group = GroupedRolloutWorkflow(workflow, 2, min_usable_group_size=2)
    result = await group.arun_episode(engine, {})
    assert result["input_ids"].shape[0] == 4
    assert result["rollout_group"] == RolloutGroup(row_counts=(3, 1), rewards=(3.0, None))
    assert "rollout_reward" not in result


async def test_rows_of_different_width_are_padded(replay, rows, engine) -> None:
    workflow = replay([rows(1.0, length=3), rows(2.0, length=5)])
    result = await GroupedRolloutWorkflow(workflow, 2).arun_episode(engine, {})
    assert result["input_ids"].tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]]
    assert result["attention_mask"].tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    assert result["loss_mask"].tolist() == [[0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    assert result["versions"].tolist() == [[-1, 0, 0, 0, 0], [-1, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("slots", "floor", "drop", "usable", "trainable", "masked", "singleton"),
    [
        ("oo.", 1, False, 2, 2, 0, 0),
        ("...", 1, False, 0, 0, 1, 0),
        ("o..", 2, False, 1, 0, 0, 1),
        ("o.", 1, True, 1, 0, 0, 1),
        ("ooo", 3, False, 3, 3, 0, 0),
        ("oo.", 3, False, 2, 0, 0, 0),
        ("oex", 1, False, 1, 1, 0, 1),
    ],
)
async def test_seven_metrics_on_every_way_out(
    replay, rows, engine, slots, floor, drop, usable, trainable, masked, singleton
) -> None:
    """``.`` returned None, ``e`` an empty dict, ``x`` raised."""
    values = {"o": rows(1.0), ".": None, "e": {}, "x": ConnectionError("down")}
    group = GroupedRolloutWorkflow(
        replay([values[slot] for slot in slots]),
        len(slots),
        min_usable_group_size=floor,
        drop_incomplete_group=drop,
    )
    result = await group.arun_episode(engine, {})
    assert (result is not None) == (trainable > 0)
    assert metrics() == {
        "target_slot_count": len(slots),
        "usable_slot_count": usable,
        "trainable_slot_count": trainable,
        "fully_masked_group": masked,
        "singleton_slot_group": singleton,
        "pre_filter_usable_slot_yield": pytest.approx(usable / len(slots)),
        "pre_filter_trainable_slot_yield": pytest.approx(trainable / len(slots)),
    }


async def test_metrics_go_to_the_scope_of_the_episode(replay, rows, engine) -> None:
    async def run() -> None:
        workflow_context.set(workflow_context.WorkflowContext(is_eval=True))
        await GroupedRolloutWorkflow(replay([rows(1.0)] * 2), 2).arun_episode(engine, {})

    await asyncio.create_task(run())
    assert metrics("rollout") == {}
    assert counts_of_metrics("eval-rollout") == {1}


async def test_metrics_are_recorded_once_when_the_contract_is_broken(
    replay, rows, interaction, engine
) -> None:
    group = GroupedRolloutWorkflow(replay([rows(1.0), {"a": interaction("a", 1.0)}]), 2)
    with pytest.raises(WorkflowContractError, match="same kind"):
        await group.arun_episode(engine, {})
    stats = stats_tracker.get("rollout").export()
    assert stats["rollout/trainable_slot_count"] == 0.0
    assert stats["rollout/usable_slot_count__count"] == 1


async def test_exception_in_a_slot_is_an_unusable_slot(replay, rows, engine) -> None:
    """cases B82, B195: two of four members are left; the error is kept."""
    odd = ExceptionGroup("tools", [ConnectionError("refused")])
    group = GroupedRolloutWorkflow(replay([rows(1.0), rows(0.0), odd, None]), 4)
    result = await group.run_group(engine, {})
    assert result.value["rewards"].tolist() == [1.0, 0.0]
    kinds = [type(slot.error) for slot in result.slots]
    assert kinds == [type(None), type(None), EpisodeError, type(None)]
    assert result.slots[2].error.__cause__ is odd


async def test_on_error_raise_cancels_the_siblings(replay, rows, engine) -> None:
    ended = []

    class Slow(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            if not ended:
                ended.append("raised")
                raise ConnectionError("down")
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")

    group = GroupedRolloutWorkflow(Slow(), 3)
    with pytest.raises(EpisodeError, match="ConnectionError: down"):
        await group.run_group(engine, {}, EpisodeRules(on_error="raise"))
    assert ended == ["raised", "cancelled", "cancelled"]
    stats = stats_tracker.get("rollout").export()
    assert (stats["rollout/usable_slot_count"], stats["rollout/fully_masked_group"]) == (0.0, 1.0)
    assert stats["rollout/target_slot_count__count"] == 1


async def test_deadline_is_for_each_episode(engine, rows) -> None:
    hangs = iter([False, True, False])

    class Hangs(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            if next(hangs):
                await asyncio.Event().wait()
            return rows(1.0)

    result = await GroupedRolloutWorkflow(Hangs(), 3).run_group(
        engine, {}, EpisodeRules(timeout_s=0.3)
    )
    assert result.value["rollout_group"].num_rollouts == 2
    assert [type(slot.error) for slot in result.slots][1] is EpisodeTimeoutError


async def test_interactions_become_one_union_in_slot_order(replay, interaction, engine) -> None:
    slots = [{"a": interaction("a", 1.0), "b": interaction("b", 1.0)}, {"c": interaction("c", 3.0)}]
    result = await GroupedRolloutWorkflow(replay(slots), 2).arun_episode(engine, {})
    assert list(result) == ["a", "b", "c"]
    assert result.rollout_group == RolloutGroup(row_counts=(2, 1))
    table = as_rows(result)
    assert table["rewards"].tolist() == [1.0, 1.0, 3.0]
    assert table["loss_mask"].tolist() == [[0, 0, 1]] * 3


async def test_one_id_in_two_slots_is_refused(replay, interaction, engine) -> None:
    group = GroupedRolloutWorkflow(replay([{"a": interaction("a", 1.0)}] * 2), 2)
    with pytest.raises(ValueError, match=r"interactions \['a'\]"):
        await group.arun_episode(engine, {})


async def test_different_keys_in_one_group_are_refused(replay, rows, engine) -> None:
    group = GroupedRolloutWorkflow(replay([rows(1.0), rows(1.0, extra=torch.ones(1))]), 2)
    with pytest.raises(WorkflowContractError, match="different keys"):
        await group.arun_episode(engine, {})


async def normalized(replay, engine, slots, **options):
    group = GroupedRolloutWorkflow(replay(slots), len(slots), reward_normalization=True, **options)
    return await group.arun_episode(engine, {})


async def test_rewards_one_and_three_become_minus_one_and_one(replay, interaction, engine) -> None:
    """case B79: the raw rewards are kept, also when the group is normalized twice."""
    slots = [{"a": interaction("a", 1.0)}, {"b": interaction("b", 3.0)}]
    result = await normalized(replay, engine, slots)
    assert [i.reward for i in result.values()] == pytest.approx([-1.0, 1.0])
    assert [i.original_reward for i in result.values()] == [1.0, 3.0]
    assert result.rollout_group.rewards == pytest.approx((-1.0, 1.0))
    table = as_rows(result)
    assert table["rewards"].tolist() == pytest.approx([-1.0, 1.0])
    assert table["original_rewards"].tolist() == [1.0, 3.0]
    assert [slot[name].reward for slot, name in zip(slots, "ab", strict=True)] == [1.0, 3.0]
    again = await normalized(replay, engine, [{name: i} for name, i in result.items()])
    assert [i.original_reward for i in again.values()] == [1.0, 3.0]


async def test_reference_of_a_rollout_with_two_rows(replay, interaction, engine) -> None:
    slots = [
        {
            "a": interaction("a", 1.0, rollout_reward=1.0),
            "b": interaction("b", 2.0, rollout_reward=1.0),
        },
        {"c": interaction("c", 3.0)},
    ]
    result = await normalized(replay, engine, slots)
    assert [i.reward for i in result.values()] == pytest.approx([-1.0, 0.0, 1.0])
    assert result.rollout_group.rewards == pytest.approx((-1.0, 1.0))
    assert result.rollout_group.row_counts == (2, 1)


async def test_step_rewards_stay_visible(replay, interaction, engine) -> None:
    """case B79: steps [-0.2, 1.0] and [0.0, 0.0], finals 1 and 0 -> mean 0.5, std 0.5."""
    slots = [
        {
            "a": interaction("a", -0.2, rollout_reward=1.0),
            "b": interaction("b", 1.0, rollout_reward=1.0),
        },
        {"c": interaction("c", 0.0), "d": interaction("d", 0.0)},
    ]
    result = await normalized(replay, engine, slots)
    assert [i.reward for i in result.values()] == pytest.approx([-1.4, 1.0, -1.0, -1.0])
    assert [i.original_reward for i in result.values()] == [-0.2, 1.0, 0.0, 0.0]


async def test_equal_rewards_become_zero(replay, interaction, engine) -> None:
    slots = [{"a": interaction("a", 0.1)}, {"b": interaction("b", 0.1)}]
    result = await normalized(replay, engine, slots)
    assert [i.reward for i in result.values()] == [0.0, 0.0]


async def test_only_the_mean_without_std(replay, interaction, engine) -> None:
    slots = [{"a": interaction("a", 1.0)}, {"b": interaction("b", 5.0)}]
    result = await normalized(replay, engine, slots, reward_normalization_use_std=False)
    assert [i.reward for i in result.values()] == [-2.0, 2.0]


async def test_normalization_is_over_the_usable_only(replay, interaction, engine) -> None:
    def slots():
        return [{"a": interaction("a", 1.0)}, None, {"b": interaction("b", 3.0)}]

    result = await normalized(replay, engine, slots())
    assert [i.reward for i in result.values()] == pytest.approx([-1.0, 1.0])
    assert await normalized(replay, engine, slots(), drop_incomplete_group=True) is None


async def test_one_rollout_alone_is_centred_to_zero(replay, interaction, engine) -> None:
    result = await normalized(replay, engine, [{"a": interaction("a", 0.7)}])
    assert result["a"].reward == 0.0


async def test_missing_reward_drops_the_group(replay, interaction, engine) -> None:
    slots = [{"a": interaction("a", 1.0)}, {"b": interaction("b", None)}]
    assert await normalized(replay, engine, slots) is None
    assert metrics()["usable_slot_count"] == 2.0


async def test_floor_comes_before_the_missing_reward(replay, interaction, engine) -> None:
    slots = [{"a": interaction("a", 1.0), "b": interaction("b", 2.0)}, None]
    assert await normalized(replay, engine, slots, min_usable_group_size=2) is None


async def test_unequal_rows_need_a_reference(replay, interaction, engine) -> None:
    slots = [
        {"a": interaction("a", 1.0), "b": interaction("b", 2.0)},
        {"c": interaction("c", 3.0)},
    ]
    with pytest.raises(WorkflowContractError, match="explicit rollout_reward"):
        await normalized(replay, engine, slots)


async def test_equal_rows_need_none(replay, interaction, engine) -> None:
    slots = [
        {"a": interaction("a", 1.0), "b": interaction("b", 1.0)},
        {"c": interaction("c", 3.0)},
    ]
    result = await normalized(replay, engine, slots)
    assert [i.reward for i in result.values()] == pytest.approx([-1.0, -1.0, 1.0])


async def test_tensor_rewards_are_left_to_the_trainer(replay, rows, engine) -> None:
    result = await normalized(replay, engine, [rows(1.0), rows(3.0)])
    assert result["rewards"].tolist() == [1.0, 3.0]
