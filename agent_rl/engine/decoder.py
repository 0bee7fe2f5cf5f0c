"""Decoder: the forward passes of one batch. Requests join and leave between two of them.

The last known token of a sequence is always the input of the next decode step, all before it are
prefilled. So a fresh prompt, a shared prefix, and a completion that starts over under new weights
are one case. Single-threaded; knows neither queues nor versions' meaning.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_rl.engine.kv_cache import SlotCache
from agent_rl.engine.matcher import forbidden_tokens
from agent_rl.engine.sampling import SamplingPlan, plan_sampling, sample
from agent_rl.engine.scoring import ScoredToken, ScoreJob, read_scores
from agent_rl.engine.sequence import SampledToken, Sequence
from agent_rl.engine.slots import SlotTable
from agent_rl.errors import EngineError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Most tokens of one prefill pass: bounds its memory and how long a pause has to wait.
_PREFILL_TOKENS = 1024
# A row joins a prefill pass if the longest row is at most this much longer than the shortest.
_PREFILL_STRETCH = 1.25


@dataclass(slots=True, kw_only=True)
class EngineCounters:
    """Totals since the engine was made; prefill tokens are those that could not be reused."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    decode_steps: int = 0


class Decoder:
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        max_batch_size: int,
        max_seq_len: int,
    ) -> None:
        self.counters = EngineCounters()
        self._model = model
        self._tokenizer = tokenizer
        self._device = model.device
        # Transformers 5.2x renamed the argument; both names are in use.
        names = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self._max_seq_len = max_seq_len
        self._cache = SlotCache(num_slots=max_batch_size, max_len=max_seq_len)
        self._table = SlotTable(self._cache, max_batch_size)
        self._plan: SamplingPlan | None = None
        self._num_steps_left = 0.0

    @property
    def running(self) -> list[Sequence]:
        return self._table.running

    @property
    def num_free(self) -> int:
        return self._table.num_free

    def admit(self, waiting: Iterable[Sequence]) -> list[Sequence]:
        """Seat those that can start now, in order; the others wait for a prefix to be computed."""
        admitted = [sequence for sequence in waiting if self._table.admit(sequence)]
        if admitted:
            self.counters.reused_tokens += sum(s.num_cached for s in admitted)
            for sequence in admitted:
                if sequence.num_reused is None:  # not again after new weights dropped the cache
                    sequence.num_reused = sequence.num_cached
            self._plan = None
        return admitted

    def remove(self, sequences: list[Sequence]) -> None:
        if sequences:
            self._table.release(sequences)
            self._plan = None

    def drop(self) -> list[Sequence]:
        """Forget all keys and values; returns the running sequences, to be admitted again."""
        self._plan = None
        return self._table.drop()

    def step(self, version: int) -> None:
        """One forward pass: prefill while a running sequence misses anything, else decode all."""
        missing = [slot for slot, s in enumerate(self.running) if s.num_missing]
        if missing:
            self._prefill(missing)
        elif self.running:
            self._decode(version)

    def score(self, job: ScoreJob) -> list[ScoredToken]:
        """Beside the running sequences, in a slot of its own that is gone afterwards."""
        cache = SlotCache(num_slots=1, max_len=self._max_seq_len)
        ids, scores = job.input_ids, []
        for start, end, num_scored in job.chunks():
            places = list(range(start, end))
            logits_1SV = self._logits(cache, [0], [list(ids[start:end])], [places], num_scored or 1)
            if num_scored:
                followers = ids[end - num_scored + 1 : end + 1]
                scores += read_scores(logits_1SV[0], followers, job.temperature, job.num_top)
        return scores

    def _prefill(self, slots: list[int]) -> None:
        """A row shorter than the longest repeats its last token at the same position.

        It then writes the same values to the same place again, so padding needs neither a mask of
        its own nor scratch memory.
        """
        counts = {slot: min(self.running[slot].num_missing, _PREFILL_TOKENS) for slot in slots}
        chosen = _similar_rows(counts)
        width = max(counts[slot] for slot in chosen)
        ids, positions = [], []
        for slot in chosen:
            start = self.running[slot].num_cached
            chunk = list(range(start, start + counts[slot]))
            chunk += chunk[-1:] * (width - counts[slot])
            positions.append(chunk)
            ids.append([self.running[slot].ids[position] for position in chunk])
        self._forward(chosen, ids, positions)
        for slot in chosen:
            self.running[slot].num_cached += counts[slot]
            self.counters.prefill_tokens += counts[slot]

    def _decode(self, version: int) -> None:
        ids = [[sequence.ids[-1]] for sequence in self.running]
        positions = [[sequence.num_cached] for sequence in self.running]
        logits_BV = self._forward(range(len(ids)), ids, positions)
        uniforms = [sequence.noise.random() for sequence in self.running]
        uniforms_B = torch.tensor(uniforms, dtype=torch.float64).to(self._device)
        plan = self._current_plan(logits_BV.shape[1])
        forbidden = self._forbidden(logits_BV.shape[1])
        rows = sample(logits_BV, plan, uniforms_B, forbidden).tolist()  # the only sync of the step
        self.counters.decode_steps += 1
        self.counters.generated_tokens += len(rows)
        finished = []
        for sequence, row in zip(self.running, rows, strict=True):
            token = _read(row, version, sequence.gconfig.top_logprobs, plan.num_top)
            try:
                sequence.extend(token)
            except RequestError as error:
                sequence.mailbox.put(error)
                finished.append(sequence)
                continue
            stop_reason = sequence.stop_reason(self._tokenizer)
            if stop_reason is not None:
                sequence.answer(stop_reason)
                finished.append(sequence)
        self.remove(finished)

    def _forbidden(self, vocab_size: int) -> tuple[Tensor, Tensor] | None:
        """What grammars forbid; None where no running sequence has one."""
        sets = {row: sequence.allowed for row, sequence in enumerate(self.running)}
        allowed = {row: tokens for row, tokens in sets.items() if tokens is not None}
        return forbidden_tokens(allowed, vocab_size, self._device) if allowed else None

    def _current_plan(self, vocab_size: int) -> SamplingPlan:
        if self._plan is None or self._num_steps_left <= 0:
            self._plan = plan_sampling(self.running, vocab_size, self._device)
            self._num_steps_left = self._plan.num_steps
        self._num_steps_left -= 1
        return self._plan

    def _forward(
        self, slots: Iterable[int], ids: list[list[int]], positions: list[list[int]]
    ) -> Tensor:
        """Run tokens [B][T] at their positions; logits [B, V] after the last of each row."""
        return self._logits(self._cache, list(slots), ids, positions, 1)[:, -1]

    def _logits(
        self,
        cache: SlotCache,
        slots: list[int],
        ids: list[list[int]],
        positions: list[list[int]],
        num_kept: int,
    ) -> Tensor:
        """Logits [B, num_kept, V] after the last tokens of each row.

        One rule masks everything: a token at position p sees the positions up to p of its slot.
        """
        inputs_BT, positions_BT = torch.tensor([ids, positions]).to(self._device)
        length = 1 + max(row[-1] for row in positions)
        cache.aim(slots, positions_BT, length)
        is_hidden = torch.arange(length, device=self._device) > positions_BT[:, None, :, None]
        mask_B1TL = torch.zeros(is_hidden.shape, dtype=self._model.dtype, device=self._device)
        output = self._model(
            input_ids=inputs_BT,
            position_ids=positions_BT,
            attention_mask=mask_B1TL.masked_fill_(is_hidden, -torch.inf),
            use_cache=True,
            logits_to_keep=num_kept,
            **{self._cache_argument: cache},
        )
        logits_BKV: Tensor = output.logits
        return logits_BKV


def _similar_rows(counts: dict[int, int]) -> list[int]:
    """The rows of the next prefill pass, shortest first, so that little of it is padding.

    {0: 100, 1: 10, 2: 11} -> [1, 2]; row 0 comes in the next pass.
    """
    shortest_first = sorted(counts, key=lambda slot: counts[slot])
    shortest = counts[shortest_first[0]]
    chosen: list[int] = []
    for slot in shortest_first:
        is_similar = counts[slot] <= _PREFILL_STRETCH * shortest
        if chosen and not (is_similar and counts[slot] * (len(chosen) + 1) <= _PREFILL_TOKENS):
            break
        chosen.append(slot)
    return sorted(chosen)


def _read(row: list[float], version: int, num_top: int, max_top: int) -> SampledToken:
    """A row of ``sample``: id, log-prob, then ``max_top`` ids and their log-probs."""
    if math.isnan(row[1]):
        raise EngineError("the logits are NaN: the weights are broken")
    top_ids, top_logprobs = row[2 : 2 + num_top], row[2 + max_top : 2 + max_top + num_top]
    return SampledToken(
        token_id=int(row[0]),
        logprob=row[1],
        version=version,
        top_logprobs=tuple(zip(map(int, top_ids), top_logprobs, strict=True)),
    )
