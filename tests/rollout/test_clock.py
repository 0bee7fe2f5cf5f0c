from __future__ import annotations

import time

import pytest

from agent_rl.rollout.clock import PausableClock


def test_it_stands_still_while_stopped(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = PausableClock()
    start = clock.now()
    now = 103.0
    clock.stop()
    clock.stop()
    now = 150.0
    assert clock.now() - start == pytest.approx(3.0)
    clock.go()
    clock.go()
    now = 152.0
    assert clock.now() - start == pytest.approx(5.0)
