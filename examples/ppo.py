"""Train a small agent with GRPO on one machine: one-digit sums, two minutes on a CPU.

python examples/ppo.py                      # settings below
python examples/ppo.py total_train_steps=3  # overrides as on the command line
"""

from __future__ import annotations

import random
import re
import sys
from typing import Any

from openai import AsyncOpenAI

from agent_rl import PPOTrainer, load_config, small_model

SETTINGS = [
    "experiment_name=ppo_example",
    "total_train_steps=12",
    "rollout.group_size=8",
    "rollout.consumer_batch_size=4",
    "gconfig.temperature=0.8",
    "gconfig.max_new_tokens=8",
    "stats_logger.console=off",
]


class Adder:
    """One worked example, one question; the reward is 1 when the only number is the sum."""

    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        completion = await client.chat.completions.create(
            model="local",
            messages=[
                {"role": "user", "content": "3+4"},
                {"role": "assistant", "content": "7"},
                {"role": "user", "content": f"{data['a']}+{data['b']}"},
            ],
        )
        numbers = re.findall(r"\d+", completion.choices[0].message.content or "")
        return float(numbers == [str(data["a"] + data["b"])])


def main() -> None:
    config = load_config(None, [*SETTINGS, f"tokenizer_path={small_model()}", *sys.argv[1:]])
    tasks = [{"a": a, "b": b} for a in range(1, 10) for b in range(1, 10)]
    random.Random(config.seed).shuffle(tasks)
    with PPOTrainer(config, tasks[16:], tasks[:16]) as trainer:
        print("held-out before:", trainer.evaluate(Adder)["eval-rollout/reward"])
        trainer.train(
            workflow=Adder,
            on_step=lambda report: print(
                f"step {report.step + 1}: reward {report.stats['rollout/reward']:.2f}"
            ),
        )
        print("held-out after:", trainer.evaluate(Adder)["eval-rollout/reward"])


if __name__ == "__main__":
    main()
