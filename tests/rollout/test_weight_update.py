"""A weight update while an agent's answer is being sampled, from the agent down to the decoder."""

from __future__ import annotations

import asyncio
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.config import AgentConfig, RolloutConfig
from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.local import LocalEngine
from agent_rl.rollout.executor import RolloutEngine

MAX_TOKENS = 48


class Asks:
    async def run(self, data: Any, client: ArealOpenAI) -> float:
        answer = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": f"hi {data['i']}"}],
            max_tokens=MAX_TOKENS,
            logit_bias=data["never"],
        )
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == MAX_TOKENS
        return 1.0


class HeldEngine(LocalEngine):
    """Holds the decode thread inside its fifth step until a pause has been asked for."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        self.decoding, self.paused = threading.Event(), threading.Event()
        steps = itertools.count(1)

        def hold_fifth(*_: Any) -> None:
            if next(steps) == 5:
                self.decoding.set()
                assert self.paused.wait(60)

        model.get_input_embeddings().register_forward_pre_hook(hold_fifth)
        super().__init__(model, *args, **kwargs)

    async def pause(self) -> None:
        asked = asyncio.ensure_future(super().pause())
        await asyncio.sleep(0)  # now the decode thread finds the request after this step
        self.paused.set()
        await asked


@pytest.mark.parametrize("export_style", ["individual", "concat"])
def test_running_answers_go_on_under_the_new_version(tiny_model_dir: Path, export_style) -> None:
    """cases B35, B36, B61, B134, B136: nothing is aborted, sampled twice or over the budget."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    engine = HeldEngine(model, tokenizer, max_batch_size=4, max_seq_len=256)
    ends = {str(token_id): -100 for token_id in (tokenizer.eos_token_id,)}
    template = "concat" if export_style == "concat" else "hf"
    agent = AgentConfig(export_style=export_style, chat_template_type=template)
    config = RolloutConfig(consumer_batch_size=4, max_concurrent_rollouts=4, agent=agent)
    with RolloutEngine(engine, config, tokenizer=tokenizer) as rollout:
        for number in range(4):
            rollout.submit({"i": number, "never": ends}, Asks)
        assert engine.decoding.wait(60)
        rollout.pause()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        rollout.update_weights(WeightUpdate(version=1))
        rollout.resume()
        groups = rollout.wait(4, timeout=60)
        counts = rollout.counts()
    asyncio.run(engine.close())
    assert (counts.accepted, counts.failed) == (4, 0)
    for group in groups:
        mask = group["loss_mask"].bool()
        versions = group["versions"][mask].tolist()
        assert len(versions) == MAX_TOKENS == int(mask.sum())
        assert versions == sorted(versions)
        assert bool((group["logprobs"][mask] < 0).all())
    first = [int(group["versions"][group["loss_mask"].bool()][0]) for group in groups]
    assert min(first) == 0, "at least the answer that was held began under version 0"
    assert all(int(group["versions"].max()) == 1 for group in groups)
