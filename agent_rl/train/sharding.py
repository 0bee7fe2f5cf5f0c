"""A model whose parameters are divided among the processes (FSDP2, ``fully_shard``).

Between passes a parameter is a DTensor: this process's part of it. Inside ``run_pass`` modules have
whole parameters, and after the backward pass each part has the sum of all processes' gradients. A
model of a team of one is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from agent_rl.train.team import Team

T = TypeVar("T")


def shard(model: Any, team: Team, *, reshard_after_forward: bool = True) -> None:
    """Divide the parameters, layer by layer; what is not in a layer is one more part."""
    if team.size == 1:
        return
    first = next(model.parameters())
    mesh = _mesh(first.device.type, team.size)
    # Gradients of bfloat16 weights are summed in float32.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.promote_types(first.dtype, torch.float32))
    for part in (*_layers(model), model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            # Losses have global denominators already: sums, not means over processes.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    model.run_pass = MethodType(_run, model)
    register_fsdp_forward_method(model, "run_pass")


def run_pass(model: Any, function: Callable[..., T], *arguments: Any) -> T:
    """Call the function, which uses parameters of the model; it returns a tensor or a tuple."""
    if not isinstance(model, FSDPModule):
        return function(*arguments)
    result: T = model.run_pass(function, *arguments)
    return result


def _run(_model: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Its results are copied: a view would lose the hook that makes parameters whole again."""
    result = function(*arguments)
    if isinstance(result, Tensor):
        return result.clone()
    return tuple(None if value is None else value.clone() for value in result)


def whole(tensor: Tensor) -> Tensor:
    """All of it; every process of the team must ask at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Name and whole value of each weight, one at a time; for every process at the same time."""
    for name, value in model.state_dict().items():
        yield name, whole(value)


@cache
def _mesh(device_type: str, size: int) -> DeviceMesh:
    return init_device_mesh(device_type, (size,))


def _layers(model: Any) -> Iterable[Any]:
    """The repeated blocks, each of which is divided and made whole by itself."""
    lists = (part for part in model.modules() if isinstance(part, torch.nn.ModuleList))
    return next(lists, ())
