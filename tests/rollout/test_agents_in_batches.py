"""Agents of users in a RolloutEngine: what reaches the batch, what does not, how it is counted."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from agent_rl import ArealOpenAI, RolloutEngine, ScriptedEngine
from agent_rl.config import AgentConfig, RolloutConfig
from agent_rl.rollout.workflow import RolloutWorkflow


async def ask(client: ArealOpenAI, text: str = "hi") -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return await client.chat.completions.create(model="m", messages=messages)


@pytest.fixture
def open_with(open_rollout, tokenizer) -> Callable[..., RolloutEngine]:
    """``open_with(reply, ..., key=value)``: an engine with these replies and keys of rollout."""

    def build(*replies: Any, **keys: Any) -> RolloutEngine:
        engine = ScriptedEngine(replies or ["four"], tokenizer=tokenizer, repeat=True)
        return open_rollout(engine, RolloutConfig(**keys), tokenizer=tokenizer)

    return build


class SecondTime:
    """Its first attempt at a datum breaks after two calls, the second makes three."""

    def __init__(self) -> None:
        self.attempts = 0

    async def run(self, data: Any, client: ArealOpenAI) -> float:
        self.attempts += 1
        for turn in range(self.attempts + 1):
            await ask(client, f"turn {turn}")
        if self.attempts == 1:
            raise ConnectionError("the tool server is gone")
        return 1.0


def test_a_second_attempt_has_a_record_of_its_own(open_with) -> None:
    """case B70: three interactions, not five, also where one instance serves all episodes."""
    rollout = open_with(max_concurrent_rollouts=1)
    first, group = rollout.rollout_batch([{}, {}], SecondTime())
    assert first is None
    assert group["rollout_group"].row_counts == (3,)
    assert len(group["input_ids"]) == 3


class Elsewhere:
    """Never uses the client that it was given."""

    async def run(self, data: Any) -> float:
        return 1.0


class Refused:
    """Its only call is a bad request, which it does not mind."""

    async def run(self, data: Any, client: ArealOpenAI) -> float:
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=[])
        return 1.0


@pytest.mark.parametrize("agent", [Elsewhere, Refused])
def test_a_reward_without_a_call_is_no_row(open_with, agent: type, caplog) -> None:
    """case B191: rejected with the likely cause, not a row of zeros, not counted as accepted."""
    rollout = open_with()
    assert rollout.rollout_batch([{}, {}], agent) == [None, None]
    counts = rollout.counts()
    assert (counts.accepted, counts.rejected, counts.failed) == (0, 2, 0)
    assert "it used another client than the one it was given" in caplog.text
    assert "rollout/reward" not in rollout.export_stats()


class Global:
    """Sets the client of all as its own, as `set_default_openai_client` does, and asks later."""

    client: ArealOpenAI
    all_have_set: asyncio.Barrier

    async def run(self, data: Any, client: ArealOpenAI) -> float:
        Global.client = client
        await Global.all_have_set.wait()
        await ask(Global.client, data["text"])
        return 1.0


def test_a_client_is_of_its_episode_alone(open_with, caplog) -> None:
    """Two conversations would be rewarded as one episode's."""
    Global.all_have_set = asyncio.Barrier(2)
    rollout = open_with()
    groups = rollout.rollout_batch([{"text": "a"}, {"text": "b"}], Global)
    [kept] = [group for group in groups if group is not None]
    assert kept["rollout_group"].row_counts == (1,)
    assert rollout.export_stats()["rollout/failed/client"] == 0.5
    assert "this client is another episode's" in caplog.text


class Limit(Exception):
    """Of a framework whose turns are used up."""


class FiveTurns:
    async def run(self, data: Any, client: ArealOpenAI) -> float:
        for turn in range(5):
            completion = await ask(client, f"turn {turn}")
            if turn == 1:
                client.set_reward(completion.id, 0.5)
        raise Limit("recursion limit reached")


@pytest.mark.parametrize(
    ("policy", "rewards"),
    [("drop", None), ("zero", [0, 0.5, 0, 0, 0]), ("keep", [0, 0.5, 0, 0, 0])],
)
def test_a_limit_of_the_framework_after_five_turns(
    open_with, policy: Any, rewards: list[float] | None, caplog
) -> None:
    """case B194: dropped by default; counted under the agent, its traceback logged once."""
    agent = AgentConfig(on_agent_error=policy, turn_discount=0.0)
    rollout = open_with(agent=agent)
    groups = rollout.rollout_batch([{}, {}], FiveTurns)
    found = [None if group is None else group["rewards"].tolist() for group in groups]
    assert found == [rewards, rewards]
    assert rollout.export_stats()["rollout/failed/agent"] == 1.0
    [record] = [record for record in caplog.records if "recursion limit" in record.getMessage()]
    assert record.exc_info is not None and record.exc_info[0] is Limit
    assert AgentConfig().on_agent_error == "drop"


class TooLong:
    """Sets its reward, then sends more than the context holds and does not catch the error."""

    async def run(self, data: Any, client: ArealOpenAI) -> float:
        await ask(client)
        client.set_last_reward(0.5)
        await ask(client, "x y " * 100)
        raise AssertionError("a prompt that is too long is an error")


