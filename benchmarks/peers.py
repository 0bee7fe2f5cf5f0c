"""Other recorders of the same engine, measured beside ours where they can be imported.

`areal` 1.0.4: ``pip install --no-deps areal``, and what its modules then ask for; for its proxy
also fastapi and litellm 1.81. Each function raises ImportError where something is missing.
"""

from __future__ import annotations

import json
import socket
from types import SimpleNamespace
from typing import Any

ADMIN_KEY = "the-owner-of-the-proxy"


def areal_client(engine: Any, tokenizer: Any, mode: str) -> Any:
    """Its recording client over an engine that answers as ours does."""
    from areal.api import ModelResponse  # type: ignore[import-not-found]
    from areal.experimental.openai.client import ArealOpenAI  # type: ignore[import-not-found]

    class Engine:
        async def agenerate(self, req: Any) -> Any:
            return ModelResponse(
                input_tokens=list(req.input_ids),
                output_tokens=list(engine.output),
                output_logprobs=list(engine.logprobs),
                output_versions=list(engine.versions),
                tokenizer=tokenizer,
                latency=0.0,
                ttft=0.0,
            )

    return ArealOpenAI(Engine(), tokenizer, chat_template_type=mode, api_key="none")


async def serve_areal_proxy(engine: Any, tokenizer: Any, listener: socket.socket) -> None:
    """Its server of rollouts, as its own ``main`` runs it, over the same engine."""
    import uvicorn
    from areal.experimental.openai.proxy import (  # type: ignore[import-not-found]
        proxy_rollout_server as proxy,
    )

    proxy._engine = SimpleNamespace()  # only asked whether it is there
    proxy._openai_client = areal_client(engine, tokenizer, "hf")
    proxy._admin_api_key = ADMIN_KEY
    config = uvicorn.Config(
        proxy.app, log_level="warning", timeout_keep_alive=300, access_log=False
    )
    await uvicorn.Server(config).serve(sockets=[listener])


def areal_session_key(connection: Any, name: str) -> str:
    """Starts a session over the connection; the key that its calls carry."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json"}
    for path, body in (("/grant_capacity", {}), ("/rl/start_session", {"task_id": name})):
        connection.request("POST", path, json.dumps(body), headers)
        reply = json.loads(connection.getresponse().read())
    key: str = reply["api_key"]
    return key
