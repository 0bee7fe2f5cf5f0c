"""The model's side of a micro-batch: hidden states of packed trees, log-probs of chosen tokens.

Attention runs segment by segment over the path from the root, so that no pair of tokens which may
not see each other is computed. Log-probs are ``log_softmax(logits / temperature)``, made in chunks:
float32 logits over the vocabulary never exist for a large micro-batch. The model is shared with the
engine: its attention is put back afterwards. Knows nothing of rewards and losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_rl.errors import ConfigError, WorkflowContractError
from agent_rl.train.batch import Batch, MicroBatch, micro_batches
from agent_rl.train.sharding import run_pass
from agent_rl.train.team import Team
from agent_rl.train.tree import Segment

_ATTENTION = "agent_rl_segments"
_CHUNK_ELEMENTS = 1 << 25
"""Logits that are worked on at once: 128 MiB in float32."""
_KEPT_ELEMENTS = 1 << 27
"""Up to so many (512 MiB) are kept from the forward to the backward pass."""


def predicted_logprobs(
    model: Any, micro_batch: MicroBatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-prob [K] of each target, with gradient, and entropy [K] of its distribution.

    With ``choices`` in the micro-batch the log-probs are [K, 1 + k]: of the target, then of each
    choice. Inside ``segment_attention`` only.
    """
    hidden = hidden_states(model.base_model, micro_batch)
    return logprobs_of(model, hidden, micro_batch, temperature)


def hidden_states(trunk: Any, micro_batch: MicroBatch) -> Tensor:
    """[N, hidden size] of all nodes, with gradient. ``trunk``: the model without its head.

    Inside ``segment_attention`` only.
    """
    hidden: Tensor = trunk(
        input_ids=micro_batch.input_ids[None],
        position_ids=micro_batch.positions[None],
        use_cache=False,
        segment_plans=_Plans([_plan(segment, micro_batch) for segment in micro_batch.segments]),
    ).last_hidden_state[0]
    return hidden


