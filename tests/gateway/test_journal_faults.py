"""The gateway's journal beside what may go wrong: a full disk, calls that outlive their session."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from agent_rl import ScriptedEngine, small_model
from agent_rl.config import GatewayConfig
from agent_rl.errors import JournalError
from agent_rl.gateway.server import Gateway
from agent_rl.types import ModelRequest

ASK = {"role": "user", "content": "hi"}


class Slow:
    """Scripted answers, of which the one to "slow" waits for ``go_on``."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.has_begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def reply(self, request: ModelRequest) -> str:
        if "slow" in self.tokenizer.decode(request.input_ids):
            self.has_begun.set()
            await self.go_on.wait()
        return "four"


@contextmanager
def full_disk(gateway: Gateway) -> Iterator[None]:
    """Every write to the journal fails: its file is /dev/full meanwhile."""
    file = gateway._log._journal._file
    saved, full = os.dup(file), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file)
    try:
        yield
    finally:
        os.dup2(saved, file)
        os.close(saved)
        os.close(full)


def after(answer: Any, text: str) -> dict[str, Any]:
    """The body of the request that goes on from an answer to ASK."""
    message = answer.json()["choices"][0]["message"]
    return {"messages": [ASK, message, {"role": "user", "content": text}]}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
async def test_a_full_disk_leaves_no_gap(start: Any, plain: Any, tmp_path: Path) -> None:
    """What could not be written is written later, in order: turn 3 is encoded against turn 2."""
    journal = str(tmp_path / "j")
    gateway = await start(["one", "two", "b", "three"], journal=journal, api_key="user")
    http = plain(gateway)
    names = {"x-session-id": "s", "x-api-key": "user"}
    first = await http.post("/v1/chat/completions", {"messages": [ASK]}, **names)
    with full_disk(gateway):
        for name in ("s", "other"):
            failed = await http.post(
                "/v1/chat/completions", after(first, "2"), **{**names, "x-session-id": name}
            )
            assert failed.status_code == 500
            assert "journal cannot be written" in failed.json()["error"]["message"]
            assert str(tmp_path) not in failed.text
    messages = [*after(first, "2")["messages"], {"role": "assistant", "content": "two"}, ASK]
    third = await http.post("/v1/chat/completions", {"messages": messages}, **names)
    assert third.status_code == 200
    await gateway.close()
    again = await start([], journal=journal, api_key="user")
    assert {one.session_id: len(one.session.cache) for one in again._sessions} == {
        "s": 3,
        "other": 1,
    }


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
async def test_an_end_that_was_not_written_is_written_later(
    start: Any, plain: Any, tmp_path: Path
) -> None:
    journal = str(tmp_path / "j")
    gateway = await start(["one"], journal=journal, admin_key="admin")
    http = plain(gateway)
    key = (await http.admin("start_session", task_id="t")).json()["api_key"]
    await http.chat(key)
    with full_disk(gateway):
        assert (await http.admin("end_session", session_id="t-1")).status_code == 500
    assert (await http.admin("start_session", task_id="u")).status_code == 200
    await gateway.close()
    again = await start([], journal=journal, admin_key="admin")
    assert {one.session_id: one.end_reason for one in again._sessions} == {
        "t-1": "done",
        "u-2": None,
    }


async def test_the_sessions_of_another_tokenizer_are_refused(
    start: Any, plain: Any, tmp_path: Path
) -> None:
    """Their ids would be other words to this model."""
    journal = str(tmp_path / "j")
    gateway = await start(["a"], journal=journal)
    await plain(gateway).chat(gateway.api_key, x_session_id="s")
    await gateway.close()
    other = AutoTokenizer.from_pretrained(small_model())
    assert other.add_tokens(["Rain, 0123"]) == 1
    refused = Gateway(ScriptedEngine([]), other, GatewayConfig(journal=journal))
    with pytest.raises(JournalError, match="another tokenizer"):
        await refused.start()
    assert len(list((await start([], journal=journal))._sessions)) == 1


async def test_a_call_that_outlives_its_session_is_not_in_the_next_of_that_name(
    start: Any, plain: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """Its turn goes on from one that the next session never had."""
    journal, slow = str(tmp_path / "j"), Slow(tokenizer)
    gateway = await start([slow.reply] * 4, journal=journal)
    http = plain(gateway)
    names = {"x-session-id": "s", "x-api-key": gateway.api_key}
    first = await http.post("/v1/chat/completions", {"messages": [ASK]}, **names)
    late = asyncio.create_task(http.post("/v1/chat/completions", after(first, "slow"), **names))
    await slow.has_begun.wait()
    await http.chat(gateway.api_key, "bye", x_session_id="s", x_session_done="1")
    new = await http.chat(gateway.api_key, "new", x_session_id="s")
    slow.go_on.set()
    assert (await late).status_code == 200
    await gateway.close()
    (live,) = (await start([], journal=journal))._sessions
    assert list(live.session.cache) == [new.json()["id"]]


@pytest.mark.parametrize("is_ended", [False, True])
async def test_what_runs_while_its_user_is_forgotten_is_not_written(
    start: Any, plain: Any, tokenizer: Any, tmp_path: Path, is_ended: bool
) -> None:
    journal, slow = tmp_path / "j", Slow(tokenizer)
    gateway = await start([slow.reply] * 2, journal=str(journal), user_keys={"ann": "ka"})
    http = plain(gateway)
    late = asyncio.create_task(http.chat("ka", "slow SWORDFISH", x_session_id="s"))
    await slow.has_begun.wait()
    if is_ended:
        await http.chat("ka", "bye", x_session_id="s", x_session_done="1")
    assert await gateway.forget(user_id="ann") == (0 if is_ended else 1)
    slow.go_on.set()
    assert (await late).status_code == 200
    await gateway.close()
    assert b"SWORDFISH" not in journal.read_bytes()


async def test_a_user_whom_only_the_body_names_can_be_forgotten(
    start: Any, plain: Any, tmp_path: Path
) -> None:
    """Also when the call that named them is of an earlier process."""
    journal = tmp_path / "j"
    gateway = await start(["a"] * 4, journal=str(journal), api_key="user")
    http = plain(gateway)
    ask = {"messages": [{"role": "user", "content": "SWORDFISH"}], "max_tokens": 5}
    await http.chat("user", "SWORDFISH", x_session_id="ann-1")
    for path, name, label in [
        ("chat/completions", "ann-1", {"user": "ann"}),
        ("messages", "ann-2", {"metadata": {"user_id": "ann"}}),
        ("chat/completions", "bob-1", {"user": "bob"}),
    ]:
        headers = {"x-session-id": name, "x-api-key": "user"}
        assert (await http.post(f"/v1/{path}", ask | label, **headers)).status_code == 200
    await gateway.close()
    again = await start([], journal=str(journal), api_key="user")
    assert await again.forget(user_id="ann") == 2
    assert [live.session_id for live in again._sessions] == ["bob-1"]
    assert await again.forget(user_id="bob") == 1
    assert b"SWORDFISH" not in journal.read_bytes()
