"""Requests that nobody thought of: each one is answered, and never by a fault of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import GenerationMode

from agent_rl import ScriptedEngine
from agent_rl.config import GatewayConfig
from agent_rl.gateway.server import Gateway

_TEXT = {"type": "string", "maxLength": 20}
_PART = {"type": "object", "properties": {"type": {"enum": ["text", "image_url"]}, "text": _TEXT}}
_CONTENT = {"anyOf": [_TEXT, {"type": "null"}, {"type": "array", "items": _PART, "maxItems": 3}]}
_SCHEMA = {"type": "object", "properties": {"type": {"const": "object"}}}
_MARKS = {
    "session_id": _TEXT,
    "turn_type": {"enum": ["main", "side"]},
    "session_done": {"type": "boolean"},
    "stream": {"type": "boolean"},
    "model": _TEXT,
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": 3}


_FUNCTION = _object(["name"], name=_TEXT, parameters=_SCHEMA)
_CALL = _object(["id"], id=_TEXT, function=_object(["name"], name=_TEXT, arguments=_TEXT))
_MESSAGE = _object(
    ["role", "content"],
    role={"enum": ["system", "user", "assistant", "tool"]},
    content=_CONTENT,
    tool_calls=_list(_CALL),
    tool_call_id=_TEXT,
)
_BLOCK = _object(
    ["type"],
    type={"enum": ["text", "thinking", "tool_use", "tool_result", "image"]},
    text=_TEXT,
    thinking=_TEXT,
    id=_TEXT,
    name=_TEXT,
    input={"type": "object"},
    tool_use_id=_TEXT,
    content=_CONTENT,
)
_BODIES = {
    "/v1/chat/completions": _object(
        ["messages"],
        **_MARKS,
        messages=_list(_MESSAGE),
        n={"type": "integer", "minimum": 1, "maximum": 3},
        stop={"anyOf": [_TEXT, _list(_TEXT)]},
        tools=_list(_object(["type"], type={"const": "function"}, function=_FUNCTION)),
        tool_choice={"enum": ["none", "auto"]},
        logprobs={"type": "boolean"},
        max_tokens={"type": "integer", "minimum": 1, "maximum": 99},
        metadata={"type": "object"},
    ),
    "/v1/completions": _object(
        ["prompt"], **_MARKS, prompt={"anyOf": [_TEXT, _list({"type": "integer"})]}
    ),
    "/v1/responses": _object(
        ["input"],
        **_MARKS,
        input={"anyOf": [_TEXT, _list(_MESSAGE)]},
        instructions=_TEXT,
        previous_response_id=_TEXT,
    ),
    "/v1/messages": _object(
        ["messages", "max_tokens"],
        **_MARKS,
        max_tokens={"type": "integer", "minimum": 1, "maximum": 99},
        system={"anyOf": [_TEXT, _list(_BLOCK)]},
        messages=_list(
            _object(
                ["role", "content"],
                role={"enum": ["user", "assistant"]},
                content={"anyOf": [_TEXT, _list(_BLOCK)]},
            )
        ),
        tools=_list(_object(["name", "input_schema"], name=_TEXT, input_schema=_SCHEMA)),
        thinking=_object(["type"], type={"enum": ["enabled", "disabled"]}),
    ),
    "/v1/messages/count_tokens": _object(
        ["messages"],
        system={"anyOf": [_TEXT, _list(_BLOCK)]},
        messages=_list(_object(["role", "content"], role=_TEXT, content=_CONTENT)),
        tools=_list(_object(["name", "input_schema"], name=_TEXT, input_schema=_SCHEMA)),
    ),
    "/rl/start_session": _object(
        ["task_id"], task_id=_TEXT, attempt={"type": "integer"}, api_key=_TEXT, user_id=_TEXT
    ),
    "/rl/set_reward": _object(
        ["reward"], reward={"type": "number"}, interaction_id=_TEXT, session_id=_TEXT
    ),
    "/rl/end_session": _object([], session_id=_TEXT),
    "/rl/export_trajectories": _object(
        ["session_id", "wait_s"],
        session_id=_TEXT,
        style={"enum": ["individual", "concat"]},
        discount={"type": "number"},
        wait_s={"const": 0},
    ),
}
# GET, with what stands in the path and behind "?".
_LOOK_UPS: dict[str, dict[str, Any]] = {
    "/v1/models": {},
    "/v1/models/{name}": {},
    "/v1/responses/{name}": {"include": _TEXT, "stream": _TEXT, "starting_after": _TEXT},
    "/v1/responses/{name}/input_items": {"limit": _TEXT, "order": _TEXT, "after": _TEXT},
    "/s/{name}/v1/models": {},
    "/healthz": {"x": _TEXT},
    "/metrics": {"x": _TEXT},
}


def _parameters(path: str, query: dict[str, Any]) -> list[dict[str, Any]]:
    named = {"name": "name", "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}}
    return [
        *([named] if "{name}" in path else []),
        *({"name": name, "in": "query", "schema": schema} for name, schema in query.items()),
    ]


_ANSWER = {"default": {"description": "an answer"}}
_SPEC = schemathesis.openapi.from_dict(
    {
        "openapi": "3.1.0",
        "info": {"title": "gateway", "version": "1"},
        "paths": {
            path: {
                "post": {
                    "requestBody": {
                        "required": True,
                        "content": {"application/json": {"schema": body}},
                    },
                    "responses": _ANSWER,
                }
            }
            for path, body in _BODIES.items()
        }
        | {
            path: {"get": {"parameters": _parameters(path, query), "responses": _ANSWER}}
            for path, query in _LOOK_UPS.items()
        },
    }
)


@pytest.fixture(scope="module")
def gateway(tokenizer: Any) -> Iterator[Gateway]:
    engine = ScriptedEngine(["four"], tokenizer=tokenizer, repeat=True)
    with Gateway(engine, tokenizer, GatewayConfig(max_sessions=100_000)).run_in_thread() as one:
        yield one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "mode"),
    [(path, GenerationMode.POSITIVE) for path in (*_BODIES, *_LOOK_UPS)]
    # Where nothing is sent, nothing can be wrong in it.
    + [(path, GenerationMode.NEGATIVE) for path, sent in {**_BODIES, **_LOOK_UPS}.items() if sent],
)
def test_every_request_is_answered(gateway: Gateway, path: str, mode: GenerationMode) -> None:
    method = "POST" if path in _BODIES else "GET"
    key = gateway.admin_key if path.startswith("/rl/") else gateway.api_key
    root = gateway.base_url.removesuffix("/v1")

    @seed(1)
    @settings(
        max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=_SPEC[path][method].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        response = case.call(base_url=root, headers={"authorization": f"Bearer {key}"})
        assert response.status_code < 500, (response.status_code, response.text, case.body)
        if response.status_code >= 400:
            assert response.json()["error"]["message"], response.text

    ask()
