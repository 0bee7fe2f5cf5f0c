"""One episode that every framework plays, and what must be true of its rows.

The clerk of examples/frameworks/shop.py is asked twice and looks a price up each time: four model
calls. The answers are written as frameworks like to rewrite them: arguments with odd spacing, text
beside a call, space around a text. Two clerks run at the same time, in step with each other.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from shop import PRICES
from transformers import AutoTokenizer

from agent_rl import ArealOpenAI, ModelRequest, RolloutEngine, ScriptedEngine, small_model
from agent_rl.config import AgentConfig, RolloutConfig
from agent_rl.types import TensorDict

PATIENCE_S = 300.0
KEYS = ("input_ids", "loss_mask", "logprobs", "versions")


def call_of(item: str) -> str:
    arguments = f'{{"item":  "{item}"}}'
    return f'<tool_call>\n{{"name": "price", "arguments": {arguments}}}\n</tool_call>'


def usual_replies(item: str) -> list[str]:
    one = PRICES[item]
    call = call_of(item)
    return [call, f" {item} costs {one} cents.\n", f"Let me see.\n{call}", f"{2 * one} cents."]


class GuidedEngine(ScriptedEngine):
    """Takes requests for structured output; the script has the answers in that form."""

    supported = ScriptedEngine.supported | {"grammar"}


class Stage:
    """An engine whose answers depend on the item in the prompt, and what it was asked.

    Answer i of one clerk waits until the other, unless it has ended, has asked for its own.
    """

    def __init__(self, replies: dict[str, Sequence[str]]) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(small_model())
        self.prompts: dict[str, list[list[int]]] = {item: [] for item in replies}
        self.sampled: dict[str, list[list[int]]] = {item: [] for item in replies}
        self.clients: dict[str, ArealOpenAI] = {}
        self.errors: dict[str, BaseException] = {}
        self.groups: dict[str, TensorDict | None] = {}
        self.stats: dict[str, float] = {}
        self._replies = replies
        self._ended: set[str] = set()

    def play(
        self,
        agent: Callable[[], Any],
        *,
        export_style: str = "concat",
        reply: Callable[[ModelRequest], Any] | None = None,
    ) -> None:
        """Run one episode of ``agent`` for each item, all at once."""

        async def watch(data: dict[str, Any], client: ArealOpenAI, **address: str) -> Any:
            self.clients[data["item"]] = client
            given = {"client": client, **address}
            run = agent().run
            wanted = given.keys() & inspect.signature(run).parameters.keys()
            try:
                return await run(data, **{name: given[name] for name in wanted})
            except Exception as error:
                self.errors[data["item"]] = error
                raise
            finally:
                self._ended.add(data["item"])

        class WithClient:
            async def run(self, data: dict[str, Any], client: ArealOpenAI) -> Any:
                return await watch(data, client)

        class WithAddress:
            """The same record, and the port where it is served."""

            async def run(
                self, data: dict[str, Any], client: ArealOpenAI, base_url: str, api_key: str
            ) -> Any:
                return await watch(data, client, base_url=base_url, api_key=api_key)

        wants_address = "base_url" in inspect.signature(agent().run).parameters
        watched = WithAddress if wants_address else WithClient
        config = RolloutConfig(
            max_concurrent_rollouts=len(self._replies),
            episode_timeout_s=PATIENCE_S,
            agent=AgentConfig(
                export_style=export_style, chat_template_type="concat", turn_discount=0.5
            ),
        )
        engine = GuidedEngine([reply or self._reply], tokenizer=self.tokenizer, repeat=True)
        data = [{"item": item, "count": 2, "reset": {"item": item}} for item in self._replies]
        with RolloutEngine(engine, config, tokenizer=self.tokenizer) as rollout:
            groups = rollout.rollout_batch(data, watched)
            self.stats = rollout.export_stats()
        self.groups = dict(zip(self._replies, groups, strict=True))

    async def _reply(self, request: ModelRequest) -> list[int]:
        text = self.tokenizer.decode(request.input_ids)
        (item,) = (item for item in self._replies if item in text)  # and no other clerk's
        number = len(self.prompts[item])
        self.prompts[item].append(list(request.input_ids))
        async with asyncio.timeout(PATIENCE_S):
            # Not an Event: requests come from several event loops.
            while not self._all_asked(number):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        ids = self.tokenizer.encode(self._replies[item][number], add_special_tokens=False)
        self.sampled[item].append([*ids, self.tokenizer.eos_token_id])
        return self.sampled[item][-1]

    def _all_asked(self, number: int) -> bool:
        running = self.prompts.keys() - self._ended
        return all(len(self.prompts[item]) > number for item in running)

    def rows(self, item: str) -> list[dict[str, list[Any]]]:
        """The exported rows without their padding."""
        group = self.groups[item]
        assert group is not None, f"the episode of {item} failed"
        return [
            {key: group[key][index][mask].tolist() for key in KEYS}
            for index, mask in enumerate(group["attention_mask"])
        ]

    def expected_rows(self, item: str) -> list[dict[str, list[Any]]]:
        """From what the engine was asked and answered alone; one row for each leaf.

        Call i goes on from the longest earlier one whose prompt and answer begin its prompt.
        """
        prompts, sampled = self.prompts[item], self.sampled[item]
        wholes = [prompt + answer for prompt, answer in zip(prompts, sampled, strict=True)]
        before: list[int | None] = []
        for number, prompt in enumerate(prompts):
            found = [i for i in range(number) if prompt[: len(wholes[i])] == wholes[i]]
            before.append(max(found, key=lambda i: len(wholes[i]), default=None))
        rows, trained = [], set()
        for leaf in range(len(prompts)):
            if leaf not in before:
                row, line = _context(wholes[leaf]), leaf
                while line is not None:
                    if line not in trained:
                        _train(row, len(prompts[line]), len(sampled[line]))
                    trained.add(line)
                    line = before[line]
                rows.append(row)
        return rows


def _context(ids: list[int]) -> dict[str, list[Any]]:
    count = len(ids)
    values = (ids, [0] * count, [0.0] * count, [-1] * count)
    return dict(zip(KEYS, map(list, values), strict=True))


def _train(row: dict[str, list[Any]], start: int, count: int) -> None:
    """ScriptedEngine's rule: log-probs -0.1, -0.2, ..., all under version 0."""
    span = slice(start, start + count)
    row["loss_mask"][span] = [1] * count
    row["logprobs"][span] = [-0.1 * (i + 1) for i in range(count)]
    row["versions"][span] = [0] * count


