"""Adapters: what is trained, what the reference sees, and that exports say what the model says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_batches import groups, tiny_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MixtralConfig

from agent_rl import PPOTrainer, load_config, stats_tracker
from agent_rl.config import ActorConfig, LoraConfig, RefConfig
from agent_rl.engine.loading import load_model
from agent_rl.engine.local import LocalEngine
from agent_rl.errors import CheckpointError, ConfigError
from agent_rl.train import lora
from agent_rl.train.actor import Actor
from agent_rl.train.batch import Batch
from agent_rl.train.checkpoint import load_state, save_hf_checkpoint, save_state
from agent_rl.train.reference import Reference

IDS = torch.arange(1, 9)[None]
SETTINGS = LoraConfig(rank=4, alpha=8)
CONFIG = ActorConfig.model_validate({"lora": {"rank": 4}, "optimizer": {"lr": 0.05}})


def adapted(
    dtype: torch.dtype = torch.float32, settings: LoraConfig = SETTINGS
) -> LlamaForCausalLM:
    torch.manual_seed(1)
    model = tiny_model(dtype)
    lora.add_adapters(model, settings)
    return model


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=IDS).logits
    return result


def trained(config: ActorConfig = CONFIG) -> tuple[LlamaForCausalLM, Actor]:
    model = adapted()
    actor = Actor(model, config, total_steps=4, temperature=1.0)
    actor.update(Batch.from_trajectories(groups()))
    return model, actor


def test_only_adapters_are_trained() -> None:
    plain = tiny_model(torch.float32)
    model, actor = trained()
    assert not torch.equal(logits(model), logits(plain))
    with lora.adapters_off(model):
        assert torch.equal(logits(model), logits(plain))
    assert all(
        parameter.requires_grad == ("lora_" in n) for n, parameter in model.named_parameters()
    )
    assert all("lora_" in name for name in actor.state_dict()["model"])


def test_adapters_start_as_no_change() -> None:
    assert torch.equal(logits(adapted()), logits(tiny_model(torch.float32)))


def test_exports_say_what_the_model_says(tmp_path: Path) -> None:
    """Whole weights with the adapters added in, and the adapters alone in peft's form."""
    model, _ = trained()
    save_hf_checkpoint(model, None, tmp_path / "out")
    merged = load_model(tmp_path / "out", device=torch.device("cpu"), dtype=torch.float32)
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-5, rtol=0.0)
    alone = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj.lora_A"
    assert torch.equal(
        alone[f"base_model.model.{name}.weight"], model.state_dict()[f"{name}.default.weight"]
    )
    assert (tmp_path / "out" / "adapter" / "adapter_config.json").exists()


def test_adapters_of_experts_are_added_in(tmp_path: Path) -> None:
    """The experts of a layer are two parameters of many matrices, the router is a third."""
    torch.manual_seed(1)
    config = MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    before = logits(model)
    lora.add_adapters(model, SETTINGS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    save_hf_checkpoint(model, None, tmp_path / "out")
    merged = load_model(tmp_path / "out", device=torch.device("cpu"), dtype=torch.float32)
    assert float((logits(model) - before).abs().max()) > 0.1
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-5, rtol=0.0)
    with lora.adapters_off(model):
        assert torch.equal(logits(model), before)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_reads_the_adapter_folder(tmp_path: Path) -> None:
    from peft import PeftModel

    model, _ = trained()
    lora.write_adapters(model, tmp_path)
    read = PeftModel.from_pretrained(tiny_model(torch.float32), tmp_path)
    torch.testing.assert_close(logits(read), logits(model))


def test_state_continues_exactly(tmp_path: Path) -> None:
    model, actor = trained()
    resumed_model = adapted()
    resumed = Actor(resumed_model, CONFIG, total_steps=4, temperature=1.0)
    resumed.load_state_dict(load_state(save_state(actor.state_dict(), tmp_path / "a.safetensors")))
    for one in (actor, resumed):
        one.update(Batch.from_trajectories(groups(2)))
    assert torch.equal(logits(model), logits(resumed_model))


def test_other_adapters_are_refused() -> None:
    """Of other layers, of another rank, and none at all."""
    _, actor = trained()
    others = [
        adapted(settings=LoraConfig(rank=4, target_modules=("q_proj",))),
        adapted(settings=LoraConfig(rank=3)),
        tiny_model(torch.float32),
    ]
    for other in others:
        resumed = Actor(other, CONFIG, total_steps=4, temperature=1.0)
        with pytest.raises(CheckpointError, match=r"actor\.lora has changed"):
            resumed.load_state_dict(actor.state_dict())


@pytest.mark.parametrize("name", ["no_such_layer", "lm_head", "embed_tokens"])
def test_layers_without_adapters_are_refused(name: str) -> None:
    """Log-probs are made from the output layer's own weight: adapters there would be missed."""
    with pytest.raises(ConfigError, match=r"actor\.lora\.target_modules"):
        adapted(settings=LoraConfig(target_modules=(name,)))


def test_the_reference_is_the_model_without_adapters() -> None:
    """Log-probs of the reference stay those of the start while the adapters move."""
    config = ActorConfig.model_validate({**CONFIG.model_dump(), "kl_loss_coef": 0.1})
    model = adapted()
    reference = Reference(model, RefConfig(), temperature=1.0, is_actor=True)
    actor = Actor(model, config, total_steps=4, temperature=1.0, reference=reference)
    batch = Batch.from_trajectories(groups())
    before = reference.logprobs(batch)
    actor.update(batch)
    assert stats_tracker.export_all()["ppo_actor/update/loss/reference_kl"] == pytest.approx(0.0)
    actor.update(batch)
    assert stats_tracker.export_all()["ppo_actor/update/loss/reference_kl"] > 0.0
    assert torch.equal(reference.logprobs(batch), before)


class Greeter:
    async def run(self, data: dict[str, str], client: object) -> float:
        messages = [{"role": "user", "content": data["question"]}]
        completion = await client.chat.completions.create(model="m", messages=messages)  # type: ignore[attr-defined]
        return 1.0 / completion.usage.completion_tokens


def test_a_run_with_adapters(tiny_run: list[str]) -> None:
    """The engine samples with the adapters; what is saved is a whole model with them added in."""
    adapters = ["actor.lora={rank: 4}", "actor.kl_loss_coef=0.01"]
    config = load_config(None, [*tiny_run, *adapters])
    rows = [{"question": f"say {index}"} for index in range(4)]
    with PPOTrainer(config, rows) as trainer:
        trainer.train(Greeter)
        model = trainer.actor.model
        assert isinstance(trainer.engine, LocalEngine)
        folder = trainer.save("out")
    merged = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-5, rtol=0.0)
