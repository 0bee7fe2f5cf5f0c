"""The examples are scripts in a folder; tests import them by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_rl.stats import tracker as stats_tracker

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples" / "frameworks"))


@pytest.fixture(autouse=True)
def fresh_stats() -> Iterator[None]:
    stats_tracker.export_all()
    yield
    stats_tracker.export_all()
