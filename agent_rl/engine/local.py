"""LocalEngine: the embedded engine, a transformers model behind the engine seam.

It shares the parameters of a model that is being trained: new weights cost a version bump. This
module is the asynchronous front, used from any event loop; ``decode.py`` is the thread behind it.
"""

from __future__ import annotations

import asyncio
import copy
import random
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from collections.abc import Sequence as Ids
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from agent_rl import workflow_context
from agent_rl.engine.base import StreamItem, WeightUpdate, token_budget
from agent_rl.engine.decode_thread import DecodeThread
from agent_rl.engine.decoder import Decoder, EngineCounters
from agent_rl.engine.loading import (
    check_attention,
    end_ids,
    inference_view,
    load_model,
    load_tokenizer,
    load_weights,
)
from agent_rl.engine.mailbox import Mailbox, call_on
from agent_rl.engine.matcher import GrammarCompiler, Matcher, can_guide
from agent_rl.engine.scoring import ScoredToken, ScoreJob
from agent_rl.engine.sequence import Sequence
from agent_rl.errors import (
    ConfigError,
    ContextLengthError,
    EngineError,
    RequestError,
    WrongTypeError,
    shown,
)
from agent_rl.tokens.vocabulary import require_tokenizer
from agent_rl.types import ModelRequest, ModelResponse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LocalEngine:
    """An ``InferenceEngine`` in this process, with its own decode thread.

    Args:
        model_or_path: a loaded transformers causal LM, whose parameter tensors are used as they
            are, or a folder with one.
        tokenizer: for stop strings, grammars (a fast one; with the extra ``guided``) and its
            end-of-turn id; read from the folder when left out.
        device: cuda when there is one, else cpu; a loaded model stays where it is by default.
        dtype: of the weights; float32 by default. A loaded model keeps its own.
        max_batch_size: sequences decoded together; more wait in order of arrival.
        max_seq_len: prompt and completion tokens of one sequence, at most what the model's
            positions allow. Keys and values take up to max_batch_size * max_seq_len places.
    """

    supported = frozenset(
        {"min_new_tokens", "top_p", "top_k", "min_p", "stop", "seed", "logit_bias", "top_logprobs"}
        | {"frequency_penalty", "presence_penalty", "repetition_penalty", "grammar"}
    )

    def __init__(
        self,
        model_or_path: PreTrainedModel | str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        max_batch_size: int = 32,
        max_seq_len: int = 2048,
    ) -> None:
        if tokenizer is not None:
            require_tokenizer(tokenizer)
        if isinstance(model_or_path, str | Path):
            on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            model = load_model(model_or_path, device=on, dtype=_dtype(dtype) or torch.float32)
            tokenizer = tokenizer or load_tokenizer(model_or_path)
        elif not isinstance(model_or_path, torch.nn.Module):
            raise WrongTypeError(
                f"LocalEngine needs a transformers model or its folder, not {shown(model_or_path)}"
            )
        else:
            model = model_or_path if device is None else model_or_path.to(device)
            if _dtype(dtype) not in (None, model.dtype):
                raise ConfigError(f"engine.dtype is {dtype} but the shared model is {model.dtype}")
        if max_batch_size < 1:
            raise ConfigError(f"engine.max_batch_size is {max_batch_size}; it must be at least 1")
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", max_seq_len)
        self.max_seq_len = min(max_seq_len, limit)
        self.model = model
        self._tokenizer = tokenizer
        self._vocab_size = model.get_input_embeddings().weight.shape[0]
        self._end_ids = end_ids(model, tokenizer)
        check_attention(model, self.max_seq_len)
        tokenizer = copy.deepcopy(tokenizer)  # a fast tokenizer must not be shared by threads
        if tokenizer is None:
            self.supported = self.supported - {"stop"}
        self._grammars = None
        if tokenizer is not None and can_guide(tokenizer):
            self._grammars = GrammarCompiler(tokenizer, self._end_ids, self._vocab_size)
        else:
            self.supported = self.supported - {"grammar"}
        self._decoder = Decoder(
            inference_view(model),
            tokenizer=tokenizer,
            max_batch_size=max_batch_size,
            max_seq_len=self.max_seq_len,
        )
        self._thread = DecodeThread(self._decoder)
        # An engine that nobody holds any more ends its thread, without waiting for it here.
        weakref.finalize(self, self._thread.stop).atexit = False

    @property
    def counters(self) -> EngineCounters:
        return self._decoder.counters

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        async with aclosing(self._items(req, wants_deltas=False)) as items:
            async for item in items:
                if isinstance(item, ModelResponse):
                    return item
        raise AssertionError("the items of a request end with its response")

    def astream(self, req: ModelRequest) -> AsyncIterator[StreamItem]:
        return self._items(req, wants_deltas=True)

    async def _items(
        self, req: ModelRequest, *, wants_deltas: bool
    ) -> AsyncGenerator[StreamItem, None]:
        sequence = self._sequence(req, Mailbox(wants_deltas=wants_deltas))
        if req.gconfig.grammar is not None:
            sequence.matcher = await self._matcher(req.gconfig.grammar, sequence.end_ids)
        self._thread.submit(sequence)
        try:
            while True:
                item = await sequence.mailbox.get()
                yield item
                if isinstance(item, ModelResponse):
                    return
        finally:
            self._thread.withdraw(sequence)

    async def score(
        self, input_ids: Ids[int], num_scored: int, *, temperature: float = 1.0
    ) -> tuple[float, ...]:
        """See ``ScoringEngine``."""
        scores = await self._score(input_ids, num_scored, temperature, 0)
        return tuple(score.logprob for score in scores)

    async def score_top(
        self, input_ids: Ids[int], num_scored: int, num_top: int, *, temperature: float = 1.0
    ) -> tuple[tuple[tuple[int, float], ...], ...]:
        """See ``ScoringEngine``."""
        scores = await self._score(input_ids, num_scored, temperature, num_top)
        return tuple(score.top_logprobs for score in scores)

    async def _score(
        self, input_ids: Ids[int], num_scored: int, temperature: float, num_top: int
    ) -> list[ScoredToken]:
        ids = tuple(input_ids)
        self._check_ids("input_ids", ids)
        if len(ids) > self.max_seq_len:
            raise ContextLengthError(prompt_tokens=len(ids), limit=self.max_seq_len)
        job = ScoreJob(
            input_ids=ids, num_scored=num_scored, temperature=temperature, num_top=num_top
        )
        self._thread.score(job)
        return await asyncio.wrap_future(job.result)

    async def abort(self, rid: str) -> None:
        self._thread.abort(rid)

    async def pause(self) -> None:
        self._thread.pause()
        await self._idle()

    async def resume(self) -> None:
        self._thread.resume()

    def get_version(self) -> int:
        return self._thread.version

    def set_version(self, version: int) -> None:
        """Drops the caches: whoever sets the version has changed the weights."""
        self._thread.set_version(version)

    async def update_weights(self, update: WeightUpdate) -> None:
        """Raises ModelLoadError, with the old weights kept, when a folder does not fit the model.

        ``in_process``: pause the engine before the shared parameters change, resume after this.
        """
        if update.method not in ("in_process", "disk"):
            raise EngineError(
                f"the embedded engine cannot take weights by method {update.method!r}; use "
                "'in_process' or 'disk'"
            )
        if update.method == "disk":
            if update.path is None:
                raise ConfigError("WeightUpdate.path is missing; method='disk' needs a folder")
            await asyncio.to_thread(self._load, update.path, update.version)
        else:
            self.set_version(update.version)

    async def health(self) -> bool:
        return self._thread.is_healthy

    async def close(self) -> None:
        self._thread.stop()
        await self._idle()
        self._thread.join()

    async def _idle(self) -> None:
        loop, is_idle = asyncio.get_running_loop(), asyncio.Event()
        self._thread.when_idle(lambda: call_on(loop, is_idle.set))
        await is_idle.wait()

    def _load(self, folder: Path, version: int) -> None:
        with self._thread.held():
            load_weights(self.model, folder)
            self.set_version(version)  # before the next forward pass

    def _sequence(self, req: ModelRequest, mailbox: Mailbox) -> Sequence:
        gconfig, ids = req.gconfig, list(req.input_ids)
        budget = token_budget(gconfig, len(ids), self.max_seq_len)
        if budget < 1:
            raise ContextLengthError(prompt_tokens=len(ids), limit=len(ids) + budget)
        if req.image_data:
            raise RequestError("the embedded engine does not read images", param="image_data")
        if gconfig.stop and self._tokenizer is None:
            raise RequestError("stop strings need LocalEngine(..., tokenizer=...)", param="stop")
        self._check_ids("input_ids", ids)
        self._check_ids("logit_bias", gconfig.logit_bias)
        self._check_ids("stop_token_ids", gconfig.stop_token_ids)
        return Sequence(
            request=req,
            mailbox=mailbox,
            end_ids=tuple({*self._end_ids, *gconfig.stop_token_ids}),
            budget=budget,
            ids=ids,
            num_prompt=len(ids),
            noise=random.Random(workflow_context.draw() if gconfig.seed is None else gconfig.seed),
        )

    async def _matcher(self, grammar: str, end_ids: tuple[int, ...]) -> Matcher:
        """In a thread, because a large grammar takes a while to compile."""
        if self._grammars is None:
            raise RequestError(
                "a grammar needs a fast tokenizer and llguidance; run: pip install llguidance",
                param="grammar",
            )
        return await asyncio.to_thread(self._grammars.matcher, grammar, end_ids)

    def _check_ids(self, param: str, ids: Iterable[int]) -> None:
        """One id outside the vocabulary would break the batch it sits in."""
        highest, lowest = max(ids, default=0), min(ids, default=0)
        if lowest < 0 or highest >= self._vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise RequestError(
                f"{param} holds {wrong}; token ids of this model are 0 to {self._vocab_size - 1}",
                param=param,
            )


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if not isinstance(dtype, str):
        return dtype
    named = getattr(torch, dtype, None)
    if not isinstance(named, torch.dtype):
        raise ConfigError(f"engine.dtype is {dtype!r}; it must be a torch dtype such as 'bfloat16'")
    return named
