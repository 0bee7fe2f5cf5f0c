"""The guards: a sink that raises, fills the disk or hangs costs its own records only."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest

from agent_rl.stats import sink as sink_module
from agent_rl.stats.sink import BackgroundSink, Commit, GuardedSink


class Recorder:
    """A sink that keeps the steps; ``misbehave(call, number)`` may raise or wait."""

    name = "recorder"

    def __init__(self, misbehave: Callable[[str, int], None] = lambda call, number: None) -> None:
        self.steps: list[int] = []
        self.opened_at: list[int] = []
        self.num_closed = 0
        self._misbehave = misbehave
        self._calls = {"open": 0, "log": 0, "close": 0}

    def _call(self, call: str) -> None:
        self._calls[call] += 1
        self._misbehave(call, self._calls[call])

    def open(self, next_step: int) -> None:
        self._call("open")
        self.opened_at.append(next_step)

    def log(self, commit: Commit) -> None:
        self._call("log")
        self.steps.append(commit.step)

    def close(self) -> None:
        self.num_closed += 1
        self._call("close")


def commit(step: int) -> Commit:
    return Commit(step=step, epoch=0, epoch_step=step, global_step=step, header="", metrics={})


def raising(call: str, *numbers: int) -> Callable[[str, int], None]:
    def misbehave(actual: str, number: int) -> None:
        if actual == call and number in numbers:
            raise OSError(28, "No space left on device")

    return misbehave


def finish(sink: GuardedSink | BackgroundSink, timeout_s: float = 30.0) -> None:
    sink.request_close()
    sink.join(time.monotonic() + timeout_s)


@pytest.fixture(params=[GuardedSink, BackgroundSink])
def guard(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> type[GuardedSink] | type[BackgroundSink]:
    monkeypatch.setattr(sink_module, "_OPEN_RETRY_DELAYS_S", (0.0, 0.0))
    return request.param  # type: ignore[no-any-return]


def test_everything_arrives_in_order(guard: type[GuardedSink] | type[BackgroundSink]) -> None:
    recorder = Recorder()
    sink = guard(recorder)
    for step in range(5, 9):
        sink.log(commit(step))
    finish(sink)
    finish(sink)
    assert (recorder.opened_at, recorder.steps) == ([5], [5, 6, 7, 8])
    assert recorder.num_closed == 1


def test_log_failures_are_reported_once(
    guard: type[GuardedSink] | type[BackgroundSink], caplog: pytest.LogCaptureFixture
) -> None:
    """Case B159: every third call raises; the others get through."""
    recorder = Recorder(raising("log", 3, 6, 9))
    sink = guard(recorder)
    with caplog.at_level(logging.WARNING):
        for step in range(9):
            sink.log(commit(step))
        finish(sink)
    assert recorder.steps == [0, 1, 3, 4, 6, 7]
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "metrics sink recorder failed (OSError: [Errno 28] No space left on device)"
    )


def test_open_and_close_failures(
    guard: type[GuardedSink] | type[BackgroundSink], caplog: pytest.LogCaptureFixture
) -> None:
    """Case B159: a sink that never opens is left alone; one that cannot close is reported."""
    never = Recorder(raising("open", *range(10)))
    bad_end = Recorder(raising("close", 1))
    with caplog.at_level(logging.WARNING):
        for recorder in (never, bad_end):
            sink = guard(recorder)
            sink.log(commit(0))
            sink.log(commit(1))
            finish(sink)
    assert (never.steps, never.num_closed, bad_end.steps) == ([], 0, [0, 1])
    assert len(caplog.records) == 2


def test_a_transient_open_failure_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case B159: the service answers at the third try."""
    monkeypatch.setattr(sink_module, "_OPEN_RETRY_DELAYS_S", (0.0, 0.0))
    recorder = Recorder(raising("open", 1, 2))
    sink = BackgroundSink(recorder)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            sink.log(commit(step))
        finish(sink)
    assert (recorder.opened_at, recorder.steps, caplog.records) == ([0], [0, 1, 2], [])


@pytest.mark.parametrize("call", ["open", "log", "close"])
def test_a_hanging_sink_blocks_neither_steps_nor_the_end(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case B159: it would hang for ever; the queue has a limit, and so has the wait at the end."""
    monkeypatch.setattr(sink_module, "_MAX_WAITING", 5)
    release = threading.Event()

    def hang(actual: str, number: int) -> None:
        if actual == call:
            release.wait()

    sink = BackgroundSink(Recorder(hang))
    with caplog.at_level(logging.WARNING):
        for step in range(20 if call != "close" else 5):
            sink.log(commit(step))
        finish(sink, timeout_s=0.05)
    texts = [record.getMessage() for record in caplog.records]
    if call != "close":
        assert texts.pop(0).startswith("metrics sink recorder is 5 steps behind")
    assert [text.partition(";")[0] for text in texts] == [
        "metrics sink recorder did not finish in stats_logger.close_timeout_s"
    ]
    release.set()
    finish(sink)
