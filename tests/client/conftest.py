"""An engine that claims to honour every parameter."""

from __future__ import annotations

import pytest

from agent_rl import ScriptedEngine


class GuidedEngine(ScriptedEngine):
    """What a test checks is the request that arrives, not that the script obeys it."""

    supported = ScriptedEngine.supported | {"grammar", "image_data", "top_logprobs"}


@pytest.fixture
def guided_engine_type() -> type[ScriptedEngine]:
    return GuidedEngine
