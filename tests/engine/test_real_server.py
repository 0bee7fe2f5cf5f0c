"""What is measured on a real server, whose address and model folder are in the environment
(tests/real_servers): run with -s to see the figures."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Literal

import pytest
import torch

from agent_rl import PPOTrainer
from agent_rl.demo.runner import demo_config
from agent_rl.demo.shop import ShopAgent, make_tasks
from agent_rl.engine.base import UpdateMethod, WeightUpdate
from agent_rl.engine.loading import load_model
from agent_rl.engine.remote import RemoteEngine
from agent_rl.engine.server_api import ServerApi
from agent_rl.engine.sglang import SGLang
from agent_rl.engine.vllm import VLLM
from agent_rl.train.trainer import StepReport
from agent_rl.types import GenerationConfig, ModelRequest, ModelResponse

pytestmark = pytest.mark.slow

Kind = Literal["sglang", "vllm"]
APIS: dict[Kind, ServerApi] = {"sglang": SGLang(), "vllm": VLLM()}
METHODS: dict[Kind, tuple[UpdateMethod, ...]] = {
    "sglang": ("disk", "distributed", "tensor"),
    "vllm": ("disk", "distributed"),
}
REAL = [kind for kind in APIS if f"AGENT_RL_{kind.upper()}" in os.environ]


def address(kind: Kind) -> str:
    return os.environ[f"AGENT_RL_{kind.upper()}"]


def ask(number: int, max_new_tokens: int) -> ModelRequest:
    config = GenerationConfig(max_new_tokens=max_new_tokens)
    return ModelRequest(rid=f"r{number}", input_ids=[100 + number, 6, 7], gconfig=config)


@pytest.mark.parametrize(("kind", "method"), [(k, m) for k in REAL for m in METHODS[k]])
async def test_a_real_server_takes_weights_under_load(
    served_folder: Path, tmp_path: Path, kind: Kind, method: UpdateMethod
) -> None:
    """Each token has the log-prob and the version of the weights that sampled it."""
    old = load_model(served_folder, device=torch.device("cpu"), dtype=torch.float32)
    new = load_model(served_folder, device=torch.device("cpu"), dtype=torch.float32)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in new.parameters():
            spread = 0.05 * parameter.std()
            parameter += spread * torch.randn(parameter.shape, generator=noise)
    new.save_pretrained(tmp_path / "v1")
    engine = await asyncio.to_thread(lambda: RemoteEngine(APIS[kind], [address(kind)]))
    await engine.update_weights(WeightUpdate(version=0, method="disk", path=served_folder))
    streams = [engine.astream(ask(number, 60)) for number in range(4)]
    for stream in streams:
        await anext(stream)
    update = WeightUpdate(
        version=1,
        method=method,
        path=tmp_path / "v1",
        tensors=dict(new.named_parameters()).items,
    )
    start_s = time.monotonic()
    await engine.update_weights(update)
    print(f"\n{kind}: update by {method} in {time.monotonic() - start_s:.2f} s")
    worst, num_new = 0.0, 0
    for stream in streams:
        response = [item async for item in stream][-1]
        assert isinstance(response, ModelResponse)
        ids = torch.tensor([[*response.input_tokens, *response.output_tokens]])
        chosen = torch.tensor(response.output_tokens)[:, None]
        is_new = torch.tensor(response.output_versions) == 1
        with torch.no_grad():
            before, after = (
                model(input_ids=ids).logits[0, 2:-1].log_softmax(-1).gather(1, chosen)[:, 0]
                for model in (old, new)
            )
        difference = torch.tensor(response.output_logprobs) - torch.where(is_new, after, before)
        worst, num_new = max(worst, float(difference.abs().max())), num_new + int(is_new.sum())
    print(f"{kind}: {num_new} tokens on the new weights, log-probs differ by up to {worst:.1e}")
    assert worst < 2e-3
    assert num_new > 0
    await engine.update_weights(WeightUpdate(version=0, method="disk", path=served_folder))
    await engine.close()


@pytest.mark.parametrize("kind", REAL)
async def test_tokens_per_second_of_a_real_server(kind: Kind) -> None:
    engine = await asyncio.to_thread(lambda: RemoteEngine(APIS[kind], [address(kind)]))
    start_s = time.monotonic()
    requests = [engine.agenerate(ask(number, 40)) for number in range(32)]
    num_tokens = sum(len(response.output_tokens) for response in await asyncio.gather(*requests))
    per_s = num_tokens / (time.monotonic() - start_s)
    print(f"\n{kind}: {per_s:.0f} tokens/s, 32 requests at once")
    assert num_tokens > 32
    await engine.close()


@pytest.mark.parametrize("kind", REAL)
def test_one_step_of_the_demo_with_a_real_server(
    served_folder: Path, tmp_path: Path, kind: Kind
) -> None:
    """Its task, agent and settings; half the episodes, because the server has a CPU only."""
    servers = [
        f"tokenizer_path={served_folder}",
        f"engine={{backend: {kind}, addresses: ['{address(kind)}'], update: {METHODS[kind][-1]}}}",
        "total_train_steps=1",
        "rollout.consumer_batch_size=2",
        "rollout.group_size=4",
    ]
    config = demo_config(seed=1, out=tmp_path, overrides=servers)
    reports: list[StepReport] = []
    with PPOTrainer(config, make_tasks(seed=1, count=2, split="train")) as trainer:
        start_s = time.monotonic()
        trainer.train(workflow=ShopAgent, on_step=reports.append)
        wall_s = time.monotonic() - start_s
        assert trainer.engine.get_version() == 1
        trainer.engine.set_version(0)
    stats = reports[0].stats
    error = "ppo_actor/update/behave_logp_error"
    print(
        f"\n{kind}: one step in {wall_s:.0f} s, reward {stats['rollout/reward']:.2f}, log-probs "
        f"differ by {stats[f'{error}/avg']:.1e}, at most {stats[f'{error}/max']:.1e}"
    )
    assert stats["ppo_actor/n_seqs"] == 8
    assert stats[f"{error}/max"] < 2e-3
