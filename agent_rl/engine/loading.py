"""Models and weights from disk, and the engine's own view of a model that is being trained."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from agent_rl.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def load_model(path: str | Path, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a folder, or of a hub id where the user names one.

    Raises:
        ModelLoadError: no such folder, or what it holds is not a whole model.
    """
    with _explained("model", path), _quiet():
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, output_loading_info=True
        )
    absent = sorted(report["missing_keys"])
    if absent:
        raise ModelLoadError(
            f"cannot load a model from {path}: its files lack {len(absent)} weights, first "
            f"{absent[0]}"
        )
    return model.to(device).eval()


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Raises ModelLoadError when the folder holds no tokenizer."""
    with _explained("tokenizer", path):
        return AutoTokenizer.from_pretrained(path)


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


@contextmanager
def _explained(noun: str, path: str | Path) -> Iterator[None]:
    """Turn the many errors of transformers into one line that names the folder."""
    is_folder = Path(path).is_dir()
    is_local = isinstance(path, Path) or not _HUB_ID.fullmatch(path) or Path(path).parent.is_dir()
    if not is_folder and is_local:
        raise ModelLoadError(f"cannot load a {noun}: there is no folder {path}")
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        where = path if is_folder else f"{path} (no such folder here, so it was taken for a hub id)"
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelLoadError(f"cannot load a {noun} from {where}: {reason}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
