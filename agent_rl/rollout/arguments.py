"""What an agent's ``run`` wants to be passed, read off its signature once.

async def run(self, data, client)              client
async def run(self, data, base_url, api_key)   both, and an address of its own to be reached at
async def run(self, data, **kwargs)            everything
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from agent_rl.errors import WorkflowResolutionError

ARGUMENTS = ("client", "session", "http_client", "base_url", "api_key")

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """``needs_address``: ``http_client`` would reach the engine without a port, but is not taken.

    A client beside an address that has a default is enough: the address is left out.
    """

    names: tuple[str, ...]
    needs_address: bool
    is_async: bool


def wanted_arguments(agent: object, name: str) -> Wanted:
    """
    Args:
        agent: an instance or a class; ``name`` is how it is called in messages.

    Raises:
        WorkflowResolutionError: ``run`` takes no datum, needs what nobody passes, or yields.
    """
    run = agent.run  # type: ignore[attr-defined]
    written = inspect.unwrap(run)
    if inspect.isasyncgenfunction(written) or inspect.isgeneratorfunction(written):
        raise WorkflowResolutionError(
            f"{name}.run is a generator, for it has `yield`; `return` the reward in its place"
        )
    parameters = list(inspect.signature(run).parameters.values())
    is_method_of_class = isinstance(agent, type) and not isinstance(
        inspect.getattr_static(agent, "run"), staticmethod | classmethod
    )
    parameters = parameters[1:] if is_method_of_class else parameters
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise WorkflowResolutionError(
            f"{name}.run must take the datum as its first argument, as in `run(self, data, client)`"
            "; a decorator that hides the arguments needs functools.wraps"
        )
    if parameters[0].name in ARGUMENTS:
        raise WorkflowResolutionError(
            f"{name}.run has {parameters[0].name} as its first argument, but that is the datum: "
            f"write `run(self, data, {parameters[0].name})`"
        )
    named = {p.name: p for p in parameters[1:] if p.kind not in _VARIADIC}
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    wanted = set(ARGUMENTS) if takes_any else set(ARGUMENTS) & named.keys()
    addresses = {"base_url", "api_key"} & wanted
    needs_address = bool(addresses) and "http_client" not in wanted
    if needs_address and "client" in wanted and _are_optional(addresses, named):
        wanted, needs_address = wanted - addresses, False
    missing = [p.name for p in named.values() if p.default is p.empty and p.name not in wanted]
    if missing:
        raise WorkflowResolutionError(
            f"{name}.run needs {', '.join(missing)}, which nobody passes; it may take "
            f"{', '.join(ARGUMENTS)}, anything else needs a default"
        )
    return Wanted(
        names=tuple(argument for argument in ARGUMENTS if argument in wanted),
        needs_address=needs_address,
        is_async=inspect.iscoroutinefunction(written),
    )


def _are_optional(names: set[str], parameters: dict[str, inspect.Parameter]) -> bool:
    return all(parameters[name].default is not inspect.Parameter.empty for name in names)
