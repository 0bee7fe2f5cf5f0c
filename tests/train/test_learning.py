"""Whole runs of a toy agent that learn: synchronous, with stale samples, with a critic, adapters.

The model has 64 words and starts out with any of them; the reward is the share of good words in an
answer of 8. It begins at about 0.5 and must come to 0.75 in the mean of the last three steps.
Adapters leave the output layer as it is and come less far.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agent_rl import PPOTrainer, load_config
from agent_rl.train.trainer import StepReport

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<answer> {% endif %}"
)


@pytest.fixture(scope="module")
def word_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    words = ["<unk>", "<end>", "<answer>", *(f"good{n}" for n in range(31))]
    words += [f"bad{n}" for n in range(64 - len(words))]
    inner = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", eos_token="<end>", pad_token="<end>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.1,  # adapters leave the output layer as it is: it must tell words apart
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Talker:
    async def run(self, data: dict[str, Any], client: Any) -> float:
        messages = [{"role": "user", "content": data["question"]}]
        completion = await client.chat.completions.create(model="m", messages=messages)
        words = (completion.choices[0].message.content or "").split()
        return sum(word.startswith("good") for word in words) / 8


METHODS: dict[str, list[str]] = {
    "GRPO": [],
    "decoupled, staleness 2": [
        "rollout.max_head_offpolicyness=2",
        "actor.use_decoupled_loss=true",
    ],
    "loglinear, staleness 2": [
        "rollout.max_head_offpolicyness=2",
        "actor.use_decoupled_loss=true",
        "actor.prox_logp_method=loglinear",
    ],
    "GAE with a critic": [
        "critic={optimizer: {lr: 0.01}}",
        "actor.reward_norm=null",
        "actor.adv_norm={mean_level: batch, std_level: batch}",
        "actor.gae_lambda=0.95",
        "actor.ppo_n_minibatches=2",
    ],
    "GAE with a shared trunk": [
        "critic={trunk: shared, loss_coef: 0.1}",
        "actor.reward_norm=null",
        "actor.adv_norm={mean_level: batch, std_level: batch}",
    ],
    "single episodes, running mean": [
        "rollout.group_size=1",
        "rollout.consumer_batch_size=64",
        "actor.reward_norm={mean_level: running, std_level: batch}",
    ],
    "adapters, KL to the start": [
        "actor.lora={rank: 8, target_modules: [all-linear]}",
        "actor.kl_loss_coef=0.001",
    ],
}
GOALS = {"adapters, KL to the start": 0.6}


@pytest.mark.parametrize("name", METHODS)
def test_it_learns(word_model: Path, tmp_path: Path, name: str) -> None:
    config = load_config(
        None,
        [
            f"tokenizer_path={word_model}",
            f"fileroot={tmp_path}",
            "total_train_steps=24",
            "rollout.consumer_batch_size=8",
            "rollout.group_size=8",
            "gconfig={min_new_tokens: 8, max_new_tokens: 8}",
            "actor={device: cpu, optimizer: {lr: 0.01, warmup_steps_proportion: 0.0}}",
            "engine={max_batch_size: 64, max_seq_len: 64}",
            "stats_logger.console=false",
            *METHODS[name],
        ],
    )
    rewards: list[float] = []

    def on_step(report: StepReport) -> None:
        rewards.append(report.stats["rollout/reward"])

    rows = [{"question": f"good{n % 8} bad{n // 8}"} for n in range(64)]
    with PPOTrainer(config, rows) as trainer:
        trainer.train(Talker, on_step=on_step)
    assert rewards[0] < 0.65
    assert sum(rewards[-3:]) / 3 > GOALS.get(name, 0.75), rewards
