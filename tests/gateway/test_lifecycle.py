"""``/rl/*`` over a real socket: start, turns, rewards, end, export."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


async def test_an_episode_from_start_to_export(start: Any, plain: Any, tokenizer: Any) -> None:
    gateway = await start(["one", "two"])
    http = plain(gateway)
    opened = (await http.admin("start_session", task_id="shop-7")).json()
    assert opened["session_id"] == "shop-7-1"
    assert opened["base_url"] == f"{gateway.base_url.removesuffix('/v1')}/s/shop-7-1/v1"
    key = opened["api_key"]
    async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=key) as client:
        ask = [{"role": "user", "content": "1?"}]
        first = await client.chat.completions.create(model="m", messages=ask)
        answer = {"role": "assistant", "content": first.choices[0].message.content}
        more = [*ask, answer, {"role": "user", "content": "2?"}]
        second = await client.chat.completions.create(model="m", messages=more)
    rewarded = await http.post("/rl/set_reward", {"interaction_id": first.id, "reward": 0.5}, key)
    told = {"session_id": "shop-7-1", "interaction_id": first.id, "is_learnt": False}
    assert rewarded.json() == told  # nobody learns here: the rewards are for the export
    last = await http.post("/rl/set_reward", {"interaction_id": None, "reward": 1}, key)
    assert last.json()["interaction_id"] == second.id
    ended = await http.post("/rl/end_session", {}, key)
    assert ended.json() == {"session_id": "shop-7-1", "num_interactions": 2}
    assert (await http.chat(key)).status_code == 410
    assert (await http.post("/rl/set_reward", {"reward": 1}, key)).status_code == 410
    exported = await http.admin("export_trajectories", session_id="shop-7-1", discount=0.5)
    body = exported.json()
    assert body["end_reason"] == "done"
    rows = body["interactions"]
    assert {name: row["reward"] for name, row in rows.items()} == {first.id: 1.0, second.id: 1.0}
    row = rows[second.id]["trajectory"]
    sampled = [
        token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask
    ]
    assert tokenizer.decode(sampled) == "two" + tokenizer.eos_token
    logprobs = [lp for lp, mask in zip(row["logprobs"], row["loss_mask"], strict=True) if mask]
    assert logprobs == pytest.approx([-0.1, -0.2])
    again = await http.admin("export_trajectories", session_id="shop-7-1")
    assert again.status_code == 404
    assert "it was exported already" in again.json()["error"]["message"]


async def test_the_status_codes_of_the_lifecycle(start: Any, plain: Any) -> None:
    """Cases B172, B176, and B179 for a reward before any call."""
    gateway = await start(["x"], max_sessions=1, admin_key="admin", api_key="user")
    http = plain(gateway)
    task = {"task_id": "t"}

    async def status(path: str, body: Any, key: str | None) -> int:
        return (await http.post(path, body, key)).status_code

    assert await status("/rl/start_session", task, None) == 401
    assert await status("/rl/start_session", task, "wrong") == 403
    assert await status("/rl/start_session", {**task, "api_key": "admin"}, "admin") == 400
    for key in ("user", "", "two words", "k\u00e9"):
        assert await status("/rl/start_session", {**task, "api_key": key}, "admin") == 400
    opened = (await http.admin("start_session", task_id="t", api_key="mine")).json()
    assert opened["api_key"] == "mine"
    assert await status("/rl/start_session", {**task, "api_key": "mine"}, "admin") == 409
    full = await http.admin("start_session", task_id="u")
    assert full.status_code == 429 and full.headers["retry-after"] == "1"
    assert "x-should-retry" not in full.headers
    assert await status("/rl/set_reward", {"reward": 1.0}, "unknown") == 401
    assert await status("/rl/set_reward", {"reward": 1.0}, "mine") == 400  # nothing recorded yet
    assert (await http.chat("mine")).status_code == 200
    assert await status("/rl/set_reward", {"reward": 1.0, "interaction_id": "no"}, "mine") == 400
    assert await status("/rl/set_reward", {"reward": "good"}, "mine") == 400
    assert await status("/rl/set_reward", {"reward": 1.0, "colour": 1}, "mine") == 400
    assert await status("/rl/export_trajectories", {"session_id": "t-1"}, "mine") == 403
    assert await status("/rl/export_trajectories", {"session_id": "nobody"}, "admin") == 404
    early = await http.admin("export_trajectories", session_id="t-1", wait_s=0)
    assert early.status_code == 408
    assert await status("/rl/end_session", {}, "mine") == 200
    assert await status("/rl/end_session", {}, "mine") == 410
    assert (await http.admin("start_session", task_id="u", api_key="mine")).status_code == 200
    assert await status("/rl/no_such_route", {}, "admin") == 404
    assert (await http.get("/rl/start_session", "admin")).status_code == 405


async def test_refusals_say_what_is_wrong_and_what_there_is(start: Any, plain: Any) -> None:
    http = plain(await start(["x"], admin_key="admin"))
    key = (await http.admin("start_session", task_id="t")).json()["api_key"]
    await http.chat(key)

    async def message(path: str, body: Any, key: str) -> str:
        return (await http.post(path, body, key)).json()["error"]["message"]

    assert await message("/rl/set_reward", {"reward": "good"}, key) == (
        "reward is refused: a reward must be one finite number, got 'good' of type str"
    )
    said = await message("/rl/set_reward", {"reward": 1, "interaction_id": "no"}, key)
    assert said.startswith("interaction_id is refused: no interaction 'no' is recorded")
    said = await message("/v1/embeddings", {}, key)
    assert said == (
        "POST /embeddings is not served here; below /v1 there are chat/completions, completions, "
        "messages, messages/count_tokens, models, responses, responses/{id}"
    )
    assert await message("/rl/reward", {}, "admin") == (
        "/rl/reward is not served here; there are rl/end_session, rl/export_trajectories, "
        "rl/set_reward, rl/start_session"
    )


async def test_an_export_waits_for_the_end(start: Any, plain: Any) -> None:
    gateway = await start(["x"])
    http = plain(gateway)
    key = (await http.admin("start_session", task_id="t")).json()["api_key"]
    waiting = asyncio.create_task(http.admin("export_trajectories", session_id="t-1"))
    await http.chat(key)
    assert not waiting.done()
    await http.post("/rl/end_session", {}, key)
    assert len((await waiting).json()["interactions"]) == 1


async def test_a_session_without_calls_exports_no_rows(start: Any, plain: Any) -> None:
    """Case B179."""
    http = plain(await start([]))
    key = (await http.admin("start_session", task_id="t")).json()["api_key"]
    assert (await http.post("/rl/end_session", {}, key)).json()["num_interactions"] == 0
    exported = await http.admin("export_trajectories", session_id="t-1")
    assert exported.json()["interactions"] == {}


async def test_a_call_without_reward_is_exported_without_one(start: Any, plain: Any) -> None:
    """Case B179: what it counts as is the reader's rule."""
    http = plain(await start(["x"]))
    key = (await http.admin("start_session", task_id="t")).json()["api_key"]
    await http.chat(key)
    await http.post("/rl/end_session", {}, key)
    exported = await http.admin("export_trajectories", session_id="t-1")
    (row,) = exported.json()["interactions"].values()
    assert row["reward"] is None


