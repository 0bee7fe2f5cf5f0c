"""stream=True: what the chunks say joined is what the whole answer says, and it is recorded."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from streams import HI, joined

from agent_rl import ArealOpenAI, ScriptedEngine
from agent_rl.client.http import hx
from agent_rl.errors import EngineError

TOOLS: Any = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "now")]
CALLS = (
    "Let me see.\n<tool_call>\n"
    '{"name": "f", "arguments": {"x":  1, "q": "中文 🙂 \\u00e9"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "g", "arguments": {"cmd": "mkdir -p t/{a,b"}}\n</tool_call>'
)
ANSWERS = {
    "plain": "Hello there, how are you?",
    "spaces": "\n  two spaces, a trailing one \n",
    "emoji": "a🙂 é 中文 👩‍👩‍👧",
    "two calls": CALLS,
    "no arguments": '<tool_call>{"name": "now"}</tool_call>',
    "tag in a string": (
        '<tool_call>\n{"name":"f","arguments":{"t":"use </tool_call> here"}}\n</tool_call>'
    ),
    "malformed": '<tool_call>\n{"name":"f","arguments":{"x":1,}}\n</tool_call>',
    "look-alike": "a < b and <tool is not one, <tool_calls> neither",
    "reasoning": "<think>\nadd them\n</think>\n\nfour",
    "reasoning and call": '<think>call it</think><tool_call>{"name": "f"}</tool_call>',
    "empty": "",
}


def make(tokenizer: Any, *replies: Any, **kwargs: Any) -> ArealOpenAI:
    options = {"reasoning_parser": "qwen3"}
    engine = ScriptedEngine(list(replies), tokenizer=tokenizer, **kwargs)
    return ArealOpenAI(engine, tokenizer, **options)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("stop_reason", ["stop", "length"])
async def test_streamed_equals_not_streamed(name: str, stop_reason: str, tokenizer: Any) -> None:
    """Cases B20, B21, B22, B23, B25, B31, B27, B47, B49, B54: calls, usage, record."""
    ids = tokenizer.encode(ANSWERS[name])
    if stop_reason == "length":
        ids = ids[: max(len(ids) - 3, 0)]
    reply = {"output_tokens": ids, "stop_reason": stop_reason}
    client = make(tokenizer, reply, reply)
    whole = await client.chat.completions.create(model="m", messages=HI, tools=TOOLS)
    stream = await joined(client, tools=TOOLS, stream_options={"include_usage": True})
    ChatCompletion.model_validate(whole.to_dict())
    message = whole.choices[0].message
    assert stream.content[0] == (message.content or "")
    assert stream.reasoning[0] == (getattr(message, "reasoning_content", None) or "")
    calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
    assert [tuple(parts[1:]) for parts in stream.calls[0].values()] == calls
    assert stream.finish[0] == whole.choices[0].finish_reason
    assert stream.chunks[-1].choices == []
    assert stream.chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in stream.chunks[:-1])
    assert "\ufffd" not in stream.content[0]
    assert {chunk.id for chunk in stream.chunks} == {list(client.interactions)[1]}
    one, two = client.interactions.values()
    assert one.model_response.output_tokens == two.model_response.output_tokens == tuple(ids)
    assert one.model_response.output_logprobs == two.model_response.output_logprobs
    sent = [parts[0] for parts in stream.calls[0].values()]
    assert sent == [c["id"] for c in two.output_message_list[0].get("tool_calls", ())]


async def test_shape_of_the_chunks(tokenizer: Any) -> None:
    client = make(tokenizer, "one two")
    stream = await joined(client)
    assert stream.chunks[0].choices[0].delta.role == "assistant"
    assert stream.chunks[0].choices[0].delta.content == ""
    assert [c.choices[0].delta.content for c in stream.chunks[1:-1]] == ["one", " two"]
    assert stream.chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in stream.chunks)


async def test_stop_string_is_never_shown_and_ids_are_kept(tokenizer: Any) -> None:
    """Case B41: content is trimmed, ids and log-probs stay as sampled and are of one length."""
    ids = tokenizer.encode("one two END")
    reply = {"output_tokens": ids, "stop_reason": "stop"}
    client = make(tokenizer, reply, reply)
    stream = await joined(client, stop=["END"])
    whole = await client.chat.completions.create(model="m", messages=HI, stop="END")
    assert stream.content[0] == whole.choices[0].message.content == "one two "
    assert stream.finish[0] == "stop"
    for interaction in client.interactions.values():
        response = interaction.model_response
        assert response.output_tokens == tuple(ids)
        assert len(response.output_logprobs) == len(ids)
        assert int(interaction.to_tensor_dict()["loss_mask"].sum()) == len(ids)


async def test_emoji_cut_in_half(tokenizer: Any) -> None:
    """Case B54: half a character is not shown, its ids are kept."""
    ids = [*tokenizer.encode("a"), tokenizer.encode("🙂")[0]]
    client = make(tokenizer, {"output_tokens": ids, "stop_reason": "length"})
    stream = await joined(client)
    assert stream.content[0] == "a"
    (interaction,) = client.interactions.values()
    assert interaction.model_response.output_tokens == tuple(ids)


async def test_logprobs_joined_are_those_of_the_record(tokenizer: Any) -> None:
    """Case B53: each token has its own log-prob, in order."""
    client = make(tokenizer, "a🙂 two", "a🙂 two")
    stream = await joined(client, logprobs=True)
    whole = await client.chat.completions.create(model="m", messages=HI, logprobs=True)
    (recorded, _) = client.interactions.values()
    assert [e.logprob for e in stream.logprobs[0]] == list(recorded.model_response.output_logprobs)
    assert stream.logprobs[0] == whole.choices[0].logprobs.content
    text = b"".join(bytes(entry.bytes) for entry in stream.logprobs[0][:-1])
    assert text.decode() == "a🙂 two"


async def test_choices_of_one_stream_stay_apart(tokenizer: Any) -> None:
    """Case B51: n=2, two texts, two calls, two records, whatever the order of the chunks."""

    def reply(request: Any) -> str:
        i = 1 if request.rid.endswith("/1") else 0
        return f'{"AB"[i]}{i}<tool_call>{{"name": "f", "arguments": {{"i":{i}}}}}</tool_call>'

    client = make(tokenizer, reply, repeat=True)
    stream = await joined(client, n=2, tools=TOOLS)
    assert stream.content == {0: "A0", 1: "B1"}
    assert [stream.calls[i][0][1:] for i in (0, 1)] == [["f", '{"i":0}'], ["f", '{"i":1}']]
    assert stream.finish == {0: "tool_calls", 1: "tool_calls"}
    name = stream.chunks[0].id
    assert list(client.interactions) == [name, f"{name}/1"]
    texts = [i.output_message_list[0]["content"] for i in client.interactions.values()]
    assert texts == ["A0", "B1"]


async def test_recorded_before_the_terminal_chunk(tokenizer: Any) -> None:
    """Case B48: whoever leaves at the terminal chunk can reward at once."""
    client = make(tokenizer, "a", repeat=True)
    for _ in range(20):
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
        async for chunk in stream:
            if chunk.choices[0].finish_reason:
                break
        client.set_reward(chunk.id, 1.0)
        await stream.close()
    assert client.total_reward == 20.0


class SlowEngine(ScriptedEngine):
    """Yields a token, then waits; counts who is inside."""

    pause_s = 30.0
    running = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.has_started = asyncio.Event()

    async def astream(self, req: Any) -> Any:
        self.running += 1
        self.has_started.set()
        try:
            async for item in super().astream(req):
                yield item
                await asyncio.sleep(self.pause_s)
        finally:
            self.running -= 1


async def test_close_aborts_the_generation(tokenizer: Any) -> None:
    engine = SlowEngine(["one two three"], tokenizer=tokenizer, repeat=True)
    client = ArealOpenAI(engine, tokenizer)
    stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
    assert (await anext(aiter(stream))).choices[0].delta.role == "assistant"
    assert engine.running == 1
    await stream.close()
    assert engine.running == 0
    unread = await client.chat.completions.create(model="m", messages=HI, stream=True, n=3)
    assert engine.running == 3
    await unread.close()
    assert engine.running == 0
    assert len(client.interactions) == 0


async def test_cancelling_the_reader_aborts_the_generation(tokenizer: Any) -> None:
    engine = SlowEngine(["one two three"], tokenizer=tokenizer)
    client = ArealOpenAI(engine, tokenizer)
    task = asyncio.create_task(joined(client))
    await engine.has_started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gc.collect()
    await asyncio.sleep(0)
    assert engine.running == 0
    assert len(client.interactions) == 0


async def test_timeout_between_chunks(tokenizer: Any) -> None:
    engine = SlowEngine(["one two three"], tokenizer=tokenizer)
    client = ArealOpenAI(engine, tokenizer, max_retries=0)
    # openai 2.x lets the library's own error through while a stream is read.
    with pytest.raises((openai.APITimeoutError, hx.ReadTimeout)):
        await joined(client.with_options(timeout=0.02))
    assert engine.running == 0
    assert len(client.interactions) == 0


async def test_an_error_before_the_first_token_is_an_error_reply(tokenizer: Any) -> None:
    client = make(tokenizer, EngineError("no memory left"))
    with pytest.raises(openai.InternalServerError, match="no memory left"):
        await joined(client.with_options(max_retries=0))
    with pytest.raises(openai.BadRequestError):
        await joined(client, temperature=-1)


async def test_an_error_after_the_first_token_is_raised_too(tokenizer: Any) -> None:
    """Case B19: nothing of the failed call is recorded."""
    ids = tokenizer.encode("one two")
    client = make(tokenizer, {"output_tokens": ids, "stop_reason": "abort"})
    with pytest.raises(openai.APIError, match="was aborted after 2 tokens"):
        await joined(client)
    assert len(client.interactions) == 0


async def test_stream_helper(tokenizer: Any) -> None:
    client = make(tokenizer, CALLS)
    tools: Any = [
        {"type": "function", "function": {"name": name, "strict": True}} for name in ("f", "g")
    ]
    async with client.chat.completions.stream(model="m", messages=HI, tools=tools) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "content.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].message.content == "Let me see."
    assert [c.function.name for c in final.choices[0].message.tool_calls] == ["f", "g"]
    assert list(client.interactions) == [final.id]


async def test_token_ids_of_a_stream(tokenizer: Any) -> None:
    client = make(tokenizer, "a🙂 two")
    stream = await joined(client, extra_body={"return_token_ids": True})
    ids = [i for c in stream.chunks for i in getattr(c.choices[0], "token_ids", None) or ()]
    (interaction,) = client.interactions.values()
    assert tuple(ids) == interaction.model_response.output_tokens
    assert tuple(stream.chunks[-1].prompt_token_ids) == interaction.model_response.input_tokens
