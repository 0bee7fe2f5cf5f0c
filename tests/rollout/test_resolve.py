"""Every form of ``workflow=`` and of ``should_accept_fn=``, and what the errors say."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from agent_rl.errors import WorkflowResolutionError
from agent_rl.rollout.agent import AgentSettings, AgentWorkflow
from agent_rl.rollout.import_path import import_name
from agent_rl.rollout.resolve import resolve_accept, resolve_workflow
from agent_rl.rollout.workflow import RolloutWorkflow

SETTINGS = AgentSettings(tokenizer=object())


class Legacy(RolloutWorkflow):
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    async def arun_episode(self, engine: Any, data: Any) -> None:
        return None


class Agent:
    def __init__(self, level: int = 0) -> None:
        self.level = level

    async def run(self, data: Any) -> float:
        return 1.0


@pytest.fixture(autouse=True)
def module(monkeypatch) -> types.ModuleType:
    """``shop.agents`` with the classes above."""
    package, module = types.ModuleType("shop"), types.ModuleType("shop.agents")
    package.__path__ = []
    module.Legacy, module.Agent, module.number, module.Outer = Legacy, Agent, 3, Agent
    module.keep = lambda group: True
    Agent.Inner = Legacy
    monkeypatch.setitem(sys.modules, "shop", package)
    monkeypatch.setitem(sys.modules, "shop.agents", module)
    return module


def test_instance_is_used_as_it_is(caplog) -> None:
    workflow = Legacy()
    assert resolve_workflow(workflow, None, SETTINGS) is workflow
    assert resolve_workflow(workflow, {"scale": 2.0}, SETTINGS) is workflow
    assert "workflow_kwargs are ignored" in caplog.text


@pytest.mark.parametrize("given", [Legacy, "shop.agents.Legacy", "shop.agents.Outer.Inner"])
def test_class_is_constructed_with_its_kwargs(given) -> None:
    assert resolve_workflow(given, {"scale": 2.0}, SETTINGS).scale == 2.0
    with pytest.raises(WorkflowResolutionError, match="give workflow_kwargs"):
        resolve_workflow(given, None, SETTINGS)
    with pytest.raises(ValueError, match=r"\['speed'\] do not fit Legacy"):
        resolve_workflow(given, {"speed": 2.0}, SETTINGS)


@pytest.mark.parametrize("given", [Agent, Agent(), "shop.agents.Agent", "shop.agents:Agent"])
def test_agents_are_wrapped(given) -> None:
    assert isinstance(resolve_workflow(given, None, SETTINGS), AgentWorkflow)


def test_kwargs_of_an_agent_class_are_checked_at_once() -> None:
    assert isinstance(resolve_workflow(Agent, {"level": 3}, SETTINGS), AgentWorkflow)
    with pytest.raises(WorkflowResolutionError, match="do not fit Agent"):
        resolve_workflow(Agent, {"colour": 3}, SETTINGS)


def test_agent_without_a_tokenizer() -> None:
    with pytest.raises(WorkflowResolutionError, match="tokenizer"):
        resolve_workflow(Agent, None, AgentSettings(tokenizer=None))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "None is a NoneType; expected a RolloutWorkflow"),
        (3, "3 is a int"),
        ("shop.agents.number", "3 is a int"),
        (dict, "dict is neither a subclass"),
        ("Agent", "expected 'pkg.mod.Name'"),
        ("no_such_package.Agent", "no module 'no_such_package' can be imported from /"),
        ("shop.agents.Missing", "shop.agents was imported but has no 'Missing'"),
        ("shop.agents.Agnt", "shop.agents was imported but has no 'Agnt'; did you mean 'Agent'?"),
        ("shop.agents:Agnt", "workflow='shop.agents:Agnt': shop.agents was imported but has no"),
        ("shop.Missing", "shop was imported but has no 'Missing'"),
        ("", "expected 'pkg.mod.Name'"),
        ("shop..Agent", "shop"),
    ],
)
def test_errors_say_what_was_tried(given, message) -> None:
    with pytest.raises(WorkflowResolutionError, match=message):
        resolve_workflow(given, {}, SETTINGS)


def test_a_function_becomes_an_agent_as_its_error_says() -> None:
    async def answer(data: Any) -> float:
        return 1.0

    with pytest.raises(WorkflowResolutionError, match=r"`class Agent: run = staticmethod\(func"):
        resolve_workflow(answer, None, SETTINGS)
    made = type("Agent", (), {"run": staticmethod(answer)})
    assert isinstance(resolve_workflow(made, None, SETTINGS), AgentWorkflow)


def test_module_that_breaks_while_importing(tmp_path, monkeypatch) -> None:
    (tmp_path / "broken_shop.py").write_text("import no_such_dependency\n", encoding="utf-8")
    (tmp_path / "wrong_shop.py").write_text("def (:\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkflowResolutionError, match="no_such_dependency"):
        import_name("broken_shop.Agent", what="workflow")
    with pytest.raises(WorkflowResolutionError, match="SyntaxError"):
        import_name("wrong_shop.Agent", what="workflow")


def test_should_accept_fn() -> None:
    def keep(group: Any) -> bool:
        return True

    assert resolve_accept(None) is None
    assert resolve_accept(keep) is keep
    assert resolve_accept("shop.agents.keep")({}) is True
    with pytest.raises(ValueError, match="has no 'drop'"):
        resolve_accept("shop.agents.drop")
    with pytest.raises(TypeError, match="must be callable, not int"):
        resolve_accept("shop.agents.number")


def test_should_accept_fn_that_must_be_awaited() -> None:
    async def keep(group: Any) -> bool:
        return True

    with pytest.raises(TypeError, match="must be a plain function: `async def` returns"):
        resolve_accept(keep)
