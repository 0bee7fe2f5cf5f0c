"""Actor: updates do not depend on how rows are packed, and only trained tokens move weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_batches import groups, tiny_model, trajectory

from agent_rl import small_model, stats_tracker
from agent_rl.config import ActorConfig, NormConfig, OptimizerConfig, RefConfig
from agent_rl.errors import WorkflowContractError
from agent_rl.train.actor import Actor
from agent_rl.train.batch import Batch, micro_batches
from agent_rl.train.checkpoint import load_state, save_state
from agent_rl.train.forward import predicted_logprobs, segment_attention
from agent_rl.train.reference import Reference
from agent_rl.types import TensorDict


def weights_after(trajectories: list[TensorDict], config: ActorConfig) -> torch.Tensor:
    model = tiny_model()
    reference = Reference(tiny_model(seed=5), RefConfig(), temperature=0.7)
    actor = Actor(model, config, total_steps=10, temperature=0.7, reference=reference)
    actor.update(Batch.from_trajectories(trajectories))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


SGD_LIKE = OptimizerConfig(lr=1e-2, eps=1.0, warmup_steps_proportion=0.0)
"""With eps 1 an AdamW step is smooth in the gradient; with 1e-8 it is close to its sign."""


@pytest.mark.parametrize("tree_packing", ["auto", "off"])
@pytest.mark.parametrize("max_tokens_per_mb", [1, 20, 4096])
def test_packing_changes_nothing(tree_packing: str, max_tokens_per_mb: int) -> None:
    """Cases B107, B108: 1 to 12 micro-batches, prefixes shared or not: the same weights."""
    plain = ActorConfig(tree_packing="off", optimizer=SGD_LIKE)
    other = ActorConfig.model_validate(
        plain.model_dump() | {"tree_packing": tree_packing, "max_tokens_per_mb": max_tokens_per_mb}
    )
    expected = weights_after(groups(), plain)
    start = torch.cat([p.detach().flatten() for p in tiny_model().parameters()])
    moved = (expected - start).abs().max()
    difference = (weights_after(groups(), other) - expected).abs().max()
    assert moved > 1e-5
    assert difference / moved < 1e-5


def test_all_masked_batch_touches_nothing() -> None:
    """Case B113: no trained token -> no step, no optimizer state, weights as they were."""
    rows = trajectory([[1, 2, 3], [1, 2, 4]], [[0, 0, 0], [0, 0, 0]], [1.0, 0.0])
    model = tiny_model()
    before = [p.detach().clone() for p in model.parameters()]
    actor = Actor(model, ActorConfig(), total_steps=10, temperature=1.0)
    report = actor.update(Batch.from_trajectories([rows]))
    assert (report.num_steps, report.num_skipped, report.num_trained_tokens) == (1, 1, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("max_tokens_per_mb", [1, 4096])
def test_masked_rows_beside_others_change_nothing(max_tokens_per_mb: int) -> None:
    """Case B113: a group without one trained token, also where it would be micro-batches alone."""
    config = ActorConfig(optimizer=SGD_LIKE, max_tokens_per_mb=max_tokens_per_mb)
    masked = trajectory([[1, 2, 3], [1, 2, 4]], [[0, 0, 0], [0, 0, 0]], [1.0, 0.0])
    expected = weights_after(groups(), config)
    assert torch.equal(weights_after([*groups(), masked], config), expected)


def test_a_component_without_tokens_is_zero() -> None:
    """Case B113: cross entropy over the rows with a reward above 0, of which there are none."""
    rows = trajectory([[1, 2, 3], [1, 2, 4]], [[0, 1, 1]] * 2, [0.0, -1.0])
    expected = weights_after([rows], ActorConfig(optimizer=SGD_LIKE))
    got = weights_after([rows], ActorConfig(optimizer=SGD_LIKE, cross_entropy_coef=1.0))
    assert torch.equal(got, expected)
    assert stats_tracker.export_all()["ppo_actor/update/loss/cross_entropy"] == 0.0


def test_state_continues_exactly(tmp_path: Path) -> None:
    config = ActorConfig(optimizer=OptimizerConfig(lr=1e-2, lr_scheduler_type="linear"))
    first, second = Batch.from_trajectories(groups(1)), Batch.from_trajectories(groups(2))
    model = tiny_model(torch.bfloat16)
    actor = Actor(model, config, total_steps=4, temperature=1.0)
    actor.update(first)
    resumed_model = tiny_model(torch.bfloat16)
    resumed = Actor(resumed_model, config, total_steps=4, temperature=1.0)
    resumed.load_state_dict(load_state(save_state(actor.state_dict(), tmp_path / "actor.pt")))
    actor.update(second)
    resumed.update(second)
    for a, b in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(a, b)


OPTIONS: list[dict[str, object]] = [
    {"importance_sampling_level": "sequence", "loss_aggregation": "seq-mean-token-mean"},
    {"policy_loss": "cispo", "eps_clip_higher": 0.28},
    {"policy_loss": "sapo"},
    {"c_clip": 1.5, "loss_aggregation": "rollout-mean"},
    {"use_decoupled_loss": True, "rejection_sampling": {"upper": 1.05, "lower": 0.9}},
    {"use_decoupled_loss": True, "rejection_sampling": {"level": "sequence", "agg": "max"}},
    {"recompute_logprob": True, "m2_threshold": 0.01, "ppo_n_minibatches": 2},
    {
        "recompute_logprob": True,
        "ppo_n_minibatches": 3,
        "entropy_coef": 0.1,
        "gradient_checkpointing": True,
    },
    {"loss_aggregation": "dr-grpo", "loss_horizon": 16, "ppo_n_minibatches": 2},
    {"adv_norm": {"mean_level": "batch", "std_level": "batch"}, "gradient_checkpointing": True},
    {"use_decoupled_loss": True, "prox_logp_method": "loglinear"},
    {"kl_loss_coef": 0.5, "loss_aggregation": "seq-mean-token-mean"},
    {"kl_ctl": 0.5, "ppo_n_minibatches": 2},
    {"kl_ctl": 0.5, "use_decoupled_loss": True, "prox_logp_method": "loglinear"},
    {"cross_entropy_coef": 0.5},
    {"distillation": {"weight": 0.5}},
    {"distillation": {"weight": 0.5, "topk": 2}, "reward_weight": 0.5},
    {"truncated_rows": "mask"},
]


def taught_groups() -> list[TensorDict]:
    """``groups`` of some age, of which one row in each group ends with an end token.

    A teacher speaks of the first trained token of every row.
    """
    trajectories = groups()
    generator = torch.Generator().manual_seed(2)
    for rows in trajectories:
        mask = rows["loss_mask"]
        assert isinstance(mask, torch.Tensor)
        first = torch.zeros_like(mask, dtype=torch.bool)
        first[:, 6] = True
        shape = (*mask.shape, 3)
        rows["teacher_logprobs"] = torch.where(first, -1.0, torch.nan)
        rows["teacher_topk_ids"] = torch.randint(1, 50, shape, generator=generator)
        rows["teacher_topk_logprobs"] = -2.0 - torch.rand(shape, generator=generator)
        rows["versions"] = torch.where(mask.bool(), -2, -1)
        rows["is_truncated"] = torch.tensor([True, True, True, False])
    return trajectories


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_moves_weights_the_same_under_any_packing(options: dict[str, object]) -> None:
    """One micro-batch of rows against many forests: row-level ratios and limits included."""
    base = ActorConfig(tree_packing="off", optimizer=SGD_LIKE).model_dump() | options
    expected = weights_after(taught_groups(), ActorConfig.model_validate(base))
    packed = ActorConfig.model_validate(base | {"tree_packing": "auto", "max_tokens_per_mb": 25})
    start = torch.cat([p.detach().flatten() for p in tiny_model().parameters()])
    plain = weights_after(taught_groups(), ActorConfig(tree_packing="off", optimizer=SGD_LIKE))
    moved = (expected - start).abs().max()
    assert moved > 1e-6
    assert (weights_after(taught_groups(), packed) - expected).abs().max() / moved < 1e-5
    assert not torch.allclose(plain, expected, rtol=0.0, atol=float(moved) * 1e-4)


def test_one_step_needs_no_pass_for_the_proximal_logprobs() -> None:
    """With one optimizer step, recomputed log-probs are the current ones: every ratio is 1."""
    model = tiny_model()
    actor = Actor(model, ActorConfig(recompute_logprob=True), total_steps=1, temperature=0.7)
    calls = []
    handle = model.model.register_forward_hook(lambda *_: calls.append(1))
    actor.update(Batch.from_trajectories(groups()))
    handle.remove()
    assert len(calls) == 1
    assert stats_tracker.export_all()["ppo_actor/update/importance_weight/avg"] == 1.0


def test_behaviour_of_the_same_weights_gives_ratio_one() -> None:
    """Case B56: log-probs sampled at temperature 0.7 by the same weights: all ratios are 1."""
    model = tiny_model()
    actor = Actor(model, ActorConfig(), total_steps=1, temperature=0.7)
    trajectories = groups()
    for rows in trajectories:
        ids, mask = rows["input_ids"], rows["loss_mask"]
        assert isinstance(ids, torch.Tensor)
        assert isinstance(mask, torch.Tensor)
        with torch.no_grad():
            logits = model(input_ids=ids.long()).logits[:, :-1] / 0.7
        taken = logits.log_softmax(-1).gather(2, ids[:, 1:, None].long())[..., 0]
        rows["logprobs"] = torch.nn.functional.pad(taken, (1, 0)).float() * mask
    actor.update(Batch.from_trajectories(trajectories))
    stats = stats_tracker.export_all()
    for key in ("min", "avg", "max"):
        assert stats[f"ppo_actor/update/importance_weight/{key}"] == pytest.approx(1.0, abs=1e-5)


def test_a_row_without_a_known_reward_is_not_there() -> None:
    """Cases B96, B112: a third row whose reward is nan changes no weight."""
    two = [trajectory([[1, 2, 3], [1, 4, 5]], [[0, 1, 1]] * 2, [1.0, 0.0])]
    three = [
        trajectory([[1, 2, 3], [1, 4, 5], [1, 6, 7]], [[0, 1, 1]] * 3, [1.0, 0.0, float("nan")])
    ]
    config = ActorConfig(optimizer=SGD_LIKE)
    assert torch.equal(weights_after(two, config), weights_after(three, config))


def test_a_truncated_row_that_does_not_count_moves_no_weight() -> None:
    """Case B99: the middle row has no end token; whether its reward is 1 or 100 says nothing."""
    config = ActorConfig(
        truncated_rows="zero",
        reward_clip=1000.0,
        reward_norm=NormConfig(mean_level="batch", std_level=None),
        optimizer=SGD_LIKE,
    )
    ids, masks = [[1, 5, 2], [1, 6, 7], [1, 8, 2]], [[0, 1, 1]] * 3
    usual, wild, other = (
        weights_after([trajectory(ids, masks, rewards)], config)
        for rewards in ([1.0, 1.0, 0.0], [1.0, 100.0, 0.0], [0.0, 1.0, 1.0])
    )
    assert torch.equal(usual, wild)
    assert not torch.equal(usual, other)


def test_non_finite_gradient_skips_the_step() -> None:
    model = tiny_model()
    actor = Actor(model, ActorConfig(), total_steps=1, temperature=1.0)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    before = model.lm_head.weight.detach().clone()
    report = actor.update(Batch.from_trajectories(groups()))
    assert (report.num_steps, report.num_skipped) == (1, 1)
    assert torch.equal(model.lm_head.weight.detach(), before)


def test_an_interrupted_update_leaves_no_gradient_behind() -> None:
    model = tiny_model()
    actor = Actor(model, ActorConfig(optimizer=SGD_LIKE), total_steps=1, temperature=0.7)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 5.0)
    actor.update(Batch.from_trajectories(groups()))
    got = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(got, weights_after(groups(), ActorConfig(optimizer=SGD_LIKE)))


@pytest.mark.parametrize("wrong", [-100, 50])
def test_ids_of_another_tokenizer_are_named(wrong: int) -> None:
    rows = trajectory([[1, wrong, 3], [1, 2, 4]], [[0, 1, 1], [0, 1, 1]], [1.0, 0.0])
    actor = Actor(tiny_model(), ActorConfig(), total_steps=10, temperature=1.0)
    with pytest.raises(WorkflowContractError, match=r"input_ids has ids .* knows 0 to 49"):
        actor.update(Batch.from_trajectories([rows]))


def test_decoupled_loss_needs_behaviour_logprobs() -> None:
    rows = groups()
    for row in rows:
        del row["logprobs"]
    batch = Batch.from_trajectories(rows)
    actor = Actor(
        tiny_model(), ActorConfig(use_decoupled_loss=True), total_steps=1, temperature=1.0
    )
    with pytest.raises(WorkflowContractError, match="logprobs"):
        actor.update(batch)
    plain = Actor(tiny_model(), ActorConfig(), total_steps=1, temperature=1.0)
    assert plain.update(batch).num_skipped == 0, "unknown log-probs are recomputed"


def test_shared_prefixes_are_computed_once() -> None:
    """Three completions of the prompt 1 2 3 with 2 tokens each: 3 + 6 nodes, not 15 tokens."""
    rows = [[1, 2, 3, 10 + i, 20 + i] for i in range(3)]
    batch = Batch.from_trajectories([trajectory(rows, [[0, 0, 0, 1, 1]] * 3, [1, 0, 0])])
    counts = {}
    for tree_packing in ("auto", "off"):
        config = ActorConfig.model_validate({"tree_packing": tree_packing})
        actor = Actor(tiny_model(), config, total_steps=1, temperature=1.0)
        counts[tree_packing] = actor.update(batch).num_computed_tokens
    assert counts == {"auto": 9, "off": 15}


@pytest.mark.slow
def test_tree_gradients_of_the_real_model() -> None:
    """float32, the 135M model, three turns exported individually: within 1e-5 relative."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 40000, (150,), generator=generator).tolist()
    rows = [ids[:50], ids[:100], ids[:150]]
    masks = [[0] * (len(row) - 30) + [1] * 30 for row in rows]
    batch = Batch.from_trajectories([trajectory(rows, masks, [0.0] * 3)])
    model = AutoModelForCausalLM.from_pretrained(small_model(), dtype=torch.float32).eval()
    gradients = []
    for share_prefixes in (False, True):
        model.zero_grad()
        with segment_attention(model):
            for micro in micro_batches(
                batch, range(3), max_tokens=1024, share_prefixes=share_prefixes
            ):
                logprobs, _ = predicted_logprobs(model, micro, 1.0)
                logprobs[micro.slots].mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    difference = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert difference < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
# The compiler looks at .grad of whatever passes where it cannot compile, and hides this itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_passes_change_nothing() -> None:
    """Three updates of rows in many divisions: one compilation, the same weights."""
    weights = []
    for is_compiled in (False, True):
        keys = {
            "compile": is_compiled,
            "max_tokens_per_mb": 25,
            "optimizer": {"lr": 0.01, "eps": 1},
        }
        model = tiny_model(torch.float32)
        actor = Actor(model, ActorConfig.model_validate(keys), total_steps=9, temperature=0.7)
        for seed in range(3):
            actor.update(Batch.from_trajectories(groups(seed)))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(weights[1], weights[0], atol=1e-6, rtol=0.0)
