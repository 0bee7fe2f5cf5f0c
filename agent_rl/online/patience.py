"""Rules of the user's own, which know no time limit: each call gets that of a judge's vote.

A judge that never returns would hold its turn's place for ever, and after ``queue_size`` of them
nothing more would be learnt.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from agent_rl.online.hints import HintSource
from agent_rl.online.verdict import Judge, JudgedTurn, Verdict


@dataclass(frozen=True, slots=True)
class TimedJudge:
    """Raises TimeoutError after ``timeout_s``; None: it waits."""

    rule: Judge
    timeout_s: float | None

    async def judge(self, turn: JudgedTurn) -> Verdict:
        async with asyncio.timeout(self.timeout_s):
            return await self.rule.judge(turn)


@dataclass(frozen=True, slots=True)
class TimedHints:
    """Raises TimeoutError after ``timeout_s``; None: it waits."""

    rule: HintSource
    timeout_s: float | None

    async def hint(self, turn: JudgedTurn) -> str | None:
        async with asyncio.timeout(self.timeout_s):
            return await self.rule.hint(turn)
