"""ServerConnection: pooled, keyed, retried only where that is safe, and worded errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from agent_rl.engine.http import ServerConnection
from agent_rl.errors import EngineError, RequestError, ServerBusyError, ServerError

Answer = Callable[[int, str], bytes]


class RawServer:
    """Answers the n-th request of all connections with ``answer(n, request line)``; b"" closes."""

    def __init__(self, answer: Answer, *, keep_alive_s: float = 60.0) -> None:
        self.requests: list[str] = []
        self.num_connections = 0
        self._answer = answer
        self._keep_alive_s = keep_alive_s
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self) -> RawServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"http://{host}:{port}"
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                async with asyncio.timeout(self._keep_alive_s):
                    head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    (
                        int(line.split(":")[1])
                        for line in head.split("\r\n")
                        if "content-length" in line.lower()
                    ),
                    0,
                )
                await reader.readexactly(length)
                self.requests.append(head)
                answer = self._answer(len(self.requests), head)
                if not answer:
                    return
                writer.write(answer)
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    def close(self) -> None:
        assert self._server is not None
        self._server.close()


def reply(body: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


Connect = Callable[..., Awaitable[tuple[RawServer, ServerConnection]]]


@pytest_asyncio.fixture
async def connect() -> AsyncIterator[Connect]:
    made: list[Any] = []

    async def make(answer: Answer, **options: Any) -> tuple[RawServer, ServerConnection]:
        keep_alive_s = options.pop("keep_alive_s", 60.0)
        server = await RawServer(answer, keep_alive_s=keep_alive_s).start()
        connection = ServerConnection(
            server.address, api_key=options.pop("api_key", None), **{"timeout_s": 10.0, **options}
        )
        made.append((server, connection))
        return server, connection

    yield make
    for server, connection in made:
        await connection.close()
        server.close()


async def test_connections_are_reused_and_carry_the_key(connect: Connect) -> None:
    server, connection = await connect(lambda n, head: reply("{}"), api_key="k1")
    for _ in range(20):
        assert await connection.post("/generate", {}) == {}
    assert server.num_connections == 1
    assert all("authorization: bearer k1" in head.lower() for head in server.requests)


async def test_a_read_is_repeated_after_a_lost_connection_a_write_is_not(connect: Connect) -> None:
    """Case B141: a POST that may have been executed is not blindly repeated."""
    server, connection = await connect(lambda n, head: b"" if n % 2 else reply("{}"))
    assert await connection.get("/model_info") == {}
    assert len(server.requests) == 2
    with pytest.raises(ServerError, match=r"POST .*/generate: "):
        await connection.post("/generate", {})
    assert len(server.requests) == 3
    assert await connection.post("/pause_generation", {}, is_idempotent=True) == {}


async def test_an_idle_connection_that_the_server_closed_is_no_failure(connect: Connect) -> None:
    """Case B141: keep-alive 50 ms on the server, requests further apart."""
    server, connection = await connect(lambda n, head: reply("{}"), keep_alive_s=0.05)
    for _ in range(3):
        assert await connection.post("/generate", {}) == {}
        await asyncio.sleep(0.15)
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        ("400 Bad Request", RequestError, "HTTP 400: the prompt is too long"),
        ("404 Not Found", RequestError, "HTTP 404"),
        ("401 Unauthorized", EngineError, "check engine.api_key"),
        ("429 Too Many Requests", ServerBusyError, "HTTP 429"),
        ("503 Service Unavailable", ServerBusyError, "HTTP 503"),
        ("500 Internal Server Error", ServerError, "HTTP 500"),
    ],
)
async def test_errors_say_whether_another_server_may_do_better(
    connect: Connect, status: str, error: type[Exception], message: str
) -> None:
    body = '{"error": {"message": "the prompt is too long"}}'
    _, connection = await connect(lambda n, head: reply(body, status))
    with pytest.raises(error, match=message) as caught:
        await connection.post("/generate", {})
    assert type(caught.value) is error


async def test_a_server_that_does_not_answer_is_given_up(connect: Connect) -> None:
    _, connection = await connect(lambda n, head: b"HTTP/1.1 200 OK\r\n", timeout_s=0.1)
    with pytest.raises(ServerError, match=r"no answer after 0\.1 s"):
        await connection.post("/generate", {})
    refused = ServerConnection("http://127.0.0.1:9", api_key=None, timeout_s=None)
    with pytest.raises(ServerError, match="ConnectError"):
        await refused.post("/generate", {})
    await refused.close()


async def test_a_stream_that_ends_early_is_a_failure(connect: Connect) -> None:
    whole = 'data: {"a": 1}\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n'
    cut = 'data: {"a": 1}\n\n'
    _, connection = await connect(lambda n, head: reply(whole if n == 1 else cut))
    assert [event async for event in connection.events("/generate", {})] == [{"a": 1}, {"a": 2}]
    with pytest.raises(ServerError, match="ended early"):
        [event async for event in connection.events("/generate", {})]


async def test_calls_after_the_close_are_failures_with_a_name(connect: Connect) -> None:
    """An abort that was on its way when the engine closed is one."""
    server, connection = await connect(lambda n, head: reply("{}"))
    await connection.close()
    with pytest.raises(ServerError, match=r"POST .*/abort_request: the connection was closed"):
        await connection.post("/abort_request", {}, is_idempotent=True)
    with pytest.raises(ServerError, match=r"POST .*/generate: the connection was closed"):
        [event async for event in connection.events("/generate", {})]
    assert server.requests == []
