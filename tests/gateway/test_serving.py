"""Model calls over a real socket: what listeners hear, when bytes leave, what a hang-up does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from agent_rl import ModelRequest, ScriptedEngine, TokenDelta, WeightUpdate
from agent_rl.errors import RefusedError
from agent_rl.gateway.listener import ServedCall

ASK = [{"role": "user", "content": "2+2?"}]


class Diary:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str]] = []
        self.calls: list[ServedCall] = []
        self.answers: list[str | None] = []
        self.refuses = False

    def on_request(self, call: ServedCall) -> None:
        if self.refuses:
            raise RefusedError(503, "learning", retry_after_s=2)
        self.calls.append(call)
        self.entries.append(("request", call.session_id))

    def on_answer(self, call: ServedCall, interaction_id: str | None) -> None:
        assert call in self.calls
        if interaction_id is not None:
            assert interaction_id in call.session.cache
        self.answers.append(interaction_id)
        self.entries.append(("answer", call.session_id))

    def on_reward(self, session_id: str, interaction_id: str) -> bool:
        return False

    def on_session_end(self, session_id: str) -> None:
        self.entries.append(("end", session_id))


class StepEngine(ScriptedEngine):
    """Streams the tokens of its reply one by one, each when the test allows it."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(["one two three"], tokenizer=tokenizer, repeat=True)
        self.steps = asyncio.Semaphore(0)
        self.has_ended = asyncio.Event()

    async def astream(self, req: ModelRequest) -> AsyncIterator[Any]:
        response = await self.agenerate(req)
        try:
            for token, logprob in zip(
                response.output_tokens, response.output_logprobs, strict=True
            ):
                await self.steps.acquire()
                yield TokenDelta(token_ids=(token,), logprobs=(logprob,), versions=(0,))
            yield response
        finally:
            self.has_ended.set()


async def test_a_listener_hears_each_turn_in_order(start: Any, plain: Any) -> None:
    diary = Diary()
    gateway = await start(["a", ValueError("no"), "b"], listener=diary, api_key="k")
    http = plain(gateway)
    first = await http.chat("k", x_session_id="s")
    assert (await http.chat("k", x_session_id="s")).status_code == 500
    third = await http.chat("k", x_session_id="s", x_session_done="1")
    assert diary.answers == [first.json()["id"], None, third.json()["id"]]
    assert diary.entries == [("request", "s"), ("answer", "s")] * 3 + [("end", "s")]
    assert [call.session_done for call in diary.calls] == [False, False, True]
    assert diary.calls[0].messages == ASK
    assert diary.calls[0].session is diary.calls[2].session


async def test_a_bad_request_is_not_heard(start: Any, plain: Any) -> None:
    diary = Diary()
    gateway = await start([], listener=diary)
    reply = await plain(gateway).post("/v1/chat/completions", {"messages": []}, gateway.api_key)
    assert reply.status_code == 400 and not diary.entries


async def test_a_listener_may_refuse(start: Any, plain: Any) -> None:
    diary = Diary()
    gateway = await start(["a"], listener=diary)
    diary.refuses = True
    reply = await plain(gateway).chat(gateway.api_key, x_session_id="s")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
    diary.refuses = False
    assert (await plain(gateway).chat(gateway.api_key, x_session_id="s")).status_code == 200
    assert diary.entries == [("request", "s"), ("answer", "s")]


async def test_marks_in_headers_win_over_the_body(start: Any, plain: Any) -> None:
    diary = Diary()
    gateway = await start(["a"] * 5, listener=diary)
    http, key = plain(gateway), gateway.api_key
    marks = {"session_id": "b", "turn_type": " Side ", "session_done": "no", "user": "ann"}
    body = {"messages": ASK, **marks}
    await http.post("/v1/chat/completions", body, key)
    await http.post("/v1/chat/completions", body, key, x_session_id="h", x_turn_type="MAIN")
    await http.post("/v1/chat/completions", {**body, "session_done": True}, key)
    await http.post("/v1/chat/completions", {"messages": ASK, "session_id": "b"}, key)
    assert [(call.session_id, call.turn_type) for call in diary.calls] == [
        *(("b", "side"), ("h", "main"), ("b", "side"), ("b", "main")),
    ]
    assert [call.user_id for call in diary.calls] == ["ann", "ann", "ann", None]
    assert diary.calls[0].session is diary.calls[2].session
    assert diary.calls[3].session is not diary.calls[2].session  # it had ended
    bad = await http.post("/v1/chat/completions", {**body, "turn_type": "aside"}, key)
    assert bad.status_code == 400 and "'aside'" in bad.json()["error"]["message"]


