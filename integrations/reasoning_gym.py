"""reasoning-gym: its generated tasks as a dataset, its verifiers as a reward, in one line each.

PPOTrainer(config, tasks("chain_sum", size=1000, seed=1)).train(workflow=one_turn(score))
"""

from __future__ import annotations

import json
from typing import Any

import reasoning_gym


def tasks(name: str, *, size: int, seed: int, **settings: Any) -> list[dict[str, Any]]:
    """Rows of plain JSON with ``question``, ``answer`` and ``metadata``.

    ``settings`` are those of the dataset: ``min_terms=2``, ...
    """
    dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **settings)
    rows: list[dict[str, Any]] = [json.loads(json.dumps(row, default=str)) for row in dataset]
    return rows


def score(data: dict[str, Any], answer: str) -> float:
    """What the dataset's own verifier gives the text after the last ``<answer>``, or all of it."""
    verify = reasoning_gym.get_score_answer_fn(data["metadata"]["source_dataset"])
    _, _, tagged = answer.rpartition("<answer>")
    return float(verify(answer=tagged.partition("</answer>")[0].strip(), entry=data))
