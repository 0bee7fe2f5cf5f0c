"""Interactions and trajectories as strict JSON and back, every id, log-prob and version exact.

    encode_interaction(c2)               c2 by itself: its messages and its whole path
    encode_interaction(c2, known={"c1"}) only what is new against c1; decode with known={"c1": c1}

A path is written as its pieces, oldest first, each with the ids behind those that it shares with
the piece before. Floats that JSON lacks are the strings "nan", "inf", "-inf". Tensors are base64
of their bytes. Nothing is ever unpickled or evaluated.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any, get_args

from agent_rl.errors import JournalError
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.record.path import TokenPath
from agent_rl.types import (
    JsonObject,
    ModelResponse,
    RolloutGroup,
    RowValue,
    StopReason,
    TensorDict,
)

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = frozenset(
    {"bool", "uint8", "int8", "int16", "int32", "int64"}
    | {"float16", "bfloat16", "float32", "float64"}
)
_PLAIN = (
    "interaction_id",
    "created_at",
    "output_message_list",
    "completion",
    "response",
    "chat_template_type",
    "temperature",
    "fork_reason",
    "metadata",
    "tools",
    "chat_template_kwargs",
    "num_recorded",
)


def encode_interaction(
    interaction: InteractionWithTokenLogpReward, known: Container[str] = ()
) -> JsonObject:
    """What ``json.dumps`` writes, as long as what the interaction holds is JSON.

    Args:
        known: ids of interactions that the reader will have: those are only named, and the cost is
            that of what is new.
    """
    history = interaction.history
    is_known = history is not None and history.interaction_id in known
    return {
        **{name: getattr(interaction, name) for name in _PLAIN},
        "reward": _number(interaction.reward),
        "rollout_reward": _number(interaction.rollout_reward),
        "original_reward": _number(interaction.original_reward),
        "is_leaf": interaction.is_leaf,
        "parent": None if interaction.parent is None else interaction.parent.interaction_id,
        "history": None if history is None else history.interaction_id,
        "messages": interaction.new_messages if is_known else interaction.messages,
        "messages_after": history.interaction_id if history is not None and is_known else None,
        "trained_from": interaction.trained_from,
        **_encode_path(interaction, known),
    }


def decode_interaction(
    encoded: Mapping[str, Any], known: Mapping[str, InteractionWithTokenLogpReward] | None = None
) -> InteractionWithTokenLogpReward:
    """
    Args:
        known: earlier interactions by id. A parent that is not among them is None; the ids are
            whole all the same.

    Raises:
        JournalError: a field is missing or wrong, or it was encoded against an interaction that
            is not known here.
    """
    known = known or {}
    try:
        history = known.get(encoded["history"])
        base = _known(encoded["messages_after"], known)
        before = [] if base is None else base.messages
        path = _decode_path(encoded, known)
        interaction = InteractionWithTokenLogpReward(
            **{name: encoded[name] for name in _PLAIN},
            reward=_float(encoded["reward"]),
            rollout_reward=_float(encoded["rollout_reward"]),
            original_reward=_float(encoded["original_reward"]),
            parent=known.get(encoded["parent"]),
            history=history,
            messages=[*before, *encoded["messages"]],
            model_response=None if path is None else _response(encoded, path),
            path=path,
        )
        interaction.is_leaf = bool(encoded["is_leaf"])
        first = encoded["trained_from"]
        return interaction if first is None else interaction.as_row(int(first))
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(f"this is no encoded interaction: {error!r}") from error


def _known(
    name: str | None, known: Mapping[str, InteractionWithTokenLogpReward]
) -> InteractionWithTokenLogpReward | None:
    if name is None:
        return None
    if name not in known:
        raise JournalError(
            f"an interaction was encoded against {name!r}, which is not known: decode in the "
            "order in which they were encoded"
        )
    return known[name]


def _encode_path(
    interaction: InteractionWithTokenLogpReward, known: Container[str]
) -> dict[str, object]:
    """The pieces back to one whose interaction is known, oldest first; None without ids."""
    if interaction.stop_reason is None:
        return {"path": None}
    pieces: list[JsonObject] = []
    path: TokenPath | None = interaction.path
    owner: InteractionWithTokenLogpReward | None = interaction
    path_after = None
    while path is not None:
        pieces.append(_piece(path))
        path, owner = path.base, None if owner is None else owner.base
        if owner is not None and owner.interaction_id in known:
            path_after = owner.interaction_id
            break
    return {
        "path": pieces[::-1],
        "path_after": path_after,
        "stop_reason": interaction.stop_reason,
        "latency_s": interaction.latency_s,
        "ttft_s": interaction.ttft_s,
        "num_cached_tokens": interaction.num_cached_tokens,
        "top_logprobs": _encode_top(interaction.top_logprobs),
    }


def _piece(path: TokenPath) -> JsonObject:
    return {
        "shared": path.shared,
        "context": list(path.own[: path.num_prompt - path.shared]),
        "output": list(path.output),
        "logprobs": [_number(value) for value in path.logprobs],
        "versions": list(path.versions),
        "temperature": path.temperature,
        "forced": None if path.forced is None else list(path.forced),
    }


def _decode_path(
    encoded: Mapping[str, Any], known: Mapping[str, InteractionWithTokenLogpReward]
) -> TokenPath | None:
    if encoded["path"] is None:
        return None
    after = _known(encoded["path_after"], known)
    path = None if after is None else after.path
    for piece in encoded["path"]:
        shared = int(piece["shared"])
        if not 0 <= shared <= (0 if path is None else len(path)):
            raise ValueError(f"a piece shares {shared} ids with what is before it")
        forced = piece["forced"]
        path = TokenPath(
            base=path,
            shared=shared,
            context=piece["context"],
            response=ModelResponse(
                input_tokens=(),
                output_tokens=tuple(piece["output"]),
                output_logprobs=tuple(float(value) for value in piece["logprobs"]),
                output_versions=tuple(piece["versions"]),
                stop_reason="stop",
                output_forced=None if forced is None else tuple(map(bool, forced)),
            ),
            temperature=float(piece["temperature"]),
        )
    return path


def _response(encoded: Mapping[str, Any], path: TokenPath) -> ModelResponse:
    """Of the last piece; the interaction keeps what its path does not have."""
    if encoded["stop_reason"] not in get_args(StopReason):
        raise ValueError(f"stop_reason is {encoded['stop_reason']!r}")
    top = encoded["top_logprobs"]
    return ModelResponse(
        input_tokens=tuple(path.ids()[: path.num_prompt]),
        output_tokens=tuple(path.output),
        output_logprobs=tuple(path.logprobs),
        output_versions=tuple(path.versions),
        stop_reason=encoded["stop_reason"],
        latency_s=float(encoded["latency_s"]),
        ttft_s=float(encoded["ttft_s"]),
        num_cached_tokens=encoded["num_cached_tokens"],
        output_top_logprobs=None if top is None else tuple(map(_decode_top, top)),
    )


def _encode_top(
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None,
) -> list[list[list[float | str | None]]] | None:
    if top_logprobs is None:
        return None
    return [[[token_id, _number(value)] for token_id, value in each] for each in top_logprobs]


def _decode_top(pairs: Iterable[tuple[int, Any]]) -> tuple[tuple[int, float], ...]:
    return tuple((int(token_id), float(value)) for token_id, value in pairs)


def encode_trajectory(trajectory: TensorDict) -> JsonObject:
    """Rows with their ``rollout_group``.

    Raises:
        JournalError: a value is neither a tensor, a RolloutGroup nor JSON.
    """
    return {key: _encode_value(value, key) for key, value in trajectory.items()}


def decode_trajectory(encoded: Mapping[str, Any]) -> TensorDict:
    """
    Raises:
        JournalError: a value is not one that ``encode_trajectory`` writes.
    """
    try:
        return {key: _decode_value(value) for key, value in encoded.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(f"this is no encoded trajectory: {error!r}") from error


def _encode_value(value: RowValue, key: str) -> JsonObject:
    from torch import Tensor

    if isinstance(value, Tensor):
        return _encode_tensor(value, key)
    if isinstance(value, RolloutGroup):
        return {
            "row_counts": list(value.row_counts),
            "rewards": list(value.references),
            "truncated": list(value.truncated),
        }
    return {"json": as_json(value, f"trajectory: {key}")}


def _decode_value(encoded: Mapping[str, Any]) -> RowValue:
    if "dtype" in encoded:
        return _decode_tensor(encoded)
    if "row_counts" in encoded:
        return RolloutGroup(
            row_counts=encoded["row_counts"],
            rewards=encoded["rewards"],
            truncated=encoded["truncated"],
        )
    value: RowValue = encoded["json"]
    return value


def _encode_tensor(tensor: Tensor, key: str) -> JsonObject:
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise JournalError(f"trajectory: {key} has the dtype {name}, which cannot be written")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return {
        "dtype": name,
        "shape": list(tensor.shape),
        "data": base64.b64encode(data).decode("ascii"),
    }


def _decode_tensor(encoded: Mapping[str, Any]) -> Tensor:
    import torch

    name, shape = encoded["dtype"], [int(size) for size in encoded["shape"]]
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    data = bytearray(base64.b64decode(encoded["data"], validate=True))
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for {name} of shape {shape}")
    if not data:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def as_json(value: object, what: str) -> Any:
    """The value as JSON gives it back: tuples as lists.

    Raises:
        JournalError: it is not JSON, NaN included; the text begins with ``what``.
    """
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise JournalError(f"{what} cannot be written as JSON: {error}") from error


def _number(value: float | None) -> float | str | None:
    """A float that JSON can hold, exactly."""
    return value if value is None or math.isfinite(value) else str(float(value))


def _float(value: object) -> float | None:
    return None if value is None else float(value)  # type: ignore[arg-type]


assert sys.byteorder == "little", "tensors are written as the bytes of a little-endian machine"
