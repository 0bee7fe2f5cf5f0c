"""Which turn is judged by which message, when it is submitted, and with what mask and reward."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_rl import stats_tracker
from agent_rl.config import OnlineConfig, PrivacyConfig
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import CollectorError, ConfigError, RefusedError
from agent_rl.online import learner as learner_module
from agent_rl.online.learner import OnlineLearner
from agent_rl.online.teacher import Teacher
from agent_rl.online.turn_store import TurnStore
from agent_rl.online.verdict import JudgedTurn, Verdict
from agent_rl.record.jsonl import read_lines

SCORES = {"good": 1.0, "bad": -1.0, "so": 0.0}


class ScriptedJudge:
    """Scores by what the next message says; one with "wait" only after ``gate``."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.gate = asyncio.Event()

    async def judge(self, turn: JudgedTurn) -> Verdict:
        text = turn.next_state["content"]
        self.seen.append((turn.answer["content"], text))
        if "wait" in text:
            await self.gate.wait()
        if "raise" in text:
            raise RuntimeError("no judge today")
        word = next((word for word in SCORES if word in text), "")
        return Verdict(score=SCORES.get(word))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - of plain code, which sets no event
        await asyncio.sleep(0)


def rows(learner: OnlineLearner, count: int) -> list[tuple[int, float | None]]:
    """(trained tokens, reward) of that many samples, which must be there."""
    assert learner.num_waiting == count
    found = []
    for table in learner.drain(count) if count else []:
        reward = float(table["rewards"])
        assert table["rollout_group"].row_counts == (1,)
        assert table["rollout_group"].rewards == (None if math.isnan(reward) else reward,)
        found.append((int(table["loss_mask"].sum()), None if math.isnan(reward) else reward))
    return found


@pytest.fixture
def judge() -> ScriptedJudge:
    return ScriptedJudge()


@pytest.fixture
def learner(judge: ScriptedJudge) -> OnlineLearner:
    return OnlineLearner(judge=judge)


async def test_three_turns_as_the_time_line_has_them(
    learner: OnlineLearner, judge: ScriptedJudge, talk: Callable
) -> None:
    """Turn 1 is judged by message 2, turn 2 by message 3; the last one is context only."""
    user = talk(learner)
    user.say("hello", "one")
    assert judge.seen == []
    user.say("good", "two")
    await learner.judged()
    assert judge.seen == [("one", "good")]
    assert rows(learner, 1) == [(2, 1.0)]
    user.say("bad", "three", is_done=True)
    await learner.judged()
    assert judge.seen == [("one", "good"), ("two", "bad")]
    assert rows(learner, 2) == [(0, None), (2, -1.0)]


async def test_the_rows_are_what_was_sampled(learner: OnlineLearner, talk: Callable) -> None:
    user = talk(learner)
    user.say("hello", "one two")
    user.say("good", "three")
    await learner.judged()
    first = next(iter(user.session.cache.values()))
    (table,) = learner.drain(1)
    assert table["input_ids"][0].tolist() == list(first.tokens)
    size = first.path.num_prompt
    assert table["loss_mask"][0].tolist() == [0] * size + [1, 1, 1]
    assert table["logprobs"][0].tolist() == pytest.approx([0.0] * size + [-0.1, -0.2, -0.3])
    assert table["versions"][0].tolist() == [-1] * size + [0, 0, 0]
    assert "teacher_logprobs" not in table


async def test_the_first_turn_without_signal_is_promoted(
    learner: OnlineLearner, talk: Callable
) -> None:
    """Scores 0, +1, 0, last: mask 1 with reward 0, mask 1, mask 0, mask 0."""
    user = talk(learner)
    for text, answer in [("hi", "a"), ("so", "b"), ("good", "c"), ("so", "d")]:
        user.say(text, answer, is_done=answer == "d")
        await learner.judged()
    assert rows(learner, 4) == [(2, 0.0), (2, 1.0), (0, None), (0, 0.0)]


