"""A whole training step beside TRL's GRPOTrainer: same model and token counts, in one process.

    python benchmarks/step.py [--prompts 8] [--samples 4] [--threads 1] [--repeat 1]

A step is: sample 64 tokens for each of prompts x samples rows, score them, one AdamW step. Without
`trl` only our column is printed. CPU seconds: on a shared machine wall time counts others' work.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import importlib.util
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from agent_rl import GenerationConfig, LocalEngine, ModelRequest, small_model
from agent_rl.config import ActorConfig
from agent_rl.engine.loading import load_model, load_tokenizer
from agent_rl.train.actor import Actor
from agent_rl.train.batch import Batch
from agent_rl.types import RolloutGroup, TensorDict

PROMPT_TOKENS = NEW_TOKENS = 64
LR = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Prompts of exactly ``PROMPT_TOKENS`` tokens, as text and as ids."""

    texts: list[str]
    ids: list[list[int]]
    samples: int

    @property
    def trained_tokens(self) -> int:
        return len(self.ids) * self.samples * NEW_TOKENS


@dataclass(slots=True)
class Costs:
    """CPU seconds of the parts of one step, and the peak memory of the process in MiB."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak_mib: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    work = make_work(arguments.prompts, arguments.samples)
    compare(work, repeat=arguments.repeat)


def compare(work: Work, *, repeat: int) -> None:
    """Print the parts of a step for both, the best of ``repeat`` each."""
    print(
        f"\nstep: {len(work.ids)} prompts x {work.samples} samples, {PROMPT_TOKENS} + {NEW_TOKENS} "
        f"tokens, {torch.get_num_threads()} thread(s), CPU s"
    )
    print(f"{'':8}generate    train     step  trained tokens/s    MiB")
    ours = _show("ours", our_step, work, repeat)
    if importlib.util.find_spec("trl") is None:
        print("TRL: not installed (pip install trl), so there is nothing to compare with")
        return
    theirs = _show("TRL", trl_step, work, repeat)
    ratios = {name: theirs.seconds[name] / ours.seconds[name] for name in ours.seconds}
    print(
        f"{'TRL/ours':8}{ratios['generate']:8.2f} {ratios['train']:8.2f} "
        f"{theirs.total / ours.total:8.2f}"
    )


def _show(label: str, step: Callable[[Work], Costs], work: Work, repeat: int) -> Costs:
    best = min((step(work) for _ in range(repeat)), key=lambda costs: costs.total)
    print(
        f"{label:8}{best.seconds['generate']:8.2f} {best.seconds['train']:8.2f} {best.total:8.2f}"
        f"{work.trained_tokens / best.total:18.1f}{best.peak_mib:7.0f}",
        flush=True,
    )
    return best


def make_work(prompts: int, samples: int) -> Work:
    """Random English words whose text has one token each, in any company."""
    tokenizer = load_tokenizer(small_model())
    words = [
        token_id
        for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
        if token.startswith("Ġ") and token[1:].isascii() and token[1:].islower()
    ]
    draw = random.Random(0)
    texts, ids = [], []
    while len(ids) < prompts:
        drawn = draw.choices(words, k=PROMPT_TOKENS)
        text = tokenizer.decode(drawn)
        if tokenizer(text)["input_ids"] == drawn:
            texts.append(text)
            ids.append(drawn)
    return Work(texts=texts, ids=ids, samples=samples)


def our_step(work: Work) -> Costs:
    model = load_model(small_model(), device=torch.device("cpu"), dtype=torch.float32)
    engine = LocalEngine(model, load_tokenizer(small_model()), max_batch_size=32)
    config = ActorConfig.model_validate({"optimizer": {"lr": LR, "weight_decay": 0.0}})
    actor = Actor(model, config, total_steps=1, temperature=1.0)
    costs = Costs()
    reset_peak()
    with costs.part("generate"):
        trajectories = asyncio.run(_sample(engine, work))
    with costs.part("train"):
        report = actor.update(Batch.from_trajectories(trajectories))
    assert report.num_trained_tokens == work.trained_tokens
    costs.peak_mib = peak_mib()
    return costs


async def _sample(engine: LocalEngine, work: Work) -> list[TensorDict]:
    gconfig = GenerationConfig(min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)
    requests = [
        ModelRequest(rid=f"{n}-{sample}", input_ids=ids, gconfig=gconfig)
        for n, ids in enumerate(work.ids)
        for sample in range(work.samples)
    ]
    responses = await asyncio.gather(*map(engine.agenerate, requests))
    await engine.close()
    groups: list[TensorDict] = []
    for first in range(0, len(responses), work.samples):
        group = responses[first : first + work.samples]
        ids = torch.tensor([[*r.input_tokens, *r.output_tokens] for r in group])
        mask = torch.zeros_like(ids)
        mask[:, PROMPT_TOKENS:] = 1
        logprobs = torch.zeros(ids.shape)
        logprobs[:, PROMPT_TOKENS:] = torch.tensor([r.output_logprobs for r in group])
        groups.append(
            {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids, dtype=torch.bool),
                "loss_mask": mask,
                "logprobs": logprobs,
                "rewards": torch.tensor([_reward(r.output_tokens) for r in group]),
                "rollout_group": RolloutGroup(row_counts=(1,) * len(group)),
            }
        )
    return groups


def _reward(token_ids: Any) -> float:
    """Differs between samples, whatever the model says."""
    return float(sum(token_ids) % 97)


def trl_step(work: Work) -> Costs:
    """One optimizer step of GRPOTrainer, its generation and its updates timed apart."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    costs = Costs()

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            with costs.part("generate"):
                return super()._generate_and_score_completions(inputs)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model=str(small_model()),
            processing_class=load_tokenizer(small_model()),
            reward_funcs=[
                lambda completion_ids, **_: [_reward(token_ids) for token_ids in completion_ids]
            ],
            train_dataset=Dataset.from_list([{"prompt": text} for text in work.texts]),
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=len(work.ids) * work.samples,
                num_generations=work.samples,
                max_completion_length=NEW_TOKENS,
                generation_kwargs={"min_new_tokens": NEW_TOKENS},
                learning_rate=LR,
                max_steps=1,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                model_init_kwargs={"dtype": "float32"},
            ),
        )
        reset_peak()
        start = time.process_time()
        trainer.train()
        whole = time.process_time() - start
    costs.seconds["train"] = whole - costs.seconds["generate"]
    costs.peak_mib = peak_mib()
    return costs


def reset_peak() -> None:
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return float(status.split("VmHWM:")[1].split()[0]) / 1024


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=1, help="the best of so many steps")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
