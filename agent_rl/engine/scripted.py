"""ScriptedEngine: the engine seam over a list of replies, for tests and for trying out agents.

Replies are used in the order in which requests arrive; nothing is sampled. What a reply may be:

    "four"              text: encoded with the tokenizer, its end-of-turn token appended
    [20, 21, 2]         token ids as sampled; log-probs -0.1, -0.2, -0.3
    {"output_tokens": [20], "stop_reason": "length"}    fields of ModelResponse; the rest by rule
    ValueError("boom")  raised
    lambda req: ...     called with the ModelRequest, returns any of the above; may be async
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from agent_rl.engine.base import StreamItem, WeightUpdate, token_budget
from agent_rl.engine.scoring import ScoreJob
from agent_rl.errors import ContextLengthError, EngineError, WrongTypeError
from agent_rl.tokens.vocabulary import require_tokenizer
from agent_rl.types import ModelRequest, ModelResponse, TokenDelta

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Reply: TypeAlias = (
    "str | list[int] | dict[str, Any] | BaseException | Callable[[ModelRequest], Any]"
)


class ScriptedEngine:
    """A deterministic ``InferenceEngine``.

    Args:
        replies: see the module docstring. Running out of them is an EngineError unless ``repeat``.
        tokenizer: needed for replies that are text.
        latency_s: each reply waits this long first; abort, close and cancellation end the wait.
        version: weight version of the first tokens.
        repeat: start again from the first reply when all are used.
    """

    supported = frozenset(
        {"min_new_tokens", "top_p", "top_k", "min_p", "stop", "seed", "logit_bias"}
        | {"frequency_penalty", "presence_penalty", "repetition_penalty"}
    )

    def __init__(
        self,
        replies: Iterable[Reply],
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        latency_s: float = 0.0,
        version: int = 0,
        repeat: bool = False,
        max_seq_len: int = 1 << 20,
    ) -> None:
        if isinstance(replies, str):
            raise WrongTypeError(f"ScriptedEngine takes a list of replies: [{replies!r}]")
        if tokenizer is not None:
            require_tokenizer(tokenizer)
        self.requests: list[ModelRequest] = []
        self.max_seq_len = max_seq_len
        self._replies = list(replies)
        self._tokenizer = tokenizer
        self._latency_s = latency_s
        self._version = version
        self._repeat = repeat
        self._ends: list[tuple[str, asyncio.Future[dict[str, Any] | EngineError]]] = []
        self._running = asyncio.Event()
        self._running.set()
        self._is_closed = False

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        if self._is_closed:
            raise EngineError("the engine is closed")
        budget = token_budget(req.gconfig, len(req.input_ids), self.max_seq_len)
        if budget < 1:
            limit = len(req.input_ids) + budget
            raise ContextLengthError(prompt_tokens=len(req.input_ids), limit=limit)
        start = time.perf_counter()
        reply = self._next_reply(req)
        version, fields = await self._unless_ended(req, self._wait_for(reply, req))
        count = len(fields["output_tokens"])
        defaults: dict[str, Any] = {
            "input_tokens": tuple(req.input_ids),
            "output_logprobs": _ruled_logprobs(count),
            "output_versions": [version] * count,
            "stop_reason": "stop",
            "latency_s": time.perf_counter() - start,
            "ttft_s": time.perf_counter() - start,
        }
        return ModelResponse(**{**defaults, **fields})

    async def astream(self, req: ModelRequest) -> AsyncIterator[StreamItem]:
        response = await self.agenerate(req)
        per_token = (response.output_tokens, response.output_logprobs, response.output_versions)
        for token_id, logprob, version in zip(*per_token, strict=True):
            yield TokenDelta(token_ids=(token_id,), logprobs=(logprob,), versions=(version,))
        yield response

    async def score(
        self, input_ids: Sequence[int], num_scored: int, *, temperature: float = 1.0
    ) -> tuple[float, ...]:
        """By rule, like the log-probs of replies: -0.1, -0.2, -0.3."""
        if self._is_closed:
            raise EngineError("the engine is closed")
        ScoreJob(input_ids=tuple(input_ids), num_scored=num_scored, temperature=temperature)
        return _ruled_logprobs(num_scored)

    async def score_top(
        self, input_ids: Sequence[int], num_scored: int, num_top: int, *, temperature: float = 1.0
    ) -> tuple[tuple[tuple[int, float], ...], ...]:
        """The scored id first; of what it leaves, id 0 has a half, the next a quarter, ..."""
        logprobs = await self.score(input_ids, num_scored, temperature=temperature)
        return tuple(
            _ruled_top(token_id, logprob, num_top)
            for token_id, logprob in zip(input_ids[-num_scored:], logprobs, strict=True)
        )

    async def abort(self, rid: str) -> None:
        self._end({"output_tokens": [], "stop_reason": "abort"}, rid)

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    def get_version(self) -> int:
        return self._version

    def set_version(self, version: int) -> None:
        self._version = version

    async def update_weights(self, update: WeightUpdate) -> None:
        self._version = update.version

    async def health(self) -> bool:
        return not self._is_closed

    async def close(self) -> None:
        self._is_closed = True
        self._end(EngineError("the engine is closed"))

    async def _wait_for(self, reply: Reply, req: ModelRequest) -> tuple[int, dict[str, Any]]:
        """The fields of the reply, and the version that the request ran under."""
        await self._running.wait()
        version = self._version
        await asyncio.sleep(self._latency_s)
        return version, self._fields(await _resolve(reply, req))

    async def _unless_ended(
        self, req: ModelRequest, work: Coroutine[Any, Any, tuple[int, dict[str, Any]]]
    ) -> tuple[int, dict[str, Any]]:
        """Its result, or what abort or close put in its place; cancellation cancels it too."""
        task = asyncio.ensure_future(work)
        end: asyncio.Future[dict[str, Any] | EngineError] = asyncio.Future()
        self._ends.append((req.rid, end))
        either: set[asyncio.Future[Any]] = {task, end}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else (self._version, self._fields(end.result()))
        finally:
            task.cancel()
            self._ends.remove((req.rid, end))

    def _end(self, reply: dict[str, Any] | EngineError, only_rid: str | None = None) -> None:
        for rid, end in self._ends:
            if only_rid in (None, rid) and not end.done():
                end.set_result(reply)

    def _next_reply(self, req: ModelRequest) -> Reply:
        index = len(self.requests)
        self.requests.append(req)
        if index >= len(self._replies) and not (self._repeat and self._replies):
            raise EngineError(
                f"ScriptedEngine has {len(self._replies)} replies and got request {index + 1}; "
                "give it more replies or repeat=True"
            )
        return self._replies[index % len(self._replies)]

    def _fields(self, reply: Any) -> dict[str, Any]:
        if isinstance(reply, BaseException):
            raise reply
        if isinstance(reply, dict):
            return {"output_tokens": [], **reply}
        if isinstance(reply, str):
            if self._tokenizer is None:
                raise EngineError("a text reply needs ScriptedEngine(..., tokenizer=...)")
            ids = list(self._tokenizer.encode(reply, add_special_tokens=False))
            eos = self._tokenizer.eos_token_id
            return {"output_tokens": ids if eos is None else [*ids, eos]}
        if isinstance(reply, list | tuple):
            return {"output_tokens": list(reply)}
        raise EngineError(f"ScriptedEngine cannot use a reply of type {type(reply).__name__}")


def _ruled_logprobs(count: int) -> tuple[float, ...]:
    return tuple(round(-0.1 * (i + 1), 10) for i in range(count))


def _ruled_top(token_id: int, logprob: float, count: int) -> tuple[tuple[int, float], ...]:
    left = math.log1p(-math.exp(logprob))
    others = [other for other in range(count) if other != token_id]
    ranked = [(other, left - rank * math.log(2)) for rank, other in enumerate(others, start=1)]
    return ((token_id, logprob), *ranked)[:count]


async def _resolve(reply: Any, req: ModelRequest) -> Any:
    if callable(reply) and not isinstance(reply, BaseException):
        reply = reply(req)
        if inspect.isawaitable(reply):
            reply = await reply
    return reply
