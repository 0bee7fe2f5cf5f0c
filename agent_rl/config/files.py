"""What a config names on disk, looked at before anything heavy is imported.

Each fault names the key that the user wrote. Whether a folder holds a whole model, and a file good
rows, is found when they are loaded.
"""

from __future__ import annotations

import re
from pathlib import Path

from agent_rl.config.ppo import PPOConfig
from agent_rl.errors import DatasetError, ModelLoadError

SMALL_MODEL = "small"
"""In place of a folder: the small model of demo, tests and examples."""
ROW_FILES = (".jsonl", ".ndjson", ".parquet")
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def check_files(config: PPOConfig) -> None:
    """
    Raises:
        ModelLoadError, DatasetError: a folder or file that a key names is not there.
    """
    ref, critic = config.ref, config.critic
    models = {
        "tokenizer_path": config.tokenizer_path or None,
        "actor.path": config.actor.path,
        "ref.path": ref.path if ref is not None else None,
        "critic.path": critic.path if critic is not None else None,
        "rollout.tokenizer_path": config.rollout.tokenizer_path,
    }
    for key, name in models.items():
        if name is not None:
            check_model(key, name)
    datasets = {"train_dataset": config.train_dataset, "valid_dataset": config.valid_dataset}
    for key, file in datasets.items():
        if file is not None:
            check_dataset(key, Path(file))


def check_model(key: str, name: str) -> None:
    """
    Raises:
        ModelLoadError: ``name`` is neither a folder nor ``small``, and cannot be a hub id.
    """
    if name != SMALL_MODEL and not Path(name).is_dir() and not is_hub_id(name):
        raise ModelLoadError(
            f"{key}={name}: there is no folder {name}; give the Hugging Face folder of a model, or "
            f"{SMALL_MODEL!r} for the small one"
        )


def is_hub_id(name: str) -> bool:
    """``owner/model``, where there is no such path here that is meant."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).parent.is_dir()


def check_dataset(key: str, file: Path) -> None:
    """
    Raises:
        DatasetError: no such file, or not of a kind that is read.
    """
    if not file.is_file():
        raise DatasetError(f"{key}={file}: the dataset file {file} does not exist")
    if file.suffix not in ROW_FILES:
        raise DatasetError(f"{key}={file}: a dataset file must end in {', '.join(ROW_FILES)}")
