"""Turn: one validated request for completions, the same whichever endpoint it came from.

Messages and tools are the caller's own JSON, checked and neither copied nor changed; ChatFormat
knows how to render them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_rl.api.fields import Fields
from agent_rl.api.session import Session
from agent_rl.engine.base import InferenceEngine
from agent_rl.errors import RequestError
from agent_rl.tokens.messages import TEXT_PARTS
from agent_rl.types import GenerationConfig, JsonObject

_ROLES = ("system", "developer", "user", "assistant", "tool")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_IMAGE_URL = re.compile(r"https?://.|data:image/[\w.+-]+;base64,.", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """``messages`` is what the record keeps.

    ``stop`` is what the text is trimmed at; the engine may be told to stop at more.
    ``grammar_param`` is the parameter that asked for ``gconfig.grammar``.
    ``is_raw``: no template made the prompt, so nothing but text is read from the answer.
    ``labels`` (metadata, user, ...) are kept on the interaction and change nothing.
    """

    model: str
    messages: list[JsonObject]
    gconfig: GenerationConfig
    stop: tuple[str, ...] = ()
    grammar_param: str = "grammar"
    tools: list[JsonObject] | None = None
    can_call_tools: bool = False
    n: int = 1
    has_logprobs: bool = False
    has_token_ids: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    image_data: tuple[str, ...] = ()
    is_raw: bool = False
    store: bool = True
    labels: Mapping[str, Any] = field(default_factory=dict)


def check_messages(messages: Any, engine: InferenceEngine) -> tuple[str, ...]:
    """Raises RequestError naming the message that is wrong; returns the images in order."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a non-empty list", param="messages")
    images: list[str] = []
    for index, message in enumerate(messages):
        is_plain = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not is_plain or message.get("role") not in _ROLES:
            images += _check_message(message, f"messages[{index}]")
    if images and "image_data" not in engine.supported:
        raise RequestError(
            f"messages hold images, which this engine ({type(engine).__name__}) cannot read",
            param="messages",
            code="unsupported_content",
        )
    return tuple(images)


def _check_message(message: Any, where: str) -> list[str]:
    if not isinstance(message, dict):
        raise RequestError(
            f"{where} must be an object with a role, not {type(message).__name__}", param=where
        )
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise RequestError(
            f"{where}.role is {role!r}; it must be one of {', '.join(_ROLES)}",
            param=f"{where}.role",
        )
    if isinstance(content, list):
        return _check_parts(content, f"{where}.content")
    if content is not None and not isinstance(content, str):
        raise RequestError(
            f"{where}.content must be a string or a list of parts", param=f"{where}.content"
        )
    return []


def _check_parts(parts: Sequence[Any], where: str) -> list[str]:
    images = []
    for index, part in enumerate(parts):
        place = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if kind == "image_url" and isinstance(part.get("image_url"), dict):
            images.append(_image_url(part["image_url"].get("url"), f"{place}.image_url"))
        elif key is None:
            raise RequestError(
                f"{place} is a part of type {kind!r}; text and image_url are supported",
                param=place,
                code="unsupported_content",
            )
        elif not isinstance(part.get(key), str):
            raise RequestError(f"{place}.{key} must be a string", param=f"{place}.{key}")
    return images


def _image_url(url: Any, where: str) -> str:
    """Servers open whatever they are given, their own files too."""
    if not isinstance(url, str) or _IMAGE_URL.match(url) is None:
        raise RequestError(
            f"{where}.url must be https://..., http://... or data:image/...;base64,... with the "
            "image in it",
            param=f"{where}.url",
            code="unsupported_content",
        )
    return url


def check_tools(tools: list[Any] | None) -> list[JsonObject] | None:
    """Function tools only; an empty list is the same as none."""
    for index, tool in enumerate(tools or []):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise RequestError(
                f"tools[{index}] has type {kind!r}; only function tools are supported",
                param=f"tools[{index}]",
                code="unsupported_tool",
            )
    return tools or None


def check_schemas(tools: Sequence[JsonObject] | None) -> None:
    """Raises RequestError naming the tool whose parameters are no JSON schema at first sight."""
    for index, tool in enumerate(tools or []):
        _check_parameters(tool.get("function", tool), f"tools[{index}]")


def _check_parameters(function: Any, where: str) -> None:
    schema = function.get("parameters") if isinstance(function, dict) else None
    if schema is None:
        return
    if not isinstance(schema, dict):
        raise RequestError(f"{where} has parameters that are no object", param=where)
    properties, required = schema.get("properties"), schema.get("required")
    members = properties.values() if isinstance(properties, dict) else ()
    enums = [each.get("enum") for each in members if isinstance(each, dict)]
    for name, is_good in (
        ("properties", properties is None or isinstance(properties, dict)),
        ("required", required is None or isinstance(required, list)),
        ("enum", all(enum is None or isinstance(enum, list) for enum in enums)),
    ):
        if not is_good:
            raise RequestError(f"{where} has parameters with a malformed {name!r}", param=where)


def read_labels(fields: Fields) -> dict[str, Any]:
    """What only names or caches a request: kept on the interaction, without effect on it."""
    sent = {
        "metadata": fields.mapping("metadata"),
        "user": fields.string("user"),
        "safety_identifier": fields.string("safety_identifier"),
        "prompt_cache_key": fields.string("prompt_cache_key"),
        "prompt_cache_retention": fields.string("prompt_cache_retention"),
        "prompt_cache_options": fields.mapping("prompt_cache_options"),
        "service_tier": fields.choice("service_tier", ("auto", "default")),
    }
    return {name: value for name, value in sent.items() if value is not None}


def effort_kwargs(fields: Fields, name: str, session: Session) -> dict[str, Any]:
    """What the chat template is told about the reasoning effort: its level, or on and off."""
    effort = fields.choice(name, _EFFORTS)
    if effort is None:
        return {}
    source = session.format.template.source
    if "reasoning_effort" in source:
        return {"reasoning_effort": effort}
    if "enable_thinking" in source:
        return {"enable_thinking": effort != "none"}
    raise fields.refusal(name, "means nothing to this model's chat template; leave it out")
