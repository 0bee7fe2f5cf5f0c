"""DecodeLoop: the thread that computes. Requests join and leave between two forward passes.

One iteration is one forward pass: prefill while any running sequence misses keys and values, else
one decode step for all. The last known token of a sequence is always the decode step's input, so a
fresh prompt, a shared prefix and a sequence that starts over under new weights are one case.
Knows neither event loops nor models' families; results leave through each sequence's mailbox.
"""

from __future__ import annotations

import atexit
import inspect
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_rl.engine.kv_cache import SlotCache
from agent_rl.engine.sampling import SamplingPlan, plan_sampling, sample
from agent_rl.engine.slots import Sequence, SlotTable
from agent_rl.engine.stop_strings import ends_with_stop
from agent_rl.errors import EngineError
from agent_rl.types import ModelResponse, StopReason, TokenDelta

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PREFILL_TOKENS = 2048


@dataclass(slots=True, kw_only=True)
class EngineCounters:
    """Totals since the engine was made. Prompt tokens are either computed or reused."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    decode_steps: int = 0


class DecodeLoop:
    """All public methods may be called from any thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_batch_size: int,
        max_seq_len: int,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self.counters = EngineCounters()
        self.version = 0
        self.failure: BaseException | None = None
        self._model = model
        self._device = model.device
        self._vocab_size = model.get_output_embeddings().weight.shape[0]
        self._cache = SlotCache(num_slots=max_batch_size, max_len=max_seq_len)
        self._cache_argument = _cache_argument(model)
        self._table = SlotTable(self._cache, max_batch_size)
        self._plan: SamplingPlan | None = None
        self._plan_age = 0
        self._tokenizer = tokenizer
        self._waiting: deque[Sequence] = deque()
        self._changed = threading.Condition()
        self._aborted_rids: set[str] = set()
        self._thread: threading.Thread | None = None
        self._num_holds = 0
        self._is_computing = False
        self._is_stale = False
        self._is_closed = False

    # ---- from other threads

    def submit(self, sequence: Sequence) -> None:
        with self._changed:
            if self._is_closed:
                raise EngineError("the engine is closed")
            if self.failure is not None:
                raise _broke_down(self.failure)
            self._waiting.append(sequence)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
                self._thread.start()
                _LIVE.add(self)
            self._changed.notify_all()

    def withdraw(self, sequence: Sequence) -> None:
        """Nobody waits for it any more; its slot is free at the next boundary."""
        with self._changed:
            sequence.is_withdrawn = True
            self._changed.notify_all()

    def abort(self, rid: str) -> None:
        with self._changed:
            self._aborted_rids.add(rid)
            self._changed.notify_all()

    def hold(self) -> None:
        """Start no forward pass; returns when none is running."""
        with self._changed:
            self._num_holds += 1
            self._changed.wait_for(lambda: not self._is_computing)

    def release(self) -> None:
        with self._changed:
            self._num_holds -= 1
            self._changed.notify_all()

    def set_version(self, version: int) -> None:
        """Tokens of later forward passes carry it; keys and values of earlier ones are dropped."""
        with self._changed:
            self.version = version
            self._is_stale = True

    @property
    def is_healthy(self) -> bool:
        return not self._is_closed and self.failure is None

    def stop(self) -> None:
        """Ask the thread to fail what is left and to end after the forward pass that is running."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """``stop`` and wait for the end of the thread."""
        self.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # ---- the decode thread

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._begin():
                    try:
                        self._compute()
                    finally:
                        self._end()
        except BaseException as error:
            # The edge of the thread: whatever broke, nobody may wait for it forever.
            self.failure = error
        finally:
            self._fail_all()

    def _begin(self) -> bool:
        """Wait for something to compute and mark it begun; False when the engine closes."""
        with self._changed:
            while not self._is_closed:
                if self._is_stale:
                    self._start_over()
                self._reap()
                is_held = self._num_holds > 0
                if not is_held and (self._waiting or self._table.running):
                    self._is_computing = True
                    return True
                self._changed.wait()
            return False

    def _end(self) -> None:
        with self._changed:
            self._is_computing = False
            self._changed.notify_all()

    def _start_over(self) -> None:
        self._is_stale = False
        self._waiting.extendleft(reversed(self._table.drop()))
        self._plan = None

    def _reap(self) -> None:
        """Answer the aborted, forget the withdrawn."""
        everyone = (*self._waiting, *self._table.running)
        rids = self._aborted_rids
        leaving = [s for s in everyone if s.is_withdrawn or s.request.rid in rids]
        rids.clear()
        for sequence in leaving:
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            if not sequence.is_withdrawn:
                _answer(sequence, "abort")
        self._leave([s for s in leaving if s in self._table.running])

    def _leave(self, finished: list[Sequence]) -> None:
        if finished:
            self._table.release(finished)
            self._plan = None

    def _fail_all(self) -> None:
        with self._changed:
            self._is_computing = False
            for sequence in (*self._waiting, *self._table.running):
                sequence.mailbox.put(
                    EngineError("the engine was closed")
                    if self.failure is None
                    else _broke_down(self.failure)
                )
            self._waiting.clear()
            self._table.drop()
            self._changed.notify_all()

    def _compute(self) -> None:
        self._admit()
        missing = [slot for slot, s in enumerate(self._table.running) if s.num_missing]
        if missing:
            self._prefill(missing)
        else:
            self._decode(self.version)

    def _admit(self) -> None:
        with self._changed:
            first = list(self._waiting)[: self._table.num_free]
        for sequence in first:
            reused = self._table.admit(sequence)
            if reused is not None:
                self.counters.reused_tokens += reused
                self._plan = None
                with self._changed:
                    self._waiting.remove(sequence)

    def _prefill(self, slots: list[int]) -> None:
        """Compute keys and values of one chunk: rows of similar length, the shortest first.

        A row shorter than the longest repeats its last token at the same position: it writes the
        same values there twice, so padding needs neither mask nor scratch memory.
        """
        running = self._table.running
        slots = sorted(slots, key=lambda slot: running[slot].num_missing)
        width = min(running[slots[0]].num_missing, _PREFILL_TOKENS)
        chosen = [slots[0]]
        for slot in slots[1:]:
            wider = min(running[slot].num_missing, _PREFILL_TOKENS)
            if wider * (len(chosen) + 1) > _PREFILL_TOKENS or wider > 1.25 * width:
                break
            chosen.append(slot)
        chosen.sort()
        widths = [min(running[slot].num_missing, _PREFILL_TOKENS) for slot in chosen]
        ids, positions = [], []
        for slot, count in zip(chosen, widths, strict=True):
            start = running[slot].num_cached
            chunk = running[slot].ids[start : start + count]
            padding = max(widths) - count
            ids.append(chunk + chunk[-1:] * padding)
            positions.append([*range(start, start + count), *[start + count - 1] * padding])
        self._forward(chosen, ids, positions)
        for slot, count in zip(chosen, widths, strict=True):
            running[slot].num_cached += count
        self.counters.prefill_tokens += sum(widths)

    def _decode(self, version: int) -> None:
        running = self._table.running
        ids = [[sequence.ids[-1]] for sequence in running]
        positions = [[sequence.num_cached] for sequence in running]
        logits_BV = self._forward(list(range(len(running))), ids, positions)
        plan = self._current_plan()
        uniforms = [sequence.random.random() for sequence in running]
        uniforms_B = torch.tensor(uniforms, dtype=torch.float64).to(self._device)
        ids_B, logprobs_B, top = sample(logits_BV, plan, uniforms_B)
        # Float64 holds ids and log-probs exactly: one transfer, the only sync of the step.
        columns = [ids_B[:, None].double(), logprobs_B[:, None].double()]
        if top is not None:
            columns += [top[1].double(), top[0].double()]
        rows = torch.cat(columns, 1).tolist()
        self._plan_age += 1
        self.counters.decode_steps += 1
        self.counters.generated_tokens += len(rows)
        finished = []
        for sequence, row in zip(running, rows, strict=True):
            self._extend(sequence, row, version)
            stop_reason = self._stop_reason(sequence)
            if stop_reason is not None and not sequence.is_withdrawn:
                _answer(sequence, stop_reason)
            if stop_reason is not None:
                finished.append(sequence)
        self._leave(finished)

    def _extend(self, sequence: Sequence, row: list[float], version: int) -> None:
        token_id, logprob = int(row[0]), row[1]
        sequence.ids.append(token_id)
        sequence.num_cached += 1
        sequence.logprobs.append(logprob)
        sequence.versions.append(version)
        num_top = sequence.gconfig.top_logprobs
        if num_top:
            half = 2 + (len(row) - 2) // 2
            ids, logprobs = row[2 : 2 + num_top], row[half : half + num_top]
            pairs = zip(map(int, ids), logprobs, strict=True)
            sequence.top_logprobs.append(tuple(pairs))
        if sequence.first_token_s is None:
            sequence.first_token_s = time.perf_counter()
        if sequence.mailbox.wants_deltas:
            sequence.mailbox.put(
                TokenDelta(token_ids=(token_id,), logprobs=(logprob,), versions=(version,))
            )

    def _stop_reason(self, sequence: Sequence) -> StopReason | None:
        num_new = len(sequence.ids) - sequence.num_prompt
        if sequence.ids[-1] in sequence.end_ids:
            return "stop"
        if num_new >= sequence.gconfig.min_new_tokens and self._ends_with_stop(sequence):
            return "stop"
        return "length" if num_new >= sequence.budget else None

    def _ends_with_stop(self, sequence: Sequence) -> bool:
        stop = sequence.gconfig.stop
        if not stop or self._tokenizer is None:
            return False
        return ends_with_stop(sequence.ids, sequence.num_prompt, stop, self._tokenizer)

    def _current_plan(self) -> SamplingPlan:
        if self._plan is None or self._plan_age >= self._plan.num_steps:
            self._plan = plan_sampling(self._table.running, self._vocab_size, self._device)
            self._plan_age = 0
        return self._plan

    def _forward(
        self, slots: list[int], ids: list[list[int]], positions: list[list[int]]
    ) -> Tensor:
        """Run tokens [B][T] at their positions; logits [B, V] after the last of each row.

        One rule masks everything: a token at position p sees the positions up to p of its slot.
        """
        inputs_BT, positions_BT = torch.tensor([ids, positions]).to(self._device)
        length = 1 + max(row[-1] for row in positions)
        self._cache.aim(slots, positions_BT, length)
        is_hidden = torch.arange(length, device=self._device) > positions_BT[:, None, :, None]
        mask_B1TL = torch.zeros(is_hidden.shape, dtype=self._model.dtype, device=self._device)
        mask_B1TL.masked_fill_(is_hidden, -torch.inf)
        output = self._model(
            input_ids=inputs_BT,
            position_ids=positions_BT,
            attention_mask=mask_B1TL,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self._cache},
        )
        logits_BV: Tensor = output.logits[:, -1]
        return logits_BV

    @contextmanager
    def held(self) -> Iterator[None]:
        self.hold()
        try:
            yield
        finally:
            self.release()


def _answer(sequence: Sequence, stop_reason: StopReason) -> None:
    now_s = time.perf_counter()
    first_s = now_s if sequence.first_token_s is None else sequence.first_token_s
    sequence.mailbox.put(
        ModelResponse(
            input_tokens=tuple(sequence.ids[: sequence.num_prompt]),
            output_tokens=tuple(sequence.ids[sequence.num_prompt :]),
            output_logprobs=tuple(sequence.logprobs),
            output_versions=tuple(sequence.versions),
            stop_reason=stop_reason,
            latency_s=now_s - sequence.start_s,
            ttft_s=first_s - sequence.start_s,
            output_top_logprobs=(
                tuple(sequence.top_logprobs) if sequence.gconfig.top_logprobs else None
            ),
        )
    )


def _broke_down(cause: BaseException) -> EngineError:
    error = EngineError(f"the engine broke down: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _cache_argument(model: PreTrainedModel) -> str:
    """Transformers renamed ``past_key_values`` to ``cache`` in 5.2x; both are in use."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


_LIVE: weakref.WeakSet[DecodeLoop] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread inside torch must not outlive the interpreter, so join it before that ends."""
    for loop in list(_LIVE):
        loop.close()
