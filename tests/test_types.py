from __future__ import annotations

import math
from typing import Any

import pytest

from agent_rl import GenerationConfig, ModelRequest, ModelResponse, RolloutGroup, TrajBatchMeta


def response(**changes: Any) -> ModelResponse:
    fields: dict[str, Any] = {
        "input_tokens": [1, 5],
        "output_tokens": [20, 21, 2],
        "output_logprobs": [-0.1, -0.2, -0.3],
        "output_versions": [3, 3, 4],
        "stop_reason": "stop",
    }
    return ModelResponse(**{**fields, **changes})


def test_per_token_lists_of_another_length_are_refused_with_both_lengths() -> None:
    """Case B41: a reply with 2 ids and 3 log-probs is rejected."""
    with pytest.raises(ValueError, match="2 token ids but 3 output_logprobs"):
        response(output_tokens=[20, 21], output_versions=[3, 3])


@pytest.mark.parametrize("logprob", [math.nan, -math.inf, math.inf])
def test_a_sampled_token_without_a_finite_log_prob_is_refused(logprob: float) -> None:
    """Case B115: what could only make the loss NaN is reported where it comes from."""
    with pytest.raises(ValueError, match=r"output_logprobs\[1\] is "):
        response(output_logprobs=[-0.1, logprob, -0.3])


def test_forced_marks_are_one_for_each_token() -> None:
    assert response().output_forced is None
    assert response(output_forced=(True, False, True)).output_forced == (True, False, True)
    with pytest.raises(ValueError, match="3 token ids but 1 output_forced"):
        response(output_forced=(True,))


def test_a_response_keeps_what_was_sampled() -> None:
    assert response().output_tokens == (20, 21, 2)
    assert response().output_versions == (3, 3, 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_k", -1),
        ("min_p", 1.0),
        ("max_new_tokens", 0),
        ("n_samples", 0),
        ("repetition_penalty", 0.0),
    ],
)
def test_values_out_of_range_name_the_field(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"gconfig.{field} is"):
        GenerationConfig(**{field: value})  # type: ignore[arg-type]


def test_greedy_states_log_probs_at_temperature_one() -> None:
    assert GenerationConfig(temperature=0.0).is_greedy
    assert GenerationConfig(temperature=0.0).logprob_temperature == 1.0
    assert GenerationConfig(temperature=1e-6).logprob_temperature == 1.0
    assert GenerationConfig(temperature=1e-5).logprob_temperature == 1e-5
    assert GenerationConfig(greedy=True, temperature=0.7).logprob_temperature == 1.0
    assert GenerationConfig(temperature=0.7).logprob_temperature == 0.7


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="input_ids is empty"):
        ModelRequest(rid="r", input_ids=[])


def test_rollout_group_counts_rows_and_rollouts() -> None:
    group = RolloutGroup(row_counts=(3, 1))
    assert (group.num_rows, group.num_rollouts, group.references) == (4, 2, (None, None))


@pytest.mark.parametrize(
    ("row_counts", "rewards"),
    [((), None), ((0,), None), ((True,), None), ((1,), (1.0, 2.0)), ((1,), (math.nan,))],
)
def test_malformed_rollout_groups_are_refused(row_counts: Any, rewards: Any) -> None:
    with pytest.raises(ValueError, match="RolloutGroup"):
        RolloutGroup(row_counts=row_counts, rewards=rewards)


def test_rollout_group_accepts_lists_that_came_over_the_wire() -> None:
    group = RolloutGroup(row_counts=[2, 1], rewards=[1, None])  # type: ignore[arg-type]
    assert group == RolloutGroup(row_counts=(2, 1), rewards=(1, None))


def test_batch_meta_checks_rows_against_groups() -> None:
    with pytest.raises(ValueError, match="3 rows but its rollout_group counts 2"):
        TrajBatchMeta(
            traj_group_sizes=(3,),
            traj_seqlens=(5,),
            rollout_groups=(RolloutGroup(row_counts=(2,)),),
        )
