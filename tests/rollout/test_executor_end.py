"""RolloutEngine paused, closed, and when its background dies."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from echo import Echo, data, numbers

from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import CollectorError
from agent_rl.record.dump import TrajectoryDump
from agent_rl.rollout.workflow import RolloutWorkflow
from agent_rl.types import ModelRequest


def test_pause_stops_starts_and_the_engine(make, rows) -> None:
    """case B134: a stub that fails whatever arrives while paused sees nothing."""
    arrivals = []

    class Stub(ScriptedEngine):
        is_paused = False

        async def agenerate(self, req):
            arrivals.append(self.is_paused)
            return await super().agenerate(req)

        async def pause(self):
            self.is_paused = True
            await super().pause()

        async def resume(self):
            self.is_paused = False
            await super().resume()

    class Generates(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            response = await engine.agenerate(ModelRequest(rid=str(data["i"]), input_ids=[1]))
            return rows(float(response.output_versions[0]))

    rollout = make(Stub([[7]], repeat=True), consumer_batch_size=8)
    rollout.pause()
    for row in data(8):
        rollout.submit(row, Generates())
    assert rollout.counts().waiting == 8 and arrivals == []
    with pytest.raises(CollectorError, match="paused"):
        rollout.rollout_batch(data(1), Generates())
    rollout.update_weights(WeightUpdate(version=3))
    rollout.resume()
    assert numbers(rollout.wait(8, timeout=30)) == [3] * 8
    assert arrivals == [False] * 8
    assert rollout.get_version() == 3


def test_a_pause_does_not_use_up_the_deadline(make, rows) -> None:
    """The engine stands still three times as long as an episode may take."""
    asked = threading.Event()

    class Generates(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            asked.set()
            await engine.agenerate(ModelRequest(rid="a", input_ids=[1]))
            return rows(1.0)

    class Slow(ScriptedEngine):
        async def agenerate(self, req):
            await asyncio.sleep(0.05)
            return await super().agenerate(req)

    rollout = make(Slow([[7]]), episode_timeout_s=0.3)
    rollout.submit({}, Generates())
    asked.wait(30)
    rollout.pause()
    time.sleep(0.9)
    rollout.resume()
    assert numbers(rollout.wait(1, timeout=30)) == [1]


def test_close_cancels_and_leaves_no_thread(make, new_threads) -> None:
    ended = []

    class Hangs(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(data["i"])

    rollout = make(consumer_batch_size=4)
    for row in data(4):
        rollout.submit(row, Hangs())
    with pytest.raises(TimeoutError):
        rollout.wait(1, timeout=0.05)
    rollout.close()
    rollout.close()
    assert sorted(ended) == [0, 1, 2, 3]
    assert rollout.counts().running == 0
    assert "agent-rl-collector" not in new_threads()
    with pytest.raises(CollectorError, match="closed"):
        rollout.submit({}, Hangs())


def test_close_wakes_whoever_waits(make) -> None:
    class Hangs(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            started.set()
            await asyncio.Event().wait()

    started, raised = threading.Event(), []
    rollout = make()
    rollout.submit({}, Hangs())

    def wait() -> None:
        try:
            rollout.wait(1)
        except CollectorError as error:
            raised.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    started.wait(30)
    rollout.close()
    waiter.join(30)
    assert raised == ["the rollout engine is closed"]


def test_keyboard_interrupt_in_an_agent_stops_the_program(make, replay) -> None:
    """case B195"""
    rollout = make()
    with pytest.raises(KeyboardInterrupt):
        rollout.rollout_batch([{}], replay([KeyboardInterrupt()]))
    with pytest.raises(KeyboardInterrupt):
        rollout.submit({}, replay([]))


def test_exit_in_a_stray_task_costs_nothing(make, rows) -> None:
    """case B131: SystemExit in a task that nobody awaits."""

    class Stray(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            async def leave() -> None:
                raise SystemExit(3)

            task = asyncio.create_task(leave())
            await asyncio.sleep(0.01)
            task.exception()
            return rows(1.0)

    groups = make().rollout_batch(data(4), Stray())
    assert all(group is not None for group in groups)


def test_a_fault_of_ours_in_a_task_is_raised_with_its_cause(
    open_rollout, replay, rows, tmp_path
) -> None:
    """case B131: its group is not just one that failed."""
    fault = RuntimeError("no version")

    class Broken(ScriptedEngine):
        is_asked = False

        def get_version(self) -> int:
            if self.is_asked and threading.current_thread() is not threading.main_thread():
                raise fault
            return 0

    engine = Broken([])

    def ask(data):
        engine.is_asked = True
        return rows(1.0)

    rollout = open_rollout(engine, dump=TrajectoryDump(tmp_path, str))
    with pytest.raises(CollectorError, match="background work died") as caught:
        rollout.rollout_batch([{}], replay([ask]))
    assert caught.value.__cause__ is fault


def test_death_of_the_background_is_raised_with_its_cause(make, rows) -> None:
    """case B131"""
    fault = RuntimeError("no version")

    class Broken(ScriptedEngine):
        def get_version(self) -> int:
            if threading.current_thread() is not threading.main_thread():
                raise fault
            return 0

    rollout = make(Broken([]))
    with pytest.raises(CollectorError, match="background work died") as caught:
        rollout.rollout_batch(data(2), Echo(rows))
    assert caught.value.__cause__ is fault
    with pytest.raises(CollectorError):
        rollout.submit({}, Echo(rows))
