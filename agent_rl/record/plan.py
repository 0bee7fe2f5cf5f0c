"""Planning a prompt: which recorded interaction a request goes on from, and the ids to send.

A request that replays a recorded answer goes on from it. In "concat" the prompt is that
interaction's ids plus the bridge; in "hf" it is what the template renders. Either way the parent
is whoever's ids begin the prompt exactly; if that is not the interaction found by messages, the
branch has a ``fork_reason`` ("code: detail"). Ids of model output are never encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agent_rl.record.history import History
from agent_rl.record.identity import Key
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.record.path import TokenPath, shared_length
from agent_rl.types import ChatTemplateType, JsonObject, ModelResponse

if TYPE_CHECKING:
    from agent_rl.tokens.format import ChatFormat
    from agent_rl.tokens.render import Rendering
    from agent_rl.tokens.vocabulary import Vocabulary


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
    ``num_shared`` ids begin both the prompt and the nearer of the two. ``rendering`` is the
    template's, None after a bridge. ``num_recorded``: see ``history.History``.
    """

    request: Request
    key: Key
    input_ids: tuple[int, ...]
    num_recorded: int = 0
    rendering: Rendering | None = None
    num_shared: int = 0
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
            num_recorded=self.num_recorded,
            path=TokenPath(
                base=base.path if base is not None else None,
                shared=self.num_shared,
                context=self.input_ids[self.num_shared :],
                response=model_response,
                temperature=temperature,
                whole=self.input_ids + model_response.output_tokens,
                rendering=self.rendering,
            ),
        )


def plan_prompt(request: Request, history: History, fmt: ChatFormat) -> PromptPlan:
    """Bridge or render ``request``, then say whose ids begin the prompt."""
    found = history.interaction
    if found is not None and not found.is_complete:
        found = None
    prompt: _Prompt | None = None
    obstacle = None
    if found is not None:
        obstacle = _changed_rendering(request, found)
        if obstacle is None:  # one copy of the tools is kept, not one for each turn
            request = replace(request, tools=found.tools)
        if obstacle is None and request.chat_template_type == "concat":
            prompt, obstacle = _bridged(request, history.num_messages, found, fmt)
    if prompt is None:
        prompt = _rendered(request, found, fmt)
    parent, num_shared, difference = _nearest(prompt, found)
    if parent is found:
        obstacle = None
    return PromptPlan(
        request=request,
        key=history.key,
        input_ids=prompt.ids,
        num_recorded=history.num_recorded,
        rendering=prompt.rendering,
        num_shared=num_shared,
        parent=parent,
        history=found,
        fork_reason=history.fork_reason or obstacle or difference,
    )


@dataclass(frozen=True, slots=True)
class _Prompt:
    """``extends_found``: the found interaction's ids begin it by construction."""

    ids: tuple[int, ...]
    rendering: Rendering | None = None
    extends_found: bool = False


def _changed_rendering(request: Request, found: InteractionWithTokenLogpReward) -> str | None:
    if (request.tools or None) != (found.tools or None):
        return "tools changed"
    if (request.chat_template_kwargs or None) != (found.chat_template_kwargs or None):
        return "chat_template_kwargs changed"
    return None


def _bridged(
    request: Request, num_known: int, found: InteractionWithTokenLogpReward, fmt: ChatFormat
) -> tuple[_Prompt | None, str | None]:
    """The ids of ``found`` and the bridge after them, or why there is no safe bridge.

    An engine may end a turn with ids that the template does not write there: a pad for the end of
    turn, or pads after it. The next prompt leaves them out, and so it does not extend ``found``.
    """
    ids = found.path.whole()
    refusal = None
    for end in _ends(found, ids, fmt):
        suffix = fmt.bridge(
            ids[:end],
            request.messages[num_known:],
            request.tools,
            request.chat_template_kwargs or {},
            history=request.messages[:num_known],
        )
        if isinstance(suffix, tuple):
            return _Prompt(ids[:end] + suffix, extends_found=end == len(ids)), refusal
        refusal = refusal or f"no bridge: {suffix.reason}"
    return None, refusal


def _ends(
    found: InteractionWithTokenLogpReward, ids: tuple[int, ...], fmt: ChatFormat
) -> Sequence[int]:
    """Where the turn may be gone on from: its end, behind its first end id, or before that one."""
    fillers = {*fmt.stop_token_ids, fmt.vocabulary.pad_id}
    start = len(ids)
    while start > found.path.num_prompt and ids[start - 1] in fillers:
        start -= 1
    return list(dict.fromkeys((len(ids), min(start + 1, len(ids)), start)))


def _rendered(
    request: Request, found: InteractionWithTokenLogpReward | None, fmt: ChatFormat
) -> _Prompt:
    """What the template renders; ids of ``found`` are reused where its text begins the text."""
    arguments = (request.messages, request.tools, request.chat_template_kwargs or {})
    if found is None and request.chat_template_type == "concat":
        return _Prompt(fmt.render(*arguments))
    before = found.path.rendering if found is not None else None
    rendering = fmt.template.rendering(*arguments, after=before)
    text = rendering.text
    if found is not None:
        known = found.path.text(fmt.vocabulary)
        if text.startswith(known):
            ids = found.path.whole()
            suffix = _suffix(ids[-1], text[len(known) :], fmt.vocabulary)
            if suffix is not None:
                return _Prompt((*ids, *suffix), rendering, extends_found=True)
    return _Prompt(tuple(fmt.vocabulary.encode(text)), rendering)


def _suffix(last_id: int, rest: str, vocabulary: Vocabulary) -> Sequence[int] | None:
    """Ids of the text behind a token, as inside the whole text; None where they cannot be told.

    Some vocabularies write the start of a text with a piece of its own: "user" alone is "▁user".
    Only at a boundary token is the text cut anyway, so it is encoded with one in front.
    """
    if last_id not in vocabulary.boundaries:
        ids = vocabulary.encode(rest)
        if not ids or ids[0] in vocabulary.boundaries:
            return ids
    ids = vocabulary.encode(vocabulary.text_of(last_id) + rest)
    return ids[1:] if ids[0] == last_id else None


def _nearest(
    prompt: _Prompt, found: InteractionWithTokenLogpReward | None
) -> tuple[InteractionWithTokenLogpReward | None, int, str | None]:
    """The first of ``found`` and its forebears whose ids begin the prompt.

    Also the ids shared with it, or with ``found`` where there is none, and why it is not ``found``.
    Going up costs no comparison: a path says how many ids it shares with its base.
    """
    if found is None:
        return None, 0, None
    if prompt.extends_found:
        return found, len(found.path), None
    ids = prompt.ids
    num_shared = shared = shared_length(ids, found.path.whole())
    if shared == len(found.path):
        return found, shared, None
    difference = (
        f"tokens differ: at index {shared} of the {len(found.path)} tokens of "
        f"{found.interaction_id}"
    )
    node: InteractionWithTokenLogpReward = found
    while shared < len(node.path):
        base = node.base
        if base is None:
            return None, num_shared, difference
        if shared == node.path.shared < len(base.path):
            shared = shared_length(ids, base.path.whole())
        else:
            shared = min(shared, node.path.shared)
        node = base
    return node, len(node.path), difference