def logprobs_of(
    model: Any, hidden: Tensor, micro_batch: MicroBatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """``predicted_logprobs`` from hidden states that are known already."""
    targets, choices = micro_batch.targets, micro_batch.choices
    own, head = micro_batch.temperatures, model.get_output_embeddings()
    return token_logprobs(
        hidden.index_select(0, micro_batch.predictors),
        head.weight,
        getattr(head, "bias", None),
        targets if choices is None else torch.cat([targets[:, None], choices], dim=1),
        temperature if own is None else own,
    )


@torch.no_grad()
def score(
    model: Any, batch: Batch, *, temperature: float, max_tokens: int, team: Team | None = None
) -> Tensor:
    """[T] log-probs of the trained tokens, 0 elsewhere. Inside ``segment_attention`` only."""
    team = team or Team()
    dtype = torch.promote_types(model.dtype, torch.float32)
    logprobs = torch.zeros(batch.num_tokens, dtype=dtype, device=model.device)
    own = team.own_rows(batch, range(batch.num_rows))
    parts = micro_batches(batch, own, max_tokens=max_tokens, share_prefixes=True)
    for part in team.even(parts, batch):
        here = part.to(model.device)
        predicted, _ = run_pass(model, predicted_logprobs, model, here, temperature)
        logprobs[here.tokens] = predicted[here.slots]
    return team.add_up(logprobs)


@contextmanager
def segment_attention(model: Any, *, recompute_layers: bool = False) -> Iterator[None]:
    """Let the model attend by segments; nothing else may use the model meanwhile.

    ``recompute_layers`` keeps only the inputs of layers and makes the rest again in the backward
    pass. The model stays in evaluation mode, which transformers' own switch for that would end:
    with dropout or a router's noise, log-probs would not be those of the model that sampled.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(_ATTENTION)
    with ExitStack() as stack:
        stack.callback(model.set_attn_implementation, before)
        if recompute_layers:
            for layer in model.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.forward = partial(_recompute, layer.forward)
                    stack.callback(delattr, layer, "forward")
        yield


def _recompute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def check_model(model: Any) -> None:
    """Compare our path through the model with its own on two rows that share three tokens.

    Raises:
        ConfigError: the model does more than attention over all earlier tokens and a linear head
            (soft-capped logits, attention sinks, recurrent layers), which training would miss.
    """
    ids = torch.arange(1, 8, device=model.device) % len(model.get_output_embeddings().weight)
    rows = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]], device=model.device)
    both = _fork(ids, rows)
    is_exact = model.dtype in (torch.float32, torch.float64)
    tolerance, noise = (1e-3, 1e-6) if is_exact else (0.2, 1e-2)
    with torch.no_grad():
        logits = model(input_ids=ids[rows], use_cache=False).logits[:, :-1].flatten(0, 1)
        expected = logits.float().log_softmax(-1).gather(1, both.targets[:, None])[:, 0]
        with segment_attention(model):
            got, _ = predicted_logprobs(model, both, 1.0)
            seen = hidden_states(model.base_model, both)
            # What the first row goes on with is not seen by the second: where a model that has
            # learnt nothing does see it, log-probs do not tell.
            other = hidden_states(model.base_model, _fork(ids.index_fill(0, rows[0, 3:], 0), rows))
    is_same = torch.allclose(got.float(), expected, atol=tolerance, rtol=tolerance)
    moved = (seen - other)[5:].abs().max()
    if not is_same or bool(moved > noise * seen.abs().max()):
        raise ConfigError(
            f"actor.path: {type(model).__name__} is not supported: its log-probs are not those of "
            "plain causal attention and a linear output layer"
        )


def _fork(ids: Tensor, rows: Tensor) -> MicroBatch:
    """Nodes 0 to 6 as two rows of five that part after node 2; all but node 0 are predicted."""
    predictors, nodes = rows[:, :-1].flatten(), rows[:, 1:].flatten()
    places = torch.arange(len(nodes), device=ids.device)
    return MicroBatch(
        input_ids=ids,
        positions=torch.tensor([0, 1, 2, 3, 4, 3, 4], device=ids.device),
        segments=(
            Segment(start=0, end=3),
            Segment(start=3, end=5, ancestors=(0,)),
            Segment(start=5, end=7, ancestors=(0,)),
        ),
        predictors=predictors,
        targets=ids[nodes],
        temperatures=None,
        choices=None,
        slots=places,
        tokens=places,
        nodes=nodes,
        rows=places // 4,
    )


def check_ids(model: Any, batch: Batch) -> None:
    """A GPU that looked up an id which the model does not know is of no more use to the process.

    Raises:
        WorkflowContractError: the batch has such an id.
    """
    size = model.get_input_embeddings().weight.shape[0]
    topk = None if batch.teacher is None else batch.teacher.topk_ids
    for key, ids in (("input_ids", batch.token_ids), ("teacher_topk_ids", topk)):
        if ids is not None and bool(((ids < 0) | (ids >= size)).any()):
            raise WorkflowContractError(
                f"{key} has ids from {int(ids.min())} to {int(ids.max())}, and the model knows 0 "
                f"to {size - 1}: are they of another tokenizer?"
            )


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """log_softmax((hidden @ weight.T + bias) / temperature) at the targets, and the entropy [K].

    ``targets`` are [K] or [K, C], and so are the log-probs. ``temperature`` is one for all or [K].
    Logits 2 and 0, target 0, at 0.5 -> -0.018150.
    """
    apply = cast("Callable[..., tuple[Tensor, Tensor]]", _TokenLogprobs.apply)
    return apply(hidden, weight, bias, targets, temperature)


class _TokenLogprobs(torch.autograd.Function):
    """Keeps a few logits for the backward pass; where there are many, makes them once more."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float | Tensor,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_sums = torch.empty(len(targets), dtype=dtype, device=hidden.device)
        entropies = torch.empty_like(log_sums)
        columns = targets if targets.ndim == 2 else targets[:, None]
        logprobs = torch.empty(columns.shape, dtype=dtype, device=hidden.device)
        ctx.kept = [] if len(targets) * len(weight) <= _KEPT_ELEMENTS else None
        for part in _chunks(len(targets), len(weight)):
            logits = _logits(hidden[part], weight, bias, _divisor(temperature, part), dtype)
            peaks = logits.amax(-1)
            powers = (logits - peaks[:, None]).exp_()
            sums = powers.sum(-1)
            log_sums[part] = sums.log() + peaks
            logprobs[part] = logits.gather(1, columns[part]) - log_sums[part, None]
            # H = log Z - sum p x
            entropies[part] = log_sums[part] - torch.linalg.vecdot(powers, logits) / sums
            if ctx.kept is not None:
                ctx.kept.append(logits)
        ctx.save_for_backward(hidden, weight, bias, columns, log_sums, entropies)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs.view(targets.shape), entropies

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, columns, log_sums, entropies = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(columns, dtype=log_sums.dtype)
        grad_logprobs = grad_logprobs.view(columns.shape)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        for i, part in enumerate(_chunks(len(columns), len(weight))):
            if ctx.kept is not None:
                logits = ctx.kept[i]
            else:
                divisor = _divisor(ctx.temperature, part)
                logits = _logits(hidden[part], weight, bias, divisor, log_sums.dtype)
            logs = logits - log_sums[part, None]
            # dlog p(y)/dx = [y] - p and dH/dx = -p (log p + H)
            factor = grad_logprobs[part].sum(1, keepdim=True)
            if grad_entropies is not None:
                factor = factor + (logs + entropies[part, None]) * grad_entropies[part, None]
            grad = logs.exp_().mul_(factor).neg_()
            grad.scatter_add_(1, columns[part], grad_logprobs[part])
            grad = grad.div_(_divisor(ctx.temperature, part)).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, hidden[part])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    divisor: float | Tensor,
    dtype: torch.dtype,
) -> Tensor:
    return linear(hidden, weight, bias).to(dtype).div_(divisor)


