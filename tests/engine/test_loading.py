"""Loading: one clear line for each way in which a folder can be wrong."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from agent_rl.engine.loading import (
    check_attention,
    inference_view,
    load_model,
    load_tokenizer,
    load_weights,
)
from agent_rl.engine.local import LocalEngine
from agent_rl.errors import ModelLoadError

CPU = torch.device("cpu")


def refuse(path: str | Path, match: str) -> None:
    with pytest.raises(ModelLoadError, match=match) as caught:
        load_model(path, device=CPU, dtype=torch.float32)
    assert "\n" not in str(caught.value)


def test_missing_folder(tmp_path: Path) -> None:
    refuse(tmp_path / "x", "there is no folder")
    refuse(str(tmp_path / "x"), "there is no folder")
    refuse("no_such_model", "there is no folder no_such_model")
    with pytest.raises(ModelLoadError, match="there is no folder"):
        LocalEngine(tmp_path / "x")


def test_a_misspelt_checkpoint_is_not_looked_up_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "runs/x" has the form of a hub id, but there is a folder "runs"."""
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    refuse("runs/x", "there is no folder runs/x")


def test_a_hub_that_does_not_answer_is_asked_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client says of each try that it will be repeated; nothing listens at this port."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    refuse(
        "nobody/nothing", r"nobody/nothing \(no such folder here, so it was taken for a hub id\)"
    )
    with pytest.raises(ModelLoadError, match="cannot load a tokenizer from nobody/nothing"):
        load_tokenizer("nobody/nothing")
    assert not [said for said in caplog.messages if "Retrying" in said]


def test_broken_folders(tmp_path: Path, model: LlamaForCausalLM) -> None:
    refuse(tmp_path, "cannot load a model from")
    with pytest.raises(ModelLoadError, match="cannot load a tokenizer from"):
        load_tokenizer(tmp_path)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"123")
    refuse(tmp_path, "cannot load a model from")


def test_missing_weights_are_not_made_up(tmp_path: Path, model: LlamaForCausalLM) -> None:
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refuse(tmp_path, "its files lack 1 weights, first model.norm.weight")


def test_loading_in_many_threads_leaves_transformers_as_it_was(
    tmp_path: Path, model: LlamaForCausalLM
) -> None:
    """A tied model loads after loads that overlapped: none left a patched tie_weights behind."""
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(load_model, tmp_path, device=CPU, dtype=torch.float32) for _ in range(24)
        ]
    for job in jobs:
        loaded = job.result()
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    again = load_model(tmp_path, device=CPU, dtype=torch.float32)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_weights_that_do_not_fit_change_nothing(
    tmp_path: Path, model: LlamaForCausalLM, other_model: LlamaForCausalLM
) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other_model.resize_token_embeddings(100)
    other_model.save_pretrained(tmp_path)
    with pytest.raises(
        ModelLoadError, match=r"lm_head.weight has shape \(100, 32\), not \(97, 32\)"
    ):
        load_weights(model, tmp_path)
    with pytest.raises(ModelLoadError, match="there is no folder"):
        load_weights(model, tmp_path / "nothing")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_weights_are_loaded_into_the_same_tensors(
    tmp_path: Path, model: LlamaForCausalLM, other_model: LlamaForCausalLM
) -> None:
    other_model.save_pretrained(tmp_path)
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    load_weights(model, tmp_path)
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == places[name]
        assert torch.equal(tensor, other_model.state_dict()[name])


def test_view_shares_parameters_but_not_flags(model: LlamaForCausalLM) -> None:
    view = inference_view(model)
    model.train()
    mine, its = dict(model.named_parameters()), dict(view.named_parameters())
    assert mine.keys() == its.keys()
    assert all(mine[name] is its[name] for name in mine)
    assert not view.training and model.training


def test_attention_that_the_slots_cannot_serve(model: LlamaForCausalLM) -> None:
    check_attention(model, 400)
    model.config.sliding_window = 128
    with pytest.raises(ModelLoadError, match="a window of 128 tokens"):
        check_attention(model, 400)
    check_attention(model, 128)
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ModelLoadError, match="layers of type linear_attention"):
        check_attention(model, 128)
