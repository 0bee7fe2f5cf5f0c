"""Models and weights from disk, and the engine's own view of a model that is being trained."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import constants, get_session, snapshot_download
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from agent_rl.config.files import is_hub_id
from agent_rl.engine.checksums import check_checksums, has_checksums
from agent_rl.engine.load_lock import loading
from agent_rl.engine.small_model import model_folder
from agent_rl.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHTS = "*.safetensors"
_HUB_TIMEOUT_S = 10.0


def load_model(path: str | Path, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a folder, or of a hub id where the user names one.

    Weights are read from safetensors only: other formats can run code when they are loaded.

    Raises:
        ModelLoadError: no such folder, or what it holds is not a whole model; or a checkpoint whose
            weights are not those that were written (``WEIGHTS`` have checksums there).
    """
    path = model_folder(path)
    with loading, _explained("model", path), quiet_transformers():
        if has_checksums(Path(path)):
            check_checksums(Path(path), WEIGHTS)
        model, report = AutoModelForCausalLM.from_pretrained(
            _at_hand(path), dtype=dtype, use_safetensors=True, output_loading_info=True
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
    path = model_folder(path)
    with _explained("tokenizer", path):
        return AutoTokenizer.from_pretrained(_at_hand(path))


def _at_hand(path: str | Path) -> str | Path:
    """The path; for a hub that does not answer one short question, the folder of an earlier
    download. The hub's own client would go on asking for a minute.

    Raises:
        OSError: there is none.
    """
    if Path(path).is_dir():
        return path
    client = get_session()
    library: Any = sys.modules[type(client).__module__.partition(".")[0]]  # httpx, or another one
    try:
        client.head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
    except (OSError, library.HTTPError) as error:
        try:
            return snapshot_download(str(path), local_files_only=True)
        except OSError:
            raise OSError(f"the hub does not answer ({error}), and nothing is cached") from error
    return path


def end_ids(model: Any, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """End-of-turn ids of generation config and tokenizer; either may name one, several or none."""
    found: set[int] = set()
    named = (
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
    )
    for ids in (*named, tokenizer.eos_token_id if tokenizer is not None else None):
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return tuple(sorted(found))


def inference_view(model: PreTrainedModel) -> PreTrainedModel:
    """A second module tree over the same parameters and buffers.

    Training mode, gradient checkpointing and the attention implementation are flags on modules:
    with a tree of its own the engine is never affected by what the trainer sets meanwhile.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
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
    """Copy the weights of a model folder into the tensors the model already has.

    The folder is loaded whole first, so a bad one changes nothing.

    Raises:
        ModelLoadError: it cannot be loaded, or is a model of other names or shapes.
    """
    loaded = load_model(folder, device=torch.device("cpu"), dtype=model.dtype).state_dict()
    tensors = model.state_dict()
    for name in sorted(tensors.keys() | loaded.keys()):
        mine, new = (
            tuple(side[name].shape) if name in side else None for side in (tensors, loaded)
        )
        if mine != new:
            raise ModelLoadError(
                f"the weights in {folder} do not fit the model: {name} has shape {new}, not {mine}"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(loaded[name])


@contextmanager
def _explained(noun: str, path: str | Path) -> Iterator[None]:
    """Turn the many errors of transformers into one line that names the folder."""
    is_folder = Path(path).is_dir()
    if not is_folder and (isinstance(path, Path) or not is_hub_id(path)):
        raise ModelLoadError(f"cannot load a {noun}: there is no folder {path}")
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        where = path if is_folder else f"{path} (no such folder here, so it was taken for a hub id)"
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelLoadError(f"cannot load a {noun} from {where}: {reason}") from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of transformers."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
