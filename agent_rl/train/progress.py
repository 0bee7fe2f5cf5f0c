"""What a run tells the person who started it: lines, and on a terminal a bar below them.

Elsewhere than on a terminal what takes long says every ``line_every_s`` how far it is. A quiet run
says nothing. It knows no metrics: what a step was is a text to it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from agent_rl.rollout.lane import Counts
from agent_rl.stats.console import plain_console

_MINUTE_S, _HOUR_S = 60.0, 3600.0


class GroupCount:
    """``5/8 groups``, and ``, 3 without a result`` where some failed or were rejected meanwhile.

    Args:
        counts: the collector's, asked for from other threads.
        num_before: of the accepted groups those that are of earlier batches.
    """

    def __init__(self, counts: Callable[[], Counts], total: int, *, num_before: int) -> None:
        self._counts = counts
        self._total = total
        self._num_before = num_before
        self._fruitless_before = counts().fruitless

    def __str__(self) -> str:
        counts = self._counts()
        done = min(counts.accepted - self._num_before, self._total)
        fruitless = counts.fruitless - self._fruitless_before
        text = f"{done}/{self._total} groups"
        return f"{text}, {fruitless} without a result" if fruitless else text


class RunProgress:
    """
    Args:
        is_quiet: nothing is printed.
        is_timed: the steps have an end that can be foretold; else there is no bar.
    """

    def __init__(self, *, is_quiet: bool, is_timed: bool, line_every_s: float = 30.0) -> None:
        self._console = plain_console()
        self._is_quiet = is_quiet
        self._is_timed = is_timed
        self._line_every_s = line_every_s
        self._num_steps = self._num_done = self._num_before = 0
        self._start_s, self._is_running = time.monotonic(), False
        self._doing: tuple[str, GroupCount | None] = ("starting", None)
        self._has_bar = is_timed and not is_quiet and self._console.is_terminal
        self._bar = Progress(
            SpinnerColumn(),
            _Doing(self._describe),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._has_bar,
        )
        self._task = self._bar.add_task("steps", total=None)

    def say(self, text: str) -> None:
        """Print a line."""
        if not self._is_quiet:
            self._console.print(text, soft_wrap=True)

    def begin(self, num_steps: int, *, num_done: int) -> None:
        """The number of steps is known, and those of an earlier process."""
        self._num_steps, self._num_done, self._num_before = num_steps, num_done, num_done
        self._bar.update(self._task, total=num_steps, completed=num_done)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The steps are done inside."""
        self._start_s, self._is_running = time.monotonic(), True
        try:
            with self._shown():
                yield
        finally:
            self._is_running = False

    @contextmanager
    def phase(self, name: str, count: GroupCount | None = None) -> Iterator[None]:
        """Name what goes on inside, and how far it is."""
        before, self._doing = self._doing, (name, count)
        try:
            with self._shown(), self._lines():
                yield
        finally:
            self._doing = before

    def advance(self) -> None:
        """One step is done."""
        self._num_done += 1
        self._bar.advance(self._task)

    def step_line(self, text: str) -> str:
        """``step 3/14: text; about 4 min left``, of the step that is about to be done."""
        line = f"step {self._num_done + 1}/{self._num_steps}: {text}"
        done = self._num_done + 1 - self._num_before
        left_s = (time.monotonic() - self._start_s) / done * (self._num_steps - self._num_done - 1)
        return f"{line}; about {duration(left_s)} left" if self._is_timed and left_s > 0 else line

    @contextmanager
    def _shown(self) -> Iterator[None]:
        if self._bar.live.is_started:
            yield
        else:
            with self._bar:
                yield

    @contextmanager
    def _lines(self) -> Iterator[None]:
        """Where there is no bar: a line now and then, from a thread that ends with the block."""
        if self._has_bar or self._is_quiet or not self._is_timed or self._doing[1] is None:
            yield
            return
        start_s, is_over = time.monotonic(), threading.Event()

        def tell() -> None:
            while not is_over.wait(self._line_every_s):
                self.say(f"{self._describe()}, {duration(time.monotonic() - start_s)}")

        thread = threading.Thread(target=tell, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _describe(self) -> str:
        """``step 3: rollout 5/8 groups``; before and after the steps ``eval 5/8 groups``"""
        name, count = self._doing
        step = f"step {self._num_done + 1}: " if self._is_running else ""
        return f"{step}{name}" + (f" {count}" if count is not None else "")


class _Doing(ProgressColumn):
    """What goes on, asked for at each refresh."""

    def __init__(self, describe: Callable[[], str]) -> None:
        super().__init__()
        self._describe = describe

    def render(self, task: Task) -> Text:
        return Text(self._describe())


def duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3.5 h``"""
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.0f} s"
    return (
        f"{seconds / _MINUTE_S:.0f} min" if seconds < 2 * _HOUR_S else f"{seconds / _HOUR_S:.1f} h"
    )