async def test_a_call_without_a_session_is_recorded_nowhere(start: Any, plain: Any) -> None:
    """Case B176: two clients without a session share nothing."""
    diary = Diary()
    gateway = await start(["a", "b"], listener=diary)
    for _ in range(2):
        assert (await plain(gateway).chat(gateway.api_key, x_turn_type="main")).status_code == 200
    first, second = diary.calls
    assert first.turn_type == second.turn_type == "side"
    assert first.session_id != second.session_id and first.session is not second.session
    assert [kind for kind, _ in diary.entries] == ["request", "answer", "end"] * 2
    assert not list(gateway._sessions)


async def test_users_with_keys_of_their_own(start: Any, plain: Any) -> None:
    """Case B176: interleaved users keep to themselves."""
    diary = Diary()
    gateway = await start(["1"] * 4, listener=diary, user_keys={"ann": "ka", "bob": "kb"})
    http = plain(gateway)
    for key in ("ka", "kb", "ka"):
        assert (await http.chat(key, x_session_id="main")).status_code == 200
    assert [(call.user_id, call.session_id) for call in diary.calls] == [
        *(("ann", "ann:main"), ("bob", "bob:main"), ("ann", "ann:main")),
    ]
    assert [len(call.session.cache) for call in diary.calls] == [2, 1, 2]
    assert (await http.chat("kb", x_session_id="ann:main")).status_code == 200
    assert diary.calls[-1].session_id == "bob:ann:main"


async def test_unmarked_turns_can_be_aside(start: Any, plain: Any) -> None:
    diary = Diary()
    gateway = await start(["1"], listener=diary, unmarked_turns="side")
    await plain(gateway).chat(gateway.api_key, x_session_id="s")
    assert diary.calls[0].turn_type == "side"


