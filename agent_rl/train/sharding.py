"""A model whose parameters are divided among the processes (FSDP2, ``fully_shard``).

Between passes a parameter is a DTensor: this process's part of it. Inside ``run_pass`` modules have
whole parameters, and after the backward pass each part has the sum of all processes' gradients. A
model of a team of one is left as it is, and then nothing of torch.distributed is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from agent_rl.train.team import Team

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


def shard(model: Any, team: Team) -> None:
    """Divide the parameters, layer by layer; what is not in a layer is one more part."""
    if team.size == 1:
        return
    from torch.distributed.fsdp import (
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    first = next(model.parameters())
    mesh = _mesh(first.device.type, team.size)
    # Gradients of bfloat16 weights are summed in float32.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.promote_types(first.dtype, torch.float32))
    for part in (*_layers(model), model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=team.reshards)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            # Losses have global denominators already: sums, not means over processes.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    model.run_pass = MethodType(_run, model)
    register_fsdp_forward_method(model, "run_pass")


def run_pass(model: Any, function: Callable[..., T], *arguments: Any) -> T:
    """Call the function, which uses parameters of the model; it returns a tensor or a tuple."""
    through: Callable[..., T] | None = getattr(model, "run_pass", None)
    return function(*arguments) if through is None else through(function, *arguments)


def _run(_model: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Its results are copied: a view would lose the hook that makes parameters whole again."""
    result = function(*arguments)
    if isinstance(result, Tensor):
        return result.clone()
    return tuple(None if value is None else value.clone() for value in result)


def whole(tensor: Tensor) -> Tensor:
    """All of it; every process of the team must ask at the same time."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def whole_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Name and whole value of each weight, one at a time; for every process at the same time."""
    for name, value in model.state_dict().items():
        yield name, whole(value)


@cache
def _mesh(device_type: str, size: int) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, (size,))


def _layers(model: Any) -> Iterable[Any]:
    """The repeated blocks, each of which is divided and made whole by itself."""
    lists = (part for part in model.modules() if isinstance(part, torch.nn.ModuleList))
    return next(lists, ())
