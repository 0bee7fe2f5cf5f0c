"""Order: all that another process needs to run one episode of an agent, and what it sends back.

Both go as JSON, over a pipe (child.py) or through Ray (ray_pool.py):

    order    the agent's class and kwargs, the datum, the model's address, the episode's context
    outcome  {"returned": 0.5} or
             {"error": "agent raised ...", "owner": "agent", "place": "...", "traceback": "..."}

It knows neither processes nor how an agent is run. Kept light: a child process imports it.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from agent_rl import workflow_context
from agent_rl.errors import EpisodeError, JournalError, RewardError, WorkflowResolutionError
from agent_rl.record.codec import as_json
from agent_rl.rollout.arguments import wanted_arguments
from agent_rl.types import JsonObject

if TYPE_CHECKING:
    from agent_rl.gateway.sessions import Door

_takes_orders = False


def begin_taking_orders() -> None:
    """This process runs agents for another one: a script that it imports must not train again."""
    global _takes_orders
    _takes_orders = True


class RemoteTraceback(Exception):
    """The traceback in the agent's process, as text: the cause of the error that is raised here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSource:
    """Where a fresh interpreter finds the agent's class, and what it is constructed with."""

    module: str
    script: str | None
    name: str
    kwargs: JsonObject

    @classmethod
    def of(cls, agent: object, kwargs: Mapping[str, Any], name: str, mode: str) -> Self:
        """
        Raises:
            WorkflowResolutionError: the agent cannot be imported from elsewhere, ``kwargs`` are not
                JSON, or ``run`` needs what cannot be passed.
        """
        if _takes_orders:
            raise WorkflowResolutionError(
                "an agent's process began to run episodes itself: put what your script does under "
                'if __name__ == "__main__"'
            )
        wanted_arguments(agent, name)
        if not isinstance(agent, type):
            raise WorkflowResolutionError(
                f"rollout.agent.mode={mode} constructs the agent in its own process: give the "
                f"class {name} (or its import path) and workflow_kwargs, not an instance"
            )
        if "<locals>" in agent.__qualname__:
            raise _not_importable(agent.__qualname__, f"rollout.agent.mode={mode}")
        module, script = _importable(agent, name, mode)
        plain = _plain_kwargs(kwargs, name)
        return cls(module=module, script=script, name=agent.__qualname__, kwargs=plain)

    def construct(self) -> object:
        """A fresh instance, in the process that runs it.

        Raises:
            EpisodeError: importing its module did not define it.
        """
        if self.script is None:
            found: Any = importlib.import_module(self.module)
        else:
            # As multiprocessing does it: code under `if __name__ == "__main__"` does not run.
            found = SimpleNamespace(**runpy.run_path(self.script, run_name="__mp_main__"))
        for name in self.name.split("."):
            if not hasattr(found, name):
                raise EpisodeError(str(_not_importable(self.name, self.script or self.module)))
            found = getattr(found, name)
        agent: object = found(**self.kwargs)
        return agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    agent: AgentSource
    data: JsonObject
    base_url: str
    api_key: str
    is_eval: bool
    task_id: str | None

    @classmethod
    def of(cls, agent: AgentSource, data: JsonObject, door: Door) -> Self:
        """For the episode that is running here, served at the door.

        Raises:
            EpisodeError: ``data`` is not JSON.
        """
        try:
            plain: JsonObject = as_json(data, "the datum")
        except JournalError as error:
            raise EpisodeError(
                f"{error}; an agent in another process needs plain values"
            ) from error
        context = workflow_context.get()
        return cls(
            agent=agent,
            data=plain,
            base_url=door.base_url,
            api_key=door.api_key,
            is_eval=context.is_eval,
            task_id=context.task_id,
        )

    def encode(self) -> JsonObject:
        return asdict(self)

    @classmethod
    def decode(cls, fields: JsonObject) -> Self:
        return cls(**{**fields, "agent": AgentSource(**fields["agent"])})

    def enter_context(self) -> None:
        """What the agent's code may ask its ``workflow_context`` for."""
        workflow_context.set(
            workflow_context.WorkflowContext(is_eval=self.is_eval, task_id=self.task_id)
        )


def returned(outcome: JsonObject, printed: str = "") -> object:
    """What the agent returned; ``printed`` is what it last wrote, told beside its traceback.

    Raises:
        EpisodeError: the outcome is a failure.
    """
    if "returned" in outcome:
        return outcome["returned"]
    if outcome["owner"] == "reward":
        raise RewardError(outcome["error"])
    trace = outcome["traceback"] + (f"it printed last:\n{printed}" if printed else "")
    raise EpisodeError(
        outcome["error"], boundary=outcome["owner"], place=outcome["place"]
    ) from RemoteTraceback(f"\n{trace}")


def _not_importable(name: str, where: str) -> WorkflowResolutionError:
    return WorkflowResolutionError(
        f"{where}: another process cannot import {name}; define the class at the top level of a "
        'module, outside functions and `if __name__ == "__main__"`, or set '
        "rollout.agent.mode=inline"
    )


def _importable(agent: type, name: str, mode: str) -> tuple[str, str | None]:
    """The class's module, and its file where that is the script that was started."""
    if agent.__module__ != "__main__":
        if _found_in(sys.modules.get(agent.__module__), agent.__qualname__) is not agent:
            raise _not_importable(agent.__qualname__, f"rollout.agent.mode={mode}")
        return agent.__module__, None
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return spec.name, None
    script = getattr(main, "__file__", None)
    if script is None:
        raise WorkflowResolutionError(
            f"rollout.agent.mode={mode} cannot import {name} from a notebook or a prompt: put the "
            "class into a file and import it"
        )
    return agent.__module__, script


def _found_in(module: object, name: str) -> object:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def _plain_kwargs(kwargs: Mapping[str, Any], name: str) -> JsonObject:
    for key, value in kwargs.items():
        try:
            as_json(value, key)
        except JournalError as error:
            raise WorkflowResolutionError(
                f"workflow_kwargs of {name} go to another process as JSON: {error}"
            ) from error
    return dict(kwargs)
