"""The Anthropic SDK on a recording client: the Messages API without a port.

The answers are turns of the same record as those of ``client`` itself.
"""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic

from agent_rl import ArealOpenAI


def anthropic_client(client: ArealOpenAI, **settings: Any) -> AsyncAnthropic:
    """``settings`` are those of ``AsyncAnthropic``: max_retries, timeout, default_headers, ...

    It needs openai 3.x, whose HTTP library is the one of the Anthropic SDK.
    """
    return AsyncAnthropic(
        api_key=client.api_key,
        base_url=str(client.base_url).rstrip("/").removesuffix("/v1"),
        http_client=client.http_client,
        **settings,
    )