def test_turns_before_a_prompt_that_is_too_long(open_rollout, tokenizer) -> None:
    """case B39: with on_agent_error=keep they keep their reward; the engine never sees the rest."""
    arrived = []

    class Stub(ScriptedEngine):
        async def agenerate(self, req: Any) -> Any:
            arrived.append(req)
            return await super().agenerate(req)

    engine = Stub(["four"], tokenizer=tokenizer, repeat=True, max_seq_len=100)
    config = RolloutConfig(agent=AgentConfig(on_agent_error="keep"))
    rollout = open_rollout(engine, config, tokenizer=tokenizer)
    [group] = rollout.rollout_batch([{}], TooLong)
    assert group["rewards"].tolist() == [0.5]
    assert len(arrived) == 1
    assert rollout.export_stats()["rollout/failed/client"] == 1.0


class TwoVersions:
    """A conversation of two turns; the weights change in between."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine

    async def run(self, data: Any, client: ArealOpenAI) -> float:
        first = await ask(client)
        self.engine.set_version(4)
        more: Any = [
            {"role": "user", "content": "hi"},
            first.choices[0].message,
            {"role": "user", "content": "and?"},
        ]
        await client.chat.completions.create(model="m", messages=more)
        return 1.0


def test_versions_of_interleaved_turns_in_the_dump(open_rollout, tokenizer, tmp_path) -> None:
    """case B64: head 3, tail 4; the prompt ends where the first sampled token stands."""
    engine = ScriptedEngine(["four", "five"], tokenizer=tokenizer, version=3)
    agent = AgentConfig(export_style="concat", chat_template_type="concat")
    config = RolloutConfig(agent=agent, dump_to_file=True, fileroot=str(tmp_path))
    rollout = open_rollout(engine, config, tokenizer=tokenizer)
    [group] = rollout.rollout_batch([{}], TwoVersions(engine))
    [path] = tmp_path.glob("**/rollout/4/*.jsonl")
    [record] = [json.loads(line) for line in path.read_text().splitlines()]
    assert (record["head_version"], record["tail_version"]) == (3, 4)
    assert record["prompt_len"] == len(engine.requests[0].input_ids)
    assert [part["role"] for part in record["segments"]] == ["prompt", "gen", "context", "gen"]
    assert record["version_rle"] == [[3, 2], [4, 2]]
    assert group["versions"].max() == 4 and int((group["versions"] == 3).sum()) == 2


class Raises:
    async def run(self, data: Any, client: ArealOpenAI) -> float:
        await ask(client)
        if data["error"] is not None:
            raise data["error"]
        return 1.0


@pytest.mark.parametrize("is_eval", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        ExceptionGroup("tools", [ConnectionError("refused")]),
        BaseExceptionGroup("tools", [asyncio.CancelledError()]),
        TimeoutError(),
        SystemExit(1),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_an_agent_raises_costs_its_own_episode(
    open_with, error: BaseException, is_eval: bool
) -> None:
    """case B195: the batch goes on, in evaluation too."""
    rollout = open_with()
    data = [{"error": error if number == 1 else None} for number in range(4)]
    groups = rollout.rollout_batch(data, Raises, is_eval=is_eval)
    assert [group is None for group in groups] == [False, True, False, False]
    counts = rollout.counts(is_eval=is_eval)
    assert (counts.accepted, counts.failed, counts.running) == (3, 1, 0)
    scope = "eval-rollout" if is_eval else "rollout"
    assert rollout.export_stats()[f"{scope}/failed/agent"] == 0.25
    assert rollout.rollout_batch([{"error": None}], Raises, is_eval=is_eval)[0] is not None


def test_an_end_of_turn_that_is_the_pad_is_trained(open_with, tokenizer) -> None:
    """case B44: masks come from what was sampled, padding of a group alone is 0."""
    end = tokenizer.eos_token_id
    lengths = iter([4, 1, 3])

    class Completes:
        async def run(self, data: Any, client: ArealOpenAI) -> float:
            await client.completions.create(model="m", prompt=[5, end], echo=False)
            return 1.0

    rollout = open_with(lambda request: [20] * next(lengths) + [end])
    [group] = rollout.rollout_batch([{}], Completes, group_size=3)
    masks = sorted(
        zip(group["attention_mask"].int().tolist(), group["loss_mask"].tolist(), strict=True)
    )
    assert masks == [
        ([1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0]),
        ([1, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1, 0]),
        ([1] * 7, [0, 0, 1, 1, 1, 1, 1]),
    ]


class Hangs(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: Any) -> None:
        await asyncio.Event().wait()


def until(is_so: Callable[[], bool]) -> None:
    for _ in range(6000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to be")


def test_the_bound_of_staleness_is_for_the_whole_run(make) -> None:
    """case B129: (2 + 0 + 1) * 8 = 24 groups, whatever the number of workers."""
    rollout = make(consumer_batch_size=8, max_head_offpolicyness=2, max_concurrent_rollouts=1000)
    for _ in range(100):
        rollout.submit({}, Hangs())
    until(lambda: rollout.counts().running >= 24)
    counts = rollout.counts()
    assert (counts.running, counts.waiting) == (24, 76)


class Blocks:
    """Holds the event loop, as a hung verifier does."""

    begun, let_go = threading.Event(), threading.Event()

    async def run(self, data: Any, client: ArealOpenAI) -> float:
        self.begun.set()
        self.let_go.wait(60)
        return 1.0


def test_close_gives_up_on_an_agent_that_blocks(open_with, monkeypatch, caplog) -> None:
    """case B133: it returns with a warning while the agent still hangs."""
    monkeypatch.setattr("agent_rl.loop_thread._JOIN_TIMEOUT_S", 0.05)
    rollout = open_with()
    rollout.submit({}, Blocks)
    assert Blocks.begun.wait(60)
    rollout.close()
    assert "blocks the event loop of the" in caplog.text
    Blocks.let_go.set()
