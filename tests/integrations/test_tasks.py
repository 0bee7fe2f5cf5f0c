from __future__ import annotations

import threading
from typing import Any

import pytest
from scenario import Stage, played
from transformers import AutoTokenizer

from agent_rl import ArealOpenAI, ScriptedEngine, small_model
from agent_rl.integrations.tasks import one_turn, text_env


class Counter:
    """Counts down from 3; each "down" earns 1, anything else ends it with -1."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.item, self.left = data["item"], 3
        self.is_closed = False
        self.threads: set[int] = set()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return f"{self.item}: {self.left}", {}

    def step(self, action: str) -> Any:
        self.threads.add(threading.get_ident())
        if action != "down":
            return "wrong", -1.0, True, False, {}
        self.left -= 1
        return f"{self.left} left", 1.0, self.left == 0, False, {}

    def close(self) -> None:
        self.is_closed = True


def test_each_action_earns_its_reward() -> None:
    made: dict[str, Counter] = {}

    def make(data: dict[str, Any]) -> Counter:
        return made.setdefault(data["item"], Counter(data))

    replies = {"corn": [" down\n", "down", "down"], "flax": ["down", "up"]}
    stage = Stage(replies)
    stage.play(text_env(make, system="Count."))
    # Half of what a later turn is worth is carried back: 1.75 = 1 + (1 + 1/2)/2.
    for item, rewards in (("corn", [1.75, 1.5, 1.0]), ("flax", [0.5, -1.0])):
        assert [turn.reward for turn in stage.clients[item].interactions.values()] == rewards
        assert made[item].is_closed
        assert threading.get_ident() not in made[item].threads
        played(stage, item, num_rows=1)


def test_an_environment_that_is_cut() -> None:
    stage = Stage({"corn": ["down"] * 2})
    stage.play(text_env(Counter, max_turns=2))
    assert [turn.reward for turn in stage.clients["corn"].interactions.values()] == [1.5, 1.0]


def test_an_environment_that_breaks() -> None:
    class Broken(Counter):
        def step(self, action: str) -> Any:
            raise OSError("the game crashed")

    stage = Stage({"corn": ["down"]})
    stage.play(text_env(Broken))
    assert stage.groups["corn"] is None
    assert stage.stats["rollout/failed/agent"] == 1.0


@pytest.mark.parametrize("is_async", [False, True])
def test_one_turn(is_async: bool) -> None:
    def score(data: dict[str, Any], answer: str) -> float:
        return float(answer == f"a {data['item']}")

    async def score_later(data: dict[str, Any], answer: str) -> float:
        return score(data, answer)

    stage = Stage({"corn": ["a corn"], "flax": ["what?"]})
    stage.play(one_turn(score_later if is_async else score, question="item"))
    for item, reward in (("corn", 1.0), ("flax", 0.0)):
        group = stage.groups[item]
        assert group is not None and group["rewards"].tolist() == [reward]
        played(stage, item, num_rows=1)


async def played_alone(agent: type, data: dict[str, Any], *replies: str) -> tuple[Any, Any]:
    """What the agent returned, and the messages of its last request."""
    tokenizer = AutoTokenizer.from_pretrained(small_model())
    client = ArealOpenAI(ScriptedEngine(list(replies), tokenizer=tokenizer), tokenizer)
    returned = await agent().run(data, client)
    return returned, list(client.interactions.values())[-1].messages


async def test_a_question_that_is_a_list_of_messages() -> None:
    """As in the `prompt` column of other trainers' datasets; it was asked as Python's repr."""
    asked = [{"role": "user", "content": "hi"}]
    agent = one_turn(lambda data, answer: len(answer), question="prompt", system="Be kind.")
    returned, messages = await played_alone(agent, {"prompt": asked}, "hello")
    assert returned == 5
    assert messages == [{"role": "system", "content": "Be kind."}, *asked]


async def test_a_question_that_is_not_there() -> None:
    agent = one_turn(lambda data, answer: 1.0)
    with pytest.raises(
        LookupError, match=r"no 'question', but 'prompt', 'city': one_turn\(reward,"
    ):
        await played_alone(agent, {"prompt": "hi", "city": "Rome"}, "hello")
    with pytest.raises(TypeError, match="must be a text or a list of messages, not of type dict"):
        await played_alone(agent, {"question": {"text": "hi"}}, "hello")


def test_functions_that_cannot_be_called_so_are_refused_at_once() -> None:
    def of_verl(data_source: str, solution_str: str, ground_truth: str) -> float:
        return 1.0

    with pytest.raises(
        TypeError, match=r"called as reward\(data, answer\), but missing a required"
    ):
        one_turn(of_verl)
    with pytest.raises(TypeError, match=r"reward\(data, answer\) must be a function, not list"):
        one_turn([of_verl])
    with pytest.raises(TypeError, match=r"make\(data\) must be a function, not Counter"):
        text_env(Counter({"item": "corn"}))


async def test_a_reward_that_turns_out_to_be_awaitable() -> None:
    async def later(answer: str) -> float:
        return float(len(answer))

    agent = one_turn(lambda data, answer: later(answer))
    assert (await played_alone(agent, {"question": "hi"}, "four"))[0] == 4.0


async def test_environments_of_an_older_interface() -> None:
    class Plain(Counter):
        def reset(self) -> Any:
            return "ready", {}

    class NoInfo(Counter):
        def reset(self, **options: Any) -> Any:
            return "ready"

    class Four(Counter):
        def step(self, action: str) -> Any:
            return "seen", 1.0, True, {}

    datum = {"item": "corn"}
    await played_alone(text_env(Plain), datum, "down", "up")
    with pytest.raises(TypeError, match=r"return \(observation, info\), as Gymnasium's; got str"):
        await played_alone(text_env(NoInfo), datum, "down")
    with pytest.raises(
        TypeError, match=r"terminated, truncated, info\), as Gymnasium's; got 4 val"
    ):
        await played_alone(text_env(Four), datum, "down")
