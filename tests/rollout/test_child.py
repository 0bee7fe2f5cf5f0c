"""Agents in processes of their own: isolation, rewards, failures, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child_agents
import pytest

from agent_rl.config import AgentConfig, RolloutConfig
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import EpisodeError, RewardError, WorkflowResolutionError
from agent_rl.rollout.executor import RolloutEngine


@pytest.fixture
def make(open_rollout, tokenizer) -> Callable[..., RolloutEngine]:
    def build(max_workers: int = 2, **keys: Any) -> RolloutEngine:
        engine = ScriptedEngine(["four", "five"], tokenizer=tokenizer, repeat=True)
        agent = AgentConfig(mode="subproc", subproc_max_workers=max_workers, turn_discount=0.0)
        return open_rollout(engine, RolloutConfig(agent=agent, **keys), tokenizer=tokenizer)

    return build


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s, "it never came to be"
        time.sleep(0.01)


def rewards(group: Any) -> list[float]:
    return [round(float(value), 6) for value in group["rewards"]]


def test_sync_agents_that_read_the_environment_are_isolated(make) -> None:
    """case B192: each process has its own address and key, so its own record."""
    rollout = make(max_workers=3)
    groups = rollout.rollout_batch([{"i": i} for i in range(3)], child_agents.Environment, {})
    assert [rewards(group) for group in groups] == [[0.0], [1.0], [2.0]]
    engine = rollout.engine
    assert len(engine.requests) == 3
    by_path = rollout.rollout_batch([{"i": 4}], "child_agents.Environment", {"factor": 2})
    assert rewards(by_path[0]) == [8.0]


def test_anthropics_variables_work_too(make) -> None:
    assert rewards(make(on_error="raise").rollout_batch([{}], child_agents.Anthropic)[0]) == [1.0]


def test_coroutines_get_their_arguments_and_return_rewards_by_id(make) -> None:
    [group] = make().rollout_batch([{}], child_agents.Coroutine)
    assert rewards(group) == [0.25, 0.75]


def test_clients_of_the_sdk_set_rewards(make) -> None:
    [group] = make().rollout_batch([{}], child_agents.Sdk)
    assert rewards(group) == [0.5, 1.0]


def test_a_session_sets_rewards_in_the_record_at_once(make) -> None:
    [group] = make().rollout_batch([{}], child_agents.Rewards)
    assert rewards(group) == [0.25, 1.5]


@pytest.mark.parametrize("value", ["text", "tuple", "nan", "keys", {"unknown": 1.0}])
def test_returns_that_are_no_reward(make, value) -> None:
    """case B86"""
    rollout = make(on_error="raise")
    with pytest.raises(RewardError, match=r"a reward must be|interaction id|interaction's id"):
        rollout.rollout_batch([{}], child_agents.Returns, {"value": value})


def test_an_exception_keeps_its_own_traceback(make) -> None:
    """case B194"""
    rollout = make(on_error="raise")
    with pytest.raises(EpisodeError, match="agent raised LookupError: the tool is gone") as caught:
        rollout.rollout_batch([{}], child_agents.Fails, {"how": "raise"})
    assert caught.value.boundary == "agent"
    assert "child_agents.py:" in caught.value.place
    assert caught.value.place.endswith('in run: raise LookupError("the tool is gone")')
    assert str(caught.value).endswith(f" at {caught.value.place}")
    cause = str(caught.value.__cause__)
    assert 'raise LookupError("the tool is gone")' in cause and "child_agents.py" in cause
    assert "the last words" in cause


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exit", "SystemExit: 3"),
        ("die", "code -11"),
        ("mute", "agent raised UnspeakableError, whose message cannot be read"),
        ("loud", "agent raised ValueError: zzz"),
    ],
)
def test_a_process_that_ends_costs_one_episode(make, how, message) -> None:
    """case B195"""
    rollout = make(on_error="raise")
    with pytest.raises(EpisodeError, match=message) as caught:
        rollout.rollout_batch([{}], child_agents.Fails, {"how": how})
    assert len(str(caught.value)) < 30_000
    assert "the last words" in str(caught.value.__cause__)
    assert rollout.rollout_batch([{"i": 1}], child_agents.Environment, {})[0] is not None


def test_what_an_agent_prints_is_shown(make, capfd) -> None:
    """print, standard error and logging, of an episode that succeeds."""
    make().rollout_batch([{}], child_agents.Talks)
    shown = capfd.readouterr().err
    for line in ("to standard output", "to standard error", "to the log"):
        assert f"[Talks, task 0] {line}\n" in shown


@pytest.mark.parametrize("agent", [child_agents.Alarm, child_agents.AlarmInTask])
def test_a_verifier_that_needs_the_main_thread_works(make, agent) -> None:
    """case B84"""
    assert rewards(make().rollout_batch([{}], agent)[0]) == [1.0]


def test_the_context_goes_along(make) -> None:
    groups = make(on_error="raise").rollout_batch([{}], child_agents.Context, is_eval=True)
    assert groups[0] is not None


def test_the_deadline_kills_the_child_and_its_children(make, tmp_path) -> None:
    """case B133: no orphan processes."""
    rollout = make(episode_timeout_s=1.5)
    assert rollout.rollout_batch([{"i": 0}], child_agents.Hangs, {"folder": str(tmp_path)}) == [
        None
    ]
    assert rollout.export_stats()["rollout/failed/timeout"] == 1.0
    if (tmp_path / "0").exists():  # else it was killed while it started
        for pid in map(int, (tmp_path / "0").read_text().split()):
            wait_until(lambda pid=pid: not is_alive(pid))


def test_close_leaves_no_process(make, tmp_path, new_threads) -> None:
    """case B133"""
    rollout = make()
    for number in range(2):
        rollout.submit({"i": number}, child_agents.Hangs, {"folder": str(tmp_path)})
    wait_until(lambda: (tmp_path / "0").exists() or (tmp_path / "1").exists())
    rollout.close()
    pids = [int(pid) for name in tmp_path.iterdir() for pid in name.read_text().split()]
    for pid in pids:
        wait_until(lambda pid=pid: not is_alive(pid))
    assert "agent-rl-collector" not in new_threads()


def test_what_an_agent_leaves_running_is_ended_with_its_episode(make, tmp_path) -> None:
    groups = make().rollout_batch([{}], child_agents.Leaves, {"folder": str(tmp_path)})
    assert groups[0] is not None
    wait_until(lambda: not is_alive(int((tmp_path / "left").read_text())))


def run_and_kill(script: Path, folder: Path) -> None:
    """Kill the script once its agent runs; the agent and its child must be gone too."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.getenv("PYTHONPATH")]))
    parent = subprocess.Popen(
        [sys.executable, str(script), str(folder)], env={**os.environ, "PYTHONPATH": path}
    )
    try:
        wait_until(lambda: (folder / "0").exists() or parent.poll() is not None)
        pids = [int(pid) for pid in (folder / "0").read_text().split()]
        assert all(map(is_alive, pids))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    for pid in pids:
        wait_until(lambda pid=pid: not is_alive(pid))


