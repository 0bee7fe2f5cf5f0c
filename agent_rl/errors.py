"""The exception tree, and the worded boundary that says whose fault a failure was.

Every message names the field, the value and the fix. Errors of the user's input also derive from
the built-in class a Python programmer would expect (ValueError, KeyError, ...).
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from agent_rl.foreign_error import close_forgotten, described, named, place_of

Boundary: TypeAlias = Literal["agent", "client", "engine", "reward", "judge"]


class AgentRLError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(AgentRLError, ValueError):
    """A config key or value is wrong; the message names the key and the nearest valid one."""


class WrongTypeError(AgentRLError, TypeError):
    """An argument is not of the kind that is needed; the message says what to give instead."""


class MissingDependencyError(AgentRLError, ImportError):
    """An optional package is needed; the message has the install command."""


class ModelLoadError(AgentRLError, OSError):
    """A model or tokenizer folder cannot be loaded."""


class DatasetError(AgentRLError, ValueError):
    """A dataset cannot be read, is empty, or has rows that are not JSON objects."""


class CheckpointError(AgentRLError, OSError):
    """A checkpoint cannot be written, or what was found is not one of ours."""


class JournalError(AgentRLError, OSError):
    """A journal cannot be written, is damaged, or has an entry that is not one of ours."""


class RequestError(AgentRLError, ValueError):
    """A generation request is refused (HTTP 400). ``param`` names the field."""

    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt leaves no room for even one new token. ``is_least``: nobody counted them all."""

    def __init__(self, *, prompt_tokens: int, limit: int, is_least: bool = False) -> None:
        least = "at least " if is_least else ""
        super().__init__(
            f"the prompt has {least}{prompt_tokens} tokens and the context holds {limit}; shorten "
            "the messages or raise engine.max_seq_len",
            param="messages",
            code="context_length_exceeded",
        )


class TooManyRequestsError(RequestError):
    """The client's ``max_requests`` is used up (HTTP 429): a runaway agent loop."""

    status = 429


class BudgetSpentError(TooManyRequestsError):
    """The episode's ``rollout.budget`` is used up (HTTP 429): it ends as truncated."""


class NotSupportedError(RequestError):
    """An endpoint that does not exist here (HTTP 404)."""

    status = 404


class RefusedError(RequestError):
    """The gateway does not take a call: its key, session, size or the load; see ``status``.

    With ``retry_after_s`` the same call may be taken later.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.retry_after_s = retry_after_s


class EngineError(AgentRLError, RuntimeError):
    """The engine failed or was closed; the request may be tried again elsewhere."""


class ServerError(EngineError):
    """One inference server is unreachable, broken or too slow; another may do better."""


class ServerUnreachableError(ServerError):
    """No connection to one inference server: it has not seen the request."""


class ServerBusyError(ServerError):
    """One inference server takes no more requests now (HTTP 429 or 503).

    ``retry_after_s``: for how long, if it says so.
    """

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TokenError(AgentRLError, ValueError):
    """Messages cannot be turned into token ids: no template, or a part that is not supported."""


class ExportError(AgentRLError, ValueError):
    """Recorded interactions cannot be exported in the style asked for."""


class WorkflowResolutionError(AgentRLError, ValueError):
    """``workflow=`` names nothing that can run episodes; the message lists what was tried."""


class WorkflowContractError(AgentRLError, ValueError):
    """A workflow broke the contract in a way that retrying cannot mend; it stops the run."""


class CollectorError(AgentRLError, RuntimeError):
    """The collector's background work died; ``__cause__`` has the reason."""


class AgentHostError(AgentRLError, RuntimeError):
    """Where agents are to run cannot be reached: no agent's fault, and none can run."""


class EpisodeError(AgentRLError):
    """One episode failed. It costs its own sample only; ``boundary`` says whose fault it was,
    ``place`` which line of the user's code raised, where one did."""

    boundary: Boundary = "agent"

    def __init__(self, message: str, *, boundary: Boundary | None = None, place: str = "") -> None:
        super().__init__(message)
        self.place = place
        if boundary is not None:
            self.boundary = boundary


class RewardError(EpisodeError):
    """The episode's reward is missing, not a number, not finite, or for an unknown id."""

    boundary: Boundary = "reward"


class EpisodeRejectedError(EpisodeError):
    """The episode ran but is not to be trained on; ``reason`` is one word that is counted."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class EpisodeTimeoutError(EpisodeError):
    """The episode ran past ``rollout.episode_timeout_s``."""


def shown(value: object) -> str:
    """A value of an unexpected type in a message: ``None``, or ``the str './model'``."""
    return "None" if value is None else f"the {type(value).__name__} {reprlib.repr(value)}"


@contextmanager
def boundary(owner: Boundary) -> Iterator[None]:
    """Turn whatever the foreign code inside raises into an EpisodeError of that owner.

    Our own typed errors pass unchanged, and so do the signals to stop (KeyboardInterrupt,
    CancelledError): they are not failures of an episode. SystemExit in an agent is one.
    """
    try:
        yield
    except AgentRLError:
        raise
    except (Exception, SystemExit) as error:
        close_forgotten(error)
        # An engine's error is answered to whoever asked: with no line of a file.
        what = named(error) if owner == "engine" else described(error)
        raise EpisodeError(
            f"{owner} raised {what}", boundary=owner, place=place_of(error)
        ) from error
