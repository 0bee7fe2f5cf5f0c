"""Forward and backward pass of the trainer against the same passes written by hand.

    python benchmarks/train.py [--case groups|turns|step] [--small] [--threads 1] [--device cuda]

Prints CPU seconds (on a GPU wall seconds and model FLOP utilisation), the speed-up over the best
hand-written layout, peak memory, and how far the gradients are from those of separate rows. Same
model, tokens and loss (-A log p / N) in one run. Case ``step`` is benchmarks/step.py: beside TRL.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flops import training_flops, utilisation
from step import compare, make_work, peak_mib, reset_peak
from torch import Tensor

from agent_rl import small_model
from agent_rl.train.batch import Batch, micro_batches
from agent_rl.train.forward import predicted_logprobs, segment_attention
from agent_rl.types import TensorDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The tokens of one optimizer step; ``advantages`` [T] stand for whatever the method gives."""

    batch: Batch
    advantages: Tensor
    max_tokens: int

    def rows(self) -> Iterator[slice]:
        for start, length in zip(self.batch.starts, self.batch.lengths, strict=True):
            yield slice(start, start + length)


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = _model(arguments.device)
    cases = {"groups": _groups, "turns": _turns}
    for name, make in cases.items():
        if arguments.case in (None, name):
            _run(name, model, make(model, small=arguments.small), arguments)
    if arguments.case in (None, "step") and arguments.device == "cpu":
        del model
        compare(make_work(prompts=2 if arguments.small else 8, samples=4), repeat=arguments.repeat)


def _run(name: str, model: Any, work: Work, arguments: argparse.Namespace) -> None:
    layouts: dict[str, Callable[[Any, Work], tuple[int, float]]] = {
        "by hand, one row at a time": _bare_rows,
        "by hand, padded": _bare_padded,
        "ours, packed rows": lambda model, work: _ours(model, work, share_prefixes=False),
        "ours, prefix tree": lambda model, work: _ours(model, work, share_prefixes=True),
    }
    print(
        f"\n{name}: {work.batch.num_rows} rows, {work.batch.num_tokens} tokens, "
        f"{int(work.batch.loss_mask.sum())} trained; {work.max_tokens} tokens per pass, "
        f"{arguments.threads} thread(s), {arguments.device}"
    )
    print(f"{'layout':28}  tokens   CPU s  wall s  speed-up    MiB   gradient  rate")
    expected: list[Tensor] = []
    best = 0.0
    for label, layout in layouts.items():
        seconds = []
        for _ in range(arguments.repeat):
            model.zero_grad(set_to_none=True)
            _reset_peak(arguments.device)
            cpu, wall = time.process_time(), time.perf_counter()
            tokens, _ = layout(model, work)
            _synchronize(arguments.device)
            seconds.append((time.process_time() - cpu, time.perf_counter() - wall))
        cpu_s, wall_s = min(seconds)
        shown = wall_s if arguments.device == "cuda" else cpu_s
        grads = [p.grad.cpu() for p in model.parameters()]
        if not expected:
            expected, difference = grads, 0.0
        else:
            difference = _relative_difference(grads, expected)
        del grads
        if label.startswith("by hand"):
            best = min(best or shown, shown)
        print(
            f"{label:28}{tokens:8}{cpu_s:8.2f}{wall_s:8.2f}{best / shown:10.2f}"
            f"{_peak_mib(arguments.device):7.0f}{difference:11.1e}"
            f"  {_rate(model, work, label, shown)}",
            flush=True,
        )


def _ours(model: Any, work: Work, *, share_prefixes: bool) -> tuple[int, float]:
    batch, total, tokens = work.batch, 0.0, 0
    num_trained = batch.loss_mask.sum()
    with segment_attention(model):
        for part in micro_batches(
            batch,
            range(batch.num_rows),
            max_tokens=work.max_tokens,
            share_prefixes=share_prefixes,
        ):
            on_device = part.to(model.device)
            logprobs, _ = predicted_logprobs(model, on_device, 1.0)
            advantages = work.advantages[part.tokens].to(model.device)
            loss = -(advantages * logprobs[on_device.slots]).sum() / num_trained
            loss.backward()
            total += float(loss.detach())
            tokens += len(part.input_ids)
    return tokens, total


