"""Sessions that outlive their gateway: from a journal as a killed process leaves it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_rl.errors import JournalError
from agent_rl.gateway import session_log
from agent_rl.record.journal import Journal

SERVER = """
import asyncio, sys
from transformers import AutoTokenizer
from agent_rl import ScriptedEngine, small_model
from agent_rl.config import GatewayConfig
from agent_rl.gateway.server import Gateway

async def main():
    tokenizer = AutoTokenizer.from_pretrained(small_model())
    engine = ScriptedEngine(["four"], tokenizer=tokenizer, repeat=True)
    config = GatewayConfig(admin_key="admin", api_key="user", journal=sys.argv[1])
    gateway = Gateway(engine, tokenizer, config)
    await gateway.start()
    print(gateway.base_url, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def as_killed(journal: Path) -> str:
    """What a process that is killed now leaves behind."""
    copy = journal.with_name("left.journal")
    copy.write_bytes(journal.read_bytes())
    return str(copy)


async def test_a_killed_gateway_goes_on_with_its_sessions(
    start: Any, plain: Any, tmp_path: Path
) -> None:
    keys = {"admin_key": "admin", "api_key": "user", "chat_template_type": "concat"}
    journal = tmp_path / "sessions.journal"
    first = plain(await start(["one", "two", "chat"], journal=str(journal), **keys))
    opened = (await first.admin("start_session", task_id="t", attempt=3, user_id="ann")).json()
    key = opened["api_key"]
    answers = [(await first.chat(key, text)).json() for text in ("1?", "2?")]
    await first.post("/rl/set_reward", {"interaction_id": answers[0]["id"], "reward": 0.25}, key)
    await first.chat("user", x_session_id="phone")

    second = plain(await start(["three"], journal=as_killed(journal), **keys))
    assert (await second.admin("start_session", task_id="t", attempt=2)).status_code == 409
    messages = [
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "3?"},
    ]
    third = await second.post("/v1/chat/completions", {"messages": messages}, key)
    assert third.status_code == 200
    await second.post("/rl/end_session", {}, key)
    exported = (await second.admin("export_trajectories", session_id="t-1")).json()
    rows = exported["interactions"]
    assert list(rows) == [answers[0]["id"], answers[1]["id"], third.json()["id"]]
    assert rows[answers[0]["id"]]["reward"] == 0.25
    parent, child = [row["trajectory"]["input_ids"] for row in list(rows.values())[1:]]
    assert child[: len(parent)] == parent
    live = {one.session_id: one for one in second.gateway._sessions}
    assert list(live) == ["phone"] and len(live["phone"].session.cache) == 1


async def test_the_record_comes_back_exactly(start: Any, plain: Any, tmp_path: Path) -> None:
    journal = tmp_path / "sessions.journal"
    first = plain(await start(["a", "b"], journal=str(journal), api_key="user"))
    for text in ("1?", "2?"):
        await first.chat("user", text, x_session_id="s", x_turn_type="main")
    second = await start([], journal=as_killed(journal), api_key="user")
    (before,), (after,) = list(first.gateway._sessions), list(second._sessions)
    for old, new in zip(before.session.cache.values(), after.session.cache.values(), strict=True):
        assert new.interaction_id == old.interaction_id
        assert new.messages == old.messages and new.created_at == old.created_at
        assert new.output_message_list == old.output_message_list
        assert new.model_response == old.model_response


async def test_no_key_is_on_disk(start: Any, plain: Any, tmp_path: Path) -> None:
    journal = tmp_path / "sessions.journal"
    http = plain(await start(["a"], journal=str(journal)))
    key = (await http.admin("start_session", task_id="t")).json()["api_key"]
    await http.chat(key)
    content = journal.read_bytes()
    for secret in (key, http.gateway.admin_key, http.gateway.api_key):
        assert secret.encode() not in content
    assert journal.stat().st_mode & 0o077 == 0


async def test_a_turn_is_on_disk_before_its_last_event(
    start: Any, plain: Any, tmp_path: Path
) -> None:
    journal = tmp_path / "sessions.journal"
    http = plain(await start(["a"] * 10, journal=str(journal)))
    key = (await http.admin("start_session", task_id="t")).json()["api_key"]
    body = {"messages": [{"role": "user", "content": "?"}], "stream": True}
    for _ in range(10):
        async with http.http.stream(
            "POST", "/v1/chat/completions", json=body, headers={"x-api-key": key}
        ) as reply:
            async for line in reply.aiter_lines():
                if '"finish_reason":"stop"' in line.replace(" ", ""):
                    name = json.loads(line.removeprefix("data: "))["id"]
                    assert name.encode() in journal.read_bytes()


