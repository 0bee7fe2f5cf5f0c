"""Sampling by hand-worked numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from agent_rl.engine.sampling import draw, plan_sampling, sample, truncate
from agent_rl.types import GenerationConfig

CPU = torch.device("cpu")
LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


@dataclass(kw_only=True)
class Row:
    gconfig: GenerationConfig = field(default_factory=GenerationConfig)
    ids: list[int] = field(default_factory=lambda: [0])
    num_prompt: int = 1
    end_ids: tuple[int, ...] = ()


def uniforms(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def kept(**gconfig: float) -> list[int]:
    plan = plan_sampling([Row(gconfig=GenerationConfig(**gconfig))], 4, CPU)
    weights = LOGITS.exp()[None]
    if plan.truncation is not None:
        weights = truncate(weights, plan.truncation)
    return weights[0].nonzero()[:, 0].tolist()


def run(row: Row, logits: Tensor, u: float = 0.5) -> list[float]:
    result: list[float] = sample(
        logits[None], plan_sampling([row], len(logits), CPU), uniforms(u)
    ).tolist()[0]
    return result


def test_draw_inverts_the_cumulated_weights() -> None:
    weights = torch.tensor([[1.0, 0.0, 3.0]]).expand(5, 3)
    ids = draw(weights, uniforms(0.0, 0.2499, 0.25, 0.5, 0.999999))
    assert ids.tolist() == [0, 0, 2, 2, 2]


def test_draw_never_takes_a_weight_of_zero() -> None:
    weights = torch.zeros(2, 50_000)
    weights[:, 40_000] = 1.0
    assert draw(weights, uniforms(0.0, 1 - 2**-53)).tolist() == [40_000, 40_000]


def test_draw_has_the_right_frequencies() -> None:
    u = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = draw(LOGITS.exp().expand(20_000, 4), u)
    assert ids.bincount().div(20_000).tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.01)


@pytest.mark.parametrize(
    ("gconfig", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.49}, [0]),
        ({"top_p": 0.7}, [0, 1]),
        ({"top_p": 0.94}, [0, 1, 2]),
        ({"min_p": 0.2}, [0, 1, 2]),
        ({"min_p": 0.2, "top_k": 2}, [0, 1]),
        ({"top_k": 2, "top_p": 0.6}, [0]),  # of the two, the first has .625
        ({"top_k": 9}, [0, 1, 2, 3]),
    ],
)
def test_truncation(gconfig: dict[str, float], expected: list[int]) -> None:
    assert kept(**gconfig) == expected


def test_a_nucleus_larger_than_the_candidates_is_sorted_whole() -> None:
    """5000 ids, about equally likely: .90005 of them are 4500.25, so 4501 are kept."""
    flat, peaked = torch.linspace(0, 1e-4, 5000), torch.arange(5000.0)
    rows = [Row(gconfig=GenerationConfig(top_p=0.90005)) for _ in range(2)]
    plan = plan_sampling(rows, 5000, CPU)
    assert plan.truncation is not None
    weights = truncate(torch.stack([flat, peaked]).softmax(-1), plan.truncation)
    assert weights.count_nonzero(1).tolist() == [4501, 3]  # 1 - e^-2 < .90005 < 1 - e^-3


def test_rows_are_truncated_each_by_its_own_rule() -> None:
    configs = [{"top_p": 0.7}, {}, {"top_k": 1}, {"greedy": True, "top_k": 3}]
    rows = [Row(gconfig=GenerationConfig(**config)) for config in configs]
    ids = sample(LOGITS.expand(4, 4), plan_sampling(rows, 4, CPU), uniforms(0.99, 0.99, 0.99, 0.99))
    assert ids[:, 0].tolist() == [1, 3, 0, 0]


def test_logprob_is_tempered_and_untruncated() -> None:
    """Logits [2, 0] at temperature .5: log-softmax([4, 0])[0] = -0.018150 (cases B56, B57)."""
    row = Row(gconfig=GenerationConfig(temperature=0.5, top_k=1))
    token_id, logprob = run(row, torch.tensor([2.0, 0.0]))
    assert token_id == 0
    assert logprob == pytest.approx(-0.018150, abs=1e-6)


def test_greedy_logprob_is_of_temperature_one() -> None:
    row = Row(gconfig=GenerationConfig(temperature=0.0))
    assert run(row, torch.tensor([2.0, 0.0])) == pytest.approx([0, -0.126928], abs=1e-6)


def test_penalties_choose_but_do_not_change_the_logprob() -> None:
    """Prompt [0], completion [1, 1]; greedy over logits [2, 2.5, 1, -1].

    frequency .5: 2.5 - 2 * .5 = 1.5 < 2, so id 0. presence 1: 1.5, id 0. repetition 2: [1, 1.25, 1,
    -1] stays id 1, repetition 3: [.67, .83, 1, -1] takes id 2. bias {3: 9}: id 3.
    """
    logits = torch.tensor([2.0, 2.5, 1.0, -1.0])
    logprobs = logits.log_softmax(-1)
    cases: list[tuple[dict[str, object], int]] = [
        ({}, 1),
        ({"frequency_penalty": 0.5}, 0),
        ({"presence_penalty": 1.0}, 0),
        ({"repetition_penalty": 2.0}, 1),
        ({"repetition_penalty": 3.0}, 2),
        ({"logit_bias": {3: 9.0}}, 3),
    ]
    for config, expected in cases:
        row = Row(gconfig=GenerationConfig(greedy=True, **config), ids=[0, 1, 1])
        assert run(row, logits) == pytest.approx([expected, float(logprobs[expected])])


def test_counts_follow_the_tokens_of_later_steps() -> None:
    """Presence 1 on logits [1, .5]: id 0, then .0 < .5 takes id 1, then both are down: id 0."""
    row = Row(gconfig=GenerationConfig(greedy=True, presence_penalty=1.0), ids=[5], num_prompt=1)
    logits = torch.tensor([[1.0, 0.5, -9, -9, -9, -9]])
    plan = plan_sampling([row], 6, CPU)
    ids = [int(sample(logits, plan, uniforms(0.5))[0, 0]) for _ in range(3)]
    assert ids == [0, 1, 0]


def test_end_ids_are_banned_until_min_new_tokens() -> None:
    """The end is all but certain, and the ban still leaves a proper distribution."""
    config = GenerationConfig(min_new_tokens=2)
    logits = torch.tensor([60.0, 0.0, 0.0])
    early, done = (Row(gconfig=config, ids=ids, end_ids=(0,)) for ids in ([9, 1], [9, 1, 1]))
    plan = plan_sampling([early], 3, CPU)
    assert plan.num_steps == 1
    assert [run(early, logits, u)[0] for u in (0.1, 0.9)] == [1, 2]
    assert run(done, logits)[0] == 0


def test_forbidden_ids_are_never_chosen_and_truncation_takes_from_the_others() -> None:
    """Row 1 may take ids 2 and 3 only, .15 and .05: top-p .7 keeps id 2. Log-probs are unmasked."""
    rows = [Row(), Row(gconfig=GenerationConfig(top_p=0.7)), Row()]
    plan = plan_sampling(rows, 4, CPU)
    forbidden = (torch.tensor([1, 2]), torch.tensor([[True, True, False, False]] * 2))
    result = sample(LOGITS.expand(3, 4), plan, uniforms(0.0, 0.99, 0.8), forbidden)
    assert result[:, 0].tolist() == [0, 2, 3]
    assert result[:, 1].tolist() == pytest.approx(LOGITS[[0, 2, 3]].tolist())


def test_a_grammar_itself_keeps_the_end_ids_away() -> None:
    """So that an end id which is all the grammar allows can still be chosen."""
    row = Row(gconfig=GenerationConfig(min_new_tokens=2, grammar="g"), end_ids=(0,))
    assert plan_sampling([row], 3, CPU).banned is None


def test_top_logprobs_are_ids_then_logprobs() -> None:
    row = Row(gconfig=GenerationConfig(top_logprobs=2, top_k=1))
    expected = [0, -0.693147, 0, 1, -0.693147, -1.203973]
    assert run(row, LOGITS) == pytest.approx(expected, abs=1e-6)
