"""Samples that wait, on disk: what is found again, what is not written, and how large it grows."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from agent_rl import stats_tracker
from agent_rl.config import OnlineConfig, PrivacyConfig
from agent_rl.errors import JournalError
from agent_rl.online import sample_journal
from agent_rl.online.learner import OnlineLearner
from agent_rl.online.methods import Lesson
from agent_rl.online.sample import OnlineSample
from agent_rl.online.sample_journal import SampleJournal
from agent_rl.online.teacher import TeacherScores
from agent_rl.online.verdict import JudgedTurn, Verdict
from agent_rl.record.journal import Journal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DAY_S = 86_400.0


class Pleased:
    async def judge(self, turn: JudgedTurn) -> Verdict:
        return Verdict(score=1.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "samples.journal"


@pytest.fixture
def journal(path: Path, tokenizer: PreTrainedTokenizerBase) -> Callable[..., SampleJournal]:
    def make(privacy: PrivacyConfig | None = None, **fields: object) -> SampleJournal:
        fields = {"model": "m", "max_trained": 100, **fields}
        return SampleJournal(path, privacy or PrivacyConfig(), tokenizer, **fields)

    return make


@pytest.fixture
def learn(journal: Callable[..., SampleJournal]) -> Callable[..., OnlineLearner]:
    """A learner as a process that starts at this version makes it."""

    def make(version: int = 0, *, max_staleness: int | None = None, **fields: object):
        learner = OnlineLearner(
            OnlineConfig(max_staleness=max_staleness), judge=Pleased(), journal=journal(**fields)
        )
        learner.restore(version)
        return learner

    return make


async def chat(talk: Callable, learner: OnlineLearner, num_turns: int, **options: object) -> None:
    """That many judged turns of a session, and an open one."""
    one = talk(learner, **options)
    for number in range(num_turns + 1):
        one.say(f"question {number}", f"answer {number}")
        await learner.judged()


def ids(learner: OnlineLearner, count: int) -> list[list[int]]:
    assert learner.num_waiting == count
    return [row["input_ids"][0].tolist() for row in learner.drain(count)] if count else []


async def test_what_waits_is_found_again_exactly(talk: Callable, learn: Callable) -> None:
    killed = learn()
    await chat(talk, killed, 3)
    rows = killed.drain(3)
    await killed.close()
    after = learn()
    assert after.num_waiting == 3
    for row, found in zip(rows, after.drain(3), strict=True):
        assert row.keys() == found.keys()
        assert found["rollout_group"] == row["rollout_group"]
        for key in row.keys() - {"rollout_group"}:
            assert row[key].dtype == found[key].dtype
            assert torch.equal(row[key], found[key]), key
    await after.close()


def samples_in(path: Path) -> list[dict]:
    return [entry for entry in Journal.read(path) if "sample" in entry]


def replace(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def content(path: Path) -> bytes:
    return path.read_bytes()


async def waiting(learn: Callable, version: int = 0, **options: object) -> int:
    """How many a process that starts at this version finds; it is killed at once."""
    learner = learn(version, **options)
    count = learner.num_waiting
    await learner.close()
    return count


async def test_each_sample_is_once_in_the_weights_that_are_gone_on_from(
    talk: Callable, learn: Callable
) -> None:
    """Version 1 learnt the first two and 2 the third: a restart finds what its version has not."""
    for version, found in [(2, 1), (1, 2), (0, 4)]:
        learner = learn()
        await learner.forget(session_id="s1")
        await chat(talk, learner, 4)
        learner.drain(2)
        learner.note_trained(1)
        learner.drain(1)
        learner.note_trained(2)
        learner.drain(1)  # in no weights yet
        await learner.close()
        assert await waiting(learn, version) == found
        assert await waiting(learn, version) == found, "nothing was learnt in between"


async def test_what_saved_weights_have_learnt_leaves_the_disk(
    talk: Callable, learn: Callable, path: Path
) -> None:
    learner = learn()
    await chat(talk, learner, 3)
    for version in (1, 2):
        learner.drain(1)
        learner.note_trained(version)
    learner.note_saved(1)
    await learner.close()
    assert [entry["sample"] for entry in samples_in(path)] == [1, 2]
    assert await waiting(learn, 0) == 2, "the first is gone, whatever is gone on from"


async def test_a_torn_last_line_costs_only_itself(
    talk: Callable, learn: Callable, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = learn()
    await chat(talk, learner, 3)
    await learner.close()
    os.truncate(path, len(content(path)) - 1)
    assert await waiting(learn) == 2
    assert "torn entry" in caplog.text


async def test_a_journal_that_cannot_be_used_is_an_error_and_stays(
    talk: Callable, learn: Callable, path: Path
) -> None:
    """Damaged, of another model, of something else, or in use: nothing is lost without a word."""
    learner = learn()
    await chat(talk, learner, 2)
    with pytest.raises(JournalError, match="another writer has"):
        learn()
    await learner.close()
    whole = content(path)
    with pytest.raises(JournalError, match="of the model m, not other; move the file away"):
        learn(model="other")
    assert content(path) == whole
    replace(path, b"x" + whole)
    with pytest.raises(JournalError, match="damaged at byte 0"):
        learn()
    replace(path, b"")
    with Journal(path) as foreign:
        foreign.append({"kind": "turn"})
    whole = content(path)
    with pytest.raises(JournalError, match="no sample's: KeyError"):
        learn()
    assert content(path) == whole


async def test_what_would_be_redacted_is_not_written(
    talk: Callable, learn: Callable, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Token ids could be decoded. It waits in memory all the same, and others are written."""
    learner = learn()
    await chat(talk, learner, 1, session_id="ann@x.org", user_id="+49 30 1234567")
    secret = talk(learner, "s2")
    for text in ("mail me: bob@y.org", "good", "and more"):
        secret.say(text, "yes")
        await learner.judged()
    assert learner.num_waiting == 3
    await learner.close()
    assert caplog.text.count("is not kept on disk") == 1
    (entry,) = samples_in(path)
    assert entry["session_id"].startswith("[email]:")
    assert entry["user_ids"][0].startswith("[phone]:")
    for name in ({"session_id": "ann@x.org"}, {"user_id": "+49 30 1234567"}):
        after = learn()
        assert await after.forget(**name) == (1 if "session_id" in name else 0)
        await after.close()
    assert samples_in(path) == []


