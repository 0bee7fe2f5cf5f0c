"""The Anthropic SDK on a recording client, and Claude Code at the address of one.

Their answers are turns of the same record as those of ``client`` itself.
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


def claude_code_env(base_url: str, api_key: str, folder: str) -> dict[str, str]:
    """``ClaudeAgentOptions(env=...)``, or the environment of the command ``claude``.

    ``base_url`` and ``api_key`` are those that ``run`` takes; ``folder`` is an empty one of this
    episode's own: its settings and its memory are not those of the user or of another episode.
    """
    return {
        "ANTHROPIC_BASE_URL": base_url.rstrip("/").removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
        "HOME": folder,
        "CLAUDE_CONFIG_DIR": folder,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # It sends an effort that nobody asked for, which a model without one has to refuse.
        "CLAUDE_CODE_EFFORT_LEVEL": "unset",
    }
