"""The demo's agent and its world: questions about a small shop, answered with the right tool.

Every task has its own shop, so no answer can be learnt by heart: the agent has to choose the tool,
take its argument from the question, read the result and answer with it.

    user       How many pieces of rope are left?
    assistant  get_stock({"item": "rope"})
    tool       24
    assistant  24

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
}
ITEMS_IN_A_SHOP = 4
MAX_MODEL_CALLS = 2


def _tool(name: str) -> ChatCompletionToolUnionParam:
    schema: dict[str, object] = {"type": "object", "properties": {"item": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [_tool(name) for name in QUESTIONS]


def _worked_example(
    question: str, tool: str, item: str, result: str
) -> list[ChatCompletionMessageParam]:
    function = {"name": tool, "arguments": json.dumps({"item": item})}
    call = {"id": f"example-{tool}", "type": "function", "function": function}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},  # type: ignore[list-item]
        {"role": "tool", "tool_call_id": f"example-{tool}", "content": result},
        {"role": "assistant", "content": result},
    ]


# A model that never saw tools has to see what a call looks like, else no episode of the first
# groups earns anything.
EXAMPLES = [
    *_worked_example("What does one pie cost?", "get_price", "pie", "37"),
    *_worked_example("How many pieces of rope are left?", "get_stock", "rope", "24"),
]


def make_tasks(seed: int, count: int, split: Literal["train", "heldout"]) -> list[dict[str, Any]]:
    """Tasks as plain JSON, the kinds of question in turn; the same for the same arguments."""
    rng = random.Random(f"{seed} {split}")
    tools = list(QUESTIONS)
    return [_make_task(rng, tools[index % len(tools)], ITEMS[split]) for index in range(count)]


def _make_task(rng: random.Random, tool: str, items: Sequence[str]) -> dict[str, Any]:
    """``shop`` holds what each tool says of each item."""
    shop = {
        item: {name: rng.randint(12, 98) for name in QUESTIONS}
        for item in rng.sample(items, ITEMS_IN_A_SHOP)
    }
    item = rng.choice(list(shop))
    question = rng.choice(QUESTIONS[tool]).format(item=item)
    return {"question": question, "shop": shop, "tool": tool, "item": item}


def run_tool(shop: Mapping[str, Mapping[str, int]], name: str, arguments: Any) -> str | None:
    """What the tool says; None: there is no such tool, item or argument."""
    match arguments:
        case {"item": str(item), **rest} if not rest and item in shop and name in shop[item]:
            return str(shop[item][name])
    return None


def grade(task: Mapping[str, Any], calls: Sequence[tuple[str, Any]], answer: str) -> float:
    """0.2 for a call of a tool that exists, 0.2 each for the right tool and the right argument,
    and the remaining 0.4 for the right answer after the right call.

    Only the first call counts, and the number alone, without a call, earns nothing.
    """
    if not calls or calls[0][0] not in QUESTIONS:
        return 0.0
    name, arguments = calls[0]
    is_right_tool = name == task["tool"]
    is_right_item = arguments == {"item": task["item"]}
    right_answer = str(task["shop"][task["item"]][task["tool"]])
    is_right_answer = re.findall(r"\d+", answer) == [right_answer]
    reward = 0.2 + 0.2 * is_right_tool + 0.2 * is_right_item
    return 1.0 if is_right_tool and is_right_item and is_right_answer else reward


class ShopAgent:
    """Ask the model; if it calls a tool, run the tool, tell it the result and ask again."""

    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        messages: list[Any] = [*EXAMPLES, {"role": "user", "content": data["question"]}]
        calls: list[tuple[str, Any]] = []
        for _ in range(MAX_MODEL_CALLS):
            completion = await client.chat.completions.create(
                model="local", messages=messages, tools=TOOLS
            )
            message = completion.choices[0].message
            if not message.tool_calls:
                return grade(data, calls, answer=message.content or "")
            messages.append(message)
            for call in message.tool_calls:
                assert call.type == "function"
                name, arguments = call.function.name, json.loads(call.function.arguments)
                calls.append((name, arguments))
                result = run_tool(data["shop"], name, arguments)
                if result is None:
                    return grade(data, calls, answer="")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return grade(data, calls, answer="")
