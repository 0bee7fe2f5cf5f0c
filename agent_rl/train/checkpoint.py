"""Weights as a Hugging Face folder, everything else as one safetensors file with a JSON tree.

What is saved appears under its name complete and flushed or not at all, so that a killed save
leaves the old one. Neither format can hold code; what cannot be read is refused with
CheckpointError, never taken for a fresh start. Weights are read by ``engine/loading.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from agent_rl.engine.loading import quiet_transformers
from agent_rl.errors import CheckpointError
from agent_rl.train.lora import has_adapters, merged_state_dict, write_adapters

_TREE = "agent_rl.state"


def save_hf_checkpoint(
    model: Any, tokenizer: PreTrainedTokenizerBase | None, folder: str | Path
) -> Path:
    """Write config, safetensors, tokenizer and chat template; replaces what ``folder`` held.

    Adapters are added into the weights, and written to the folder ``adapter`` as they are.
    """
    with whole_folder(Path(folder)) as work, quiet_transformers():
        if has_adapters(model):
            model.save_pretrained(work, state_dict=merged_state_dict(model))
            write_adapters(model, work / "adapter")
        else:
            model.save_pretrained(work)
        if tokenizer is not None:
            tokenizer.save_pretrained(work)
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


def save_state(state: dict[str, Any], path: str | Path) -> Path:
    """Write tensors, numbers, strings, lists and dicts to one file; tuples come back as lists.

    Raises:
        CheckpointError: the disk fails, or the state holds anything else.
    """
    target = Path(path)
    work = target.with_name(f".{target.name}.{os.getpid()}")
    tensors = _Tensors()
    tree = _as_tree(state, "", tensors)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors.by_name, work, metadata={_TREE: json.dumps(tree)})
        _flush(work)
        os.replace(work, target)
        _flush(target.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the state {target}: {error}") from error
    finally:
        work.unlink(missing_ok=True)
    return target


def load_state(path: str | Path) -> dict[str, Any]:
    """Read what ``save_state`` wrote, on the CPU.

    Raises:
        CheckpointError: the file is missing, damaged, or not one of these.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tree, names = json.loads((file.metadata() or {})[_TREE]), file.keys()
            state = _from_tree(tree, {name: file.get_tensor(name) for name in names})
    except KeyError as error:
        raise CheckpointError(f"{path} is no saved state: it has no {error}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the state {path}: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"the state {path} is a {type(state).__name__}, not a dict")
    return state


class _Tensors:
    """The tensors of a state by name. Tied weights are one tensor under two keys: stored once."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self._names: dict[object, str] = {}
        self._storages: set[int] = set()

    def keep(self, tensor: Tensor, name: str) -> str:
        """The name it is stored under."""
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in self._names:
            assert name not in self.by_name, f"two tensors of the state are called {name}"
            kept = tensor.detach().cpu().contiguous()
            if kept.untyped_storage().data_ptr() in self._storages:  # a view of another one
                kept = kept.clone()
            self._storages.add(kept.untyped_storage().data_ptr())
            self.by_name[name] = kept
            self._names[place] = name
        return self._names[place]


def _as_tree(value: Any, name: str, tensors: _Tensors) -> Any:
    """The value as JSON: {"dict": [[key, value], ...]}, {"list": [...]}, {"tensor": its name}."""
    if isinstance(value, Tensor):
        return {"tensor": tensors.keep(value, name)}
    if isinstance(value, dict):
        pairs = [[key, _as_tree(v, f"{name}/{key}", tensors)] for key, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        return {"list": [_as_tree(v, f"{name}/{i}", tensors) for i, v in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"a state cannot hold {name} = {value!r} ({type(value).__name__})")


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
