"""The demo's agent and its world: questions about a small shop, answered with the right tool.

Every task has its own shop, so no answer can be learnt by heart: the agent has to choose one of
three tools, take its arguments from the question, read the result and answer with it.

    user       What do 4 pieces of rope cost?
    assistant  get_total({"item": "rope", "count": 4})
    tool       208
    assistant  208

Knows the openai SDK and nothing of agent_rl.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam

_TRAIN = """
    apple bread butter cake candle carrot cheese chair coffee cup egg fish grape hammer hat honey
    jam kettle knife lemon mango melon nail onion orange paint pear pen
"""
_HELDOUT = (
    "pepper pillow plate potato rice salt soap sock spoon sugar table tea tomato towel vase wine"
)

# Tasks of one split never name an item of the other, nor one of the worked examples.
ITEMS = {"train": _TRAIN.split(), "heldout": _HELDOUT.split()}
QUESTIONS = {
    "get_price": ["What does one {item} cost?", "How much is the {item}?"],
    "get_stock": ["How many pieces of {item} are left?", "How many of the {item} do you have?"],
    "get_total": ["What do {count} pieces of {item} cost?", "How much are {count} of the {item}?"],
}
ITEMS_IN_A_SHOP = 4
MAX_MODEL_CALLS = 2


def _tool(name: str, **parameters: str) -> ChatCompletionToolUnionParam:
    properties = {parameter: {"type": kind} for parameter, kind in parameters.items()}
    schema: dict[str, object] = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    _tool("get_price", item="string"),
    _tool("get_stock", item="string"),
    _tool("get_total", item="string", count="integer"),
]


def _worked_example(
    question: str, name: str, arguments: Mapping[str, Any], result: str
) -> list[ChatCompletionMessageParam]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"example-{name}", "type": "function", "function": function}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},  # type: ignore[list-item]
        {"role": "tool", "tool_call_id": f"example-{name}", "content": result},
        {"role": "assistant", "content": result},
    ]


# A model that never saw tools has to see what a call looks like, else no episode of the first
# groups earns anything.
EXAMPLES = [
    *_worked_example("What does one pie cost?", "get_price", {"item": "pie"}, "37"),
    *_worked_example("How many pieces of lamp are left?", "get_stock", {"item": "lamp"}, "24"),
    *_worked_example(
        "What do 4 pieces of rope cost?", "get_total", {"item": "rope", "count": 4}, "208"
    ),
]


def make_tasks(seed: int, count: int, split: Literal["train", "heldout"]) -> list[dict[str, Any]]:
    """Tasks as plain JSON, the three kinds of question in turn; the same for the same arguments.

    ``call`` is the tool call that answers the question, ``answer`` its result.
    """
    rng = random.Random(f"{seed} {split}")
    kinds = list(QUESTIONS)
    return [_make_task(rng, kinds[index % len(kinds)], ITEMS[split]) for index in range(count)]


def _make_task(rng: random.Random, kind: str, items: Sequence[str]) -> dict[str, Any]:
    shop = {
        item: {"price": rng.randint(12, 98), "stock": rng.randint(12, 98)}
        for item in rng.sample(items, ITEMS_IN_A_SHOP)
    }
    item, count = rng.choice(list(shop)), rng.randint(2, 9)
    arguments = {"item": item, "count": count} if kind == "get_total" else {"item": item}
    return {
        "question": rng.choice(QUESTIONS[kind]).format(item=item, count=count),
        "shop": shop,
        "call": {"name": kind, "arguments": arguments},
        "answer": run_tool(shop, kind, arguments),
    }


def run_tool(shop: Mapping[str, Mapping[str, int]], name: str, arguments: Any) -> str | None:
    """What the tool says; None: there is no such tool, item or argument."""
    match name, arguments:
        case "get_price", {"item": str(item), **rest} if item in shop and not rest:
            return str(shop[item]["price"])
        case "get_stock", {"item": str(item), **rest} if item in shop and not rest:
            return str(shop[item]["stock"])
        case "get_total", {"item": str(item), "count": int(count), **rest} if (
            item in shop and not rest
        ):
            return str(shop[item]["price"] * count)
    return None


def grade(task: Mapping[str, Any], calls: Sequence[tuple[str, Any]], answer: str) -> float:
    """1 for the right answer after the right call; less, in steps, for the way there.

    0.1 a call of anything, 0.2 of a tool that exists, 0.4 of the right tool, 0.6 with the right
    arguments. The number alone earns nothing, nor does a second call in place of a wrong first one.
    """
    if not calls:
        return 0.0
    name, arguments = calls[0]
    if name not in QUESTIONS:
        return 0.1
    if name != task["call"]["name"]:
        return 0.2
    if arguments != task["call"]["arguments"]:
        return 0.4
    return 1.0 if re.findall(r"\d+", answer) == [task["answer"]] else 0.6


class ShopAgent:
    """Ask the model; if it calls a tool, run the tool, tell it the result and ask again."""

    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        messages: list[Any] = [*EXAMPLES, {"role": "user", "content": data["question"]}]
        calls: list[tuple[str, Any]] = []
        for _ in range(MAX_MODEL_CALLS):
            completion = await client.chat.completions.create(
                model="default", messages=messages, tools=TOOLS
            )
            message = completion.choices[0].message
            if not message.tool_calls:
                return grade(data, calls, answer=message.content or "")
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                assert call.type == "function"
                name, arguments = call.function.name, json.loads(call.function.arguments)
                calls.append((name, arguments))
                result = run_tool(data["shop"], name, arguments)
                if result is None:
                    return grade(data, calls, answer="")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return grade(data, calls, answer="")
