"""Planning a prompt: which recorded interaction a request goes on from, and the ids to send.

A request that replays a recorded answer goes on from it. In "concat" the prompt is that
interaction's ids plus the bridge; in "hf" it is what the template renders. Either way the parent
is whoever's ids begin the prompt exactly; if that is not the interaction found by messages, the
branch has a ``fork_reason`` ("code: detail"). Ids of model output are never encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent_rl.record.history import History
from agent_rl.record.identity import Key
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.record.path import TokenPath, shared_length
from agent_rl.types import ChatTemplateType, JsonObject, ModelResponse

if TYPE_CHECKING:
    from agent_rl.tokens.format import ChatFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is rendered. It belongs to the record from now on and is not changed by anyone."""

    messages: list[JsonObject]
    tools: Sequence[JsonObject] | None
    chat_template_type: ChatTemplateType
    chat_template_kwargs: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """The ids to send, and where they hang in the conversation tree.

    ``parent``'s prompt and completion ids begin ``input_ids``. ``history`` is the interaction whose
    answer the messages replay; it differs from the parent only where ``fork_reason`` says why.
    """

    request: Request
    key: Key
    input_ids: tuple[int, ...]
    parent: InteractionWithTokenLogpReward | None = None
    history: InteractionWithTokenLogpReward | None = None
    fork_reason: str | None = None

    def interaction(
        self,
        *,
        interaction_id: str,
        model_response: ModelResponse,
        output_message_list: Sequence[JsonObject],
        completion: object | None = None,
        response: object | None = None,
        created_at: float | None = None,
        temperature: float = 1.0,
        metadata: Mapping[str, Any] | None = None,
    ) -> InteractionWithTokenLogpReward:
        """The record of one completion of this prompt, at a cost that history does not change.

        Raises:
            ValueError: the engine's ``input_tokens`` are not the ids of this plan.
        """
        prompt = model_response.input_tokens
        if prompt is not self.input_ids and prompt != self.input_ids:
            raise ValueError(
                f"{interaction_id}: the engine answered a prompt of {len(prompt)} tokens that is "
                f"not the one it was sent ({len(self.input_ids)} tokens)"
            )
        base = self.parent or self.history
        shared = 0
        if base is not None:
            whole = base.path.whole()
            shared = len(whole) if self.parent is not None else shared_length(prompt, whole)
        return InteractionWithTokenLogpReward(
            interaction_id=interaction_id,
            created_at=created_at,
            messages=self.request.messages,
            output_message_list=output_message_list,
            completion=completion,
            response=response,
            model_response=model_response,
            parent=self.parent,
            chat_template_type=self.request.chat_template_type,
            temperature=temperature,
            fork_reason=self.fork_reason,
            metadata=metadata,
            tools=self.request.tools,
            chat_template_kwargs=self.request.chat_template_kwargs,
            history=self.history,
            key=self.key,
            path=TokenPath(
                base=base.path if base is not None else None,
                shared=shared,
                context=self.input_ids[shared:],
                response=model_response,
                whole=self.input_ids + model_response.output_tokens,
            ),
        )


def plan_prompt(request: Request, history: History, fmt: ChatFormat) -> PromptPlan:
    """Bridge or render ``request``, then say whose ids begin the prompt."""
    found = history.interaction
    if found is not None and not found.is_complete:
        found = None
    parent, obstacle = found, None
    input_ids: tuple[int, ...] | None = None
    if found is not None:
        obstacle = _changed_rendering(request, found)
        if obstacle is None and request.chat_template_type == "concat":
            input_ids, obstacle = _bridged(request, history.num_messages, found, fmt)
    if input_ids is None:
        input_ids = tuple(fmt.render(request.messages, request.tools, _kwargs(request)))
        parent, difference = _confirmed(input_ids, found)
        obstacle = None if parent is found else obstacle or difference
    return PromptPlan(
        request=request,
        key=history.key,
        input_ids=input_ids,
        parent=parent,
        history=found,
        fork_reason=history.fork_reason or obstacle,
    )


def _changed_rendering(request: Request, found: InteractionWithTokenLogpReward) -> str | None:
    if (request.tools or None) != (found.tools or None):
        return "tools changed"
    if (request.chat_template_kwargs or None) != (found.chat_template_kwargs or None):
        return "chat_template_kwargs changed"
    return None


def _bridged(
    request: Request, num_known: int, found: InteractionWithTokenLogpReward, fmt: ChatFormat
) -> tuple[tuple[int, ...] | None, str | None]:
    """The parent's ids and the bridge after them, or why there is no safe bridge."""
    ids = found.path.whole()
    new_messages = request.messages[num_known:]
    suffix = fmt.bridge(ids, found.stop_reason, new_messages, request.tools, _kwargs(request))
    if isinstance(suffix, tuple):
        return ids + suffix, None
    return None, f"no bridge: {suffix.reason}"


def _confirmed(
    input_ids: tuple[int, ...], found: InteractionWithTokenLogpReward | None
) -> tuple[InteractionWithTokenLogpReward | None, str | None]:
    """The nearest of ``found`` and its forebears whose ids begin the prompt; where it differed."""
    difference = None
    node = found
    while node is not None:
        ids = node.path.whole()
        if input_ids[: len(ids)] == ids:
            return node, difference
        if difference is None:
            difference = (
                f"tokens differ: at index {shared_length(input_ids, ids)} of the "
                f"{len(ids)} tokens of {node.interaction_id}"
            )
        node = node.history
    return None, difference


def _kwargs(request: Request) -> Mapping[str, Any]:
    return request.chat_template_kwargs or {}
