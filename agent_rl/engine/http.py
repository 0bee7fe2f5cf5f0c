"""ServerConnection: the HTTP calls of one server, with one pool, one key and worded errors.

A failure says whether another server may do better: ServerError (broken, too slow),
ServerUnreachableError (it has not seen the request), ServerBusyError (not taken, try again later)
or RequestError (refused, as it would be everywhere).
Only calls marked idempotent are repeated here. It knows no endpoint and no protocol.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

import httpx

from agent_rl.errors import (
    EngineError,
    RequestError,
    ServerBusyError,
    ServerError,
    ServerUnreachableError,
)
from agent_rl.types import JsonObject

logger = logging.getLogger(__name__)

_NUM_TRIES = 3
_BACKOFF_S = 0.2
# uvicorn closes idle connections after 5 s: give them up before the server does.
_KEEPALIVE_S = 3.0
_CONNECT_TIMEOUT_S = 10.0
_UNREACHABLE = (httpx.ConnectError, httpx.ConnectTimeout)


class ServerConnection:
    """To be made and used on one event loop.

    Args:
        address: ``http://host:port``.
        timeout_s: of a whole call that names none; None: no limit.
    """

    def __init__(self, address: str, *, api_key: str | None, timeout_s: float | None) -> None:
        self.address = address.rstrip("/")
        self._timeout_s = timeout_s
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.AsyncClient(
            base_url=self.address,
            headers=headers,
            # The engine bounds the requests in flight; a second bound here could only deadlock.
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S),
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            trust_env=False,
        )

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        return await self.call("GET", path, None, timeout_s=timeout_s, is_idempotent=True)

    async def post(
        self,
        path: str,
        body: JsonObject,
        *,
        timeout_s: float | None = None,
        is_idempotent: bool = False,
    ) -> Any:
        return await self.call("POST", path, body, timeout_s=timeout_s, is_idempotent=is_idempotent)

    async def call(
        self,
        method: str,
        path: str,
        body: JsonObject | None,
        *,
        timeout_s: float | None,
        is_idempotent: bool,
    ) -> Any:
        """The JSON of the answer, or None where it has no body."""
        for tries_left in reversed(range(_NUM_TRIES if is_idempotent else 1)):
            try:
                return await self._call_once(method, path, body, timeout_s or self._timeout_s)
            except (_NoAnswerError, ServerUnreachableError) as error:
                if not tries_left:
                    raise
                logger.info("%s; trying again", error)
                await asyncio.sleep(_BACKOFF_S)
        raise AssertionError("the last try returns or raises")

    async def events(self, path: str, body: JsonObject) -> AsyncGenerator[JsonObject, None]:
        """The JSON of each server-sent event up to ``[DONE]``.

        Raises ServerError when the connection ends before that. Close it (``aclosing``): that ends
        the request of a stream that is left early.
        """
        self._check_open("POST", path)
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream("POST", path, json=body) as answer,
            ):
                if answer.status_code >= 400:
                    await answer.aread()
                    self._read("POST", path, answer)
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data:"):
                        yield json.loads(line.removeprefix("data:"))
        except TimeoutError as error:
            raise self._failed("POST", path, f"no end after {self._timeout_s:g} s") from error
        except _UNREACHABLE as error:
            raise self._unreachable("POST", path, error) from error
        except (httpx.TransportError, json.JSONDecodeError) as error:
            raise self._failed("POST", path, _describe(error)) from error
        raise self._failed("POST", path, "the stream ended early")

    async def close(self) -> None:
        await self._client.aclose()

    async def _call_once(
        self, method: str, path: str, body: JsonObject | None, timeout_s: float | None
    ) -> Any:
        self._check_open(method, path)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._client.request(method, path, json=body)
        except TimeoutError as error:
            raise self._failed(method, path, f"no answer after {timeout_s:g} s") from error
        except _UNREACHABLE as error:
            raise self._unreachable(method, path, error) from error
        except httpx.TransportError as error:
            raise _NoAnswerError(f"{method} {self.address}{path}: {_describe(error)}") from error
        return self._read(method, path, answer)

    def _check_open(self, method: str, path: str) -> None:
        """A last abort may come after ``close``."""
        if self._client.is_closed:
            raise self._failed(method, path, "the connection was closed")

    def _read(self, method: str, path: str, answer: httpx.Response) -> Any:
        status = answer.status_code
        if status < 400:
            try:
                return answer.json() if answer.content else None
            except json.JSONDecodeError as error:
                raise self._failed(method, path, "the answer is not JSON") from error
        message = f"{method} {self.address}{path}: HTTP {status}: {_message(answer)}"
        if status == 401:
            raise EngineError(f"{message}; check engine.api_key")
        if status in (429, 503):
            raise ServerBusyError(message, retry_after_s=_retry_after_s(answer))
        raise RequestError(message) if status < 500 else ServerError(message)

    def _failed(self, method: str, path: str, why: str) -> ServerError:
        return ServerError(f"{method} {self.address}{path}: {why}")

    def _unreachable(self, method: str, path: str, error: Exception) -> ServerUnreachableError:
        return ServerUnreachableError(f"{method} {self.address}{path}: {_describe(error)}")


class _NoAnswerError(ServerError):
    """The connection was closed before any answer."""


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _retry_after_s(answer: httpx.Response) -> float:
    """The header in its form of seconds; 0 without it, or with a date."""
    value = answer.headers.get("retry-after", "")
    return float(value) if value.isdecimal() else 0.0


def _message(answer: httpx.Response) -> str:
    """What servers put into an error: {"error": {"message"}}, {"message"}, {"detail"} or text."""
    try:
        body = answer.json()
    except json.JSONDecodeError:
        return answer.text[:300]
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail") or error
        body = error
    return str(body)[:300]
