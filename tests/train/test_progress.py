"""What a run prints while it works; not on a terminal, as in a log file."""

from __future__ import annotations

import threading

import pytest

from agent_rl.rollout.lane import Counts
from agent_rl.train.progress import GroupCount, RunProgress, duration


def test_a_quiet_run_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = RunProgress(is_quiet=True, is_timed=True, line_every_s=0.001)
    progress.begin(2, num_done=0)
    with progress.running(), progress.phase("rollout", GroupCount(Counts, 2, num_before=0)):
        progress.say("hello")
    assert capsys.readouterr().out == ""


def test_a_long_phase_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    asked = threading.Semaphore(0)

    def counts() -> Counts:
        asked.release()
        return Counts(accepted=10)

    progress = RunProgress(is_quiet=False, is_timed=True, line_every_s=0.001)
    progress.begin(5, num_done=1)
    with progress.running(), progress.phase("rollout", GroupCount(counts, 8, num_before=7)):
        asked.acquire()  # when it was made
        asked.acquire()
        asked.acquire()  # so the first line is out
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("step 2: rollout 3/8 groups, ")
    with progress.phase("eval", GroupCount(counts, 2, num_before=0)):
        asked.acquire()
        asked.acquire()
        asked.acquire()
    assert "\neval 2/2 groups, " in "\n" + capsys.readouterr().out, "before and after the steps"


def test_groups_that_come_to_nothing_are_told() -> None:
    now = Counts(accepted=4, rejected=1, failed=1)
    count = GroupCount(lambda: now, 8, num_before=3)
    assert str(count) == "1/8 groups"
    now = Counts(accepted=15, rejected=2, failed=3)
    assert str(count) == "8/8 groups, 3 without a result"


def test_a_step_has_its_number_and_what_is_left() -> None:
    progress = RunProgress(is_quiet=True, is_timed=True)
    progress.begin(2, num_done=0)
    with progress.running():
        said = progress.step_line("reward 0.5")
        assert said.startswith("step 1/2: reward 0.5; about ") and said.endswith(" left")
        progress.advance()
        assert progress.step_line("reward 1") == "step 2/2: reward 1"


@pytest.mark.parametrize(
    ("seconds", "said"), [(45.4, "45 s"), (119.0, "119 s"), (121.0, "2 min"), (7201.0, "2.0 h")]
)
def test_durations_are_round(seconds: float, said: str) -> None:
    assert duration(seconds) == said
