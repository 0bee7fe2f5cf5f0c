"""A tiny random model with the real tokenizer: a whole training run takes a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_rl.stats import tracker as stats_tracker


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 2 layers, 16 wide, on SmolLM2's vocabulary."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from agent_rl import small_model

    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(small_model())
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": len(tokenizer)}
    depth = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **depth, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def fresh_metrics() -> None:
    """The trackers are of the process: what an earlier test recorded is not this one's."""
    stats_tracker.export_all()
