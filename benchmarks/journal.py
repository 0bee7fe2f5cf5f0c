"""What the journal costs: groups a second that are encoded and put on disk, and read back.

    python benchmarks/journal.py              # seconds, one core

A group is 8 episodes of 2,048 tokens: ids, masks, log-probs, versions and temperatures, 344 kB.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from agent_rl.record.codec import decode_trajectory, encode_trajectory
from agent_rl.record.journal import Journal
from agent_rl.types import RolloutGroup, TensorDict

ROWS, LENGTH = 8, 2048


def group() -> TensorDict:
    shape = (ROWS, LENGTH)
    return {
        "input_ids": torch.randint(0, 50_000, shape, dtype=torch.int32),
        "attention_mask": torch.ones(shape, dtype=torch.bool),
        "loss_mask": torch.ones(shape, dtype=torch.int32),
        "logprobs": -torch.rand(shape),
        "versions": torch.zeros(shape, dtype=torch.int32),
        "temperatures": torch.ones(shape),
        "rewards": torch.rand(ROWS),
        "rollout_group": RolloutGroup(row_counts=(1,) * ROWS),
    }


def measure(fsync: Literal["always", "never"], count: int, folder: Path) -> tuple[float, float]:
    """Seconds for one group, to write and to read."""
    path, trajectory = folder / fsync, group()
    start_s = time.perf_counter()
    with Journal(path, fsync=fsync) as journal:
        for number in range(count):
            journal.append({"draw": number, "rows": encode_trajectory(trajectory)})
    written_s = time.perf_counter()
    for entry in Journal.read(path):
        decode_trajectory(entry["rows"])
    read_s = time.perf_counter()
    return (written_s - start_s) / count, (read_s - written_s) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("fsync", "write ms", "read ms")
    with tempfile.TemporaryDirectory() as folder:
        for fsync in ("always", "never"):
            times_s = measure(fsync, arguments.groups, Path(folder))
            table.add_row(fsync, *(f"{1000 * seconds:.2f}" for seconds in times_s))
    Console().print(table)


if __name__ == "__main__":
    main()
