"""A server of either protocol that answers by a script: exact tokens, exact faults."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Kind = Literal["sglang", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``logprobs`` None: -0.1, -0.2, ...; ``spans`` None: the server tells no versions.

    ``num_before``: so many tokens of it were sent in earlier events, and are not sent again.
    """

    token_ids: Sequence[int] = ()
    finish: str | None = "stop"
    logprobs: Sequence[Any] | None = None
    spans: Sequence[tuple[str, int, int]] | None = None
    num_before: int = 0


@dataclass(slots=True, kw_only=True)
class ScriptedServer:
    """``script`` has an Answer for each generation request, or the JSON that is sent instead.

    ``before`` is awaited before the n-th answer, n from 1. ``asked`` has (input ids, budget) of
    each request; ``controls`` the paths and bodies of other posts.
    """

    kind: Kind
    script: Sequence[Answer | Any]
    before: Callable[[int], Awaitable[None]] | None = None
    models: Sequence[Any] = ({"id": "m", "root": "/m", "max_model_len": 405},)
    asked: list[tuple[list[int], int]] = field(default_factory=list)
    controls: list[tuple[str, Any]] = field(default_factory=list)
    label: str = "default"

    def app(self) -> Starlette:
        routes = [Route("/{path:path}", self._serve, methods=["GET", "POST"])]
        app = Starlette(routes=routes)
        app.state.model = self
        return app

    async def close(self) -> None:
        """As LiveServer asks of what it serves."""

    async def _serve(self, request: Request) -> Response:
        content, path = await request.body(), request.url.path
        body = json.loads(content) if content else {}
        if path == "/v1/models":
            return JSONResponse({"data": list(self.models)})
        if path == "/server_info":
            config = {"structured_outputs_config": {"backend": "none"}}
            return JSONResponse({"grammar_backend": None, "vllm_config": config})
        if path in ("/model_info", "/weight_info"):
            return JSONResponse({"model_path": "/m", "weight_version": self.label})
        if path.endswith("/generate"):
            return await self._generate(body)
        if path != "/health":
            self.controls.append((path, body))
        if path == "/update_weight_version":
            self.label = body["new_version"]
        return JSONResponse({"success": True})

    async def _generate(self, body: dict[str, Any]) -> Response:
        sampling = body["sampling_params"]
        if self.kind == "vllm" and sampling.get("top_k") == 1:  # what its log-probs are
            return JSONResponse(_vllm(Answer(token_ids=[5], finish="length", logprobs=[0.0])))
        budget = sampling["max_new_tokens" if self.kind == "sglang" else "max_tokens"]
        self.asked.append((body["input_ids" if self.kind == "sglang" else "token_ids"], budget))
        answer = self.script[len(self.asked) - 1]
        if self.before is not None:
            await self.before(len(self.asked))
        texts = [self._text(each) for each in (answer if isinstance(answer, tuple) else [answer])]
        if not body["stream"]:
            return Response(texts[-1], media_type="application/json")
        events = (f"data: {event}\n\n" for event in (*texts, "[DONE]"))
        return StreamingResponse(events, media_type="text/event-stream")

    def _text(self, answer: Any) -> str:
        if isinstance(answer, Answer):
            answer = _sglang(answer) if self.kind == "sglang" else _vllm(answer)
        return json.dumps(answer)


def _logprobs(answer: Answer) -> Sequence[Any]:
    ruled = [round(-0.1 * n, 10) for n in range(1, len(answer.token_ids) + 1)]
    return ruled if answer.logprobs is None else answer.logprobs


def _pairs(answer: Answer) -> list[tuple[int, Any]]:
    """More log-probs than tokens are of a token 0."""
    logprobs = _logprobs(answer)
    ids = [*answer.token_ids, *[0] * (len(logprobs) - len(answer.token_ids))]
    return list(zip(ids, logprobs, strict=True))


def _spans(answer: Answer) -> dict[str, Any]:
    if answer.spans is None:
        return {}
    keys = ("version", "start", "end")
    return {"weight_versions": [dict(zip(keys, span, strict=True)) for span in answer.spans]}


def _sglang(answer: Answer) -> dict[str, Any]:
    meta = {
        "finish_reason": answer.finish and {"type": answer.finish},
        "completion_tokens": answer.num_before + len(answer.token_ids),
        "output_token_logprobs": [[value, token_id, None] for token_id, value in _pairs(answer)],
        **_spans(answer),
    }
    return {"output_ids": list(answer.token_ids), "meta_info": meta}


def _vllm(answer: Answer) -> dict[str, Any]:
    content = [{"token_id": token_id, "logprob": value} for token_id, value in _pairs(answer)]
    choice = {
        "token_ids": list(answer.token_ids),
        "logprobs": {"content": content},
        "finish_reason": answer.finish,
        **_spans(answer),
    }
    return {"choices": [choice]}
