"""Restarter: starts a launched server again when its process has ended, a bounded number of times.

The pauses between tries grow: 1 s, 2 s, 4 s, up to a minute. A server that was well for long has
all its tries again. It says when a server is worth waiting for and when it is gone for good; which
weights a new process needs is the keeper's business.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time

from agent_rl.engine.launch import LaunchedServers
from agent_rl.engine.router import Router
from agent_rl.engine.server import Server
from agent_rl.engine.server_process import ServerProcess

logger = logging.getLogger(__name__)

_MAX_PAUSE_S = 60.0
_POLL_S = 0.2
_WELL_AFTER_S = 600.0


class Restarter:
    """To be used on the engine's event loop.

    Args:
        first_pause_s: before the first try; twice as long before each further one.
    """

    def __init__(
        self, launched: LaunchedServers, router: Router, *, first_pause_s: float = 1.0
    ) -> None:
        self._launched = launched
        self._router = router
        self._first_pause_s = first_pause_s
        self._num_tries = dict.fromkeys(router.servers, 0)
        self._ready_s = dict.fromkeys(router.servers, time.monotonic())

    async def look_after(self, server: Server) -> None:
        """At once where the process runs; else when it runs again and answers, or is gone."""
        process = self._launched.process(server.address)
        while not server.is_gone and (code := process.exit_code) is not None:
            if self._launched.is_closed:
                return
            why = f"its process ended with code {code}"
            logger.warning("%s: %s; %s", server.address, why, process.last_words())
            await self._start_again(server, process, why)

    async def _start_again(self, server: Server, process: ServerProcess, why: str) -> None:
        if time.monotonic() - self._ready_s[server] > _WELL_AFTER_S:
            self._num_tries[server] = 0
        num_tries, max_tries = self._num_tries[server], self._launched.max_restarts
        if num_tries >= max_tries:
            server.mark_gone(
                f"{why}, after {num_tries} restarts in succession (engine.launch.max_restarts="
                f"{max_tries}); {process.last_words()}"
            )
            await self._router.look_again()
            return
        server.mark_starting(why)
        await self._router.look_again()
        pause_s = min(self._first_pause_s * 2**num_tries, _MAX_PAUSE_S)
        logger.warning(
            "%s is started again in %g s (%d of %d)",
            server.address,
            pause_s,
            num_tries + 1,
            max_tries,
        )
        await asyncio.sleep(pause_s)
        self._num_tries[server] += 1
        self._ready_s[server] = math.inf
        try:
            self._launched.start_again(server.address)
        except OSError as error:
            logger.warning("%s cannot be started: %s", server.address, error)
            return
        await self._until_ready(process)
        self._ready_s[server] = time.monotonic()

    async def _until_ready(self, process: ServerProcess) -> None:
        """Or until it has ended, by itself or because it takes too long."""
        limit_s = self._launched.ready_timeout_s
        start_s = time.monotonic()
        while process.exit_code is None and not await asyncio.to_thread(process.is_ready):
            if limit_s is not None and time.monotonic() - start_s > limit_s:
                logger.warning("%s was not ready after %g s", process.address, limit_s)
                process.ask_to_end()
                await asyncio.to_thread(process.wait_ended)
            await asyncio.sleep(_POLL_S)