def played(stage: Stage, item: str, *, num_rows: int) -> None:
    """The exported rows are exactly what the engine was asked and answered."""
    expected = stage.expected_rows(item)
    _compare(stage.rows(item), expected)
    assert len(expected) == num_rows


def _compare(rows: Sequence[dict[str, list[Any]]], expected: Sequence[dict[str, Any]]) -> None:
    for row, wanted in zip(rows, expected, strict=True):
        logprobs = pytest.approx(wanted["logprobs"], rel=1e-6)  # float32 in the rows
        assert row == {**wanted, "logprobs": logprobs}


def check_conversation(
    agent: Callable[[], Any],
    *,
    forks: dict[int, str | None] | None = None,
    replies: Callable[[str], Sequence[str]] = usual_replies,
) -> Stage:
    """Two clerks at once: exact rows, nothing of the other one, and the reasons of forks.

    ``forks``: call number -> pattern of its fork reason, None for a new conversation; a call that
    is not there extends the one before it. Without forks, an episode is one row.
    """
    forks = forks or {}
    stage = Stage({item: replies(item) for item in ("corn", "flax")})
    stage.play(agent)
    for item in ("corn", "flax"):
        assert [len(stage.prompts[item]), len(stage.sampled[item])] == [len(replies(item))] * 2
        played(stage, item, num_rows=len(forks) + 1)
        interactions = list(stage.clients[item].interactions.values())
        for number, interaction in enumerate(interactions):
            reason = interaction.fork_reason
            if number in forks:
                pattern = forks[number]
                is_as_said = reason is None if pattern is None else re.search(pattern, reason or "")
                assert is_as_said, (number, reason)
            elif number:
                assert interaction.parent is interactions[number - 1], (number, reason)
        group = stage.groups[item]
        assert group is not None
        assert group["rewards"][-1] == 1.0
        assert stage.stats["rollout/reward"] == 1.0
    return stage


def check_individual(agent: Callable[[], Any]) -> None:
    """Each call is a row of its own; the reward is carried back, halved at each turn."""
    stage = Stage({"corn": usual_replies("corn")})
    stage.play(agent, export_style="individual")
    wanted = []
    for prompt, sampled in zip(stage.prompts["corn"], stage.sampled["corn"], strict=True):
        row = _context(prompt + sampled)
        _train(row, len(prompt), len(sampled))
        wanted.append(row)
    _compare(stage.rows("corn"), wanted)
    group = stage.groups["corn"]
    assert group is not None
    assert group["rewards"].tolist() == [0.125, 0.25, 0.5, 1.0]


def check_failing_tool(
    agent: Callable[[], Any],
    *,
    first: str = call_of("gold"),
    replies: Callable[[str], Sequence[str]] = usual_replies,
) -> None:
    """``price`` raises for gold: that episode fails as the agent's, the other one is whole."""
    stage = Stage({"gold": [first] * 8, "corn": replies("corn")})
    stage.play(agent)
    assert stage.groups["gold"] is None
    assert stage.stats["rollout/failed/agent"] == 0.5  # of two episodes
    error: BaseException | None = stage.errors["gold"]
    while error is not None and not isinstance(error, KeyError):
        error = error.__cause__ or error.__context__
    assert error is not None, f"{stage.errors['gold']!r} does not come from the tool"
    assert len(stage.rows("corn")) == len(stage.expected_rows("corn"))


def check_broken_engine(agent: Callable[[], Any]) -> None:
    """What the framework makes of the SDK's error does not hide whose fault it is."""

    async def break_down(request: ModelRequest) -> list[int]:
        raise ValueError("the decoder broke")

    stage = Stage({"corn": []})
    stage.play(agent, reply=break_down)
    assert stage.groups["corn"] is None
    assert stage.stats["rollout/failed/engine"] == 1.0
