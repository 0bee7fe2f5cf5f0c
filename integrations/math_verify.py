"""math-verify: a reward for mathematical answers, compared as mathematics.

    trainer.train(workflow=one_turn(score, system="Put the answer into \\\\boxed{}."))

A comparison may take for ever and is stopped by a signal, which only the main thread of a process
gets: they run in a process of their own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import Any

_TIMEOUT_S = 5


async def score(data: dict[str, Any], answer: str) -> float:
    """1.0 where ``answer`` ends in what equals ``data["answer"]``, as far as seconds can tell."""
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(_pool(), compare, str(data["answer"]), answer)
    except BrokenProcessPool:
        _pool.cache_clear()  # out of memory, say: this episode fails, the next has a new process
        raise


def compare(gold: str, answer: str) -> float:
    """In the main thread only. "0.5" equals "$\\\\frac{1}{2}$"."""
    from math_verify import parse, verify

    wanted, found = (parse(text, parsing_timeout=_TIMEOUT_S) for text in (gold, answer))
    return float(verify(wanted, found, timeout_seconds=_TIMEOUT_S))


@cache
def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
