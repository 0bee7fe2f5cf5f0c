"""The endpoints as a shell script asks them: the real curl, whatever it prints."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_rl.gateway.server import Gateway

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

Curl = Callable[..., Awaitable[str]]
ASK = json.dumps({"messages": [{"role": "user", "content": "2+2?"}]})


async def curl(gateway: Gateway, path: str, *options: str, key: str | None = None) -> str:
    """What ``curl URL`` prints, and the status on a line of its own."""
    url = gateway.base_url.removesuffix("/v1") + path
    bearer = () if key is None else ("-H", f"Authorization: Bearer {key}")
    process = await asyncio.create_subprocess_exec(
        *("curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", "20"),
        *("--write-out", "\n%{http_code}", *bearer, *options, url),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_an_answer_and_its_record(start: Any) -> None:
    gateway = await start(["four"])
    headers = ("-H", "X-Session-Id: s", "-H", "Content-Type: application/json")
    body, status = (
        await curl(gateway, "/v1/chat/completions", *headers, "-d", ASK, key=gateway.api_key)
    ).split("\n")
    assert status == "200"
    answer = json.loads(body)
    assert answer["choices"][0]["message"]["content"] == "four"
    (live,) = gateway._sessions
    assert list(live.session.cache) == [answer["id"]]


async def test_a_stream_line_by_line(start: Any) -> None:
    gateway = await start(["four"])
    ask = json.dumps({**json.loads(ASK), "stream": True, "stream_options": {"include_usage": True}})
    output = await curl(
        gateway, "/v1/chat/completions", "--no-buffer", "-d", ask, key=gateway.api_key
    )
    *events, status = [line for line in output.split("\n") if line]
    assert status == "200"
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert chunks.pop()["usage"]["completion_tokens"] == 2
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "four"


async def test_a_message_stream(start: Any) -> None:
    gateway = await start(["four"])
    ask = json.dumps({**json.loads(ASK), "max_tokens": 9, "stream": True})
    headers = ("-H", f"x-api-key: {gateway.api_key}", "-H", "anthropic-version: 2023-06-01")
    output = await curl(gateway, "/v1/messages", *headers, "--no-buffer", "-d", ask)
    names = [line[7:] for line in output.split("\n") if line.startswith("event: ")]
    assert names[0] == "message_start"
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("-H", "Transfer-Encoding: chunked"), id="chunked"),
        pytest.param(("-H", "Expect: 100-continue"), id="expect"),
        pytest.param(("--http1.0",), id="http1.0"),
        pytest.param(("-H", "Content-Type: text/plain"), id="another content type"),
    ],
)
async def test_a_body_in_every_way_that_curl_can_send_it(
    start: Any, options: tuple[str, ...], tmp_path: Path
) -> None:
    gateway = await start(["four"])
    path = tmp_path / "body.json"
    path.write_text(ASK + " " * 100_000, encoding="utf-8")  # more than one segment
    data = ("--data-binary", f"@{path}")
    output = await curl(gateway, "/v1/chat/completions", *options, *data, key=gateway.api_key)
    body, status = output.split("\n")
    assert status == "200"
    assert json.loads(body)["choices"][0]["message"]["content"] == "four"


@pytest.mark.parametrize(
    ("path", "options", "status"),
    [
        ("/healthz", (), "200"),
        ("/healthz", ("--head",), "200"),
        ("/metrics", (), "200"),
        ("/v1/models", (), "401"),
        ("/v1/chat/completions", ("-d", ASK), "401"),
        ("/rl/start_session", ("-d", "{}", "-H", "Authorization: Bearer wrong"), "403"),
        ("/s/%2e%2e/v1/models", ("--path-as-is", "-H", "x-api-key: wrong"), "400"),
    ],
)
async def test_without_a_key(start: Any, path: str, options: tuple[str, ...], status: str) -> None:
    gateway = await start(["four"])
    output = await curl(gateway, path, *options)
    assert output.rsplit("\n", 1)[1] == status
