"""Low-rank adapters: which weights are trained, and how they leave the process.

Adapters are put into the model's own layers (``peft.inject_adapter_in_model``): the model keeps its
class, its parameters' storage and its engine, which samples with the adapters as they are. Exports
are a peft folder (adapters only) or whole weights with the adapters added in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agent_rl.config import LoraConfig
from agent_rl.errors import ConfigError, MissingDependencyError

_NAME = "default"


def add_adapters(model: Any, config: LoraConfig) -> None:
    """Freeze the model's weights and give its layers adapters that start as no change at all.

    Raises:
        MissingDependencyError: peft is not installed.
        ConfigError: no layer has one of the names of ``target_modules``.
    """
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError("actor.lora needs peft: pip install peft") from error
    model.requires_grad_(False)
    try:
        peft.inject_adapter_in_model(_peft_config(config), model, adapter_name=_NAME)
    except ValueError as error:
        raise ConfigError(f"actor.lora.target_modules: {error}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """The model as it was before ``add_adapters``; not for use by two threads at a time."""
    layers = list(_layers(model).values())
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
            for adapter in (layer.lora_A, layer.lora_B):
                adapter[_NAME].requires_grad_(True)


@torch.no_grad()
def merged_state_dict(model: Any) -> dict[str, Tensor]:
    """Weights of the plain model that says the same: W + (alpha / rank) B A in each layer."""
    layers = _layers(model)
    merged = {}
    for name, value in model.state_dict().items():
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner in layers and leaf == "weight":
            delta = layers[owner].get_delta_weight(_NAME)
            merged[f"{owner}.weight"] = (value.to(delta.dtype) + delta).to(value.dtype)
        elif owner in layers:
            merged[f"{owner}.{leaf}"] = value
        elif "lora_" not in name:
            merged[name] = value
    return merged


def save_adapters(model: Any, config: LoraConfig, folder: str | Path, *, base: str) -> None:
    """A peft folder: adapter_config.json and adapter_model.safetensors; ``base`` is noted in it."""
    from safetensors.torch import save_file

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": value.detach().cpu().contiguous()
        for name, value in model.state_dict().items()
        if "lora_" in name
    }
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    written = _peft_config(config)
    written.base_model_name_or_path = base
    written.inference_mode = True
    written.save_pretrained(str(target))


def has_adapters(model: Any) -> bool:
    return any("lora_" in name for name, _ in model.named_parameters())


def _layers(model: Any) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: part for name, part in model.named_modules() if isinstance(part, LoraLayer)}


def _peft_config(config: LoraConfig) -> Any:
    import peft

    modules = config.target_modules
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=modules[0] if modules == ("all-linear",) else list(modules),
        task_type="CAUSAL_LM",
    )
