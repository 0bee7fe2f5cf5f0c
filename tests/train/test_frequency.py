from __future__ import annotations

from agent_rl.config import StepsConfig
from agent_rl.train.frequency import Frequency


def test_never_due_without_limits() -> None:
    frequency = Frequency(StepsConfig(), steps_per_epoch=1)
    assert not any(frequency.is_due(step) for step in range(1, 6))


def test_whichever_is_first_and_counts_start_again() -> None:
    frequency = Frequency(StepsConfig(freq_steps=3, freq_epochs=1), steps_per_epoch=4)
    due = [frequency.is_due(step) for step in range(1, 8)]
    assert due == [False, False, True, True, False, False, True]


def test_counts_go_on_after_a_restart() -> None:
    config = StepsConfig(freq_steps=3, freq_secs=1e9)
    first, resumed = (Frequency(config, steps_per_epoch=9) for _ in range(2))
    assert not first.is_due(1)
    state = first.state_dict()
    assert (state["steps"], state["epochs"]) == (1, 0)
    resumed.load_state_dict(state | {"elapsed_s": 2e9})
    assert resumed.is_due(2)  # the seconds of both processes count
    resumed.load_state_dict(state)
    assert [resumed.is_due(step) for step in (2, 3)] == [False, True]
