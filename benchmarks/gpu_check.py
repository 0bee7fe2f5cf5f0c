"""One command that says whether this device trains as it should, in less than four minutes.

    python benchmarks/gpu_check.py            # a CUDA device: a random Llama of 1.1 B in bfloat16
    python benchmarks/gpu_check.py --tiny     # the same on the CPU with a toy model, in seconds

Checks (exit code 1 if one fails): loss and gradients of a toy model equal those of the CPU; prefix
sharing and plain rows give one loss; trainer and engine agree on log-probs; weights move. Prints
tokens/s, model FLOP utilisation and peak memory of sampling and training.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from flops import training_flops, utilisation
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from agent_rl import GenerationConfig, LocalEngine, ModelRequest, stats_tracker
from agent_rl.config import ActorConfig
from agent_rl.engine.base import WeightUpdate
from agent_rl.train.actor import Actor
from agent_rl.train.batch import Batch, MicroBatch, micro_batches
from agent_rl.train.forward import predicted_logprobs, segment_attention
from agent_rl.types import RolloutGroup, TensorDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is trained, and on what."""

    device: torch.device
    dtype: torch.dtype
    sizes: dict[str, int]
    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int
    steps: int
    tokens_per_mb: int
    mismatch_limit: float
    """Nats; bfloat16 rounds what float32 tells apart."""


TOY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
BILLION = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a toy model on the CPU")
    is_tiny = parser.parse_args(arguments).tiny
    if not is_tiny and not torch.cuda.is_available():
        print("there is no CUDA device here; --tiny runs the same on the CPU", file=sys.stderr)
        return 2
    plan = _tiny_plan() if is_tiny else _gpu_plan()
    where = "CPU" if is_tiny else torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}")
    results = [check_parity(plan.device), *train_and_sample(plan)]
    for is_ok, text in results:
        print(f"{'ok  ' if is_ok else 'FAIL'} {text}")
    return 0 if all(is_ok for is_ok, _ in results) else 1


def check_parity(device: torch.device) -> tuple[bool, str]:
    """Loss and gradient norm of one update in float32, here and on the CPU."""
    pairs = []
    for where in (torch.device("cpu"), device):
        model = make_model(TOY, where, torch.float32)
        actor = Actor(model, ActorConfig(), total_steps=1, temperature=1.0)
        trajectories = _made_up(TOY["vocab_size"])
        stats_tracker.export_all()
        actor.update(Batch.from_trajectories(trajectories))
        stats = stats_tracker.export_all()
        pairs.append([stats[f"ppo_actor/update/{key}"] for key in ("loss/policy", "grad_norm")])
    (loss, norm), (device_loss, device_norm) = pairs
    error = max(abs(device_loss - loss) / abs(loss), abs(device_norm - norm) / norm)
    return error < 1e-3, f"loss {loss:.6f} and gradient of the CPU: within {error:.1e}"


def train_and_sample(plan: Plan) -> list[tuple[bool, str]]:
    """A few whole steps with the embedded engine on the parameters that are trained."""
    model = make_model(plan.sizes, plan.device, plan.dtype)
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    print(
        f"{billions:.3g} B parameters, {plan.dtype}; {plan.prompts} prompts x {plan.samples} "
        f"samples, {plan.prompt_tokens} + {plan.new_tokens} tokens"
    )
    config = ActorConfig.model_validate(
        {"max_tokens_per_mb": plan.tokens_per_mb, "optimizer": {"lr": 1e-4}, "eps_clip": 10.0}
    )
    actor = Actor(model, config, total_steps=plan.steps, temperature=1.0)
    longest = plan.prompt_tokens + plan.new_tokens
    seats = plan.prompts * plan.samples
    engine = LocalEngine(model, max_batch_size=seats, max_seq_len=longest + 1)
    before = model.get_output_embeddings().weight.detach().clone()
    results = [_check_sharing(model, plan)]
    mismatch = 0.0
    for step in range(plan.steps):
        _reset_peak(plan.device)
        start = time.perf_counter()
        trajectories = asyncio.run(_sample(engine, plan, seed=step))
        sampled_s = _elapsed(start, plan.device)
        batch = Batch.from_trajectories(trajectories)
        stats_tracker.export_all()
        start = time.perf_counter()
        report = actor.update(batch)
        trained_s = _elapsed(start, plan.device)
        asyncio.run(engine.update_weights(WeightUpdate(version=step + 1)))
        stats = stats_tracker.export_all()
        mismatch = max(mismatch, stats["ppo_actor/update/behave_logp_error/avg"])
        parts = _parts(batch, plan, share_prefixes=True)
        sampled = seats * plan.new_tokens
        print(
            f"step {step + 1}: sampled {sampled / sampled_s:,.0f} tokens/s; trained "
            f"{report.num_trained_tokens / trained_s:,.0f} tokens/s, computed "
            f"{report.num_computed_tokens:,} of {batch.num_tokens:,}, "
            f"{utilisation(training_flops(model, parts), trained_s, plan.device)}, "
            f"peak {_peak(plan.device)}",
            flush=True,
        )
    asyncio.run(engine.close())
    moved = float((model.get_output_embeddings().weight.detach() - before).abs().max())
    results.append((moved > 0.0, f"weights moved by up to {moved:.1e}"))
    limit = plan.mismatch_limit
    results.append((mismatch < limit, f"trainer and engine differ by {mismatch:.1e} nats (mean)"))
    return results


