"""Checkpoints: whole or absent, and nothing in them is ever run."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from agent_rl import small_model
from agent_rl.engine.loading import load_model, load_tokenizer
from agent_rl.errors import CheckpointError, ModelLoadError
from agent_rl.train.checkpoint import (
    load_state,
    save_hf_checkpoint,
    save_state,
)


def model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def test_state_round_trip(tmp_path: Path) -> None:
    """Case B155: our own state, RNG and counters included, is read without a pickle."""
    state = {
        "weights": {"a": torch.arange(3.0)},
        "rng": torch.get_rng_state(),
        "step": 7,
        "names": ["x", None, True, 0.5],
    }
    loaded = load_state(save_state(state, tmp_path / "new" / "state"))
    assert torch.equal(loaded["weights"]["a"], torch.arange(3.0))
    assert torch.equal(loaded["rng"], state["rng"])
    assert (loaded["step"], loaded["names"]) == (7, ["x", None, True, 0.5])


def test_kinds_of_tensors_and_keys(tmp_path: Path) -> None:
    """Tied tensors, a view, a transposed one, none at all, and a number as key."""
    whole = torch.arange(4.0)
    state = {"tied": [whole, whole], "part": whole[:2], 3: {"turned": torch.ones(2, 3).T}}
    loaded = load_state(save_state(state, tmp_path / "state"))
    assert [tensor.tolist() for tensor in loaded["tied"]] == 2 * [[0.0, 1.0, 2.0, 3.0]]
    assert loaded["part"].tolist() == [0.0, 1.0]
    assert loaded[3]["turned"].shape == (3, 2)
    assert load_state(save_state({"step": 1}, tmp_path / "plain")) == {"step": 1}


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.system, (f"touch {self.marker}",))


def test_malicious_file_is_refused(tmp_path: Path) -> None:
    """Case B155: no pickle is run, and the failure is an error, not a fresh start."""
    folder, marker = save_state({"a": torch.ones(2)}, tmp_path / "state"), tmp_path / "marker"
    pickled = pickle.dumps({"step": Malicious(marker)})
    (folder / ".metadata").write_bytes(pickled)  # the name that torch's own format pickles under
    assert load_state(folder)["a"].tolist() == [1.0, 1.0]
    for path in folder.iterdir():
        path.write_bytes(pickled)
    with pytest.raises(CheckpointError, match="state"):
        load_state(folder)
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"[1, 2]", b'{"tensor": "/b"}'])
def test_damaged_tree_is_an_error(tmp_path: Path, content: bytes) -> None:
    folder = save_state({"a": torch.ones(2)}, tmp_path / "state")
    (folder / "tree.json").write_bytes(content)
    with pytest.raises(CheckpointError):
        load_state(folder)


def test_missing_tensors_and_folders_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        load_state(tmp_path / "none")
    folder = save_state({"a": torch.ones(2)}, tmp_path / "state")
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError):
        load_state(folder)


def test_a_state_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot hold /step"):
        save_state({"step": Path("x")}, tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_hf_folder_keeps_tokenizer_and_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(small_model())
    original = model()
    save_hf_checkpoint(original, tokenizer, tmp_path / "out")
    loaded = load_model(tmp_path / "out", device=torch.device("cpu"), dtype=torch.float32)
    loaded_tokenizer = load_tokenizer(tmp_path / "out")
    for a, b in zip(original.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)
    messages = [{"role": "user", "content": "hi"}]
    assert loaded_tokenizer.chat_template == tokenizer.chat_template
    assert loaded_tokenizer.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:-4], lambda content: b"\x01".join((content[:-4], content[-3:]))],
)
def test_damaged_weights_are_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """Cut off, and with one byte of a weight changed, which safetensors loads without a word."""
    folder = save_hf_checkpoint(model(), None, tmp_path / "out")
    weights = folder / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(ModelLoadError, match=r"out: model\.safetensors is damaged"):
        load_model(folder, device=torch.device("cpu"), dtype=torch.float32)


def test_settings_beside_the_weights_may_be_edited(tmp_path: Path) -> None:
    folder = save_hf_checkpoint(model(), None, tmp_path / "out")
    with (folder / "config.json").open("a") as file:
        file.write("\n")
    load_model(folder, device=torch.device("cpu"), dtype=torch.float32)


def test_weights_on_their_way_to_a_server_have_no_checksums(tmp_path: Path) -> None:
    """They are read at once, and a digest of each update would cost time."""
    folder = save_hf_checkpoint(model(), None, tmp_path / "out", has_checksums=False)
    assert not (folder / "SHA256SUMS").exists()


def test_second_save_replaces_the_first(tmp_path: Path) -> None:
    folder = save_hf_checkpoint(model(0), None, tmp_path / "out")
    (folder / "stale.txt").write_text("from the first save")
    save_hf_checkpoint(model(1), None, folder)
    assert not (folder / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 8


def test_failed_save_keeps_the_old_folder(tmp_path: Path) -> None:
    folder = save_hf_checkpoint(model(), None, tmp_path / "out")

    class Failing:
        def save_pretrained(self, folder: Path, *, state_dict: object) -> None:
            (folder / "half.safetensors").write_text("half")
            raise OSError("disk full")

    with pytest.raises(CheckpointError, match="disk full"):
        save_hf_checkpoint(Failing(), None, folder)
    assert (folder / "model.safetensors").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_weights_that_could_run_code_are_not_loaded(tmp_path: Path) -> None:
    """Case B155, for weights: a folder with a pickle in place of safetensors."""
    folder = save_hf_checkpoint(model(), None, tmp_path / "out")
    (folder / "model.safetensors").unlink()
    torch.save(model().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="out"):
        load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
