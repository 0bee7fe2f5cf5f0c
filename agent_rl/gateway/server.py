"""Gateway: the endpoints of ``api/`` on a TCP port, on the running event loop or in a thread.

``start`` binds, ``close`` lets the calls that run finish for a while and then ends them. The engine
is not the gateway's: closing the one does not close the other.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

import uvicorn

from agent_rl.api.session import Session
from agent_rl.config import GatewayConfig
from agent_rl.config.explain import require_section
from agent_rl.engine.base import InferenceEngine, require_engine
from agent_rl.errors import ConfigError
from agent_rl.gateway.access import Access
from agent_rl.gateway.app import GatewayApp
from agent_rl.gateway.counters import Counters
from agent_rl.gateway.lifecycle import Lifecycle
from agent_rl.gateway.listener import TurnListener
from agent_rl.gateway.protocol import guarded
from agent_rl.gateway.serving import CallServer
from agent_rl.gateway.session_log import PROBE, SessionLog, restore
from agent_rl.gateway.sessions import Door, LiveSession, Sessions
from agent_rl.loop_thread import LoopThread
from agent_rl.record.cache import InteractionCache
from agent_rl.record.journal import Journal
from agent_rl.tokens.format import ChatFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Longer than clients keep idle connections: the client closes them, so none dies under a request.
_KEEP_ALIVE_S = 75
_CUT_S = 5.0  # how long calls that are cut may take to end
_EXPIRY_S = 30.0  # how often idle sessions are looked for


class Gateway:
    """Serves sessions over TCP.

        gateway = Gateway(engine, tokenizer, GatewayConfig(port=8000))
        with gateway.run_in_thread():
            print(gateway.base_url, gateway.api_key)

    Args:
        listener: follows the turns; its methods run on the gateway's loop.

    Raises:
        ConfigError: the address needs a key, or two keys are the same.
        WrongTypeError: an argument is of another kind.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: PreTrainedTokenizerBase,
        config: GatewayConfig | None = None,
        *,
        listener: TurnListener | None = None,
    ) -> None:
        self.config = GatewayConfig() if config is None else config
        require_engine(engine, "Gateway")
        require_section(self.config, GatewayConfig, "Gateway")
        _check_exposure(self.config)
        self._format = ChatFormat.of(
            tokenizer,
            tool_call_parser=self.config.tool_call_parser,
            reasoning_parser=self.config.reasoning_parser,
        )
        self._engine = engine
        self._listener = listener
        self._counters = Counters()
        self._log = SessionLog()
        self._sessions = Sessions(
            self._new_session,
            max_sessions=self.config.max_sessions,
            timeout_s=self.config.session_timeout_s,
            on_start=self._log.started,
            on_end=self._on_end,
            on_drop=self._log.dropped,
        )
        access = Access(self.config, self._sessions)
        self.admin_key, self.api_key = access.admin_key, access.api_key
        self.app = GatewayApp(
            self.config,
            engine,
            CallServer(self.config, access, self._sessions, self._log, listener),
            Lifecycle(access, self._sessions, self._log, self._public_url_of, listener),
            self._sessions,
            self._counters,
        )
        self._server: uvicorn.Server | None = None
        self._socket: socket.socket | None = None
        self._expiry: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        """Of the OpenAI endpoints: ``http://127.0.0.1:8000/v1``. Raises before ``start``."""
        return f"{self._public_root}/v1"

    @property
    def num_sessions(self) -> int:
        """Started and passive sessions that are open."""
        return self._sessions.num_open

    @property
    def num_running(self) -> int:
        """Requests at work."""
        return self._counters.num_running

    @property
    def num_answered(self) -> int:
        return sum(dict(self._counters.requests).values())

    @property
    def _root_url(self) -> str:
        if self._socket is None:
            raise RuntimeError("the gateway has no address yet: await gateway.start() first")
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def _public_root(self) -> str:
        """As those find it who do not run on this machine."""
        return self.config.public_url or self._root_url

    def attach(self, session: Session) -> Door:
        """Serve an existing session, such as a client's own, until ``detach``."""
        live, key = self._sessions.attach(session)
        return Door(session_id=live.session_id, base_url=self._url_of(live), api_key=key)

    def detach(self, session_id: str) -> None:
        """Its key opens nothing from now on; calls that run go on. Unknown ids do nothing."""
        self._sessions.detach(session_id)

    async def forget(self, *, session_id: str | None = None, user_id: str | None = None) -> int:
        """End and delete the record of one session, or of all of a user, on disk too.

        Returns how many there were. On the gateway's loop.
        """
        if (session_id is None) == (user_id is None):
            raise ValueError("forget by session_id or by user_id, one of both")
        found = [
            live
            for live in self._sessions
            if live.origin != "attached"
            and session_id in (None, live.session_id)
            and (user_id in (None, live.user_id) or user_id in live.named_users)
        ]
        for live in found:
            self._sessions.end(live, "forgotten")
            self._sessions.drop(live)
        await self._log.forget_dropped()
        return len(found)

    async def start(self) -> None:
        """
        Raises:
            ConfigError: the address cannot be bound.
            JournalError: ``config.journal`` is damaged, or another gateway has it.
        """
        if self._server is not None:
            raise RuntimeError("the gateway was started before; make a new one")
        with ExitStack() as undo:
            if self.config.journal is not None:
                journal = Journal(self.config.journal, fsync=self.config.fsync)
                undo.enter_context(journal)
                probe = self._format.tokenizer.encode(PROBE)
                restore(journal, self._sessions, probe)
                self._log.open(journal, lambda: list(self._sessions), probe)
            self._socket = undo.enter_context(_bind(self.config.host, self.config.port))
            self._server = self._uvicorn()
            await self._server.startup(sockets=[self._socket])
            undo.pop_all()
        self._expiry = asyncio.create_task(self._expire())

    async def close(self) -> None:
        """Safe to call twice, and before ``start``."""
        if self._server is not None and self._server.started:
            self._server.started = False
            ending = asyncio.create_task(self._server.shutdown())
            await asyncio.wait([ending], timeout=self.config.shutdown_timeout_s)
            self.app.end_calls()
            await ending
        if self._expiry is not None:
            self._expiry.cancel()
        await self._log.close()

    @contextmanager
    def run_in_thread(self) -> Iterator[Gateway]:
        """Serve on an event loop in a thread of its own while the block runs."""
        with closing(LoopThread("gateway")) as thread:
            thread.call(self.start())
            try:
                yield self
            finally:
                thread.call(self.close())

    def _uvicorn(self) -> uvicorn.Server:
        """Without its signal handlers and its own loop: only what answers connections."""
        config = uvicorn.Config(
            self.app,
            http=guarded(
                max_head_bytes=self.config.max_header_bytes,
                head_timeout_s=self.config.read_timeout_s,
            ),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=self.config.shutdown_timeout_s + _CUT_S,  # type: ignore[arg-type]
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        return server

    def _url_of(self, live: LiveSession) -> str:
        return f"{self._root_url}/s/{live.session_id}/v1"

    def _public_url_of(self, live: LiveSession) -> str:
        return f"{self._public_root}/s/{live.session_id}/v1"

    def _new_session(self) -> Session:
        config = self.config
        return Session(
            engine=self._engine,
            format=self._format,
            cache=InteractionCache(),
            chat_template_type=config.chat_template_type,
            engine_max_tokens=config.engine_max_tokens,
            max_requests=config.max_requests,
            model=config.model,
        )

    def _on_end(self, live: LiveSession) -> None:
        self._counters.ended[live.end_reason or "done"] += 1
        self._log.ended(live)
        if self._listener is not None:
            self._listener.on_session_end(live.session_id)

    async def _expire(self) -> None:
        timeout_s = self.config.session_timeout_s
        while timeout_s is not None:
            await asyncio.sleep(min(_EXPIRY_S, timeout_s / 2))
            self._sessions.expire()


def check_address(config: GatewayConfig) -> None:
    """Whether a gateway could listen there now: known before a model is loaded for minutes.

    Raises:
        ConfigError: the address needs a key, or cannot be bound.
    """
    _check_exposure(config)
    _bind(config.host, config.port).close()


def _check_exposure(config: GatewayConfig) -> None:
    """Only a key that somebody chose may guard an address that others can reach."""
    has_key = config.admin_key or config.api_key or config.user_keys
    if not has_key and not is_loopback(config.host):
        raise ConfigError(
            f"gateway.host is {config.host!r}, which other machines can reach, and no key is set; "
            "set gateway.admin_key or gateway.api_key, or use 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise ConfigError(
            f"gateway cannot listen on {host}:{port}: {reason}; choose another gateway.port "
            "(--port) or gateway.host, or end what listens there"
        ) from error
