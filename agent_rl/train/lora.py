"""Low-rank adapters: which weights are trained, and how they leave the process.

Adapters are put into the model's own layers (``peft.inject_adapter_in_model``): the model keeps its
class, its parameters' storage and its engine, which samples with the adapters as they are. Exports
are a peft folder (adapters only) or whole weights with the adapters added in.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from agent_rl.config import LoraConfig
from agent_rl.errors import CheckpointError, ConfigError, MissingDependencyError

_NAME = "default"


def add_adapters(model: Any, config: LoraConfig) -> None:
    """Freeze the model's weights and give its layers adapters that start as no change at all.

    Raises:
        MissingDependencyError: peft is not installed.
        ConfigError: no layer has one of the names of ``target_modules``, or the first or last has.
    """
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError("actor.lora needs peft: pip install peft") from error
    model.requires_grad_(False)
    try:
        settings = _peft_config(config)
        with warnings.catch_warnings():
            # Of experts, for whose second parameter those of the first are no match.
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")
            peft.inject_adapter_in_model(settings, model, adapter_name=_NAME)
    except ValueError as error:
        raise ConfigError(f"actor.lora.target_modules: {error}") from error
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if any(hasattr(layer, "base_layer") for layer in ends):
        raise ConfigError(
            "actor.lora.target_modules: embeddings and the output layer take no adapters here; "
            "name layers between them"
        )
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


@torch.no_grad()
def merged_state_dict(model: Any) -> dict[str, Tensor]:
    """Weights of the plain model that says the same: W + (alpha / rank) B A in each layer."""
    # Experts are one parameter of many matrices; a layer with two such is wrapped twice.
    adapted = {
        f"{_plain(name)}.{getattr(layer, 'parameter_name', 'weight')}": layer
        for name, layer in _layers(model).items()
    }
    merged = {}
    for name, value in model.state_dict().items():
        if "lora_" in name:
            continue
        plain = _plain(name)
        merged[plain] = value
        if plain in adapted:
            delta = adapted[plain].get_delta_weight(_NAME)
            merged[plain] = (value.to(delta.dtype) + delta).to(value.dtype)
    return merged


def _plain(name: str) -> str:
    """The name of a layer or weight in the model without adapters."""
    return name.replace(".base_layer", "")


def write_adapters(model: Any, folder: Path) -> None:
    """A peft folder: adapter_config.json and adapter_model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": value.detach().cpu().contiguous()
        for name, value in adapter_state_dict(model).items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.copy(model.peft_config[_NAME])
    config.inference_mode = True
    config.base_model_name_or_path = model.config._name_or_path
    config.save_pretrained(str(folder))


def adapter_state_dict(model: Any) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if "lora_" in name}


def trained_state_dict(model: Any) -> dict[str, Tensor]:
    """All weights; of a model with adapters only these."""
    return adapter_state_dict(model) if has_adapters(model) else model.state_dict()


def load_trained_state_dict(model: Any, state: dict[str, Tensor]) -> None:
    """In place.

    Raises:
        CheckpointError: the state has adapters and the model none, or the other way round, or they
            are of other layers or of another rank.
    """
    saved, own = (
        {name: tuple(value.shape) for name, value in tensors.items() if "lora_" in name}
        for tensors in (state, trained_state_dict(model))
    )
    if saved != own:
        raise CheckpointError(
            f"the state has {len(saved)} adapter weights and the model {len(own)}, or of other "
            "layers or ranks: actor.lora has changed"
        )
    model.load_state_dict(state, strict=not own)


def has_adapters(model: Any) -> bool:
    return hasattr(model, "peft_config")


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
