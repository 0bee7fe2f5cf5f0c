"""Completion: one request's tokens as they come from servers, over as many attempts as it takes.

Invariant: settled tokens are kept, in order, each with its log-prob and the version that sampled
it; only they are shown to a stream, and only they survive a failure. The budget counts from the
first token of the first attempt. It knows no server and no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from agent_rl.engine.server_api import Piece, TopLogprobs
from agent_rl.errors import EngineError
from agent_rl.types import ModelRequest, ModelResponse, StopReason, TokenDelta

Emit = Callable[[TokenDelta], None]


@dataclass(slots=True, kw_only=True, eq=False)
class Completion:
    """``emit``, for streams, is given each token once, when it is settled."""

    request: ModelRequest
    budget: int
    emit: Emit | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    is_forced: list[bool] = field(default_factory=list)
    is_aborted: bool = False
    start_s: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    num_cached: int | None = None
    _num_settled: int = 0

    @property
    def num_left(self) -> int:
        return self.budget - len(self.token_ids)

    @property
    def is_guided(self) -> bool:
        return self.request.gconfig.grammar is not None

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and completion so far: what the next attempt goes on from."""
        return (*self.request.input_ids, *self.token_ids)

    def extend(self, piece: Piece, version: int) -> None:
        """Add what came; ``version`` is a belief until it is settled.

        Raises:
            EngineError: more tokens than were asked for; none is cut off to make it fit.
        """
        if len(piece.token_ids) > self.num_left:
            raise EngineError(
                f"a server sent {len(piece.token_ids)} tokens where at most {self.num_left} were "
                "asked for"
            )
        if piece.token_ids and self.first_token_s is None:
            self.first_token_s = time.perf_counter()
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.versions += [version] * len(piece.token_ids)
        if self.request.gconfig.top_logprobs:
            self.top_logprobs += piece.top_logprobs or ()
        self.is_forced += piece.is_forced or ()

    def settle(self) -> None:
        """The versions are right: the new tokens may be shown."""
        start, self._num_settled = self._num_settled, len(self.token_ids)
        if self.emit is not None and self.token_ids[start:]:
            self.emit(
                TokenDelta(
                    token_ids=tuple(self.token_ids[start:]),
                    logprobs=tuple(self.logprobs[start:]),
                    versions=tuple(self.versions[start:]),
                )
            )

    def drop_unsettled(self) -> None:
        """Forget tokens of which nobody will say any more which weights sampled them."""
        for values in (
            self.token_ids,
            self.logprobs,
            self.versions,
            self.top_logprobs,
            self.is_forced,
        ):
            del values[self._num_settled :]

    def response(self, stop_reason: StopReason) -> ModelResponse:
        assert self._num_settled == len(self.token_ids), "an attempt settles what it got"
        now_s = time.perf_counter()
        first_s = now_s if self.first_token_s is None else self.first_token_s
        return ModelResponse(
            input_tokens=tuple(self.request.input_ids),
            output_tokens=tuple(self.token_ids),
            output_logprobs=tuple(self.logprobs),
            output_versions=tuple(self.versions),
            stop_reason=stop_reason,
            latency_s=now_s - self.start_s,
            ttft_s=first_s - self.start_s,
            output_top_logprobs=tuple(self.top_logprobs)
            if self.request.gconfig.top_logprobs
            else None,
            output_forced=tuple(self.is_forced) if self.is_guided else None,
            num_cached_tokens=self.num_cached,
        )
