"""HTTP as this package sees it: the head of a request, its body, and the bytes of the reply.

Built straight on ASGI, because a web framework's request objects cost more than a whole turn of
ours does. Nothing is buffered: each event of a stream leaves when it is there. It knows no
sessions.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from agent_rl.api.routes import Reply
from agent_rl.config import GatewayConfig
from agent_rl.errors import RefusedError

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_SINGLE = (b"authorization", b"x-api-key", b"x-session-id", b"x-turn-type", b"x-session-done")
_ID = re.compile(r"[A-Za-z0-9._~:@+-]{1,200}")


class ClientGoneError(Exception):
    """The client hung up, or accepts no more bytes: nobody waits for an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """``path`` without the session's prefix and the version: ``chat/completions``.

    ``url_session`` is the session that the URL names, if it does.
    """

    method: str
    path: str
    query: bytes
    headers: Mapping[bytes, bytes]
    url_session: str | None

    @property
    def session_name(self) -> str | None:
        """From the URL, else from X-Session-Id."""
        return self.url_session or self.header(b"x-session-id")

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1").strip()

    @property
    def key(self) -> str | None:
        """What stands behind ``Authorization: Bearer``, or in ``x-api-key``."""
        scheme, _, key = (self.header(b"authorization") or "").partition(" ")
        if scheme.lower() == "bearer" and key:
            return key
        return self.header(b"x-api-key") or None


def read_head(scope: Scope, prefix: str = "") -> Head:
    """
    Args:
        prefix: of the path, beside that of an application that mounts this one.

    Raises:
        RefusedError: 400, the URL's session id is none, or a key or mark was sent twice.
    """
    headers = dict(scope["headers"])
    if len(headers) < len(scope["headers"]):
        _refuse_twice([name for name, _ in scope["headers"]])
    path: str = scope["path"]
    for mounted_at in (scope.get("root_path", ""), prefix):
        if mounted_at and path.startswith(f"{mounted_at}/"):
            path = path[len(mounted_at) :]
    path = path.lstrip("/")
    session_id = None
    if path.startswith("s/"):
        _, session_id, path = (*path.split("/", 2), "")[:3]
        check_id(session_id, "the session id")
    # A base URL for one SDK ends in /v1 and for another it does not; both get here.
    while path.startswith("v1/"):
        path = path[3:]
    return Head(
        method=scope["method"],
        path=path,
        query=scope["query_string"],
        headers=headers,
        url_session=session_id,
    )


def _refuse_twice(names: Sequence[bytes]) -> None:
    """Of two keys or session ids a proxy in front may have read the other one."""
    for name in _SINGLE:
        if names.count(name) > 1:
            word = name.decode("ascii")
            raise RefusedError(400, f"the header {word} was sent more than once", param=word)


def check_id(value: object, what: str) -> str:
    """Ids become parts of URLs and keys of tables; an id that could be a path is none."""
    if not isinstance(value, str) or not _ID.fullmatch(value) or value.strip(".") == "":
        raise RefusedError(
            400,
            f"{what} {str(value)[:40]!r} must be 1 to 200 letters, digits or . _ ~ : @ + -",
            code="invalid_id",
        )
    return value


class Channel:
    """One request's way in and out. ``has_started``: the status has left."""

    def __init__(self, receive: Receive, send: Send, config: GatewayConfig) -> None:
        self.has_started = False
        self._receive = receive
        self._send = send
        self._config = config

    async def body(self, head: Head) -> bytes:
        """Raises RefusedError: 413 for too many bytes, 408 for too slow ones, 415 if packed."""
        encoding = head.header(b"content-encoding") or "identity"
        if encoding.lower() != "identity":
            raise RefusedError(
                415,
                f"the body has Content-Encoding: {encoding[:40]}; send it without one",
                code="unsupported_encoding",
            )
        max_bytes, timeout_s = self._config.max_body_bytes, self._config.read_timeout_s
        announced = head.headers.get(b"content-length", b"0")
        parts = []
        size = int(announced) if announced.isdigit() else 0
        try:
            async with asyncio.timeout(timeout_s):
                received, is_whole = 0, False
                while not is_whole and max(size, received) <= max_bytes:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    parts.append(message.get("body", b""))
                    received += len(parts[-1])
                    is_whole = not message.get("more_body", False)
        except TimeoutError:
            raise RefusedError(408, f"the body did not arrive within {timeout_s:g} s") from None
        if max(size, received) > max_bytes:
            raise RefusedError(
                413, f"the body is larger than max_body_bytes={max_bytes}", code="body_too_large"
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @asynccontextmanager
    async def until_gone(self) -> AsyncIterator[None]:
        """The block is cancelled, and ClientGoneError raised, as soon as the client hangs up."""
        task = asyncio.current_task()
        assert task is not None, "requests are served in tasks"
        watcher = asyncio.ensure_future(self._cancel_when_gone(task))
        try:
            yield
        except asyncio.CancelledError:
            if not watcher.done():
                raise
            task.uncancel()
            raise ClientGoneError from None
        finally:
            watcher.cancel()

    async def _cancel_when_gone(self, task: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    async def start(self, reply: Reply) -> None:
        await self._write(_start(reply))

    async def write(self, content: bytes, *, is_last: bool = False) -> None:
        await self._write({"type": "http.response.body", "body": content, "more_body": not is_last})

    async def write_whole(self, reply: Reply) -> None:
        body = json.dumps(reply.body, ensure_ascii=False, separators=(",", ":")).encode()
        await self._write(_start(reply, len(body)), {"type": "http.response.body", "body": body})

    async def write_text(self, text: str, content_type: str) -> None:
        headers = [(b"content-type", content_type.encode())]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        await self._write(start, {"type": "http.response.body", "body": text.encode()})

    async def _write(self, *messages: MutableMapping[str, Any]) -> None:
        self.has_started = True
        try:
            async with asyncio.timeout(self._config.write_timeout_s):
                for message in messages:
                    await self._send(message)
        except TimeoutError:
            raise ClientGoneError from None


def _start(reply: Reply, num_bytes: int | None = None) -> MutableMapping[str, Any]:
    headers = [(name.encode(), value.encode()) for name, value in reply.headers.items()]
    if num_bytes is not None:
        headers.append((b"content-length", b"%d" % num_bytes))
    if reply.status == 408:
        headers.append((b"connection", b"close"))  # the rest of the body may never come
    return {"type": "http.response.start", "status": reply.status, "headers": headers}
