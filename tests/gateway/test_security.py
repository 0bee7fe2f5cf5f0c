"""What strangers send: wrong keys, foreign ids, pickles, huge and slow requests."""

from __future__ import annotations

import asyncio
import pickle
import socket
from pathlib import Path
from typing import Any

import pytest

from agent_rl import ScriptedEngine
from agent_rl.config import GatewayConfig
from agent_rl.errors import ConfigError
from agent_rl.gateway.server import Gateway

ASK = [{"role": "user", "content": "2+2?"}]
MODEL_ROUTES = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
]
RL_ROUTES = [
    "/rl/start_session",
    "/rl/end_session",
    "/rl/set_reward",
    "/rl/export_trajectories",
]
BAD_IDS = [
    "../../tmp/x",
    "/etc/x",
    "a\\..\\b",
    "",
    ".",
    "..",
    "a\0b",
    "x" * 5000,
    "a/b",
    "%2e%2e%2f",
]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "bearer x"},
        {"authorization": "Basic x"},
        {"authorization": "Bearer admin x"},
        {"authorization": "Bearer admi"},
        {"authorization": b"Bearer \xe4dmin"},
        {"x-api-key": ""},
        {"x-api-key": "wrong"},
    ],
)
async def test_without_the_right_key_there_is_no_way_in(
    start: Any, plain: Any, headers: Any
) -> None:
    """Case B172."""
    http = plain(await start([], admin_key="admin", api_key="user")).http
    for route in [*MODEL_ROUTES, *RL_ROUTES]:
        reply = await http.post(route, json={"task_id": "t"}, headers=headers)
        assert reply.status_code in (401, 403), route
    assert (await http.get("/v1/models", headers=headers)).status_code == 401


def test_keys_of_the_config(tokenizer: Any) -> None:
    """Case B172: no empty key, no key twice, and a random one where none is set."""
    engine = ScriptedEngine([])
    for wrong in ({"admin_key": ""}, {"api_key": " "}, {"user_keys": {"a": "k\u00e9"}}):
        with pytest.raises(ValueError, match="key"):
            GatewayConfig(**wrong)
    with pytest.raises(ConfigError, match="must all differ"):
        Gateway(engine, tokenizer, GatewayConfig(admin_key="same", api_key="same"))
    gateways = [Gateway(engine, tokenizer) for _ in range(2)]
    keys = {key for gateway in gateways for key in (gateway.admin_key, gateway.api_key)}
    assert len(keys) == 4 and all(len(key) > 40 for key in keys)
    assert "chosen" not in repr(GatewayConfig(admin_key="chosen", user_keys={"u": "chosen2"}))


async def test_the_admin_key_is_no_session(start: Any, plain: Any) -> None:
    """Case B176."""
    gateway = await start(["x"])
    reply = await plain(gateway).chat(gateway.admin_key)
    assert reply.status_code == 400 and not list(gateway._sessions)
    named = await plain(gateway).chat(gateway.admin_key, x_session_id="nobody")
    assert named.status_code == 404 and not list(gateway._sessions)


async def test_a_key_reaches_only_its_own_session(start: Any, plain: Any) -> None:
    gateway = await start(["x"] * 3)
    http = plain(gateway)
    mine, other = [(await http.admin("start_session", task_id="t")).json() for _ in range(2)]
    theirs = (await http.chat(other["api_key"])).json()["id"]
    key = mine["api_key"]
    path = f"/s/{other['session_id']}/v1/chat/completions"
    assert (await http.post(path, {"messages": ASK}, key)).status_code == 403
    # Some frameworks name sessions of their own; the key alone says which session it is.
    assert (await http.chat(key, x_session_id=other["session_id"])).status_code == 200
    body = {"messages": ASK, "session_id": "../of the framework"}
    assert (await http.post("/v1/chat/completions", body, key)).status_code == 200
    body = {"reward": 1.0, "interaction_id": theirs}
    assert (await http.post("/rl/set_reward", body, key)).status_code == 400
    assert (await http.post(f"/s/{other['session_id']}/rl/end_session", {}, key)).status_code == 403
    assert (await http.get(f"/v1/responses/{theirs}", key)).status_code == 404
    follow = {"input": "and?", "previous_response_id": theirs}
    assert (await http.post("/v1/responses", follow, key)).status_code == 400
    assert (await http.chat(gateway.api_key, x_session_id=mine["session_id"])).status_code == 403
    assert [len(live.session.cache) for live in gateway._sessions] == [2, 1]


@pytest.mark.parametrize("name", ["authorization", "X-Api-Key", "x-session-id", "x-turn-type"])
async def test_a_key_or_mark_is_sent_once(start: Any, plain: Any, name: str) -> None:
    """A proxy in front may go by the first of two, and we by the last."""
    gateway = await start(["x"])
    headers = [("x-api-key", gateway.api_key), (name, "main"), (name.upper(), "side")]
    reply = await plain(gateway).http.post(
        "/v1/chat/completions", json={"messages": ASK}, headers=headers
    )
    assert reply.status_code == 400
    assert f"{name.lower()} was sent more than once" in reply.json()["error"]["message"]
    twice = [("x-api-key", gateway.api_key), ("accept", "a"), ("accept", "b")]
    assert (await plain(gateway).http.get("/v1/models", headers=twice)).status_code == 200


