"""Each row of the guide's table of methods is a config that loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from agent_rl.config import ActorConfig

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "training.md"


def methods() -> dict[str, str]:
    text = GUIDE.read_text(encoding="utf-8")
    return dict(re.findall(r"^\| ([^|]+) \| `(\{.*?\})`", text, re.MULTILINE))


@pytest.mark.parametrize(("name", "keys"), methods().items())
def test_the_keys_of_a_method_are_a_config(name: str, keys: str) -> None:
    config = ActorConfig.model_validate(yaml.safe_load(keys))
    assert name == "GRPO" or config != ActorConfig()


def test_the_table_is_found() -> None:
    assert len(methods()) == 27