async def test_a_superseded_attempt_is_not_exported(start: Any, plain: Any) -> None:
    """Case B139."""
    http = plain(await start(["late", "good"]))
    first = (await http.admin("start_session", task_id="t", attempt=1)).json()
    await http.chat(first["api_key"])
    second = (await http.admin("start_session", task_id="t", attempt=2)).json()
    assert (second["session_id"], second["attempt"]) == ("t-2", 2)
    assert (await http.chat(first["api_key"])).status_code == 410
    assert (await http.chat(second["api_key"])).status_code == 200
    refused = await http.admin("export_trajectories", session_id="t-1")
    assert refused.status_code == 410
    await http.post("/rl/end_session", {}, second["api_key"])
    exported = await http.admin("export_trajectories", session_id="t-2")
    (row,) = exported.json()["interactions"].values()
    assert row["output_message_list"][0]["content"] == "good"


async def test_the_admin_acts_on_a_session_by_name(start: Any, plain: Any) -> None:
    gateway = await start(["x"])
    http = plain(gateway)
    await http.admin("start_session", task_id=7)
    named = await http.post(
        "/s/7-1/v1/chat/completions",
        {"messages": [{"role": "user", "content": "2+2?"}]},
        gateway.admin_key,
    )
    assert named.status_code == 200
    assert (await http.admin("set_reward", session_id="7-1", reward=1.0)).status_code == 200
    assert (await http.admin("set_reward", reward=1.0)).status_code == 400
    assert (await http.admin("end_session", session_id="7-1")).json()["num_interactions"] == 1
    assert (await http.admin("end_session", session_id="7-1")).status_code == 410


async def test_concat_needs_prompts_made_for_it(start: Any, plain: Any) -> None:
    for kind, status in (("hf", 400), ("concat", 200)):
        http = plain(await start(["x"], chat_template_type=kind))
        key = (await http.admin("start_session", task_id="t")).json()["api_key"]
        await http.chat(key)
        await http.post("/rl/end_session", {}, key)
        exported = await http.admin("export_trajectories", session_id="t-1", style="concat")
        assert exported.status_code == status


async def test_an_export_is_strict_json_and_nothing_else(start: Any, plain: Any) -> None:
    """Case B182."""
    http = plain(await start([CALL]))
    key = (await http.admin("start_session", task_id="t")).json()["api_key"]
    await http.chat(key)
    await http.post("/rl/end_session", {}, key)
    exported = await http.admin("export_trajectories", session_id="t-1")
    assert exported.headers["content-type"] == "application/json"

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    json.loads(exported.content, parse_constant=refuse)


async def test_an_idle_session_is_ended_without_any_call(
    start: Any, plain: Any, until: Any
) -> None:
    """Case B178: late calls and rewards are refused, capacity comes back."""
    gateway = await start(["a"], session_timeout_s=0.1, max_sessions=1)
    http = plain(gateway)
    key = (await http.admin("start_session", task_id="t")).json()["api_key"]
    await until(lambda: gateway._counters.ended["idle"] == 1)
    assert (await http.chat(key)).status_code == 410
    assert (await http.post("/rl/set_reward", {"reward": 1.0}, key)).status_code == 410
    assert (await http.admin("start_session", task_id="u")).status_code == 200
