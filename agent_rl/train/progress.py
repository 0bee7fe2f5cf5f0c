"""The progress bar of a run: which step, and what it is doing. Shown on terminals only."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class RunProgress:
    """A bar below everything else that is printed; it goes away at the end."""

    def __init__(self, num_steps: int, *, num_done: int = 0, is_shown: bool = True) -> None:
        console = Console()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (is_shown and console.is_terminal),
        )
        self._task = self._bar.add_task("starting", total=num_steps, completed=num_done)

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def show(self, phase: str) -> None:
        """Name what is going on."""
        self._bar.update(self._task, description=phase)

    def advance(self) -> None:
        """One step is done."""
        self._bar.advance(self._task)