async def test_without_redaction_everything_is_written(talk: Callable, learn: Callable) -> None:
    learner = learn(privacy=PrivacyConfig(redact=False))
    await chat(talk, learner, 1, session_id="ann@x.org")
    await learner.close()
    assert await waiting(learn) == 1


async def test_a_teachers_likeliest_tokens_are_looked_at_too(
    talk: Callable, learn: Callable, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A hint may hold what the conversation does not."""
    learner = learn()
    one = talk(learner)
    one.say("hello", "one")
    interaction = next(iter(one.session.cache.values()))
    told = tokenizer.encode("bob@example.org")
    top = tuple(((1, -0.1), (token, -2.0)) for token in told)
    scores = TeacherScores(logprobs=(-0.1,) * len(told), top=top)
    journal = learner._waiting._journal
    for teacher in (scores, None):
        lesson = Lesson(reward=None, teacher=teacher)
        sample = OnlineSample(
            index=1, session_id="s", user_ids=set(), interaction=interaction, lesson=lesson
        )
        assert journal._would_redact(sample) == (teacher is not None)
    await learner.close()


async def test_old_samples_and_too_many_leave_the_disk(
    talk: Callable, learn: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learn()
    await chat(talk, learner, 5)
    await learner.close()
    assert await waiting(learn, privacy=PrivacyConfig(keep_rows=3)) == 3
    assert await waiting(learn, privacy=PrivacyConfig(keep_days=1.0)) == 3
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * DAY_S)
    assert await waiting(learn, privacy=PrivacyConfig(keep_days=1.0)) == 0
    monkeypatch.undo()
    assert await waiting(learn) == 0


async def test_forgotten_samples_leave_the_disk_at_once(
    talk: Callable, learn: Callable, path: Path
) -> None:
    """Also those that were drained, and by a name that came after they were written."""
    learner = learn()
    await chat(talk, learner, 2, session_id="a", user_id="ann")
    bob = talk(learner, "b")
    for name in (None, None, "bob"):
        bob.user_id = name
        bob.say("hello", "yes")
        await learner.judged()
    learner.drain(3)
    await learner.forget(user_id="bob")
    assert [entry["session_id"] for entry in samples_in(path)] == ["a", "a"]
    await learner.forget(session_id="a")
    assert samples_in(path) == []
    assert os.stat(path).st_mode & 0o077 == 0
    await learner.close()


async def test_the_file_stays_small_while_its_samples_are_learnt(
    talk: Callable, learn: Callable, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_journal, "_FEW_LINES", 4)
    learner = learn(max_trained=3)
    sizes = []
    for version in range(1, 13):
        await chat(talk, learner, 2, session_id=f"s{version}")
        learner.drain(2)
        learner.note_trained(version)
        sizes.append(len(content(path).splitlines()))
    assert max(sizes) <= 16
    await learner.close()
    assert await waiting(learn) == 3, "of those whose weights are not saved, the newest"


async def test_a_full_disk_stops_nothing(
    talk: Callable,
    learn: Callable,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is judged meanwhile is not on disk; that something was learnt is noted later."""

    def fail(file: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    learner = learn()
    await chat(talk, learner, 1, session_id="a")
    learner._waiting._journal._disk.now(lambda: None)  # it is written
    learner.drain(1)
    with monkeypatch.context() as full:
        full.setattr("agent_rl.record.journal._write", fail)
        await chat(talk, learner, 1, session_id="b")
        learner.note_trained(1)
    assert "may be learnt twice" in caplog.text
    assert caplog.text.count("not everything is written") == 1
    await chat(talk, learner, 1, session_id="c")
    await learner.close()
    after = learn(1)
    assert [sample.session_id for sample in after._waiting.queue.drain(1)] == ["c"]
    assert after.num_waiting == 0
    await after.close()


async def test_samples_that_are_too_old_are_dropped_and_counted(
    talk: Callable, learn: Callable, path: Path
) -> None:
    """The answers are of version 0. A turn that trains nothing has no age."""
    learner = learn(max_staleness=2)
    await chat(talk, learner, 2)
    learner.on_session_end("s1")  # a third, context only
    assert learner.num_waiting == 3
    stats_tracker.get("online").export()
    (row,) = learner.drain(1, version=3)
    assert not row["loss_mask"].any()
    assert stats_tracker.get("online").export()["online/dropped_stale__count"] == 2
    await learner.close()
    assert [entry["sample"] for entry in samples_in(path)] == [2]
    await chat(talk, learner_at := learn(3, max_staleness=3), 1)
    assert len(learner_at.drain(1, version=3)) == 1
    await learner_at.close()
