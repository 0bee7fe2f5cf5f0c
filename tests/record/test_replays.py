"""How agent frameworks send a recorded turn back, as seen in what they really send.

Framework       text            arguments                   ids      reasoning
OpenAI Agents   null            as sampled                  kept     dropped
Pydantic AI     null            dumped anew, compact        kept     kept
LangChain       ""              dumped anew                 kept     dropped
smolagents      the whole turn becomes text; results are user messages
"""

from __future__ import annotations

from typing import Any

import pytest
from fix_format import Talk, assistant, call, tool, user

from agent_rl.record.export import export_interactions
from agent_rl.types import JsonObject

SAMPLED = '{"q":  "caf\\u00e9", "n": 1.0}'
ANSWER = assistant(
    None, reasoning_content="hm", refusal=None, tool_calls=[call("t1", "f", SAMPLED)]
)
RESULT = {"role": "tool", "tool_call_id": "t1", "content": "r1"}
TOOLS = [tool("f")]


def replays(talk: Talk, replay: JsonObject, result: JsonObject = RESULT) -> Any:
    """A recorded call, and the turn after its replay."""
    first = talk.say("c1", [user("hi")], [10, 20, 11, 2], ANSWER, tools=TOOLS)
    second = talk.say("c2", [user("hi"), replay, result], [20, 2], tools=TOOLS)
    return first, second


@pytest.mark.parametrize(
    "replay",
    [
        pytest.param(
            {"role": "assistant", "tool_calls": [call("t1", "f", SAMPLED)], "content": None},
            id="openai-agents",
        ),
        pytest.param(
            assistant(
                None,
                reasoning_content="hm",
                tool_calls=[call("t1", "f", '{"q":"café","n":1.0}')],
            ),
            id="pydantic-ai",
        ),
        pytest.param(
            assistant(None, tool_calls=[call("t1", "f", '{"INVALID_JSON": "{\\"q\\":"}')]),
            id="pydantic-ai, malformed arguments",
        ),
        pytest.param(
            assistant("", tool_calls=[call("t1", "f", '{"q": "caf\\u00e9", "n": 1.0}')]),
            id="langchain",
        ),
        pytest.param(
            assistant(
                [{"type": "text", "text": ""}],
                tool_calls=[{**call("t1", "f", {"q": "café", "n": 1}), "index": 0}],
            ),
            id="parts, a mapping and an index",
        ),
        pytest.param(
            assistant("", name="helper", tool_calls=[call("made-up", "f", '{"n":1,"q":"café"}')]),
            id="ids made anew",
        ),
    ],
)
def test_a_replayed_call_is_the_recorded_one(replay: JsonObject) -> None:
    """Cases B11, B14, B27: one conversation, one row, the ids as they were sampled."""
    talk = Talk()
    call_id = replay["tool_calls"][0]["id"]
    first, second = replays(talk, replay, {**RESULT, "tool_call_id": call_id})
    assert second.parent is first and second.fork_reason is None
    assert second.tokens[: first.num_tokens] == first.tokens
    (row,) = export_interactions(talk.cache, "concat").values()
    assert int(row.to_tensor_dict()["loss_mask"].sum()) == 4 + 2


@pytest.mark.parametrize(
    ("replay", "result"),
    [
        (
            assistant("Calling tools:\n[{'id': 't1', 'function': {'name': 'f'}}]"),
            user("Observation:\nr1"),
        ),
        (assistant("Thought: I look it up\n</code>"), user("Observation:\nr1")),
    ],
)
def test_a_turn_that_became_text_is_a_branch_and_keeps_its_row(
    replay: JsonObject, result: JsonObject
) -> None:
    """smolagents: the model reads other text than it wrote, so the next turn stands alone."""
    talk = Talk()
    first, second = replays(talk, replay, result)
    assert second.parent is None
    assert second.fork_reason == "history edited: messages[1] is not the recorded answer"
    talk.cache.set_last_reward(1.0)
    rows = export_interactions(talk.cache, "concat", reward_discount=0.5)
    assert {name: row.reward for name, row in rows.items()} == {"c1": 0.5, "c2": 1.0}
    sums = [int(row.to_tensor_dict()["loss_mask"].sum()) for row in rows.values()]
    assert sums == [4, 2]
    assert first.is_leaf


def test_a_code_agents_turns_stay_one_conversation_behind_an_edited_one() -> None:
    """After the edited turn the conversation goes on from what was sampled last."""
    talk = Talk()
    edited = assistant("Thought\n</code>")
    history = [user("hi"), edited, user("Observation:\nr1")]
    talk.say("c1", history[:1], [20, 2])
    second = talk.say("c2", history, [21, 2])
    third = talk.say("c3", [*history, assistant("b"), user("yo")], [20, 2])
    assert third.parent is second
