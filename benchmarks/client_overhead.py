"""What one recorded call costs besides the model: CPU µs by turn, part and concurrency.

    python benchmarks/client_overhead.py            # about a minute on one core

The engine answers at once with 64 tokens. Whole conversations are run; the figures are medians
over the calls around a turn, in CPU time (other processes cannot stretch it). "json" is writing
and reading the request's own JSON once, which grows with the history whatever the client does.
Where the package `areal` can be imported, its recording client is measured in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from openai.resources.chat import AsyncCompletions
from peers import areal_client
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from agent_rl import (
    ArealOpenAI,
    ModelRequest,
    ModelResponse,
    TokenDelta,
    small_model,
)
from agent_rl.api import routes
from agent_rl.client import transport

TURNS = (1, 8, 32, 128)
LENGTH = 132
TEXT = "The quick brown fox jumps over the lazy dog and then asks what the weather will be. "


class InstantEngine:
    """64 tokens at once: what is measured is everything else."""

    max_seq_len = 1 << 20
    supported = frozenset[str]()

    def __init__(self, tokenizer: Any) -> None:
        ids = tokenizer.encode("A plain answer of some words. " * 20)[:63]
        self.output = (*ids, tokenizer.eos_token_id)
        self.logprobs = (-0.5,) * 64
        self.versions = (0,) * 64

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        return ModelResponse(
            input_tokens=tuple(req.input_ids),
            output_tokens=self.output,
            output_logprobs=self.logprobs,
            output_versions=self.versions,
            stop_reason="stop",
        )

    async def astream(self, req: ModelRequest) -> AsyncIterator[TokenDelta | ModelResponse]:
        for token_id in self.output:
            yield TokenDelta(token_ids=(token_id,), logprobs=(-0.5,), versions=(0,))
        yield await self.agenerate(req)


class Clock:
    """CPU time spent in the parts of each call of one client."""

    def __init__(self, client: ArealOpenAI) -> None:
        self.calls: list[dict[str, float]] = []
        self._call: dict[str, float] = {}
        cache = client._session.cache
        transport.answer = self._timed_async("api", routes.answer)  # type: ignore[attr-defined]
        cache.plan = self._timed("plan", cache.plan)  # type: ignore[method-assign]
        cache.append = self._timed("record", cache.append)  # type: ignore[method-assign]

    async def call(self, create: Any, body: dict[str, Any]) -> Any:
        self._call = {}
        start = time.process_time()
        completion = await create(**body)
        total = time.process_time() - start
        start = time.process_time()
        json.loads(json.dumps(body).encode())
        own_json = time.process_time() - start
        parts = {"total": total, "sdk+transport": total - self._call["api"], **self._call}
        self.calls.append({**parts, "json": own_json, "total - json": total - own_json})
        return completion

    def median_us(self, turn: int) -> dict[str, float]:
        """Over the calls of all conversations that are at or just after that turn."""
        near = [call for i, call in enumerate(self.calls) if turn <= i % LENGTH + 1 < turn + 4]
        return {name: statistics.median(c[name] for c in near) * 1e6 for name in near[0]}

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = function(*args, **kwargs)
            self._call[name] = time.process_time() - start
            return result

        return timed

    def _timed_async(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        async def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = await function(*args, **kwargs)
            self._call[name] = time.process_time() - start
            return result

        return timed


async def conversation(create: Any, turns: int) -> None:
    """``create`` is called once for each turn, with all messages so far."""
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{turn}: {TEXT}"})
        completion = await create(model="m", messages=messages)
        answer = completion.choices[0].message.content
        messages.append({"role": "assistant", "content": answer})


async def measure_turns(
    tokenizer: Any, mode: Any, repeats: int, *, is_direct: bool = True
) -> dict[int, dict[str, float]]:
    calls: list[dict[str, float]] = []
    for _ in range(repeats):
        client = ArealOpenAI(InstantEngine(tokenizer), tokenizer, chat_template_type=mode)
        create = client.chat.completions.create if is_direct else AsyncCompletions(client).create
        clock = Clock(client)

        async def timed(clock: Clock = clock, create: Any = create, **body: Any) -> Any:
            return await clock.call(create, body)

        await conversation(timed, LENGTH)
        calls += clock.calls
    clock.calls = calls
    transport.answer = routes.answer  # type: ignore[attr-defined]
    return {turn: clock.median_us(turn) for turn in TURNS}


async def measure_concurrent(tokenizer: Any, mode: Any, episodes: int, turns: int) -> float:
    """CPU µs per call of whole episodes that run at once."""
    engine = InstantEngine(tokenizer)
    clients = [ArealOpenAI(engine, tokenizer, chat_template_type=mode) for _ in range(episodes)]
    start = time.process_time()
    creates = [client.chat.completions.create for client in clients]
    await asyncio.gather(*[conversation(create, turns) for create in creates])
    return (time.process_time() - start) / (episodes * turns) * 1e6


async def measure_chunk(tokenizer: Any, repeats: int) -> tuple[float, float]:
    """CPU µs per chunk of a stream: all of it, and without the SDK's reading."""
    client = ArealOpenAI(InstantEngine(tokenizer), tokenizer)
    body = {"model": "m", "messages": [{"role": "user", "content": TEXT}], "stream": True}
    content = json.dumps(body).encode()
    totals, ours = [], []
    for _ in range(repeats):
        start = time.process_time()
        stream: Any = await client.chat.completions.create(**body)  # type: ignore[call-overload]
        count = len([chunk async for chunk in stream])
        totals.append((time.process_time() - start) / count)
        start = time.process_time()
        reply = await routes.answer(client._session, "POST", "chat/completions", content)
        assert reply.events is not None
        count = len([event async for event in reply.events])
        ours.append((time.process_time() - start) / count)
    return statistics.median(totals) * 1e6, statistics.median(ours) * 1e6