def _bare_rows(model: Any, work: Work) -> tuple[int, float]:
    """No padding, full logits of each row."""
    batch, total = work.batch, 0.0
    num_trained = batch.loss_mask.sum()
    for row in work.rows():
        ids = batch.token_ids[row].to(model.device)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        logprobs = logits.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        weights = (work.advantages[row] * batch.loss_mask[row] / num_trained)[1:]
        loss = -(logprobs * weights.to(model.device)).sum()
        loss.backward()
        total += float(loss.detach())
    return batch.num_tokens, total


def _bare_padded(model: Any, work: Work) -> tuple[int, float]:
    """Right-padded rows in micro-batches of as many rows as ``max_tokens`` holds."""
    batch, total = work.batch, 0.0
    num_trained = batch.loss_mask.sum()
    rows = list(work.rows())
    width = max(batch.lengths)
    size = max(1, work.max_tokens // width)
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        ids = torch.zeros(len(part), width, dtype=torch.int64)
        attention = torch.zeros_like(ids)
        weights = torch.zeros(len(part), width)
        for i, row in enumerate(part):
            length = row.stop - row.start
            ids[i, :length] = batch.token_ids[row]
            attention[i, :length] = 1
            weights[i, :length] = work.advantages[row] * batch.loss_mask[row] / num_trained
        ids, attention, weights = (x.to(model.device) for x in (ids, attention, weights))
        logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        loss = -(logprobs * weights[:, 1:]).sum()
        loss.backward()
        total += float(loss.detach())
    return len(rows) * width, total


def _groups(model: Any, *, small: bool) -> Work:
    """8 prompts x 4 samples, 64 prompt and 64 sampled tokens."""
    trajectories = []
    for _ in range(2 if small else 8):
        prompt = _tokens(model, 64)
        rows = [prompt + _tokens(model, 64) for _ in range(4)]
        trajectories.append(_trajectory(rows, [[0] * 64 + [1] * 64] * 4))
    return _work(trajectories)


def _turns(model: Any, *, small: bool) -> Work:
    """One 8-turn conversation, exported individually: row k holds all turns up to turn k."""
    rows, masks, history = [], [], []
    for _ in range(4 if small else 8):
        history = history + _tokens(model, 100)
        rows.append(history)
        masks.append([0] * (len(history) - 60) + [1] * 60)
    return _work([_trajectory(rows, masks)])


def _tokens(model: Any, count: int) -> list[int]:
    return torch.randint(10, model.config.vocab_size, (count,)).tolist()


def _trajectory(rows: list[list[int]], masks: list[list[int]]) -> TensorDict:
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.int32)
    mask, attention = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for i, (row, row_mask) in enumerate(zip(rows, masks, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = torch.tensor(row_mask)
        attention[i, : len(row)] = True
    rewards = torch.zeros(len(rows))
    return {"input_ids": ids, "attention_mask": attention, "loss_mask": mask, "rewards": rewards}


def _work(trajectories: list[TensorDict]) -> Work:
    batch = Batch.from_trajectories(trajectories)
    return Work(batch=batch, advantages=torch.randn(batch.num_tokens), max_tokens=1024)


def _model(device: str) -> Any:
    from transformers import AutoModelForCausalLM

    folder: Path = small_model()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


def _relative_difference(grads: list[Tensor], expected: list[Tensor]) -> float:
    """Norm of the difference over the norm, all parameters together."""
    difference = sum(
        float((a - b).double().square().sum()) for a, b in zip(grads, expected, strict=True)
    )
    return float((difference / sum(float(b.double().square().sum()) for b in expected)) ** 0.5)


def _rate(model: Any, work: Work, label: str, seconds: float) -> str:
    """Work that the maths needs, without padding and with shared prefixes once, in that time."""
    parts = micro_batches(
        work.batch,
        range(work.batch.num_rows),
        max_tokens=work.max_tokens,
        share_prefixes="tree" in label,
    )
    return utilisation(training_flops(model, parts), seconds, model.device)


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak()


def _peak_mib(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return peak_mib()


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=["groups", "turns", "step"], help="one; all by default")
    parser.add_argument("--small", action="store_true", help="a quarter of the work")
    parser.add_argument("--repeat", type=int, default=1, help="the best of so many runs")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
