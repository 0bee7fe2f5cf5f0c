"""The real tokenizer, and a tiny random model with it: a whole training run takes a second."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent_rl import workflow_context
from agent_rl.stats import tracker as stats_tracker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """SmolLM2's, of the small model."""
    from transformers import AutoTokenizer

    from agent_rl import small_model

    return AutoTokenizer.from_pretrained(small_model())


@pytest.fixture(scope="session")
def tiny_model_dir(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase
) -> Path:
    """A Llama of 2 layers, 16 wide, on that tokenizer's vocabulary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": len(tokenizer)}
    depth = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **depth, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_run(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    """Settings of a training run of two steps of the tiny model, into ``tmp_path``."""
    return [
        f"tokenizer_path={tiny_model_dir}",
        f"fileroot={tmp_path}",
        "experiment_name=exp",
        "trial_name=one",
        "total_train_steps=2",
        "rollout.consumer_batch_size=2",
        "rollout.group_size=2",
        "gconfig.max_new_tokens=4",
        "actor.device=cpu",
        "stats_logger.console=false",
    ]


@pytest.fixture(autouse=True)
def fresh_process() -> None:
    """Trackers and the context of the main thread outlive a test; the next one starts anew."""
    stats_tracker.export_all()
    workflow_context.set(workflow_context.WorkflowContext())


@pytest.fixture
def new_threads() -> Callable[[], list[str]]:
    """Names of the threads that run and did not when the test began."""
    before = set(threading.enumerate())
    return lambda: [thread.name for thread in threading.enumerate() if thread not in before]