async def test_nothing_is_promoted_when_a_score_came_first(
    learner: OnlineLearner, judge: ScriptedJudge, talk: Callable
) -> None:
    """Turn 1 scores 0 but its judge is slower than that of turn 2."""
    user = talk(learner)
    for text, answer in [("hi", "a"), ("so wait", "b"), ("good", "c")]:
        user.say(text, answer)
    await until(lambda: learner.num_waiting == 1)
    judge.gate.set()
    await learner.judged()
    assert rows(learner, 2) == [(2, 1.0), (0, 0.0)]


@pytest.mark.parametrize("is_last_trained", [True, False])
async def test_a_session_that_ends_before_its_judge_keeps_its_counter(
    learner: OnlineLearner, judge: ScriptedJudge, talk: Callable, is_last_trained: bool
) -> None:
    """Case B181: a late score of 0 is not promoted where the session trained something before."""
    user = talk(learner)
    user.say("hi", "a")
    user.say("good" if is_last_trained else "nothing", "b")
    await learner.judged()
    user.say("so wait", "c", is_done=True)
    assert learner.num_waiting == 2
    judge.gate.set()
    await learner.judged()
    first = (2, 1.0) if is_last_trained else (0, None)
    late = (0, 0.0) if is_last_trained else (2, 0.0)
    assert rows(learner, 3) == [first, (0, None), late]


async def test_a_new_session_of_the_same_id_has_a_counter_of_its_own(
    learner: OnlineLearner, talk: Callable
) -> None:
    for _ in range(2):
        user = talk(learner)
        user.say("hi", "a")
        user.say("so", "b", is_done=True)
        await learner.judged()
    assert sorted(rows(learner, 4), key=str) == [(0, None), (0, None), (2, 0.0), (2, 0.0)]


async def test_side_turns_are_served_and_nothing_else(
    learner: OnlineLearner, judge: ScriptedJudge, talk: Callable
) -> None:
    """Case B181: a title request between two main turns judges nothing and is never judged."""
    user = talk(learner)
    user.say("hello", "one")
    title = [{"role": "system", "content": "make a title"}, *user.messages[:1]]
    user.reply(user.ask(title, turn_type="side"), "a title")
    aside = [*user.messages, {"role": "user", "content": "bad: sum this up"}]
    user.reply(user.ask(aside, turn_type="side"), "a summary")
    user.say("good", "two")
    await learner.judged()
    assert judge.seen == [("one", "good")]
    user.reply(user.ask(title, turn_type="side", is_done=True), "a title")
    assert rows(learner, 2) == [(2, 1.0), (0, None)]


async def test_two_sessions_that_interleave(
    learner: OnlineLearner, judge: ScriptedJudge, talk: Callable
) -> None:
    """Case B176: the same texts in both; each answer is judged by its own session's message."""
    one, two = talk(learner, "s1"), talk(learner, "s2")
    one.say("hello", "one")
    two.say("hello", "one")
    two.say("bad", "two")
    one.say("good", "two")
    one.say("good again", "three")
    two.say("bad again", "three")
    await learner.judged()
    assert sorted(judge.seen) == [
        ("one", "bad"), ("one", "good"), ("two", "bad again"), ("two", "good again")
    ]  # fmt: skip
    samples = learner._waiting.queue.drain(4)
    scores = {(s.session_id, s.interaction.interaction_id): s.lesson.reward for s in samples}
    assert scores == {
        ("s1", "chatcmpl-0"): 1.0,
        ("s1", "chatcmpl-1"): 1.0,
        ("s2", "chatcmpl-0"): -1.0,
        ("s2", "chatcmpl-1"): -1.0,
    }


async def test_a_turn_that_the_client_retried(
    learner: OnlineLearner, judge: ScriptedJudge, talk: Callable
) -> None:
    """Case B68: of two answers to one request the one that was gone on from is judged, once."""
    user = talk(learner)
    request = [{"role": "user", "content": "hello"}]
    lost, kept = user.ask(request), user.ask(request)
    user.reply(lost, "one")
    user.messages = [*request, user.reply(kept, "two")]
    user.say("good", "three", is_done=True)
    await learner.judged()
    assert judge.seen == [("two", "good")]
    assert sorted(rows(learner, 2), key=str) == [(0, None), (2, 1.0)]


