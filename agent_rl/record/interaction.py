"""One model call as recorded: prompt ids, sampled ids, log-probs, versions, messages, reward.

Everything but the rewards and ``is_leaf`` is fixed at construction; those belong to the cache, and
on exported copies to the workflow. History is not copied: prompt ids and messages are stored as
what is new against an earlier interaction and put together when asked for.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agent_rl.record.identity import Key
from agent_rl.record.path import Row, TokenPath, shared_length
from agent_rl.types import ChatTemplateType, JsonObject, ModelResponse, StopReason

if TYPE_CHECKING:
    from torch import Tensor


class InteractionWithTokenLogpReward:
    """One call of the model, exactly as sampled.

    ``latency_s``, ``ttft_s``, ``top_logprobs`` and ``num_cached_tokens`` are the engine's, as in
    ``ModelResponse``; a call without ids does not have them.

    Args:
        messages: the whole request.
        parent: the interaction whose prompt and completion ids begin this one's prompt.
        history: the interaction whose messages and answer begin these messages; by default the
            parent. Without parent it says that the ids differ, see ``fork_reason``.
        path: the ids as the planner knows them; by default made from ``model_response``.
        key: identity of ``messages``, as the planner knows it.
        num_recorded: how many interactions were recorded when it was asked.

    Raises:
        ValueError: the prompt does not begin with the parent's ids.
    """

    __slots__ = (
        "_history",
        "_new_messages",
        "_path",
        "_stop_reason",
        "_trained_from",
        "chat_template_kwargs",
        "chat_template_type",
        "completion",
        "created_at",
        "fork_reason",
        "interaction_id",
        "is_leaf",
        "key",
        "latency_s",
        "metadata",
        "num_cached_tokens",
        "num_messages",
        "num_recorded",
        "original_reward",
        "output_message_list",
        "parent",
        "response",
        "reward",
        "rollout_reward",
        "temperature",
        "tools",
        "top_logprobs",
        "ttft_s",
    )

    def __init__(
        self,
        *,
        interaction_id: str = "",
        created_at: float | None = None,
        messages: Sequence[JsonObject] = (),
        output_message_list: Sequence[JsonObject] = (),
        completion: object | None = None,
        response: object | None = None,
        model_response: ModelResponse | None = None,
        reward: float | None = None,
        rollout_reward: float | None = None,
        original_reward: float | None = None,
        parent: InteractionWithTokenLogpReward | None = None,
        chat_template_type: ChatTemplateType = "hf",
        temperature: float = 1.0,
        fork_reason: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        tools: Sequence[JsonObject] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        history: InteractionWithTokenLogpReward | None = None,
        path: TokenPath | None = None,
        key: Key | None = None,
        num_recorded: int = 0,
    ) -> None:
        self.interaction_id = interaction_id
        self.created_at = time.time() if created_at is None else created_at
        self.output_message_list = list(output_message_list)
        self.completion = completion
        self.response = response
        self.reward = reward
        self.rollout_reward = rollout_reward
        self.original_reward = original_reward
        self.parent = parent
        self.chat_template_type: ChatTemplateType = chat_template_type
        self.temperature = temperature
        self.fork_reason = fork_reason
        self.metadata: dict[str, Any] = dict(metadata or {})
        self.tools = tools
        self.chat_template_kwargs = chat_template_kwargs
        self.is_leaf = True
        self.key = key
        self.num_recorded = num_recorded
        self._history = history if history is not None else parent
        self.num_messages = len(messages)
        known = self._history.num_messages if self._history is not None else 0
        self._new_messages = tuple(messages[known:])
        self._trained_from: int | None = None
        self._set_response(model_response, path)

    def _set_response(self, response: ModelResponse | None, path: TokenPath | None) -> None:
        self._path = path
        if response is None:
            return
        self._stop_reason = response.stop_reason
        self.latency_s, self.ttft_s = response.latency_s, response.ttft_s
        self.top_logprobs = response.output_top_logprobs
        self.num_cached_tokens = response.num_cached_tokens
        if path is None:
            self._path = _path_of(response, self.parent, self.temperature)

    @property
    def messages(self) -> list[JsonObject]:
        """The request's messages. Those of the history are as they were sent at that time."""
        node: InteractionWithTokenLogpReward | None = self
        pieces = []
        while node is not None:
            pieces.append(node._new_messages)
            node = node._history
        return [message for piece in reversed(pieces) for message in piece]

    @property
    def new_messages(self) -> list[JsonObject]:
        """``messages`` behind those of the history."""
        return list(self._new_messages)

    @property
    def history(self) -> InteractionWithTokenLogpReward | None:
        """Whose answer this request replays last; the parent, unless the ids differ."""
        return self._history

    @property
    def base(self) -> InteractionWithTokenLogpReward | None:
        """Whose path this one's is stored against."""
        return self.parent or self._history

    @property
    def stop_reason(self) -> StopReason | None:
        return self._stop_reason if self._path is not None else None

    @property
    def model_response(self) -> ModelResponse | None:
        """What the engine returned, with the whole prompt; None for a call without ids."""
        if self._path is None:
            return None
        path = self._path
        return ModelResponse(
            input_tokens=tuple(path.ids()[: path.num_prompt]),
            output_tokens=tuple(path.output),
            output_logprobs=tuple(path.logprobs),
            output_versions=tuple(path.versions),
            stop_reason=self._stop_reason,
            latency_s=self.latency_s,
            ttft_s=self.ttft_s,
            output_top_logprobs=self.top_logprobs,
            output_forced=None if path.forced is None else tuple(map(bool, path.forced)),
            num_cached_tokens=self.num_cached_tokens,
        )

    @property
    def path(self) -> TokenPath:
        """Where the ids are.

        Raises:
            ValueError: the call has none: it never finished, or went to an external API.
        """
        if self._path is None:
            raise ValueError(f"interaction {self.interaction_id!r} has no token ids")
        return self._path

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and sampled ids."""
        return tuple(self.path.ids())

    @property
    def num_tokens(self) -> int:
        return len(self.path)

    @property
    def is_complete(self) -> bool:
        """Whether the call has an id and sampled tokens (maybe none of them): it can be a row."""
        return bool(self.interaction_id) and self._path is not None

    @property
    def request_id(self) -> str:
        """The same for all choices of one request: ``chatcmpl-1/2`` -> ``chatcmpl-1``."""
        return self.interaction_id.partition("/")[0]

    @property
    def trained_from(self) -> int | None:
        """The index that ``as_row`` was given; None for what is no exported copy."""
        return self._trained_from

    def as_row(self, trained_from: int) -> InteractionWithTokenLogpReward:
        """A copy for export: sampled tokens before index ``trained_from`` are context in its row.

        Rewards set on the copy stay on the copy.
        """
        row = copy.copy(self)
        row._trained_from = trained_from
        return row

    def to_row(self) -> Row:
        """The training sequence: by default the own output in hf mode, the whole path in concat."""
        first = self._trained_from
        if first is None:
            first = 0 if self.chat_template_type == "concat" else self.path.num_prompt
        return self.path.row(first)

    def to_tensor_dict(self) -> dict[str, Tensor]:
        """One row: ``[1, seq_len]`` tensors; ``rewards`` and ``is_truncated`` are ``[1]``.

        A missing reward reads 0.0 here; whoever trains on rows refuses them beforehand.
        """
        import torch

        row = self.to_row()
        size = len(row.token_ids)
        tensors = {
            "input_ids": torch.frombuffer(row.token_ids, dtype=torch.int32)[None],
            "attention_mask": torch.ones(1, size, dtype=torch.bool),
            "loss_mask": torch.frombuffer(row.loss_mask, dtype=torch.int32)[None],
            "logprobs": torch.frombuffer(row.logprobs, dtype=torch.float32)[None],
            "versions": torch.frombuffer(row.versions, dtype=torch.int32)[None],
            "temperatures": torch.frombuffer(row.temperatures, dtype=torch.float32)[None],
            "rewards": torch.tensor([self.reward or 0.0], dtype=torch.float32),
            "is_truncated": torch.tensor([self.stop_reason in ("length", "abort")]),
        }
        if self.original_reward is not None:
            original = torch.tensor([self.original_reward], dtype=torch.float32)
            tensors["original_rewards"] = original
        return tensors

    def __repr__(self) -> str:
        size = "no ids" if self._path is None else f"{len(self._path)} tokens"
        return f"<interaction {self.interaction_id} {size} reward={self.reward}>"


def _path_of(
    response: ModelResponse, parent: InteractionWithTokenLogpReward | None, temperature: float
) -> TokenPath:
    prompt = response.input_tokens
    if parent is None:
        return TokenPath(
            base=None, shared=0, context=prompt, response=response, temperature=temperature
        )
    size = len(parent.path)
    shared = shared_length(prompt, parent.path.whole())
    if shared < size:
        raise ValueError(
            f"the prompt does not begin with the ids of its parent {parent.interaction_id!r}: "
            f"they differ at index {shared}"
        )
    return TokenPath(
        base=parent.path,
        shared=size,
        context=prompt[size:],
        response=response,
        temperature=temperature,
    )
