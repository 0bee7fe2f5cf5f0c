"""Models and weights from disk, and the engine's own view of a model that is being trained."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agent_rl.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_model(path: str | Path, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a folder, or of a hub id where the user names one.

    Raises:
        ModelLoadError: no such folder, or it holds no loadable model.
    """
    _check_folder(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelLoadError(f"cannot load a model from {path}: {_first_line(error)}") from error
    return model.to(device).eval()


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Raises ModelLoadError when the folder holds no tokenizer."""
    _check_folder(path)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        message = f"cannot load a tokenizer from {path}: {_first_line(error)}"
        raise ModelLoadError(message) from error


def inference_view(model: PreTrainedModel) -> PreTrainedModel:
    """A second module tree over the same parameter objects.

    Training mode, gradient checkpointing and the attention implementation are flags on modules:
    with a tree of its own the engine is never affected by what the trainer sets meanwhile.
    """
    shared = {id(parameter): parameter for parameter in model.parameters()}
    view = copy.deepcopy(model, shared).eval()
    if view.config._attn_implementation not in ("sdpa", "eager"):
        view.set_attn_implementation("sdpa")
    return view


def check_attention(model: PreTrainedModel, max_seq_len: int) -> None:
    """The slot cache serves models whose layers all attend to everything before them.

    Raises:
        ModelLoadError: a layer uses another kind, or a window shorter than ``max_seq_len``.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    other = sorted(kinds - {"full_attention", "sliding_attention"})
    if other:
        raise ModelLoadError(f"the embedded engine cannot run layers of type {', '.join(other)}")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < max_seq_len:
        raise ModelLoadError(
            f"the model attends to a window of {window} tokens; set engine.max_seq_len to {window} "
            f"or less (it is {max_seq_len})"
        )


def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Copy the safetensors of ``folder`` into the parameters the model already has.

    All names and shapes are checked before the first tensor is changed.

    Raises:
        ModelLoadError: files are missing or do not fit the model.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{folder} holds no .safetensors files")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded: dict[str, Tensor] = {}
    for file in files:
        try:
            loaded.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"cannot read the weights {file}: {error}") from error
    _check_fit(folder, parameters, loaded)
    with torch.no_grad():
        for name, tensor in loaded.items():
            parameters[name].copy_(tensor)


def _check_fit(
    folder: Path, parameters: dict[str, nn.Parameter], loaded: dict[str, Tensor]
) -> None:
    # Tied parameters are stored under one of their names only.
    stored = {id(parameters[name]) for name in loaded if name in parameters}
    absent = [name for name, parameter in parameters.items() if id(parameter) not in stored]
    unknown = [name for name in loaded if name not in parameters]
    misshaped = [
        name
        for name, tensor in loaded.items()
        if name in parameters and parameters[name].shape != tensor.shape
    ]
    for problem, names in (("lacks", absent), ("has unknown", unknown), ("misshapes", misshaped)):
        if names:
            raise ModelLoadError(
                f"the weights in {folder} do not fit the model: it {problem} {names[0]}"
                + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            )


def _check_folder(path: str | Path) -> None:
    looks_like_path = isinstance(path, Path) or str(path).startswith((".", "/", "~"))
    folder = Path(path).expanduser()
    if looks_like_path and not folder.is_dir():
        raise ModelLoadError(f"there is no model folder {path}")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