async def test_concurrent_conversations_of_one_session(
    learner: OnlineLearner, judge: ScriptedJudge, talk: Callable
) -> None:
    """Requests are paired by their history, not by the order of arrival (cases B73, B181)."""
    user = talk(learner)
    openings = [[{"role": "user", "content": f"topic {n}"}] for n in range(3)]
    calls = [user.ask(messages) for messages in openings]
    for n in (2, 0, 1):
        openings[n].append(user.reply(calls[n], f"answer {n}"))
    for n in (1, 2, 0):
        user.ask([*openings[n], {"role": "user", "content": f"good {n}"}])
    await learner.judged()
    assert sorted(judge.seen) == [(f"answer {n}", f"good {n}") for n in range(3)]


async def test_every_order_in_which_requests_and_answers_can_meet(talk: Callable) -> None:
    """Two conversations of two turns: whatever the schedule, each answer has its own follower."""
    steps = ["a1", "A1", "a2", "b1", "B1", "b2"]  # a1: request, A1: its answer, a2: next request
    for order in itertools.permutations(steps):
        places = [order.index(step) for step in steps]
        if not (places[0] < places[1] < places[2] and places[3] < places[4] < places[5]):
            continue
        judge = ScriptedJudge()
        learner = OnlineLearner(judge=judge)
        user, calls, talks = talk(learner), {}, {"a": [], "b": []}
        for step in order:
            name = step.lower()[0]
            if step in ("A1", "B1"):
                talks[name].append(user.reply(calls[name], f"answer {name}"))
            else:
                talks[name].append({"role": "user", "content": f"good {step}"})
                calls[name] = user.ask(talks[name])
        await learner.judged()
        assert sorted(judge.seen) == [("answer a", "good a2"), ("answer b", "good b2")], order


async def test_a_user_who_goes_back_judges_an_answer_once(
    learner: OnlineLearner, judge: ScriptedJudge, talk: Callable
) -> None:
    user = talk(learner)
    user.say("hello", "one")
    before = list(user.messages)
    user.say("bad", "two")
    user.messages = before
    user.say("good", "other two")
    await learner.judged()
    assert judge.seen == [("one", "bad")]


async def test_a_rewritten_history_is_paired_with_the_newest_turn(
    learner: OnlineLearner, judge: ScriptedJudge, talk: Callable
) -> None:
    """Case B75: the client compacted the conversation; a fresh conversation pairs with nothing."""
    user = talk(learner)
    user.say("hello", "a long answer that is hardly repeated by chance")
    user.messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "a long answer, shortened"},
    ]
    user.say("good", "two")
    user.messages = []
    user.say("something else", "three")
    await learner.judged()
    assert judge.seen == [("a long answer that is hardly repeated by chance", "good")]


async def test_a_request_that_fails_judges_the_turn_before_it_once(
    learner: OnlineLearner, judge: ScriptedJudge, talk: Callable
) -> None:
    """The next state is known when the request arrives; the client's retry changes nothing."""
    user = talk(learner)
    user.say("hello", "one")
    follow_up = [*user.messages, {"role": "user", "content": "good"}]
    learner.on_answer(user.ask(follow_up), None)
    user.reply(user.ask(follow_up), "two")
    await learner.judged()
    assert judge.seen == [("one", "good")]
    assert learner.num_turns == 2


async def test_an_empty_answer_is_no_turn_but_ends_the_session(
    learner: OnlineLearner, talk: Callable
) -> None:
    user = talk(learner)
    user.say("hello", "one")
    user.say("good", "", is_done=True)
    await learner.judged()
    assert rows(learner, 1) == [(2, 1.0)]
    assert learner.num_turns == 1


async def test_a_session_may_end_without_a_turn(learner: OnlineLearner, talk: Callable) -> None:
    """Case B179: no row, no crash; an unknown session's end is nothing."""
    learner.on_session_end("never seen")
    user = talk(learner)
    learner.on_answer(user.ask([{"role": "user", "content": "hello"}]), None)
    learner.on_session_end("s1")
    assert rows(learner, 0) == []


