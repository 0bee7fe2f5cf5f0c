"""Agents that show images: what reaches the engine, the record, the rows and the dump."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from agent_rl import ArealOpenAI, RolloutEngine, ScriptedEngine
from agent_rl.config import AgentConfig, RolloutConfig
from agent_rl.record.dump import read_dump

TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{{ '<image>' if part.type == 'image' else part.text }}
{%- endfor -%}
{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
URLS = tuple(f"data:image/png;base64,{letter * 100_000}" for letter in "AB")


class Sees(ScriptedEngine):
    supported = ScriptedEngine.supported | {"image_data"}


@pytest.fixture
def eyes(tokenizer: Any) -> Any:
    """A tokenizer whose template has a place for images."""
    found = copy.deepcopy(tokenizer)
    found.chat_template = TEMPLATE
    return found


def shown(text: str, url: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]


class Shows:
    async def run(self, data: Any, client: ArealOpenAI) -> float:
        messages: Any = [{"role": "user", "content": shown("what is this?", URLS[0])}]
        await client.chat.completions.create(model="m", messages=messages)
        return 1.0


@pytest.mark.parametrize("said", [{"content": None}, {"content": ""}, {}])
async def test_images_of_a_user_and_of_a_tool(eyes: Any, said: dict[str, Any]) -> None:
    """Cases B186, B188, B190: as many placeholders as images, as they came; one conversation."""
    engine = Sees([CALL, "a cat"], tokenizer=eyes)
    client = ArealOpenAI(engine, eyes, chat_template_type="concat", tool_call_parser="hermes")
    asked: Any = [{"role": "user", "content": shown("what is this?", URLS[0])}]
    first = await client.chat.completions.create(model="m", messages=asked, tools=TOOLS)
    (call,) = first.choices[0].message.tool_calls
    stored = copy.deepcopy(asked)
    stored[0]["content"][1]["image_url"]["detail"] = None  # as a framework writes it out
    answered = {"role": "assistant", "tool_calls": [call.model_dump()], **said}
    seen = {"role": "tool", "tool_call_id": call.id, "content": shown("here", URLS[1])}
    second = await client.chat.completions.create(
        model="m", messages=[*stored, answered, seen], tools=TOOLS
    )
    assert [request.image_data for request in engine.requests] == [URLS[:1], URLS]
    texts = [eyes.decode(request.input_ids) for request in engine.requests]
    assert [text.count("<image>") for text in texts] == [1, 2]
    assert client.interactions[second.id].parent is client.interactions[first.id]


async def test_an_image_object_is_refused(eyes: Any) -> None:
    """Case B190: an image of PIL, say, is no JSON, for the SDK as for us; nothing is recorded."""
    engine = Sees(["a cat"], tokenizer=eyes)
    client = ArealOpenAI(engine, eyes)
    parts: Any = [{"type": "image", "image": object()}]
    with pytest.raises(TypeError, match="not JSON serializable"):
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": parts}]
        )
    assert engine.requests == [] and not client.interactions


def test_episodes_with_images_are_evaluated_and_not_trained_on(eyes: Any, tmp_path: Path) -> None:
    """Cases B186, B190: no row has a placeholder without its image; no base64 in the dump."""
    config = RolloutConfig(
        dump_to_file=True, fileroot=str(tmp_path), agent=AgentConfig(tool_call_parser="hermes")
    )
    with RolloutEngine(Sees(["a cat"] * 2, tokenizer=eyes), config, tokenizer=eyes) as rollout:
        assert rollout.rollout_batch([{}], Shows) == [None]
        (evaluated,) = rollout.rollout_batch([{}], Shows, is_eval=True)
        stats = rollout.export_stats()
    assert evaluated is not None and evaluated["rewards"].tolist() == [1.0]
    assert (stats["rollout/failed/agent"], stats["eval-rollout/reward"]) == (1.0, 1.0)
    (failed,) = read_dump(tmp_path / "rollout")
    assert failed.error is not None and "holds images" in failed.error
    (record,) = read_dump(tmp_path / "eval-rollout")
    assert "what is this?<image>" in record.prompt
    assert max(path.stat().st_size for path in tmp_path.rglob("*.jsonl")) < 10_000
