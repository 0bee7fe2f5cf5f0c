"""Which server takes a request, and who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from agent_rl.engine.http import ServerConnection
from agent_rl.engine.router import PrefixPlaces, Router, Routing
from agent_rl.engine.server import Server
from agent_rl.engine.server_api import Span
from agent_rl.errors import EngineError, ServerError


def servers(count: int) -> list[Server]:
    made = []
    for index in range(count):
        connection = ServerConnection(f"http://s{index}", api_key=None, timeout_s=None)
        server = Server(connection)
        server.mark_up()
        made.append(server)
    return made


def router(
    of: Sequence[Server],
    routing: Routing,
    *,
    max_in_flight: int = 100,
    unavailable_timeout_s: float | None = 30.0,
) -> Router:
    return Router(
        of,
        routing,
        max_in_flight=max_in_flight,
        unavailable_timeout_s=unavailable_timeout_s,
    )


async def pick(from_: Router, ids: Sequence[int] = (1, 2, 3)) -> str:
    server = await from_.pick(ids, lambda: False)
    assert server is not None
    return server.address[-2:]


async def test_round_robin() -> None:
    made = servers(3)
    robin = router(made, "round_robin")
    assert [await pick(robin) for _ in range(4)] == ["s0", "s1", "s2", "s0"]
    made[1].mark_down("gone")
    assert {await pick(robin) for _ in range(4)} == {"s0", "s2"}


async def test_least_loaded() -> None:
    made = servers(3)
    made[0].in_flight, made[1].in_flight, made[2].in_flight = 2, 1, 3
    assert await pick(router(made, "least_loaded")) == "s1"


async def test_a_prefix_goes_where_it_was_seen_unless_that_is_much_busier() -> None:
    made = servers(3)
    prefix = router(made, "prefix")
    first = tuple(range(300))
    prefix.remember(made[2], first)
    assert [await pick(prefix, (*first, 7, 8)) for _ in range(3)] == ["s2"] * 3
    assert await pick(prefix, (*first[:200], 9, 9)) == "s2"  # its first block of 128
    made[2].in_flight = 9
    assert await pick(prefix, (*first, 7, 8)) != "s2"


def test_prefix_places_by_blocks_of_two() -> None:
    a, b = servers(2)
    places = PrefixPlaces(block=2)
    places.add((1, 2, 3, 4, 5), a)
    places.add((1, 2, 9, 9), b)
    assert places.find((1, 2, 3, 4, 9, 9)) is a
    assert places.find((1, 2, 9, 9)) is b
    assert places.find((1, 2, 7, 7)) is b  # the last that saw [1, 2]
    assert places.find((9, 2)) is None
    assert places.find((1,)) is None


async def test_a_full_server_makes_them_wait_in_order() -> None:
    [only] = servers(1)
    full = router([only], "least_loaded", max_in_flight=1)
    only.in_flight = 1
    order: list[int] = []

    async def request(number: int) -> None:
        await pick(full)
        only.in_flight += 1
        order.append(number)

    waiting = [asyncio.create_task(request(number)) for number in range(3)]
    await asyncio.sleep(0)
    for number in range(3):
        only.in_flight -= 1
        await full.release()
        await waiting[number]
    assert order == [0, 1, 2]


async def test_a_server_that_failed_a_request_is_its_last_choice() -> None:
    made = servers(2)
    both = router(made, "least_loaded", max_in_flight=2)
    made[1].in_flight = 1
    first = await both.pick((1,), lambda: False, {made[0]})
    assert first is made[1]
    assert await both.pick((1,), lambda: False, set(made)) is made[0]


async def test_room_that_one_avoids_is_offered_to_the_next() -> None:
    made = servers(2)
    full = router(made, "least_loaded", max_in_flight=1)
    made[0].in_flight = made[1].in_flight = 1
    picky = [asyncio.create_task(full.pick((1,), lambda: False, {made[0]})) for _ in range(2)]
    easy = asyncio.create_task(full.pick((1,), lambda: False))
    await asyncio.sleep(0)
    made[0].in_flight = 0
    await full.release()
    assert await easy is made[0]
    assert not any(task.done() for task in picky)
    made[1].in_flight = 0
    await full.release()
    assert await picky[0] is made[1]
    picky[1].cancel()


async def test_a_cancelled_waiter_does_not_take_the_turn_of_another() -> None:
    [only] = servers(1)
    full = router([only], "least_loaded", max_in_flight=1)
    only.in_flight = 1
    first, second = (asyncio.create_task(pick(full)) for _ in range(2))
    await asyncio.sleep(0)
    only.in_flight = 0
    await full.release()  # wakes the first, which is cancelled before it runs
    first.cancel()
    assert await second == "s0"


async def test_pausing_giving_up_and_closing() -> None:
    [only] = servers(1)
    held = router([only], "least_loaded", unavailable_timeout_s=0.01)
    held.is_paused = True
    is_aborted = False
    waiting = asyncio.create_task(held.pick((1,), lambda: is_aborted))
    await asyncio.sleep(0.05)  # longer than a fleet that is down may keep it waiting
    assert not waiting.done()
    is_aborted = True
    await held.look_again()
    assert await waiting is None
    held.is_paused = False
    only.mark_down("it burns")
    with pytest.raises(EngineError, match="no inference server is up: http://s0: it burns"):
        await pick(held)
    await held.close()
    with pytest.raises(EngineError, match="closed"):
        await pick(held)


async def test_going_down_ends_what_is_in_flight() -> None:
    [only] = servers(1)
    running = asyncio.create_task(only.run(asyncio.Event().wait()))
    await asyncio.sleep(0)
    assert only.in_flight == 1
    only.mark_down("it burns")
    with pytest.raises(ServerError, match="http://s0 is down: it burns"):
        await running
    assert only.in_flight == 0


def test_spans_become_versions() -> None:
    [only] = servers(1)
    only.hold(3, "3")
    only.hold(4, "4")
    spans = (Span(label="3", start=0, end=2), Span(label="4", start=2, end=5))
    assert only.versions(spans, 5, since=1) == (3, 3, 4, 4, 4)
    with pytest.raises(ServerError, match="sent 6 tokens and weight versions of 5"):
        only.versions(spans, 6, since=1)
    with pytest.raises(ServerError, match="weights it calls '9'"):
        only.versions((Span(label="9", start=0, end=1),), 1, since=1)
    with pytest.raises(ServerError, match="weights it calls '3', which it ought not to have"):
        only.versions(spans, 5, since=2)
