"""What is printed after each step: one line, or words and a table of everything.

The table has four key/value pairs a row, filled column by column.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from agent_rl.stats.sink import Commit

_PAIRS = 4
_NO_LIMIT = 10_000
"""Width of what is not a terminal: a log file wraps nothing."""


def plain_console() -> Console:
    """Standard output, where text is printed as it is; only a terminal breaks lines."""
    is_terminal = Console().is_terminal
    return Console(
        width=None if is_terminal else _NO_LIMIT, markup=False, emoji=False, highlight=False
    )


class LineSink:
    name = "console"

    def open(self, next_step: int) -> None:
        self._console = plain_console()

    def log(self, commit: Commit) -> None:
        self._console.print(commit.line or commit.header, soft_wrap=True)

    def close(self) -> None:
        """Nothing is held back."""


class TableSink:
    name = "console"

    def open(self, next_step: int) -> None:
        self._console = plain_console()
        self._box = box.SQUARE if self._console.is_terminal else box.ASCII2

    def log(self, commit: Commit) -> None:
        for line in filter(None, (commit.header, commit.summary)):
            self._console.print(line, soft_wrap=True)
        table = Table(show_header=False, show_lines=True, box=self._box)
        for _ in range(_PAIRS):
            table.add_column(overflow="fold")
            table.add_column(justify="right", no_wrap=True)
        for row in table_rows(commit.metrics):
            table.add_row(*row)
        self._console.print(table)

    def close(self) -> None:
        """Nothing is held back."""


def table_rows(metrics: Mapping[str, float]) -> list[list[str]]:
    """Five metrics a..e make two rows: a c e - and b d - -."""
    cells = [(key, f"{value:.4e}") for key, value in metrics.items()]
    num_rows = -(-len(cells) // _PAIRS)
    return [[text for cell in cells[row::num_rows] for text in cell] for row in range(num_rows)]
