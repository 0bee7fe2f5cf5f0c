"""Weights as a Hugging Face folder; any other state as safetensors and a JSON tree in a folder.

What is saved appears under its name complete and flushed or not at all, so that a killed save
leaves the old one. Neither format can hold code; what cannot be read is refused with
CheckpointError, never taken for a fresh start. Weights are read by ``engine/loading.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedTokenizerBase

from agent_rl.engine.checksums import write_checksums
from agent_rl.engine.loading import WEIGHTS, quiet_transformers
from agent_rl.errors import CheckpointError
from agent_rl.train.lora import has_adapters, merged_state_dict, write_adapters
from agent_rl.train.team import Team

_TREE = "tree.json"
_FAULTS = (
    OSError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
    SafetensorError,
    CheckpointException,
)


def save_hf_checkpoint(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | Path,
    *,
    weights: dict[str, Tensor] | None = None,
    has_checksums: bool = True,
) -> Path:
    """Write config, safetensors, tokenizer and chat template; replaces what ``folder`` held.

    Adapters are added into the weights, and written to the folder ``adapter`` as they are.
    ``weights`` are those of a model whose own are sharded. ``has_checksums``: a flipped bit is
    found when the folder is loaded.
    """
    with whole_folder(Path(folder)) as work, quiet_transformers():
        if has_adapters(model):
            model.save_pretrained(work, state_dict=merged_state_dict(model))
            write_adapters(model, work / "adapter")
        else:
            model.save_pretrained(work, state_dict=weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(work)
        if has_checksums:
            write_checksums(work, WEIGHTS)
    return Path(folder)


def save_adapter_checkpoint(model: Any, folder: str | Path) -> Path:
    """Write the adapters alone, as a peft folder; replaces what ``folder`` held."""
    with whole_folder(Path(folder)) as work:
        write_adapters(model, work)
    return Path(folder)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A new folder to fill; at the end it is flushed to disk and takes the place of ``target``.

    Raises:
        CheckpointError: the disk fails. What ``target`` was is kept.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            yield work
            for path in [*work.rglob("*"), work]:
                _flush(path)
            work.chmod(0o755)
            _replace_folder(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        _flush(target.parent)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint {target}: {error}") from error


def save_state(state: dict[str, Any], folder: str | Path, team: Team | None = None) -> Path:
    """Write tensors, numbers, strings, lists and dicts; tuples come back as lists.

    In a team every process calls this at the same time, with the same ``folder``, which all of them
    see: each writes its own parts of sharded tensors.

    Raises:
        CheckpointError: the disk fails, or the state holds anything else.
    """
    target, team = Path(folder), team or Team()
    kept = _Tensors()
    tree, tensors = _as_tree(state, "", kept), kept.by_name
    try:
        target.mkdir(parents=True, exist_ok=True)
        if team.is_first:
            (target / _TREE).write_text(json.dumps(tree), encoding="utf-8")
        if tensors:
            writer = HuggingFaceStorageWriter(str(target), save_distributed=True)
            with _in(team) as process_group:
                save(tensors, storage_writer=writer, **process_group)
    except _FAULTS as error:
        raise CheckpointError(f"cannot write the state {target}: {error}") from error
    return target


def load_state(
    folder: str | Path, *, like: dict[str, Any] | None = None, team: Team | None = None
) -> dict[str, Any]:
    """Read what ``save_state`` wrote, on the CPU; any number of processes may have written it.

    A tensor is sharded where the one in the same place of ``like`` is.

    Raises:
        CheckpointError: a file is missing, damaged, or not one of these.
    """
    target, team = Path(folder), team or Team()
    templates = _Tensors()
    _as_tree(like or {}, "", templates)
    try:
        tree = json.loads((target / _TREE).read_bytes())
        reader = HuggingFaceStorageReader(str(target))
        known = reader.read_metadata().state_dict_metadata
        tensors = {
            name: _empty(known[name], templates.by_name.get(name)) for name in _tensor_names(tree)
        }
        if tensors:
            with _in(team) as process_group:
                load(tensors, storage_reader=reader, **process_group)
        state = _from_tree(tree, tensors)
    except _FAULTS as error:
        raise CheckpointError(f"cannot read the state {target}: {_reason(error)}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"the state {target} is a {type(state).__name__}, not a dict")
    return state


def _reason(error: BaseException) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


@contextmanager
def _in(team: Team) -> Iterator[dict[str, Any]]:
    """How the storage is told who takes part."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield {"no_dist": True} if team.size == 1 else {"process_group": team.group}


def _empty(saved: Any, template: Tensor | None) -> Tensor:
    if template is not None and hasattr(template, "full_tensor"):
        return torch.empty_like(template)
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def _as_tree(value: Any, name: str, tensors: _Tensors) -> Any:
    """The value as JSON: {"dict": [[key, value], ...]}, {"list": [...]}, {"tensor": its name}."""
    if isinstance(value, Tensor):
        return {"tensor": tensors.keep(value.detach(), name)}
    if isinstance(value, dict):
        pairs = [[key, _as_tree(v, f"{name}/{key}", tensors)] for key, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        return {"list": [_as_tree(v, f"{name}/{i}", tensors) for i, v in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"a state cannot hold {name} = {value!r} ({type(value).__name__})")


class _Tensors:
    """The tensors of a state by name. Tied weights are one tensor under two keys: stored once."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self._names: dict[object, str] = {}
        self._storages: set[int] = set()

    def keep(self, tensor: Tensor, name: str) -> str:
        """The name it is stored under."""
        part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        place = (part.device, part.data_ptr(), part.dtype, tensor.shape, tensor.stride())
        if part.numel() and place in self._names:
            return self._names[place]
        assert name not in self.by_name, f"two tensors of the state are called {name}"
        storage = part.untyped_storage().data_ptr()
        is_view = bool(part.numel()) and storage in self._storages
        self.by_name[name] = (
            tensor.clone(memory_format=torch.contiguous_format) if is_view else tensor.contiguous()
        )
        self._names[place] = name
        self._storages.add(storage)
        return name


def _tensor_names(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        ((kind, content),) = tree.items()
        if kind == "tensor":
            yield content
        else:
            for value in content:
                yield from _tensor_names(value if kind == "list" else value[1])


def _from_tree(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "list":
        return [_from_tree(value, tensors) for value in content]
    return {key: _from_tree(value, tensors) for key, value in content}


def _replace_folder(work: Path, target: Path) -> None:
    """A folder cannot be renamed over a full one: move the old one aside first."""
    if not target.exists():
        os.rename(work, target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
    os.rename(target, old)
    try:
        os.rename(work, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
