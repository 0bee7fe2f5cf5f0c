"""kill -9 at random points of a run: each datum is trained exactly once, or counted as stale."""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path

import crash_run
import pytest

from agent_rl.record.codec import decode_trajectory
from agent_rl.record.journal import Journal

FORK = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> None:
    """Processes start in milliseconds: what they import is imported once."""
    FORK.set_forkserver_preload(["agent_rl.rollout.executor"])


def process(folder: Path, num_steps: int, kill_at: int, seed: int) -> int:
    """Its exit code: -9 when it was killed."""
    started = FORK.Process(target=crash_run.run, args=(folder, num_steps, kill_at, seed))
    started.start()
    started.join(120)
    assert started.exitcode is not None, "the run hangs"
    return started.exitcode


def finished_in_journal(folder: Path) -> set[int]:
    entries = [entry for entry in Journal.read(folder / "rollout.journal") if "draw" in entry]
    rows = [decode_trajectory(entry["rows"]) for entry in entries]
    return {int(each["rewards"][0]) for each in rows}  # type: ignore[index]


def started_in(folder: Path) -> list[int]:
    path = folder / "started"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def check_crashes(folder: Path, *, num_steps: int, num_kills: int, most: int, seed: int) -> int:
    """Kill it ``num_kills`` times after at most ``most`` events, let it end, and look at it."""
    draw = random.Random(seed)
    finished: set[int] = set()
    for number in range(num_kills + 1):
        num_started = len(started_in(folder))
        kill_at = draw.randint(1, most) if number < num_kills else 0
        code = process(folder, num_steps, kill_at, number)
        assert code == (-9 if kill_at else 0), "it must not end before its last start"
        run_twice = set(started_in(folder)[num_started:]) & finished
        assert not run_twice, f"finished before kill {number} and run again: {run_twice}"
        finished |= finished_in_journal(folder)
    state = crash_run.read_state(folder)
    trained, pending = state["trained"], [data["i"] for _, data in state["rollout"]["pending"]]
    drawn = [row["i"] for row in crash_run.new_loader().take(state["rollout"]["num_drawn"])]
    assert state["step"] == num_steps and len(trained) == num_steps * crash_run.BATCH_SIZE
    assert len(set(trained)) == len(trained), "a datum was trained twice"
    assert set(trained) | set(pending) <= set(drawn) and not set(trained) & set(pending)
    missing = set(drawn) - set(trained) - set(pending)
    assert len(missing) == state["dropped"], "each missing datum is counted as stale"
    return len(missing)


def test_three_kills(tmp_path: Path) -> None:
    check_crashes(tmp_path, num_steps=8, num_kills=3, most=12, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_twenty_kills(tmp_path: Path, seed: int) -> None:
    check_crashes(tmp_path, num_steps=40, num_kills=20, most=30, seed=seed)