async def measure_peer(tokenizer: Any, mode: str, turns: int) -> dict[int, float]:
    """CPU µs per call of `areal`'s recording client at the shown turns.

    Raises:
        ImportError: the package, or something that it needs, is not installed.
    """
    client = areal_client(InstantEngine(tokenizer), tokenizer, mode)
    costs: list[float] = []

    async def timed(**body: Any) -> Any:
        start = time.process_time()
        completion = await client.chat.completions.create(**body, max_tokens=64)
        costs.append((time.process_time() - start) * 1e6)
        return completion

    await conversation(timed, turns)
    shown = {turn: costs[turn - 1 : turn + 3] for turn in TURNS}
    return {turn: statistics.median(near) for turn, near in shown.items() if near}


async def compare(console: Console, tokenizer: Any, ours: dict[str, dict[int, float]]) -> None:
    for mode, mine in ours.items():
        try:
            peer = await measure_peer(tokenizer, mode, LENGTH)
        except ImportError as error:
            console.print(f"areal is not measured: {error}")
            return
        figures = [f"turn {t}: {us:.0f} ({us / mine[t]:.1f} x ours)" for t, us in peer.items()]
        console.print(f"areal, {mode!r}, µs per call: {', '.join(figures)}")


async def main(repeats: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(small_model())
    console = Console(width=100)
    totals: dict[str, dict[int, float]] = {}
    for mode in ("hf", "concat"):
        rows = await measure_turns(tokenizer, mode, repeats)
        table = Table(title=f"CPU µs per call, chat_template_type={mode!r}", title_justify="left")
        for name in ("turn", *rows[1]):
            table.add_column(name, justify="right")
        for turn, row in rows.items():
            table.add_row(str(turn), *[f"{us:.0f}" for us in row.values()])
        console.print(table)
        totals[mode] = {turn: row["total"] for turn, row in rows.items()}
        many = await measure_concurrent(tokenizer, mode, 64, 32)
        alone = await measure_concurrent(tokenizer, mode, 1, 32)
        console.print(f"32-turn episodes, per call: {alone:.0f} alone, {many:.0f} with 64 at once")
    slow = await measure_turns(tokenizer, "concat", 1, is_direct=False)
    figures = ", ".join(f"{row['total']:.0f} (turn {turn})" for turn, row in slow.items())
    console.print(f"the same through the SDK's own create: {figures}")
    total, ours = await measure_chunk(tokenizer, repeats * 5)
    console.print(f"stream: {total:.0f} µs per chunk, {ours:.0f} of them before the SDK reads it")
    await compare(console, tokenizer, totals)
    start = time.process_time()
    for _ in range(100):
        ArealOpenAI(InstantEngine(tokenizer), tokenizer)
    console.print(f"constructing a client: {(time.process_time() - start) * 1e4:.0f} µs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="conversations per mode")
    asyncio.run(main(parser.parse_args().repeats))
