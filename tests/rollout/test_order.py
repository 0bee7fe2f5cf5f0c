"""Orders: there and back as JSON, the class found again, and outcomes that are failures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import child_agents
import pytest

from agent_rl import workflow_context
from agent_rl.errors import EpisodeError, RewardError, WorkflowResolutionError
from agent_rl.gateway.sessions import Door
from agent_rl.rollout import order as orders
from agent_rl.rollout.order import AgentSource, Order, RemoteTraceback, returned

DOOR = Door(session_id="s", base_url="http://127.0.0.1:1/v1", api_key="key")


def source(agent: type = child_agents.Environment) -> AgentSource:
    return AgentSource.of(agent, {"factor": 3}, agent.__qualname__, "subproc")


def test_an_order_comes_back_as_it_went() -> None:
    workflow_context.set(workflow_context.WorkflowContext(is_eval=True, task_id="t1"))
    order = Order.of(source(), {"pair": (1, 2)}, DOOR)
    fields = json.loads(json.dumps(order.encode()))
    assert Order.decode(fields) == order
    assert fields == {
        "agent": {
            "module": "child_agents",
            "script": None,
            "name": "Environment",
            "kwargs": {"factor": 3},
        },
        "data": {"pair": [1, 2]},
        "base_url": "http://127.0.0.1:1/v1",
        "api_key": "key",
        "is_eval": True,
        "task_id": "t1",
    }


def test_the_class_is_found_and_constructed() -> None:
    agent = source().construct()
    assert isinstance(agent, child_agents.Environment) and agent.factor == 3


class Outer:
    class Inner:
        def run(self, data: object) -> float:
            return 1.0


def test_a_class_inside_a_class_is_found() -> None:
    found = AgentSource.of(Outer.Inner, {}, "Inner", "ray").construct()
    assert type(found) is Outer.Inner


def test_a_class_of_the_script_that_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read from the script's file; what stands under ``__main__`` does not run again."""
    script = tmp_path / "train.py"
    script.write_text(
        "class Agent:\n"
        "    def run(self, data):\n"
        "        return 2.0\n"
        "if __name__ == '__main__':\n"
        "    raise RuntimeError('trained again')\n"
    )
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    agent = type("Agent", (), {"run": lambda self, data: 0.0, "__module__": "__main__"})
    with pytest.raises(WorkflowResolutionError, match="from a notebook or a prompt"):
        AgentSource.of(agent, {}, "Agent", "subproc")
    main.__file__ = str(script)
    found = AgentSource.of(agent, {}, "Agent", "subproc")
    assert found.script == str(script)
    assert found.construct().run({}) == 2.0  # type: ignore[attr-defined]


def test_a_class_that_another_process_cannot_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a function, under the ``__main__`` guard, or no longer in its module."""

    class Local:
        def run(self, data: object) -> float:
            return 1.0

    what_to_do = r"cannot import .*Local; define the class at the top level of a module"
    with pytest.raises(WorkflowResolutionError, match=what_to_do):
        AgentSource.of(Local, {}, "Local", "subproc")
    Local.__qualname__ = "Local"  # as `global Local` in the function makes it
    with pytest.raises(WorkflowResolutionError, match=what_to_do):
        AgentSource.of(Local, {}, "Local", "subproc")
    script = tmp_path / "train.py"
    script.write_text("if __name__ == '__main__':\n    class Local: pass\n")
    guarded = AgentSource(module="__main__", script=str(script), name="Local", kwargs={})
    with pytest.raises(EpisodeError, match=r"train.py: another process " + what_to_do):
        guarded.construct()


def test_a_process_that_runs_agents_starts_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training script without a ``__main__`` guard would start itself over and over."""
    monkeypatch.setattr(orders, "_takes_orders", True)
    with pytest.raises(WorkflowResolutionError, match="__main__"):
        source()


def test_outcomes() -> None:
    assert returned({"returned": {"a": 0.5}}) == {"a": 0.5}
    with pytest.raises(RewardError, match="no number"):
        returned({"error": "no number", "owner": "reward", "traceback": ""})
    failure = {
        "error": "agent raised KeyError: 'x' at a.py:3 in run",
        "owner": "client",
        "place": "a.py:3 in run",
        "traceback": "line 3\n",
    }
    with pytest.raises(EpisodeError, match="agent raised KeyError: 'x'") as caught:
        returned(failure, "last words")
    assert caught.value.boundary == "client"
    assert caught.value.place == "a.py:3 in run"
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert str(caught.value.__cause__) == "\nline 3\nit printed last:\nlast words"