async def test_events_leave_when_they_are_made(start: Any, tokenizer: Any) -> None:
    engine = StepEngine(tokenizer)
    gateway = await start(engine)
    async with (
        openai.AsyncOpenAI(base_url=gateway.base_url, api_key=gateway.api_key) as client,
        asyncio.timeout(20),
    ):
        engine.steps.release()
        stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
        texts = []
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                texts.append(chunk.choices[0].delta.content)
            engine.steps.release()  # the next token is not made before this chunk has come
    assert "".join(texts) == "one two three" and len(texts) >= 3


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_ends_its_generation(
    start: Any, until: Any, stream: bool
) -> None:
    """Case B19: nothing is recorded, and the listener hears that there is no answer."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait_for_ever(req: ModelRequest) -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "never"

    diary = Diary()
    gateway = await start([wait_for_ever], listener=diary)
    async with httpx.AsyncClient() as client, asyncio.timeout(20):
        call = asyncio.create_task(
            client.post(
                f"{gateway.base_url}/chat/completions",
                headers={"x-api-key": gateway.api_key, "x-session-id": "s"},
                json={"messages": ASK, "stream": stream},
            )
        )
        await begun.wait()
        call.cancel()
        await ended.wait()
        await until(lambda: diary.answers)
    assert diary.answers == [None]
    assert len(diary.calls[0].session.cache) == 0


async def test_hanging_up_in_the_middle_of_a_stream(start: Any, tokenizer: Any, until: Any) -> None:
    engine, diary = StepEngine(tokenizer), Diary()
    gateway = await start(engine, listener=diary)
    async with httpx.AsyncClient() as client, asyncio.timeout(20):
        engine.steps.release()
        async with client.stream(
            "POST",
            f"{gateway.base_url}/chat/completions",
            headers={"x-api-key": gateway.api_key, "x-session-id": "s"},
            json={"messages": ASK, "stream": True},
        ) as reply:
            await anext(reply.aiter_lines())
        await engine.has_ended.wait()
        await until(lambda: diary.answers)
    assert diary.answers == [None]


async def test_a_turn_is_there_when_its_last_event_arrives(start: Any, plain: Any) -> None:
    """Case B48: the client leaves at the terminal event and rewards at once."""
    gateway = await start(["four"] * 20)
    http = plain(gateway)
    key = (await http.admin("start_session", task_id="t")).json()["api_key"]
    body = {"messages": ASK, "stream": True}
    for _ in range(20):
        async with http.http.stream(
            "POST", "/v1/chat/completions", json=body, headers={"x-api-key": key}
        ) as reply:
            async for line in reply.aiter_lines():
                if '"finish_reason":"stop"' in line.replace(" ", ""):
                    name = json.loads(line.removeprefix("data: "))["id"]
                    break
        rewarded = await http.post("/rl/set_reward", {"interaction_id": name, "reward": 1}, key)
        assert rewarded.status_code == 200


async def test_versions_stay_exact_across_a_live_update(
    start: Any, plain: Any, tokenizer: Any, until: Any
) -> None:
    """Cases B61 and B134: requests in flight and new ones go on, none is refused."""
    engine = ScriptedEngine(["x"] * 8, tokenizer=tokenizer)
    diary = Diary()
    gateway = await start(engine, listener=diary)
    http = plain(gateway)
    await engine.pause()
    calls = [
        asyncio.create_task(http.chat(gateway.api_key, x_session_id=f"s{i}")) for i in range(4)
    ]
    await until(lambda: len(engine.requests) == 4)
    await engine.update_weights(WeightUpdate(version=1))
    await engine.resume()
    assert [reply.status_code for reply in await asyncio.gather(*calls)] == [200] * 4
    for call in diary.calls:
        (interaction,) = call.session.cache.values()
        assert set(interaction.model_response.output_versions) == {1}


async def test_concurrent_calls_of_a_session_are_limited(
    start: Any, plain: Any, until: Any
) -> None:
    release = asyncio.Event()

    async def wait(req: ModelRequest) -> str:
        await release.wait()
        return "x"

    gateway = await start([wait, wait], max_concurrent_requests=2)
    http = plain(gateway)
    running = [asyncio.create_task(http.chat(gateway.api_key, x_session_id="s")) for _ in range(2)]
    await until(lambda: [live.usage.num_running for live in gateway._sessions] == [2])
    refused = await http.chat(gateway.api_key, x_session_id="s")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    release.set()
    assert [reply.status_code for reply in await asyncio.gather(*running)] == [200, 200]
    assert [live.usage.num_running for live in gateway._sessions] == [0]


async def test_the_rate_of_a_session_is_limited(start: Any, plain: Any) -> None:
    gateway = await start(["x"] * 3, max_requests_per_minute=2)
    http = plain(gateway)
    codes = [(await http.chat(gateway.api_key, x_session_id="s")).status_code for _ in range(3)]
    assert codes == [200, 200, 429]
    other = await http.chat(gateway.api_key, x_session_id="other")
    assert other.status_code == 200


async def test_models_health_and_metrics(start: Any, plain: Any, tokenizer: Any) -> None:
    engine = ScriptedEngine(["x"], tokenizer=tokenizer, version=3)
    gateway = await start(engine, model="small")
    http = plain(gateway)
    models = await http.get("/v1/models", gateway.api_key)
    assert [model["id"] for model in models.json()["data"]] == ["small"]
    assert (await http.get("/healthz")).json() == {"ok": True}
    await http.chat(gateway.api_key, x_session_id="a-user-chose-this")
    await http.chat("wrong")
    metrics = await http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = metrics.text.splitlines()
    for line in (
        'agent_rl_gateway_requests_total{endpoint="chat/completions",status="200"} 1',
        'agent_rl_gateway_requests_total{endpoint="chat/completions",status="401"} 1',
        'agent_rl_gateway_request_seconds_count{endpoint="chat/completions"} 2',
        'agent_rl_gateway_sessions{state="open"} 1',
        "agent_rl_gateway_weights_version 3",
    ):
        assert line in lines, line
    assert "a-user-chose-this" not in metrics.text
    await engine.close()
    assert (await http.get("/healthz")).status_code == 503