def _divisor(temperature: float | Tensor, part: slice) -> float | Tensor:
    return temperature[part, None] if isinstance(temperature, Tensor) else temperature


def _chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


@dataclass(frozen=True, slots=True)
class _Plans:
    """Opaque on its way through the layers: a compiled layer fits every division into segments."""

    of_segments: list[tuple[int, tuple[int, ...], Tensor | None]]


def _plan(segment: Segment, micro_batch: MicroBatch) -> tuple[int, tuple[int, ...], Tensor | None]:
    """Length, ancestors, and which keys each token sees (None: the causal rule says it all)."""
    size = segment.num_tokens
    before = sum(micro_batch.segments[a].num_tokens for a in segment.ancestors)
    if not before:
        return size, (), None
    visible = torch.ones(
        size, before + size, dtype=torch.bool, device=micro_batch.input_ids.device
    ).tril_(before)
    return size, segment.ancestors, visible


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segment_plans: _Plans | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """One attention layer over [1, heads, N, head size]; split and cat keep the backward linear."""
    if segment_plans is None or softcap is not None or s_aux is not None:
        raise ConfigError(
            f"actor.path: {type(module).__name__} is not supported: its attention is not plain "
            "(capped scores, sinks), or its model does not hand on what attention is asked with"
        )
    if sliding_window is not None and sliding_window < query.shape[2]:
        raise ConfigError(
            f"actor.max_tokens_per_mb: this model attends to a window of {sliding_window} tokens, "
            f"but the micro-batch has {query.shape[2]}; windows are not supported"
        )
    sizes = [size for size, _, _ in segment_plans.of_segments]
    queries, keys, values = (torch.split(states, sizes, dim=2) for states in (query, key, value))
    outputs = []
    for i, (part, (_size, ancestors, visible)) in enumerate(
        zip(queries, segment_plans.of_segments, strict=True)
    ):
        path = (*ancestors, i)
        outputs.append(
            scaled_dot_product_attention(
                part,
                torch.cat([keys[a] for a in path], dim=2) if ancestors else keys[i],
                torch.cat([values[a] for a in path], dim=2) if ancestors else values[i],
                attn_mask=visible,
                is_causal=visible is None,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


_disable = cast("Callable[[Any], Any]", torch.compiler.disable)
AttentionInterface.register(_ATTENTION, _disable(_attend))  # never compiled: it reads the plans
