"""``gateway``: where the server listens, who may call it, and what one client may use."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from agent_rl.config.section import ChatSection, Fsync, LimitS, TimeoutS


def _header_safe(key: str) -> str:
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError("a key must be printable ASCII without spaces")
    return key


def _proxy_url(url: str) -> str:
    parts = urlsplit(url)
    is_plain = not (parts.query or parts.fragment or parts.username)
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
        raise ValueError("must be like https://example.org or https://example.org/llm")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError("goes without the /v1 that endpoints begin with")
    return url.rstrip("/")


Key = Annotated[str, Field(min_length=1), AfterValidator(_header_safe)]
# Without the colon that stands between the user and the name in a session's id.
UserId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._~@+-]{1,100}$")]


class GatewayConfig(ChatSection):
    """gateway: the endpoints over TCP."""

    host: str = Field(
        "127.0.0.1", description="address to listen on; others than loopback need a key"
    )
    port: int = Field(0, ge=0, le=65535, description="0: any free port")
    public_url: Annotated[str, AfterValidator(_proxy_url)] | None = Field(
        None, description="as clients reach it, such as https://host/llm behind a proxy; null: host"
    )
    admin_key: Key | None = Field(
        None, repr=False, description="opens and exports sessions; null: a random one"
    )
    api_key: Key | None = Field(
        None, repr=False, description="for requests without a session's key; null: a random one"
    )
    user_keys: dict[UserId, Key] = Field(
        default_factory=dict,
        repr=False,
        description="user id -> key, each with sessions of its own",
    )
    model: str = Field("default", description="the id that /v1/models shows")
    unmarked_turns: Literal["auto", "main", "side"] = Field(
        "auto",
        description="type of a turn without X-Turn-Type; auto: main where there is a session",
    )
    journal: str | None = Field(
        None, description="file that sessions survive a restart in; null: they end with the process"
    )
    fsync: Fsync = Field(
        "always", description="never: a turn survives a killed process, not a power failure"
    )
    max_sessions: int = Field(1024, ge=1, description="open sessions; one more is answered 429")
    session_timeout_s: TimeoutS = Field(
        3600.0, description="a session without calls for so long is ended, an ended one dropped"
    )
    max_requests: int | None = Field(
        None, gt=0, description="model calls in one session; null: no limit"
    )
    max_concurrent_requests: int = Field(
        64, ge=1, description="calls of one session at a time; one more is answered 429"
    )
    max_requests_per_minute: int | None = Field(
        None, gt=0, description="calls of one session in any minute; null: no limit"
    )
    max_body_bytes: int = Field(16 << 20, ge=1, description="larger bodies are answered 413")
    max_header_bytes: int = Field(32 << 10, ge=1024, description="larger heads are answered 400")
    read_timeout_s: LimitS = Field(
        30.0, description="how long a client may take to send its request"
    )
    write_timeout_s: LimitS = Field(
        60.0, description="how long a client may take to accept bytes before its call ends"
    )
    shutdown_timeout_s: LimitS = Field(
        5.0, description="how long close() waits for the calls that run"
    )

    @property
    def url_prefix(self) -> str:
        """``/llm`` where ``public_url`` is https://host/llm: a proxy may leave it in the path."""
        return urlsplit(self.public_url or "").path
