"""LoopWatch: notices code of the user's that blocks the event loop of all episodes.

A thread asks the loop to answer, twice a second. While no answer comes, it looks where the loop's
thread stands: in a line of the user's, such as ``time.sleep(3)``, one warning says so. A loop that
is late for other reasons (a busy machine) is none of its business.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

from agent_rl.foreign_error import as_place, users_frame

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_HELD_S = 1.0


class LoopWatch:
    """
    Args:
        post: runs a function in the loop's thread soon.
    """

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._post = post
        self._clock = clock
        self._loops_thread: int | None = None
        self._asked_at_s: float | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="agent-rl-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def tick(self) -> None:
        """Ask, or look for what keeps the loop from answering."""
        asked_at_s = self._asked_at_s
        if asked_at_s is None:
            self._asked_at_s = self._clock()
            self._post(self._answer)
        elif self._clock() - asked_at_s >= _HELD_S:
            self._warn(self._clock() - asked_at_s)

    def _answer(self) -> None:
        self._loops_thread = threading.get_ident()
        self._asked_at_s = None

    def _warn(self, held_s: float) -> None:
        stack = sys._current_frames().get(self._loops_thread or 0)
        frame = None if stack is None else users_frame(traceback.extract_stack(stack))
        if frame is None:
            return
        self._ended.set()
        logger.warning(
            "for %.1f s all episodes have been waiting for %s: it blocks their event loop; put it "
            "into `await asyncio.to_thread(...)`, or set rollout.agent.mode=subproc (said once)",
            held_s,
            as_place(frame),
        )

    def _run(self) -> None:
        self.tick()
        while not self._ended.wait(_TICK_S):
            self.tick()
