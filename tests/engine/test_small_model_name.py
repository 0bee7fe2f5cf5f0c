"""``small`` is the name of the small model wherever a model is loaded."""

from __future__ import annotations

import pytest

from agent_rl import load_config, small_model
from agent_rl.config.files import check_files, check_model
from agent_rl.engine.loading import load_tokenizer
from agent_rl.engine.small_model import model_folder
from agent_rl.errors import DatasetError, ModelLoadError


def test_small_is_a_folder_to_the_loaders() -> None:
    assert model_folder("small") == small_model()
    assert model_folder("owner/model") == "owner/model"
    assert load_tokenizer("small").vocab_size == load_tokenizer(small_model()).vocab_size


@pytest.mark.parametrize(
    "key", ["tokenizer_path", "actor.path", "ref.path", "critic.path", "rollout.tokenizer_path"]
)
def test_a_missing_model_is_named_by_its_key(key: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{key}=gone: there is no folder gone; .* 'small'"):
        check_files(load_config(None, [f"{key}=gone"]))
    for name in ("small", "owner/model"):
        check_model(key, name)


def test_a_missing_dataset_is_named_by_its_key() -> None:
    with pytest.raises(DatasetError, match=r"valid_dataset=gone\.jsonl: .* does not exist"):
        check_files(load_config(None, ["valid_dataset=gone.jsonl"]))