def test_a_killed_parent_leaves_no_process(tmp_path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio, os, sys
            import child_agents
            from agent_rl.gateway.sessions import Door
            from agent_rl.rollout import child
            from agent_rl.rollout.order import AgentSource, Order

            async def main():
                kwargs = {"folder": sys.argv[1]}
                agent = AgentSource.of(child_agents.Hangs, kwargs, "Hangs", "subproc")
                door = Door(session_id="s", base_url="http://127.0.0.1/v1", api_key="k")
                order = Order.of(agent, {"i": 0}, door)
                async with child.child_process(os.environ, "Hangs") as (process, _):
                    child.write(process, order.encode())
                    await process.wait()

            asyncio.run(main())
            """
        )
    )
    folder = tmp_path / "pids"
    folder.mkdir()
    run_and_kill(script, folder)


@pytest.mark.slow
def test_a_killed_training_script_leaves_no_process(tmp_path) -> None:
    """Its agent is defined in the script itself."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            from transformers import AutoTokenizer
            from agent_rl import RolloutEngine, ScriptedEngine, small_model
            from agent_rl.config import AgentConfig, RolloutConfig
            from child_agents import Hangs as Base

            class Hangs(Base):
                pass

            if __name__ == "__main__":
                tokenizer = AutoTokenizer.from_pretrained(small_model())
                config = RolloutConfig(agent=AgentConfig(mode="subproc"))
                rollout = RolloutEngine(ScriptedEngine([]), config, tokenizer=tokenizer)
                rollout.rollout_batch([{"i": 0}], Hangs, {"folder": sys.argv[1]})
            """
        )
    )
    folder = tmp_path / "pids"
    folder.mkdir()
    run_and_kill(script, folder)


def test_what_cannot_go_to_another_process_is_refused(make) -> None:
    class Local:
        def run(self, data: Any) -> float:
            return 1.0

    rollout = make(on_error="raise")
    for workflow, kwargs, message in [
        (Local, None, "define the class at the top level"),
        (child_agents.Environment(), None, "give the class Environment"),
        (child_agents.Environment, {"factor": object()}, "as JSON: factor cannot be written"),
    ]:
        with pytest.raises(WorkflowResolutionError, match=message):
            rollout.rollout_batch([{}], workflow, kwargs)
    with pytest.raises(EpisodeError, match="the datum cannot be written as JSON"):
        rollout.rollout_batch([{"i": object()}], child_agents.Environment)
