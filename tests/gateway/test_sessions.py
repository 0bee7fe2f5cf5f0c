"""Sessions by hand: a clock that the test moves, no server."""

from __future__ import annotations

from typing import Any

import pytest

from agent_rl import ScriptedEngine
from agent_rl.api.session import Session
from agent_rl.errors import RefusedError
from agent_rl.gateway.sessions import LiveSession, Sessions
from agent_rl.record.cache import InteractionCache
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.tokens.format import ChatFormat


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def make(tokenizer: Any) -> Any:
    engine, fmt = ScriptedEngine([]), ChatFormat.of(tokenizer)

    def make_sessions(**changes: Any) -> Sessions:
        settings = {"max_sessions": 3, "timeout_s": 10.0, **changes}
        return Sessions(
            lambda: Session(engine=engine, format=fmt, cache=InteractionCache()), **settings
        )

    return make_sessions


def status_of(refused: pytest.ExceptionInfo[RefusedError]) -> tuple[int, str | None]:
    return refused.value.status, refused.value.code


def answered(live: LiveSession) -> None:
    interaction = InteractionWithTokenLogpReward(
        interaction_id="i", messages=[{"role": "user", "content": "x"}]
    )
    live.session.cache.append(interaction)


async def test_a_key_opens_its_session_until_it_ends(make: Any) -> None:
    sessions = make()
    live, key = sessions.start("task", None, None, None)
    other, other_key = sessions.start("task", None, None, None)
    assert (live.session_id, other.session_id) == ("task-1", "task-2")
    assert key != other_key and len(key) > 40
    assert sessions.of_key(key) is live and sessions.of_key(other_key) is other
    sessions.end(live, "done")
    with pytest.raises(RefusedError) as refused:
        sessions.of_key(key)
    assert status_of(refused) == (410, "session_ended")
    sessions.drop(live)
    with pytest.raises(RefusedError) as refused:
        sessions.of_key(key)
    assert status_of(refused) == (410, "session_ended")
    with pytest.raises(RefusedError) as refused:
        sessions.of_key("sk-unknown")
    assert status_of(refused) == (401, "invalid_api_key")


async def test_keys_are_not_kept(make: Any) -> None:
    sessions = make()
    _, key = sessions.start("task", None, "users-own-key", None)
    assert key == "users-own-key"
    held = repr([getattr(sessions, name) for name in vars(sessions)])
    assert "users-own-key" not in held and "users-own-key" not in repr(list(sessions))


async def test_a_fixed_key_is_bound_to_one_session_after_another(make: Any) -> None:
    sessions = make()
    first, _ = sessions.start("a", None, "mine", "u")
    with pytest.raises(RefusedError) as refused:
        sessions.start("b", None, "mine", "u")
    assert status_of(refused) == (409, "key_in_use")
    sessions.end(first, "done")
    second, _ = sessions.start("b", None, "mine", "u")
    assert sessions.of_key("mine") is second
    sessions.drop(first)
    assert sessions.of_key("mine") is second


async def test_a_retried_rollout_never_mixes_with_its_first_try(make: Any) -> None:
    """Case B139: the key of the first try is worth nothing once the second has begun."""
    sessions = make()
    first, first_key = sessions.start("task", 1, None, None)
    answered(first)
    second, second_key = sessions.start("task", 2, None, None)
    assert first.end_reason == "superseded" and first.is_over.is_set()
    assert second is not first and len(second.session.cache) == 0
    assert sessions.of_key(second_key) is second
    with pytest.raises(RefusedError) as refused:
        sessions.of_key(first_key)
    assert status_of(refused) == (410, "session_ended")
    with pytest.raises(RefusedError) as refused:
        sessions.start("task", 1, None, None)
    assert status_of(refused) == (409, "attempt_in_use")


async def test_a_start_whose_answer_was_lost_can_be_sent_again(make: Any) -> None:
    """Case B141: the same attempt is the same session, as long as nobody has used it."""
    sessions = make()
    live, lost_key = sessions.start("task", 1, None, None)
    again, key = sessions.start("task", 1, None, None)
    assert again is live and sessions.num_open == 1
    assert sessions.of_key(key) is live
    with pytest.raises(RefusedError):
        sessions.of_key(lost_key)
    answered(live)
    with pytest.raises(RefusedError) as refused:
        sessions.start("task", 1, None, None)
    assert status_of(refused) == (409, "attempt_in_use")


async def test_capacity_comes_back_when_a_session_ends(make: Any) -> None:
    sessions = make(max_sessions=2)
    first, _ = sessions.start("a", None, None, None)
    sessions.passive(None, "chat")
    for full in (
        lambda: sessions.start("b", None, None, None),
        lambda: sessions.passive(None, "c"),
    ):
        with pytest.raises(RefusedError) as refused:
            full()
        assert status_of(refused) == (429, "no_capacity") and refused.value.retry_after_s == 1
    assert sessions.passive(None, "chat").session_id == "chat"
    sessions.end(first, "done")
    sessions.start("b", None, None, None)


async def test_what_is_not_called_is_ended_and_later_forgotten(make: Any) -> None:
    """Case B178: capacity comes back; what is in use stays."""
    clock, ended = Clock(), []
    sessions = make(clock=clock, on_end=ended.append)
    quiet, key = sessions.start("quiet", None, None, None)
    busy, _ = sessions.start("busy", None, None, None)
    running = sessions.passive(None, "running")
    running.usage.num_running = 1
    clock.now += 9
    busy.usage.last_used = clock.now
    sessions.expire()
    assert not ended
    clock.now += 1
    sessions.expire()
    assert ended == [quiet] and quiet.end_reason == "idle" and sessions.num_open == 2
    clock.now += 9
    busy.usage.last_used = clock.now
    sessions.expire()
    assert quiet in list(sessions)
    clock.now += 1
    sessions.expire()
    assert quiet not in list(sessions)
    with pytest.raises(RefusedError) as refused:
        sessions.of_key(key)
    assert refused.value.status == 410


async def test_users_have_sessions_of_their_own(make: Any) -> None:
    """Case B176: the same name under two keys is two sessions, and nobody reaches another's."""
    sessions = make()
    own, other = sessions.passive(None, "main"), sessions.passive("ann", "main")
    assert own is not other and sessions.passive("ann", "main") is other
    assert other.session_id == "ann:main"
    started, _ = sessions.start("task", None, None, None)
    for name in ("ann:main", started.session_id):
        with pytest.raises(RefusedError) as refused:
            sessions.passive(None, name)
        assert status_of(refused) == (403, "wrong_session")


async def test_a_started_session_never_takes_a_name_in_use(make: Any) -> None:
    sessions = make()
    sessions.passive(None, "task-1")
    live, _ = sessions.start("task", None, None, None)
    assert live.session_id == "task-2"


async def test_nothing_grows_with_the_sessions_that_were(make: Any) -> None:
    """Case B144."""
    sessions = make()
    for number in range(5000):
        live, _ = sessions.start(f"task{number}", 1, None, None)
        sessions.end(live, "done")
        sessions.drop(live)
    sizes = {
        name: len(value) for name, value in vars(sessions).items() if hasattr(value, "__len__")
    }
    assert sizes == {"_by_id": 0, "_by_key": 0, "_by_task": 0, "_gone": 4096}
