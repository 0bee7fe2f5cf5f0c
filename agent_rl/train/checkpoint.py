"""Weights as a Hugging Face folder, everything else as one file of plain tensors and values.

A save is written beside its target, flushed to disk and renamed, so that a killed save leaves the
old one. Loading a state never runs code from its file (``weights_only=True``); what cannot be read
that way is refused with CheckpointError, never taken for a fresh start. Weights are read by
``engine/loading.py``.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from agent_rl.engine.loading import quiet_transformers
from agent_rl.errors import CheckpointError


def save_hf_checkpoint(
    model: Any, tokenizer: PreTrainedTokenizerBase | None, folder: str | Path
) -> Path:
    """Write config, safetensors, tokenizer and chat template; replaces what ``folder`` held."""
    target = Path(folder)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            with quiet_transformers():
                model.save_pretrained(work)
                if tokenizer is not None:
                    tokenizer.save_pretrained(work)
            for path in [*work.rglob("*"), work]:
                _flush(path)
            work.chmod(0o755)
            _replace_folder(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        _flush(target.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint {target}: {error}") from error
    return target


def save_state(state: dict[str, Any], path: str | Path) -> Path:
    """Write tensors, numbers, strings, lists and dicts to one file.

    Raises:
        CheckpointError: the disk fails, or the state holds anything that loading would refuse.
    """
    target = Path(path)
    work = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, work)
        load_state(work)
        _flush(work)
        os.replace(work, target)
        _flush(target.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write the state {target}: {error}") from error
    finally:
        work.unlink(missing_ok=True)
    return target


def load_state(path: str | Path) -> dict[str, Any]:
    """Read what ``save_state`` wrote, on the CPU.

    Raises:
        CheckpointError: the file is missing, damaged, or would have to run code to be read.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"cannot read the state {path}: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"the state {path} is a {type(state).__name__}, not a dict")
    return state


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
