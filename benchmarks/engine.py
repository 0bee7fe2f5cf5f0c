"""LocalEngine beside static-batch ``generate`` of transformers: same weights, same token counts.

    python benchmarks/engine.py --threads 1 --repeats 5

Requests arrive separately through asyncio. Repeats alternate between the two, with new prompts each
time; figures are medians. On a shared machine read the columns by CPU time: wall time also counts
what other processes take.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from agent_rl import GenerationConfig, LocalEngine, ModelRequest, small_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``concurrency`` requests of their own prompts, or samples of one prompt."""

    concurrency: int
    is_one_prompt: bool

    @property
    def name(self) -> str:
        return f"{self.concurrency} samples, 1 prompt" if self.is_one_prompt else "own prompts"

    def prompts(self, seed: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        count = 1 if self.is_one_prompt else self.concurrency
        ids = torch.randint(3, vocab_size, (count, num_tokens), generator=generator).tolist()
        return ids * self.concurrency if self.is_one_prompt else ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Tokens per second of wall time and of CPU time."""

    wall: float
    cpu: float


def measure(run: Callable[[], None], num_tokens: int) -> Speed:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return Speed(wall=num_tokens / wall_s, cpu=num_tokens / cpu_s)


def run_generate(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int) -> None:
    ids = torch.tensor(prompts, device=model.device)
    lengths = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **lengths, **sampling)
    assert output.shape[1] == ids.shape[1] + new_tokens


def run_engine(engine: LocalEngine, prompts: list[list[int]], new_tokens: int) -> None:
    gconfig = GenerationConfig(min_new_tokens=new_tokens, max_new_tokens=new_tokens)

    async def main() -> None:
        requests = [
            ModelRequest(rid=str(n), input_ids=ids, gconfig=gconfig)
            for n, ids in enumerate(prompts)
        ]
        for response in await asyncio.gather(*map(engine.agenerate, requests)):
            assert len(response.output_tokens) == new_tokens

    asyncio.run(main())


def compare(
    case: Case, model: PreTrainedModel, engine: LocalEngine, options: argparse.Namespace
) -> tuple[list[Speed], list[Speed]]:
    """(generate, engine) for each repeat; which goes first alternates."""
    num_tokens = case.concurrency * options.new_tokens
    static: list[Speed] = []
    ours: list[Speed] = []
    for repeat in range(options.repeats):
        prompts = case.prompts(repeat, options.prompt_tokens, model.config.vocab_size)
        turns = [
            (static, lambda p=prompts: run_generate(model, p, options.new_tokens)),
            (ours, lambda p=prompts: run_engine(engine, p, options.new_tokens)),
        ]
        for speeds, run in turns if repeat % 2 == 0 else reversed(turns):
            speeds.append(measure(run, num_tokens))
        engine.set_version(repeat)  # drops what the engine could reuse in the next repeat
    return static, ours


def row(case: Case, static: list[Speed], ours: list[Speed]) -> list[str]:
    cells = [str(case.concurrency), case.name]
    for kind in ("wall", "cpu"):
        before = [getattr(speed, kind) for speed in static]
        after = [getattr(speed, kind) for speed in ours]
        ratio = statistics.median(b / a for a, b in zip(before, after, strict=True))
        cells += [f"{statistics.median(before):.1f}", f"{statistics.median(after):.1f}"]
        cells.append(f"{ratio:.2f}")
    return cells


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="Hugging Face folder; default: small_model()")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = options.model or small_model()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=options.dtype).to(device).eval()
    engine = LocalEngine(model, max_batch_size=max(8, *options.concurrency))
    cases = [Case(concurrency=count, is_one_prompt=False) for count in options.concurrency]
    cases.append(Case(concurrency=8, is_one_prompt=True))
    table = Table(
        title=f"{options.prompt_tokens} prompt tokens, {options.new_tokens} new, {device}"
    )
    for title in ("requests", "prompts", "generate tok/s", "engine tok/s", "ratio"):
        table.add_column(title, justify="right")
    for title in ("generate tok/CPU-s", "engine tok/CPU-s", "CPU ratio"):
        table.add_column(title, justify="right")
    warm_up = Case(concurrency=2, is_one_prompt=False).prompts(0, 16, model.config.vocab_size)
    run_generate(model, warm_up, 4)
    run_engine(engine, warm_up, 4)
    for case in track(cases, description="measuring", transient=True):
        table.add_row(*row(case, *compare(case, model, engine, options)))
    asyncio.run(engine.close())
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
