"""What a request has been through, and how long it waits."""

from __future__ import annotations

import pytest

from agent_rl.engine.http import ServerConnection
from agent_rl.engine.server import Server
from agent_rl.engine.tries import Tries
from agent_rl.errors import EngineError, ServerBusyError, ServerError, ServerUnreachableError


def servers(count: int) -> list[Server]:
    return [
        Server(ServerConnection(f"http://s{index}", api_key=None, timeout_s=None))
        for index in range(count)
    ]


def test_another_server_is_tried_at_once_then_there_are_pauses_that_grow() -> None:
    a, b = servers(2)
    tries = Tries()
    tries.fail(a, ServerError("broken"))
    assert tries.next_pause_s([a, b]) == 0.0
    tries.fail(b, ServerError("broken"))
    assert tries.next_pause_s([a, b]) == 0.05
    assert tries.failed_on == set()
    tries.fail(a, ServerError("broken"))
    assert tries.next_pause_s([a]) == 0.1
    tries.advance()
    tries.fail(a, ServerError("broken"))
    assert tries.next_pause_s([a]) == 0.05


def test_a_request_fails_after_six_failures_and_neither_of_waiting_nor_of_deaths() -> None:
    [only] = servers(1)
    tries = Tries()
    for _ in range(20):
        tries.fail(only, ServerBusyError("busy"))
        tries.fail(only, ServerUnreachableError("no connection"))
    for _ in range(5):
        tries.fail(only, ServerError("broken"))
    with pytest.raises(EngineError, match="failed 6 times, the last: broken"):
        tries.fail(only, ServerError("broken"))


def test_a_busy_server_says_how_long_and_is_believed_up_to_half_a_minute() -> None:
    a, b = servers(2)
    tries = Tries()
    tries.fail(a, ServerBusyError("busy", retry_after_s=7.0))
    assert tries.next_pause_s([a, b]) == 0.0
    tries.fail(b, ServerBusyError("busy"))
    assert tries.next_pause_s([a, b]) == 7.0
    tries.fail(a, ServerBusyError("busy", retry_after_s=1e9))
    assert tries.next_pause_s([a]) == 30.0
    tries.fail(a, ServerBusyError("busy"))
    assert tries.next_pause_s([a]) == 0.2