async def test_many_turns_share_one_write(start: Any, plain: Any, tmp_path: Path) -> None:
    """All who wait while a write runs are served by the next one."""
    journal = tmp_path / "sessions.journal"
    gateway = await start(["a"] * 30, journal=str(journal))
    http = plain(gateway)
    replies = await asyncio.gather(
        *[http.chat(gateway.api_key, x_session_id=f"s{i}") for i in range(30)]
    )
    assert {reply.status_code for reply in replies} == {200}
    entries = [entry for line in Journal.read(journal) for entry in line["entries"]]
    assert sorted(e["session_id"] for e in entries if e["kind"] == "turn") == sorted(
        f"s{i}" for i in range(30)
    )


async def test_what_is_forgotten_leaves_the_disk(start: Any, plain: Any, tmp_path: Path) -> None:
    journal = tmp_path / "sessions.journal"
    gateway = await start(["a"] * 3, journal=str(journal), user_keys={"ann": "ka"})
    http = plain(gateway)
    await http.chat("ka", "secret-of-ann", x_session_id="s")
    await http.chat(gateway.api_key, "kept", x_session_id="s")
    await http.chat(gateway.api_key, "secret-of-t", x_session_id="t")
    assert b"secret-of-ann" in journal.read_bytes()
    assert await gateway.forget(user_id="ann") == 1
    assert await gateway.forget(session_id="t") == 1
    content = journal.read_bytes()
    assert b"secret" not in content and b"kept" in content
    with pytest.raises(ValueError, match="one of both"):
        await gateway.forget()


async def test_the_journal_does_not_grow_with_what_has_ended(
    start: Any, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B144."""
    monkeypatch.setattr(session_log, "_MANY_STALE", 8)
    journal = tmp_path / "sessions.journal"
    gateway = await start(["a"] * 6, journal=str(journal))
    http = plain(gateway)
    await http.chat(gateway.api_key, "kept", x_session_id="open")
    for number in range(4):
        await http.chat(gateway.api_key, "gone", x_session_id=f"s{number}", x_session_done="1")
    await gateway.close()
    content = journal.read_bytes()
    assert b"kept" in content and content.count(b'"gone"') < 4


async def test_one_gateway_has_a_journal(start: Any, tmp_path: Path) -> None:
    await start([], journal=str(tmp_path / "j"))
    with pytest.raises(JournalError, match="another writer"):
        await start([], journal=str(tmp_path / "j"))


async def test_a_journal_of_something_else_is_refused(start: Any, tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append({"entries": [{"kind": "turn"}]})
    with pytest.raises(JournalError, match="no entry of a gateway's journal"):
        await start([], journal=str(tmp_path / "j"))


@pytest.mark.slow
def test_kill_9_loses_no_acknowledged_turn(tmp_path: Path) -> None:
    """The process dies in the middle of traffic; every turn whose answer came is there again."""
    journal = str(tmp_path / "sessions.journal")
    answered: dict[str, list[str]] = {}
    with _serving(journal) as (process, url):
        asyncio.run(asyncio.wait_for(_traffic(url, process, answered), 60))
    assert sum(map(len, answered.values())) >= 40
    with _serving(journal) as (_, url):
        root = url.removesuffix("/v1")
        for session_id, names in answered.items():
            for name in names:
                rewarded = httpx.post(
                    f"{root}/s/{session_id}/rl/set_reward",
                    headers={"x-api-key": "user"},
                    json={"interaction_id": name, "reward": 1.0},
                )
                assert rewarded.status_code == 200, rewarded.text


@contextmanager
def _serving(journal: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", SERVER, journal]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


async def _traffic(
    url: str, process: subprocess.Popen[str], answered: dict[str, list[str]]
) -> None:
    """Eight users talk until the server is killed after 40 answers."""

    async def user(client: httpx.AsyncClient, name: str) -> None:
        headers = {"x-api-key": "user", "x-session-id": name}
        body = {"messages": [{"role": "user", "content": "2+2?"}], "model": "m"}
        while True:
            try:
                reply = await client.post(f"{url}/chat/completions", headers=headers, json=body)
                answered.setdefault(name, []).append(reply.json()["id"])
            except httpx.TransportError:
                return
            if sum(map(len, answered.values())) == 40:
                os.kill(process.pid, signal.SIGKILL)

    async with httpx.AsyncClient(timeout=30.0) as client, asyncio.TaskGroup() as users:
        for number in range(8):
            users.create_task(user(client, f"user{number}"))