@pytest.mark.parametrize("name", BAD_IDS)
async def test_ids_that_are_none(start: Any, plain: Any, tmp_path: Path, name: str) -> None:
    """Case B175: refused at the door, and nothing is written under such a name."""
    folder = tmp_path / "store"
    gateway = await start(["x"], journal=str(folder / "journal"))
    http, key = plain(gateway), gateway.api_key
    body = {"messages": ASK, "session_id": name}
    assert (await http.post("/v1/chat/completions", body, key)).status_code == 400
    assert (await http.admin("start_session", task_id=name)).status_code == 400
    assert (await http.admin("export_trajectories", session_id=name)).status_code == 400
    assert (await http.admin("end_session", session_id=name)).status_code == 400
    if name.isprintable() and name.strip("."):  # the client itself takes dots out of paths
        assert (await http.chat(key, x_session_id=name)).status_code == 400
        path = f"/s/{name}/v1/chat/completions"
        reply = await http.post(path.replace("\\", "%5C"), {"messages": ASK}, key)
        assert reply.status_code in (400, 404)
    assert not list(gateway._sessions)
    assert _names_in(tmp_path) == ["journal", "journal.lock", "store"]


def _names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


async def test_pickles_are_only_bytes(start: Any, plain: Any, tmp_path: Path) -> None:
    """Case B182: to every route, with every content type that might invite it."""
    marker = tmp_path / "pwned"
    content = pickle.dumps(Touch(str(marker)))
    gateway = await start([])
    http = plain(gateway)
    for route in [*MODEL_ROUTES, *RL_ROUTES]:
        for kind in ("application/octet-stream", "application/json"):
            for key in (gateway.admin_key, gateway.api_key):
                reply = await http.http.post(
                    route, content=content, headers={"x-api-key": key, "content-type": kind}
                )
                assert reply.status_code in (400, 403), (route, reply.text)
    assert not marker.exists()


async def test_a_body_that_is_too_large_is_not_read(start: Any, plain: Any) -> None:
    gateway = await start(["x"], max_body_bytes=1000)
    http, key = plain(gateway), gateway.api_key
    large = {"messages": [{"role": "user", "content": "x" * 1000}]}
    reply = await http.post("/v1/chat/completions", large, key)
    assert reply.status_code == 413 and "max_body_bytes=1000" in reply.json()["error"]["message"]
    reply = await http.post("/v1/messages", {**large, "max_tokens": 1}, key)
    assert reply.json()["error"]["type"] == "request_too_large"

    async def chunks() -> Any:  # without a Content-Length
        for _ in range(100):
            yield b"x" * 100

    reply = await http.http.post(
        "/v1/chat/completions", content=chunks(), headers={"x-api-key": key}
    )
    assert reply.status_code == 413
    assert (await http.chat(key)).status_code == 200


async def _answer_to(gateway: Gateway, content: bytes) -> bytes:
    """Everything the server sends until it closes the connection."""
    host, port = gateway._socket.getsockname()[:2]
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(content)
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_a_slow_client_is_let_go(start: Any) -> None:
    """Slow loris: half a head, half a body, and a second half head on a used connection."""
    gateway = await start([], read_timeout_s=0.2)
    assert await _answer_to(gateway, b"") == b""
    assert await _answer_to(gateway, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n") == b""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
        f"X-Api-Key: {gateway.api_key}\r\n\r\n"
    )
    assert (await _answer_to(gateway, head.encode() + b"{")).startswith(b"HTTP/1.1 408")
    host, port = gateway._socket.getsockname()[:2]
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    writer.write(b"GET /hea")
    await asyncio.wait_for(reader.read(), 20)
    writer.close()


async def test_a_head_that_is_too_large_is_let_go(start: Any) -> None:
    gateway = await start([], max_header_bytes=2048)
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"X-Much: " + b"y" * 1_000_000
    assert b"200" not in await _answer_to(gateway, head)


async def test_a_client_that_does_not_read_ends_its_call(
    start: Any, tokenizer: Any, until: Any
) -> None:
    """Nobody holds the engine by not taking the bytes of a long stream."""
    long = tokenizer.encode("word " * 40_000, add_special_tokens=False)
    engine = ScriptedEngine([{"output_tokens": long, "stop_reason": "stop"}], tokenizer=tokenizer)
    gateway = await start(engine, write_timeout_s=0.2)
    host, port = gateway._socket.getsockname()[:2]
    body = b'{"stream": true, "messages": [{"role": "user", "content": "?"}]}'
    taker = socket.socket()
    taker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    taker.connect((host, port))
    _, writer = await asyncio.open_connection(sock=taker, limit=1024)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: %s\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (gateway.api_key.encode(), len(body), body)
    )
    try:
        async with asyncio.timeout(30):
            await until(lambda: gateway._counters.num_hung_up == 1)
    finally:
        writer.close()
