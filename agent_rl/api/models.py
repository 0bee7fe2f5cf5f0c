"""GET /models: one model, the engine's. Requests may name it as they like."""

from __future__ import annotations

from agent_rl.api.session import Session
from agent_rl.types import JsonObject


def list_models(session: Session) -> JsonObject:
    return {"object": "list", "data": [model_object(session.model)]}


def model_object(name: str) -> JsonObject:
    """Every name leads to the same engine, so every name is a model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "agent-rl"}