def _check_sharing(model: Any, plan: Plan) -> tuple[bool, str]:
    """Log-probs of rows that share a prefix, with the prefix computed once and with rows apart."""
    batch = Batch.from_trajectories(_made_up(plan.sizes["vocab_size"]))
    seen = []
    with torch.no_grad(), segment_attention(model):
        for share_prefixes in (True, False):
            logprobs = torch.zeros(batch.num_tokens)
            for part in _parts(batch, plan, share_prefixes=share_prefixes):
                predicted, _ = predicted_logprobs(model, part.to(plan.device), 1.0)
                logprobs[part.tokens] = predicted.float().cpu()[part.slots]
            seen.append(logprobs)
    error = float((seen[0] - seen[1]).abs().sum() / batch.loss_mask.sum())
    return error < plan.mismatch_limit, f"rows with shared prefixes: within {error:.1e} nats (mean)"


def _parts(batch: Batch, plan: Plan, *, share_prefixes: bool) -> list[MicroBatch]:
    return micro_batches(
        batch,
        range(batch.num_rows),
        max_tokens=plan.tokens_per_mb,
        share_prefixes=share_prefixes,
    )


def _made_up(vocab_size: int) -> list[TensorDict]:
    """Two groups of four rows with 16 shared and 24 sampled tokens."""
    generator = torch.Generator().manual_seed(0)
    groups: list[TensorDict] = []
    for _ in range(2):
        prompt = torch.randint(1, vocab_size, (1, 16), generator=generator).expand(4, 16)
        sampled = torch.randint(1, vocab_size, (4, 24), generator=generator)
        logprobs = torch.full((4, 24), -5.0)
        rewards = torch.rand(4, generator=generator)
        groups.append(_rows(prompt, sampled, logprobs, rewards))
    return groups


async def _sample(engine: LocalEngine, plan: Plan, *, seed: int) -> list[TensorDict]:
    generator = torch.Generator().manual_seed(seed)
    shape = (plan.prompts, plan.prompt_tokens)
    prompts = torch.randint(1, plan.sizes["vocab_size"], shape, generator=generator)
    gconfig = GenerationConfig(min_new_tokens=plan.new_tokens, max_new_tokens=plan.new_tokens)
    requests = [
        ModelRequest(rid=f"{n}-{sample}", input_ids=prompt, gconfig=gconfig)
        for n, prompt in enumerate(prompts.tolist())
        for sample in range(plan.samples)
    ]
    responses = await asyncio.gather(*map(engine.agenerate, requests))
    groups: list[TensorDict] = []
    for n, prompt_ids in enumerate(prompts):
        group = responses[n * plan.samples : (n + 1) * plan.samples]
        sampled = torch.tensor([r.output_tokens for r in group])
        logprobs = torch.tensor([r.output_logprobs for r in group])
        rewards = (sampled % 2).float().mean(1)  # odd tokens are good
        groups.append(_rows(prompt_ids.expand(len(group), -1), sampled, logprobs, rewards))
    return groups


def _rows(prompt: Tensor, sampled: Tensor, logprobs: Tensor, rewards: Tensor) -> TensorDict:
    ids = torch.cat([prompt, sampled], dim=1)
    mask = torch.cat([torch.zeros_like(prompt), torch.ones_like(sampled)], dim=1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids, dtype=torch.bool),
        "loss_mask": mask,
        "logprobs": torch.cat([torch.zeros(prompt.shape), logprobs], dim=1),
        "rewards": rewards,
        "rollout_group": RolloutGroup(row_counts=(1,) * len(ids)),
    }


def make_model(sizes: dict[str, int], device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, tie_word_embeddings=False, eos_token_id=0)  # type: ignore[arg-type]
    return LlamaForCausalLM(config).to(device, dtype).eval()


def _tiny_plan() -> Plan:
    return Plan(
        device=torch.device("cpu"),
        dtype=torch.float32,
        sizes=TOY,
        prompts=2,
        samples=4,
        prompt_tokens=32,
        new_tokens=16,
        steps=2,
        tokens_per_mb=256,
        mismatch_limit=1e-3,
    )


def _gpu_plan() -> Plan:
    return Plan(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        sizes=BILLION,
        prompts=8,
        samples=16,
        prompt_tokens=512,
        new_tokens=128,
        steps=4,
        tokens_per_mb=8192,
        mismatch_limit=0.05,
    )


def _elapsed(start: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak(device: torch.device) -> str:
    if device.type != "cuda":
        return "not measured"
    return f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"


if __name__ == "__main__":
    sys.exit(main())
