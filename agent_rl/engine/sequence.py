"""Sequence: one request on its way, prompt and completion so far. Owned by the decode thread."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent_rl.engine.mailbox import Mailbox
from agent_rl.engine.matcher import Matcher
from agent_rl.engine.stop_strings import ends_with_stop
from agent_rl.types import GenerationConfig, ModelRequest, ModelResponse, StopReason, TokenDelta

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """One row of a decode step, read back from the device."""

    token_id: int
    logprob: float
    version: int
    top_logprobs: tuple[tuple[int, float], ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """``ids[:num_cached]`` have keys and values in a slot; ``end_ids`` end the completion.

    ``num_reused``: tokens of the prompt that were there when it was first seated.
    With a ``matcher``, ``forced`` says of each sampled token whether it was the only one allowed.
    """

    request: ModelRequest
    mailbox: Mailbox
    end_ids: tuple[int, ...]
    budget: int
    ids: list[int]
    num_prompt: int
    noise: random.Random
    matcher: Matcher | None = None
    num_cached: int = 0
    num_reused: int | None = None
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    start_s: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    is_withdrawn: bool = False

    @property
    def gconfig(self) -> GenerationConfig:
        return self.request.gconfig

    @property
    def num_new(self) -> int:
        return len(self.ids) - self.num_prompt

    @property
    def num_missing(self) -> int:
        """Tokens to compute before the next can be sampled, which takes the last one as input."""
        return len(self.ids) - 1 - self.num_cached

    @property
    def allowed(self) -> int | None:
        """The tokens that may come next, as a set of ``matcher.py``; None: all of them."""
        if self.matcher is None:
            return None
        return self.matcher.allowed(may_end=self.num_new >= self.gconfig.min_new_tokens)

    def extend(self, token: SampledToken) -> None:
        """Add what was sampled; its predecessor now has keys and values.

        Raises:
            RequestError: the grammar turns out to be too complex to go on with.
        """
        if self.matcher is not None:
            self._match(self.matcher, token.token_id)
        self.ids.append(token.token_id)
        self.num_cached += 1
        self.logprobs.append(token.logprob)
        self.versions.append(token.version)
        self.top_logprobs.append(token.top_logprobs)
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter()
        if self.mailbox.wants_deltas:
            delta = TokenDelta(
                token_ids=(token.token_id,), logprobs=(token.logprob,), versions=(token.version,)
            )
            self.mailbox.put(delta)

    def stop_reason(self, tokenizer: PreTrainedTokenizerBase | None) -> StopReason | None:
        """Why the completion ends with its last token; None: it goes on."""
        is_finished = self.matcher is not None and self.matcher.is_finished
        if is_finished or self.ids[-1] in self.end_ids:
            return "stop"
        stop = self.gconfig.stop
        if stop and tokenizer is not None and self.num_new >= self.gconfig.min_new_tokens:
            is_met = ends_with_stop(self.ids, self.num_prompt, stop, tokenizer)
            return "stop" if is_met else self._length_reason()
        return self._length_reason()

    def answer(self, stop_reason: StopReason) -> None:
        """Send the response: everything that was sampled, nothing added or cut."""
        now_s = time.perf_counter()
        first_s = now_s if self.first_token_s is None else self.first_token_s
        response = ModelResponse(
            input_tokens=tuple(self.ids[: self.num_prompt]),
            output_tokens=tuple(self.ids[self.num_prompt :]),
            output_logprobs=tuple(self.logprobs),
            output_versions=tuple(self.versions),
            stop_reason=stop_reason,
            latency_s=now_s - self.start_s,
            ttft_s=first_s - self.start_s,
            output_top_logprobs=tuple(self.top_logprobs) if self.gconfig.top_logprobs else None,
            output_forced=tuple(self.forced) if self.matcher is not None else None,
            num_cached_tokens=self.num_reused,
        )
        self.mailbox.put(response)

    def _match(self, matcher: Matcher, token_id: int) -> None:
        allowed = self.allowed
        self.forced.append(allowed is not None and allowed.bit_count() == 1)
        if token_id not in self.end_ids:
            matcher.advance(token_id)

    def _length_reason(self) -> StopReason | None:
        return "length" if self.num_new >= self.budget else None
