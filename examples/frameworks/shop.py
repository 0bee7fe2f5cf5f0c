"""What the examples of this folder share: a shop, two questions about it, and a training run.

Each example is a clerk that answers both questions in one conversation and looks prices up with a
tool. Its class is all that a framework needs; ``train`` works for every one of them.
"""

from __future__ import annotations

import sys
from typing import Any

from agent_rl import PPOTrainer, load_config, small_model

PRICES = {"corn": 42, "flax": 17, "oats": 35, "peas": 58}
TASKS = [{"item": item, "count": count} for item in PRICES for count in (2, 3)]
INSTRUCTIONS = "You are the clerk of a shop. Look prices up before you answer."
MAX_TURNS = 4  # model calls that one question may take

SETTINGS = [
    "experiment_name=frameworks",
    "total_train_steps=2",
    "rollout.group_size=4",
    "rollout.consumer_batch_size=2",
    "rollout.agent.export_style=concat",
    "rollout.agent.chat_template_type=concat",
    "gconfig.max_new_tokens=24",
    "stats_logger.console=false",
    f"tokenizer_path={small_model()}",
]


def price(item: str) -> int:
    """Price of one unit of an item in cents.

    Args:
        item: what is bought
    """
    return PRICES[item]


def questions(data: dict[str, Any]) -> list[str]:
    return [f"What does {data['item']} cost?", f"And {data['count']} of them?"]


def reward(data: dict[str, Any], answer: str) -> float:
    """1 for the right sum, a little for any number: a small model has to begin somewhere."""
    if str(PRICES[data["item"]] * data["count"]) in answer:
        return 1.0
    return 0.2 if any(character.isdigit() for character in answer) else 0.0


def train(agent: type) -> None:
    """Two steps of GRPO on the small model; arguments of the command line override the settings."""
    config = load_config(None, [*SETTINGS, *sys.argv[1:]])
    with PPOTrainer(config, TASKS) as trainer:
        trainer.train(
            workflow=agent,
            on_step=lambda report: print(
                f"step {report.step + 1}: reward {report.stats['rollout/reward']:.2f}, "
                f"{report.stats['rollout/num_turns']:.1f} turns"
            ),
        )