async def test_an_answer_that_comes_after_its_session_ended(
    learner: OnlineLearner, talk: Callable
) -> None:
    user = talk(learner)
    call = user.ask([{"role": "user", "content": "hello"}])
    learner.on_session_end("s1")
    user.reply(call, "late")
    assert rows(learner, 1) == [(0, None)]
    assert learner._sessions == {}


async def test_an_answer_recorded_before_a_restart_is_a_turn(talk: Callable) -> None:
    """The gateway restored the session; this learner has never heard of it."""
    user = talk(OnlineLearner(judge=ScriptedJudge()))
    user.say("hello", "one")
    judge = ScriptedJudge()
    learner = user.listener = OnlineLearner(judge=judge)
    user.say("good", "two")
    await learner.judged()
    assert judge.seen == [("one", "good")]
    assert rows(learner, 1) == [(2, 1.0)]


async def test_a_judge_that_raises_is_a_score_of_zero(
    learner: OnlineLearner, talk: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    user = talk(learner)
    for text, answer in [("hi", "a"), ("raise", "b"), ("raise", "c")]:
        user.say(text, answer)
        await learner.judged()
    assert rows(learner, 2) == [(2, 0.0), (0, 0.0)]
    assert "no judge today" in caplog.text


@pytest.mark.parametrize("is_own_task", [False, True])
async def test_a_judge_that_is_cancelled_inside_is_a_score_of_zero(
    talk: Callable, is_own_task: bool
) -> None:
    """Case B131: a CancelledError that nobody asked for loses no turn."""

    class Cancelled:
        async def judge(self, turn: JudgedTurn) -> Verdict:
            if is_own_task:
                asyncio.current_task().cancel()
                await asyncio.sleep(0)
            raise asyncio.CancelledError

    learner = OnlineLearner(judge=Cancelled())
    user = talk(learner)
    user.say("hello", "one")
    user.say("good", "two")
    await learner.judged()
    assert rows(learner, 1) == [(2, 0.0)]


async def test_what_a_judge_writes_has_an_end(talk: Callable, tmp_path: Path) -> None:
    """The end of an evaluation is stored; a hint without end is none."""

    class Verbose:
        async def judge(self, turn: JudgedTurn) -> Verdict:
            return Verdict(score=1.0, evaluation="x" * 1_000_000 + "end")

        async def hint(self, turn: JudgedTurn) -> str:
            return "y" * 1_000_000

    store = TurnStore(tmp_path / "turns.jsonl", PrivacyConfig())
    learner = OnlineLearner(
        OnlineConfig(method="combine"),
        judge=Verbose(),
        hints=Verbose(),
        teacher=Teacher(ScriptedEngine([])),
        store=store,
    )
    user = talk(learner)
    user.say("hello", "one")
    user.say("good", "two")
    await learner.judged()
    assert rows(learner, 1) == [(2, 1.0)]
    await learner.close()
    row = next(row for _, row in read_lines(store.path))
    assert len(row["evaluation"]) == 20_000 and row["evaluation"].endswith("end")
    assert row["hint"] is None


@pytest.mark.parametrize("returned", [1.0, None, "good"])
async def test_a_judge_that_returns_no_verdict_is_a_score_of_zero(
    talk: Callable, caplog: pytest.LogCaptureFixture, returned: object
) -> None:
    class Wrong:
        async def judge(self, turn: JudgedTurn) -> object:
            return returned

    learner = OnlineLearner(judge=Wrong())
    user = talk(learner)
    user.say("hello", "one")
    user.say("good", "two")
    await learner.judged()
    assert rows(learner, 1) == [(2, 0.0)]
    assert ("is no Verdict" in caplog.text) == (returned is not None)


@pytest.mark.parametrize("score", [math.nan, math.inf, "1"])
def test_a_score_is_a_finite_number(score: object) -> None:
    with pytest.raises(ValueError):
        Verdict(score=score)


async def test_a_fault_while_settling_reaches_the_trainer(
    learner: OnlineLearner, talk: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B131: what a task raises is not swallowed; nobody waits for a sample in vain."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(learner, "_settle", broken)
    user = talk(learner)
    user.say("hello", "one")
    user.say("good", "two")
    await learner.judged()
    with pytest.raises(CollectorError) as failure:
        learner.drain(1)
    assert isinstance(failure.value.__cause__, ZeroDivisionError)


async def test_gate_refuses_new_requests_and_lets_running_ones_finish(
    judge: ScriptedJudge, talk: Callable
) -> None:
    """Case B134: with update_mode live, the default, nothing is refused."""
    for mode in ("live", "gate"):
        learner = OnlineLearner(OnlineConfig(update_mode=mode), judge=judge)
        user = talk(learner)
        call = user.ask([{"role": "user", "content": "hello"}])
        with learner.updating():
            user.reply(call, "one")
            if mode == "live":
                user.ask([{"role": "user", "content": "hello"}])
            else:
                with pytest.raises(RefusedError) as refusal:
                    user.ask([{"role": "user", "content": "hello"}])
                assert (refusal.value.status, refusal.value.retry_after_s) == (503, 1)
        user.ask([{"role": "user", "content": "hello"}])
        learner.on_session_end("s1")
        assert rows(learner, 1) == [(0, None)]


async def test_a_trainer_that_falls_behind_holds_up_judges_and_no_user(
    judge: ScriptedJudge, talk: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    learner = OnlineLearner(OnlineConfig(queue_size=2), judge=judge)
    users = [talk(learner, f"s{n}") for n in range(6)]
    for user in users:
        user.say("hello", "one")
    for user in users:  # two are being judged; the others would wait behind them
        user.say("good", "two")
    assert caplog.text.count("not learnt from") == 1
    assert stats_tracker.get("online").export()["online/shed__count"] == 4
    await learner.judged()
    assert learner.num_waiting == 2
    for user in users[:2]:
        user.say("good", "three")
    assert (learner.num_waiting, learner.num_judging) == (2, 2)
    learner.drain(1)
    await until(lambda: learner.num_judging == 1)
    learner.drain(1)
    await learner.judged()
    assert learner.num_waiting == 2


async def test_forgetting_a_user(judge: ScriptedJudge, talk: Callable, tmp_path: Path) -> None:
    """What waits, what is judged and what is stored of one user is gone, that of others stays."""
    store = TurnStore(tmp_path / "turns.jsonl", PrivacyConfig())
    learner = OnlineLearner(judge=judge, store=store)
    ann, bob = talk(learner, "s1", user_id="ann"), talk(learner, "s2", user_id="bob")
    for user in (ann, bob):
        user.say("hello", "one")
        user.say("good", "two")
    await learner.judged()
    ann.say("good wait", "three")
    late = ann.ask([*ann.messages, {"role": "user", "content": "good"}])
    assert await learner.forget(user_id="ann") == 2
    judge.gate.set()
    ann.reply(late, "four")
    learner.on_session_end("s1")
    await learner.judged()
    assert [set(sample.user_ids) for sample in learner._waiting.queue.drain(1)] == [{"bob"}]
    assert learner.num_waiting == 0
    await learner.close()
    assert [row["user_ids"] for _, row in read_lines(store.path)] == [["bob"], ["bob"]]


async def test_a_session_belongs_to_all_whom_its_calls_name(
    judge: ScriptedJudge, talk: Callable, tmp_path: Path
) -> None:
    """The first call names nobody; what waits is found by a name that came later."""
    store = TurnStore(tmp_path / "turns.jsonl", PrivacyConfig())
    learner = OnlineLearner(judge=judge, store=store)
    user = talk(learner)
    user.say("hello", "one")
    user.say("good", "two")
    await learner.judged()
    for name in ("ann", "bob"):
        user.user_id = name
        user.say("good", "three")
        await learner.judged()
    await asyncio.to_thread(store.close)
    assert [row["user_ids"] for _, row in read_lines(store.path)] == [[], ["ann"], ["ann", "bob"]]
    assert learner._waiting.queue.remove(lambda sample: "ann" in sample.user_ids) == 3


async def test_closing_ends_judges_and_drain(
    judge: ScriptedJudge, talk: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was settled can still be drained; the rest is stored, without a score."""
    store = TurnStore(tmp_path / "turns.jsonl", PrivacyConfig())
    learner = OnlineLearner(OnlineConfig(queue_size=2), judge=judge, store=store)
    user = talk(learner)
    user.say("hi", "one")
    user.say("good", "two")
    await learner.judged()
    user.say("wait", "three")
    await until(lambda: len(judge.seen) == 2)
    user.say("wait", "four")
    waiting = asyncio.create_task(asyncio.to_thread(learner.drain, 2))
    assert (learner.num_waiting, learner.num_judging) == (1, 2)  # the second waits for a place
    await learner.close()
    assert learner.num_judging == 0
    with pytest.raises(CollectorError, match="1 of 2 are left"):
        await waiting
    assert rows(learner, 1) == [(2, 1.0)]
    stored = {row["answer"]: row["score"] for _, row in read_lines(store.path)}
    assert stored == {"one": 1.0, "two": None, "three": None, "four": None}
    assert "1 samples wait that no trainer has taken" in caplog.text


async def test_a_judge_that_does_not_end_is_not_waited_for(
    talk: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(learner_module, "_CLOSE_S", 0.01)
    begun, gate = asyncio.Event(), asyncio.Event()

    class Stubborn:
        async def judge(self, turn: JudgedTurn) -> Verdict:
            begun.set()
            while not gate.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await gate.wait()
            return Verdict(score=1.0)

    learner = OnlineLearner(judge=Stubborn())
    user = talk(learner)
    user.say("hello", "one")
    user.say("good", "two")
    await begun.wait()
    await learner.close()
    assert "1 judges did not end" in caplog.text
    gate.set()
    await learner.judged()


async def test_hints_and_teacher_make_distilled_rows(talk: Callable) -> None:
    """combine: score and teacher; only one of them; neither (no sample). Ids are as sampled."""

    class Hints:
        async def hint(self, turn: JudgedTurn) -> str | None:
            return "Be brief, please." if "hint" in turn.next_state["content"] else None

    engine = ScriptedEngine([])
    learner = OnlineLearner(
        OnlineConfig(method="combine"),
        judge=ScriptedJudge(),
        hints=Hints(),
        teacher=Teacher(engine, top_k=2),
    )
    user = talk(learner)
    for text in ("hi", "good hint", "hint so", "bad", "so", "bye"):
        user.say(text, "one two", is_done=text == "bye")
        await learner.judged()
    both, taught, rewarded = learner.drain(3)
    assert learner.num_waiting == 0
    size = int((both["loss_mask"] == 0).sum())
    assert both["rewards"].tolist() == [1.0]
    assert both["loss_mask"][0, size:].tolist() == [1, 1, 1]
    assert both["teacher_logprobs"][0, size:].tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert both["teacher_logprobs"][0, :size].isnan().all()
    assert both["teacher_topk_ids"][0, size:, 0].tolist() == both["input_ids"][0, size:].tolist()
    assert both["teacher_topk_ids"].shape == (*both["input_ids"].shape, 2)
    assert taught["rewards"].isnan().all()
    assert rewarded["rewards"].tolist() == [-1.0]
    assert "teacher_logprobs" not in rewarded


async def test_metrics_of_turns_votes_and_scores(learner: OnlineLearner, talk: Callable) -> None:
    user = talk(learner)
    for text in ("hi", "good", "so"):
        user.say(text, "one two", is_done=text == "so")
        await learner.judged()
    stats = stats_tracker.get("online").export()
    assert stats["online/score"] == 0.5
    assert stats["online/score__count"] == 2
    assert stats["online/trained"] == pytest.approx(1 / 3)
    assert stats["online/reward"] == 1.0
    assert stats["online/main_turn__count"] == 3
    assert stats["online/num_sampled_tokens"] == 3.0


def test_a_method_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"method=binary needs .* judge="):
        OnlineLearner()
    with pytest.raises(ConfigError, match=r"method=opd needs .* hints="):
        OnlineLearner(OnlineConfig(method="opd"), judge=ScriptedJudge())
    with pytest.raises(ConfigError, match="scores given ids"):
        Teacher(object())
