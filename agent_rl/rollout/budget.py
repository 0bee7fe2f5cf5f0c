"""BudgetedEngine: the engine as one episode sees it, until its turns, tokens or tool calls are used
up.

The last answer within the token budget is cut where it ends (stop reason "length"); a call after
that is refused. Either way the episode is truncated, which is no failure: its turns are trained on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from agent_rl.config import BudgetConfig
from agent_rl.engine.base import InferenceEngine, StreamItem, WeightUpdate, token_budget
from agent_rl.errors import BudgetSpentError
from agent_rl.types import ModelRequest, ModelResponse


class BudgetedEngine:
    """An InferenceEngine. Calls that run at once may each use what is left of the tokens."""

    def __init__(self, engine: InferenceEngine, budget: BudgetConfig) -> None:
        self.budget = budget
        self.is_truncated = False
        self.count_tool_calls: Callable[[], int] = lambda: 0
        """Set by whoever can read tool calls out of tokens."""
        self._engine = engine
        self._num_turns = 0
        self._num_tokens = 0

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Raises BudgetSpentError beside what the engine raises."""
        with self._turn(req) as (admitted, is_capped):
            response = await self._engine.agenerate(admitted)
            self._book(response, is_capped)
            return response

    async def astream(self, req: ModelRequest) -> AsyncIterator[StreamItem]:
        """Raises as ``agenerate``."""
        with self._turn(req) as (admitted, is_capped):
            async for item in self._engine.astream(admitted):
                if isinstance(item, ModelResponse):
                    self._book(item, is_capped)
                yield item

    @contextmanager
    def _turn(self, req: ModelRequest) -> Iterator[tuple[ModelRequest, bool]]:
        """The request with at most the tokens that are left; a failed call is no turn."""
        self._refuse_if_spent()
        self._num_turns += 1
        try:
            yield self._capped(req)
        except BaseException:
            self._num_turns -= 1
            raise

    def _refuse_if_spent(self) -> None:
        budget = self.budget
        spent = (
            ("max_turns", self._num_turns, 1),
            ("max_tokens", self._num_tokens, 1),
            # The answer to the last allowed tool call is still wanted.
            ("max_tool_calls", self.count_tool_calls(), 0),
        )
        for name, used, needed in spent:
            limit = getattr(budget, name)
            if limit is not None and used + needed > limit:
                self.is_truncated = True
                raise BudgetSpentError(
                    f"rollout.budget.{name}={limit} is used up: the episode is truncated here",
                    code="budget_spent",
                )

    def _capped(self, req: ModelRequest) -> tuple[ModelRequest, bool]:
        if self.budget.max_tokens is None:
            return req, False
        left = self.budget.max_tokens - self._num_tokens
        if token_budget(req.gconfig, len(req.input_ids), self.max_seq_len) <= left:
            return req, False
        minimum = min(req.gconfig.min_new_tokens, left)
        gconfig = replace(req.gconfig, max_new_tokens=left, min_new_tokens=minimum)
        return replace(req, gconfig=gconfig), True

    def _book(self, response: ModelResponse, is_capped: bool) -> None:
        self._num_tokens += len(response.output_tokens)
        self.is_truncated |= is_capped and response.stop_reason == "length"

    # Everything else is the engine's

    @property
    def max_seq_len(self) -> int:
        return self._engine.max_seq_len

    @property
    def supported(self) -> frozenset[str]:
        return self._engine.supported

    async def abort(self, rid: str) -> None:
        await self._engine.abort(rid)

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    def get_version(self) -> int:
        return self._engine.get_version()

    def set_version(self, version: int) -> None:
        self._engine.set_version(version)

    async def update_weights(self, update: WeightUpdate) -> None:
        await self._engine.update_weights(update)

    async def health(self) -> bool:
        return await self._engine.health()

    async def close(self) -> None:
        await self._engine.close()
