"""The demo's tasks, tools, grades and agent, by hand-worked conversations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_rl import ArealOpenAI, ScriptedEngine
from agent_rl.demo.shop import (
    EXAMPLES,
    ITEMS,
    QUESTIONS,
    TOOLS,
    ShopAgent,
    grade,
    make_tasks,
    run_tool,
)
from agent_rl.tokens.format import ChatFormat

SHOP = {"hat": {"get_price": 52, "get_stock": 31}, "tea": {"get_price": 20, "get_stock": 75}}
TASK = {"question": "How many pieces of hat are left?", "shop": SHOP, "tool": "get_stock"}
TASK["item"] = "hat"
RIGHT_CALL = ("get_stock", {"item": "hat"})


def call_text(name: str, arguments: dict[str, Any]) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def test_tasks_are_the_same_for_the_same_seed() -> None:
    assert make_tasks(1, 6, "train") == make_tasks(1, 9, "train")[:6]
    assert make_tasks(1, 6, "train") != make_tasks(2, 6, "train")
    assert json.loads(json.dumps(make_tasks(1, 3, "train"))) == make_tasks(1, 3, "train")


def test_heldout_tasks_share_no_item_with_training_or_the_examples() -> None:
    train = {item for task in make_tasks(1, 200, "train") for item in task["shop"]}
    heldout = {item for task in make_tasks(1, 200, "heldout") for item in task["shop"]}
    assert train == set(ITEMS["train"])
    assert heldout == set(ITEMS["heldout"])
    assert not train & heldout
    assert not (train | heldout) & {"pie", "rope"}


def test_every_kind_of_question_comes_in_turn_and_its_call_gives_an_answer() -> None:
    tasks = make_tasks(3, 30, "train")
    assert [task["tool"] for task in tasks[:3]] == [*QUESTIONS, "get_price"]
    for task in tasks:
        assert task["item"] in task["question"]
        result = run_tool(task["shop"], task["tool"], {"item": task["item"]})
        assert result == str(task["shop"][task["item"]][task["tool"]])


def test_every_split_of_the_items_is_in_reach_of_the_token_limit(tokenizer: Any) -> None:
    """demo.yaml allows 36 new tokens: the longest call and its end-of-turn token fit."""
    longest = max(
        len(tokenizer.encode(call_text("get_price", {"item": item})))
        for items in ITEMS.values()
        for item in items
    )
    assert longest + 1 <= 36


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("get_price", {"item": "hat"}, "52"),
        ("get_stock", {"item": "tea"}, "75"),
        ("get_price", {"item": "melon"}, None),
        ("get_price", {"item": ["hat"]}, None),
        ("get_price", {"item": "hat", "count": 4}, None),
        ("buy", {"item": "hat"}, None),
        ("get_price", {}, None),
        ("get_price", "hat", None),
    ],
)
def test_tools(name: str, arguments: Any, result: str | None) -> None:
    assert run_tool(SHOP, name, arguments) == result


@pytest.mark.parametrize(
    ("calls", "answer", "reward"),
    [
        ([], "31", 0.0),
        ([("buy", {"item": "hat"})], "31", 0.0),
        ([("get_price", {"item": "tea"})], "31", 0.2),
        ([("get_price", {"item": "hat"})], "31", 0.4),
        ([("get_stock", {"item": "tea"})], "31", 0.4),
        ([("get_stock", {"item": "hat", "count": 4})], "31", 0.4),
        ([("get_price", {"item": "hat"}), RIGHT_CALL], "31", 0.4),
        ([RIGHT_CALL], "", 0.6),
        ([RIGHT_CALL], "32", 0.6),
        ([RIGHT_CALL], "31 or 32", 0.6),
        ([RIGHT_CALL], "310", 0.6),
        ([RIGHT_CALL], "31", 1.0),
        ([RIGHT_CALL], "There are 31.", 1.0),
    ],
)
def test_grades(calls: list[tuple[str, Any]], answer: str, reward: float) -> None:
    assert grade(TASK, calls, answer) == pytest.approx(reward)


async def test_the_agent_calls_the_tool_reads_the_result_and_answers(tokenizer: Any) -> None:
    engine = ScriptedEngine([call_text(*RIGHT_CALL), "31"], tokenizer=tokenizer)
    client = ArealOpenAI(engine, tokenizer, chat_template_type="concat")
    assert await ShopAgent().run(TASK, client=client) == 1.0
    first, second = client.interactions.values()
    assert second.parent is first
    assert [message["role"] for message in second.messages[-3:]] == ["user", "assistant", "tool"]
    assert second.messages[-1]["content"] == "31"
    assert tokenizer.decode(second.model_response.input_tokens).endswith(
        "<|im_start|>user\n<result>\n31\n</result><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        (["31"], 0.0),
        (["<tool_call>\n{oh"], 0.0),
        ([call_text("buy", {})], 0.0),
        ([call_text("get_price", {"item": "hat"}), call_text(*RIGHT_CALL)], 0.4),
        ([call_text(*RIGHT_CALL), call_text(*RIGHT_CALL)], 0.6),
        ([call_text(*RIGHT_CALL), "About 30."], 0.6),
    ],
)
async def test_what_an_agent_on_the_wrong_way_earns(
    replies: list[str], reward: float, tokenizer: Any
) -> None:
    engine = ScriptedEngine(replies, tokenizer=tokenizer)
    client = ArealOpenAI(engine, tokenizer, chat_template_type="concat")
    assert await ShopAgent().run(TASK, client=client) == pytest.approx(reward)
    assert len(engine.requests) == len(replies)


def test_prompts_share_all_but_the_question(tokenizer: Any) -> None:
    """What the engine prefills and the trainer computes once for a whole batch."""
    chat = ChatFormat.of(tokenizer)
    prompts = [
        chat.render([*EXAMPLES, {"role": "user", "content": task["question"]}], TOOLS)
        for task in make_tasks(1, 6, "train")
    ]
    shared = next(i for i, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1)
    assert max(map(len, prompts)) - shared < 20
    assert max(map(len, prompts)) < 480
