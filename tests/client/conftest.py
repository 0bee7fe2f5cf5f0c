"""One tokenizer for the folder, and an engine that claims to honour every parameter."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from agent_rl import ScriptedEngine, small_model


class GuidedEngine(ScriptedEngine):
    """What a test checks is the request that arrives, not that the script obeys it."""

    supported = ScriptedEngine.supported | {"grammar", "image_data", "top_logprobs"}


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(small_model())


@pytest.fixture
def guided_engine_type() -> type[ScriptedEngine]:
    return GuidedEngine
