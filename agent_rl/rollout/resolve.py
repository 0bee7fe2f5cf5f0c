"""``workflow=`` in all its forms -> one RolloutWorkflow.

instance of RolloutWorkflow        used as it is
subclass of RolloutWorkflow        constructed with workflow_kwargs, which must be given
class with ``run``                 an agent: one fresh instance for each episode
instance with ``run``              an agent: the one instance runs all episodes
"pkg.mod.Name" or "pkg.mod:Name"   imported, then as above
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from agent_rl.errors import WorkflowResolutionError
from agent_rl.rollout.agent import AgentSettings, AgentWorkflow
from agent_rl.rollout.import_path import import_name
from agent_rl.rollout.lane import AcceptFn
from agent_rl.rollout.workflow import RolloutWorkflow

logger = logging.getLogger(__name__)


def resolve_workflow(
    workflow: object, workflow_kwargs: Mapping[str, Any] | None, settings: AgentSettings
) -> RolloutWorkflow:
    """
    Raises:
        WorkflowResolutionError: naming what was given and what was tried.
    """
    if isinstance(workflow, str):
        workflow = import_name(workflow, what="workflow")
    if isinstance(workflow, type):
        return _from_class(workflow, workflow_kwargs, settings)
    if workflow_kwargs:
        logger.warning("workflow_kwargs are ignored: workflow is an instance already")
    if isinstance(workflow, RolloutWorkflow):
        return workflow
    if callable(getattr(workflow, "run", None)):
        return AgentWorkflow(workflow, settings=settings)
    hint = "; make a function an agent: `class Agent: run = staticmethod(function)`"
    raise WorkflowResolutionError(
        f"workflow={workflow!r} is a {type(workflow).__name__}; expected a RolloutWorkflow "
        "(instance or class), an agent with `async def run(self, data, ...)` (instance or class), "
        f"or the import path of one as 'pkg.mod.Name'{hint if callable(workflow) else ''}"
    )


def _from_class(
    cls: type, workflow_kwargs: Mapping[str, Any] | None, settings: AgentSettings
) -> RolloutWorkflow:
    is_workflow = issubclass(cls, RolloutWorkflow)
    if not is_workflow and not callable(getattr(cls, "run", None)):
        raise WorkflowResolutionError(
            f"{cls.__qualname__} is neither a subclass of RolloutWorkflow nor has it an "
            "`async def run(self, data, ...)`"
        )
    if is_workflow and workflow_kwargs is None:
        raise WorkflowResolutionError(
            f"{cls.__qualname__} is a class: give workflow_kwargs (may be {{}}) or an instance"
        )
    kwargs = dict(workflow_kwargs or {})
    try:
        inspect.signature(cls).bind(**kwargs)
    except TypeError as error:
        raise WorkflowResolutionError(
            f"workflow_kwargs {sorted(kwargs)} do not fit {cls.__qualname__}: {error}"
        ) from error
    return cls(**kwargs) if is_workflow else AgentWorkflow(cls, kwargs, settings=settings)


def resolve_accept(should_accept_fn: AcceptFn | str | None) -> AcceptFn | None:
    """
    Raises:
        WorkflowResolutionError: the name cannot be imported.
        TypeError: it is not callable, or must be awaited.
    """
    if should_accept_fn is None:
        return None
    found: object = should_accept_fn
    if isinstance(found, str):
        found = import_name(found, what="should_accept_fn")
    if not callable(found):
        raise TypeError(f"should_accept_fn must be callable, not {type(found).__name__}")
    if inspect.iscoroutinefunction(found):
        raise TypeError(
            "should_accept_fn must be a plain function: `async def` returns a coroutine, no verdict"
        )
    return found
