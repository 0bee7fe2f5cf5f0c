"""Session: what one client's requests share, whichever door they come through.

It bundles the engine, how messages become ids, the record, and the defaults of sampling. Nothing
here knows HTTP.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from agent_rl.engine.base import InferenceEngine
from agent_rl.errors import RefusedError, TooManyRequestsError
from agent_rl.record.cache import InteractionCache
from agent_rl.tokens.format import ChatFormat
from agent_rl.types import ChatTemplateType, GenerationConfig

Sampling: TypeAlias = Literal["agent", "override"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One recording scope.

    Args:
        gconfig: stands in for what a request leaves out; None: nobody has wishes of their own.
        sampling: "agent": what the request sends wins; "override": gconfig's temperature, top_p,
            top_k, min_p and penalties win.
        engine_max_tokens: bound on prompt and completion together, below the engine's own.
        max_requests: calls after which everything is answered with 429; a retry does not count.
        deleted: responses that the caller deleted; their interactions stay in the record.
        model: the id that ``models.list`` shows. Requests may name any model.
    """

    engine: InferenceEngine
    format: ChatFormat
    cache: InteractionCache
    gconfig: GenerationConfig | None = None
    sampling: Sampling = "agent"
    chat_template_type: ChatTemplateType = "hf"
    engine_max_tokens: int | None = None
    max_requests: int | None = None
    model: str = "default"
    deleted: set[str] = field(default_factory=set, repr=False)
    _calls: Iterator[int] = field(default_factory=lambda: itertools.count(1), repr=False)
    _has_ended: threading.Event = field(default_factory=threading.Event, repr=False)

    def __post_init__(self) -> None:
        if self.sampling not in ("agent", "override"):
            raise ValueError(f"sampling must be 'agent' or 'override', not {self.sampling!r}")
        if self.chat_template_type not in ("hf", "concat"):
            raise ValueError(
                f"chat_template_type must be 'hf' or 'concat', not {self.chat_template_type!r}"
            )
        for name in ("engine_max_tokens", "max_requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1 or None")

    def count_call(self) -> None:
        """Raises TooManyRequestsError once ``max_requests`` calls were made."""
        if self.max_requests is not None and next(self._calls) > self.max_requests:
            raise TooManyRequestsError(
                f"this client's max_requests={self.max_requests} calls are used up; the agent "
                "seems to loop without end (raise max_requests if it does not)",
                code="max_requests",
            )

    def end(self) -> None:
        """No further call is answered. What is recorded can still be read, rewarded, exported."""
        self._has_ended.set()

    def check_open(self) -> None:
        """Raises RefusedError (410) after ``end``."""
        if self._has_ended.is_set():
            raise RefusedError(
                410,
                "this session has ended; the caller outlived its episode (a thread or task of an "
                "agent that has returned or failed), or kept the client of an earlier one: use "
                "what run() is given each time",
                code="session_ended",
            )
