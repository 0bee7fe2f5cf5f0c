"""Stored responses: /responses/{id}, its input items, deletion, cancelling.

What is stored is the record. Deleting takes a response out of the caller's reach, as the API says;
the interaction stays, because what was sampled is still trained on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from agent_rl.api.fields import Fields
from agent_rl.api.items import call_item, message_item, reasoning_item, text_part
from agent_rl.api.session import Session
from agent_rl.errors import NotSupportedError, RequestError
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.types import JsonObject

_MAX_LIMIT, _DEFAULT_LIMIT = 100, 20
_LIMIT = re.compile("[0-9]{1,3}")


def stored(session: Session, response_id: str) -> InteractionWithTokenLogpReward:
    """Raises NotSupportedError (404) for one that is not recorded or was deleted."""
    interaction = session.cache.get(response_id)
    is_known = interaction is not None and isinstance(interaction.response, dict)
    if interaction is None or not is_known or response_id in session.deleted:
        raise NotSupportedError(
            f"no response {response_id!r} is recorded", code="response_not_found"
        )
    return interaction


def retrieve_response(session: Session, response_id: str, query: Mapping[str, Any]) -> JsonObject:
    fields = Fields(query)
    fields.only("stream", "false")
    fields.only("include_obfuscation", "false")
    fields.finish()
    response: JsonObject = stored(session, response_id).response  # type: ignore[assignment]
    return response


def delete_response(session: Session, response_id: str) -> JsonObject:
    stored(session, response_id)
    session.deleted.add(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


def cancel_response(session: Session, response_id: str) -> JsonObject:
    """Only responses that run in the background can be cancelled, and none does here."""
    stored(session, response_id)
    raise RequestError(
        f"response {response_id!r} is finished: only background responses can be cancelled, and "
        "background=true is not supported here; close the stream or cancel the call instead",
        code="response_not_cancellable",
    )


def input_items(session: Session, response_id: str, query: Mapping[str, Any]) -> JsonObject:
    """One page of what the model was given, without the instructions; newest first by default."""
    interaction = stored(session, response_id)
    fields = Fields(query)
    items = list(_items(interaction))
    if fields.choice("order", ("asc", "desc")) != "asc":
        items.reverse()
    limit = _limit(fields)
    after = fields.string("after")
    fields.only("include[]")
    fields.finish()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise fields.refusal("after", f"names {after!r}, which is no item of this response")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }


def _limit(fields: Fields) -> int:
    """In a query all values are text."""
    text = fields.string("limit") or str(_DEFAULT_LIMIT)
    if not _LIMIT.fullmatch(text) or not 1 <= int(text) <= _MAX_LIMIT:
        raise fields.refusal("limit", f"is {text}; it must be in [1, {_MAX_LIMIT}]")
    return int(text)


def _items(interaction: InteractionWithTokenLogpReward) -> Iterator[JsonObject]:
    """Input items of the messages; ids stay the same from page to page."""
    response = interaction.response
    has_instructions = isinstance(response, dict) and response["instructions"] is not None
    messages = interaction.messages[1:] if has_instructions else interaction.messages
    name = interaction.interaction_id.partition("_")[2]
    index = 0
    for message in messages:
        for item in _message_items(message):
            kind = str(item["type"]).partition("_")[0]
            yield {**item, "id": f"{kind}_{name}_{index}", "status": "completed"}
            index += 1


def _message_items(message: JsonObject) -> Iterator[JsonObject]:
    role, content = message["role"], message.get("content")
    if role == "tool":
        call_id = message.get("tool_call_id")
        yield {"type": "function_call_output", "call_id": call_id, "output": content or ""}
        return
    if role != "assistant":
        yield {"type": "message", "role": role, "content": _parts(content)}
        return
    if message.get("reasoning_content"):
        yield reasoning_item(message["reasoning_content"], "completed")
    if content or not message.get("tool_calls"):
        yield message_item([text_part(content or "", [])], "completed")
    for call in message.get("tool_calls") or ():
        yield call_item(call, "completed")


def _parts(content: Any) -> list[JsonObject]:
    if not isinstance(content, list):
        return [{"type": "input_text", "text": content or ""}]
    return [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
        for part in content
    ]
