"""The capacity sheet, by hand-worked numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agent_rl.cli import main
from agent_rl.engine.plan import GPUS, Gpu, ModelSize, Workload, plan
from agent_rl.errors import ConfigError

# Qwen2.5-7B's shape, without its biases.
SEVEN_B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


def folder(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_model_size(tmp_path: Path) -> None:
    """7.6 B parameters; 2 * 28 layers * 4 heads * 128 * 2 bytes = 57344 bytes a token."""
    size = ModelSize.of(folder(tmp_path, SEVEN_B))
    assert size.num_parameters == 7_615_487_488
    assert size.kv_bytes == 57_344
    tied = ModelSize.of(folder(tmp_path, {**SEVEN_B, "tie_word_embeddings": True}))
    assert size.num_parameters - tied.num_parameters == 152064 * 3584


def test_it_agrees_with_a_real_model(tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert ModelSize.of(tiny_model_dir).num_parameters == model.num_parameters()


def test_what_it_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        ModelSize.of(tmp_path / "absent")
    with pytest.raises(ConfigError, match="mixture of experts"):
        ModelSize.of(folder(tmp_path, {**SEVEN_B, "num_experts": 8}))
    for field in ("n_routed_experts", "kv_lora_rank", "linear_num_value_heads"):
        with pytest.raises(ConfigError, match=f"has {field}, so it is a "):
            ModelSize.of(folder(tmp_path, {**SEVEN_B, field: 8}))


@pytest.mark.parametrize("value", [None, 0, -4, 3.5, True, "big", [1]])
def test_a_field_that_is_no_count_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigError, match=r"num_attention_heads is .*, not a number above 0"):
        ModelSize.of(folder(tmp_path, {**SEVEN_B, "num_attention_heads": value}))


@pytest.mark.parametrize("content", ["[]", '{"text_config": null}', "3"])
def test_a_file_without_an_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="holds no object"):
        ModelSize.of(tmp_path)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_a_link_has_a_speed(speed: float) -> None:
    model = ModelSize(num_parameters=10**9, kv_bytes=1000)
    work = Workload(groups=4, group_size=8, turns=4, prompt_tokens=1000, completion_tokens=250)
    with pytest.raises(ConfigError, match="--link-gb-s is "):
        plan(model, work, GPUS["h100"], 8, link_gb_s=speed)


def test_a_step_by_hand() -> None:
    """1 B parameters, 1 kB a token; GPUs of 100 GB, 1000 GB/s, 100 TFLOPS; two of them.

    One serves: 85 GB - 2 GB hold 83e9 / (1000 * 2000 / 2) = 83000 half-grown episodes, but twice
    the batch is enough: 64. A decode step reads 2e9 + 64 * 1e6 bytes in 3.44 ms at 600 GB/s and
    computes 2e9 * 64 in 3.2 ms at 40 TFLOPS: 64 / 3.44 ms = 18605 tokens/s. 32 episodes of 4 turns
    of 250 tokens are 32000 tokens: 1.72 s. The other trains 100e12 * 0.35 / 10e9 = 3500 tokens/s:
    32 * 2000 tokens in 18.3 s. 2 GB over 10 GB/s: 0.2 s.
    """
    model = ModelSize(num_parameters=10**9, kv_bytes=1000)
    work = Workload(groups=4, group_size=8, turns=4, prompt_tokens=1000, completion_tokens=250)
    gpu = Gpu(name="X", memory_gb=100, bandwidth_gb_s=1000, tflops=100)
    sheet = plan(model, work, gpu, 2, link_gb_s=10)
    assert (sheet.rollout_gpus, sheet.train_gpus, sheet.gpus_per_server) == (1, 1, 1)
    assert sheet.in_flight == 64
    assert sheet.decode_tokens_s == pytest.approx(18605, rel=1e-3)
    assert sheet.rollout_s == pytest.approx(1.72, rel=1e-3)
    assert sheet.train_tokens_s == pytest.approx(3500)
    assert sheet.train_s == pytest.approx(64000 / 3500)
    assert sheet.update_s == pytest.approx(0.2)
    assert sheet.step_s == pytest.approx(64000 / 3500 + 0.2)
    assert sheet.table().startswith(
        "GPU: X, 100 GB, 1000 GB/s, 100 TFLOP/s in bfloat16; weights travel at 10 GB/s\n"
        f"A step: {work.groups} groups of {work.group_size} episodes; an episode: {work.turns} "
        f"turns, {work.prompt_tokens} tokens given in all, {work.completion_tokens} sampled in "
        "each turn\n"
        "Reached of them: 85% of the memory, 60% of the bandwidth, 40% (decoding) and 35% "
        "(training) of the TFLOP/s\n\nparameters "
    )
    # Training is the bottleneck, so of 8 GPUs it gets all but one.
    assert plan(model, work, gpu, 8, link_gb_s=10).train_gpus == 7


def test_large_models_are_split_and_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    work = Workload(groups=16, group_size=8, turns=4, prompt_tokens=2000, completion_tokens=500)
    large = ModelSize(num_parameters=70 * 10**9, kv_bytes=320_000)
    sheet = plan(large, work, GPUS["h100"], 64, link_gb_s=25)
    assert sheet.gpus_per_server == 8
    assert sheet.rollout_gpus + sheet.train_gpus == 64
    assert "weights per update" in sheet.table() and "140.0 GB" in sheet.table()
    with pytest.raises(ConfigError, match="cannot hold a server and a trainer"):
        plan(large, work, GPUS["l40s"], 8, link_gb_s=25)


def test_seventy_billion_by_hand(tmp_path: Path) -> None:
    """Layers of 134.2 M + 16.8 M (attention), 704.6 M (MLP) and 16384; 80 of them, and 2.1 B of
    embeddings: 70,553,706,496. A token keeps 2 * 80 * 8 * 128 * 2 = 327,680 bytes.

    A server takes 8 H100: half of their 8 * 68 GB for 141.1 GB of weights. With 256 episodes that
    are half grown (2000 of 4000 tokens), a step reads 141.1 + 167.8 GB at 8 * 2.01 TB/s: 19.2 ms.
    """
    config = {**SEVEN_B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256}
    size = ModelSize.of(folder(tmp_path, {**config, **heads}))
    assert size.num_parameters == 70_553_706_496
    assert size.kv_bytes == 327_680
    work = Workload(groups=16, group_size=8, turns=4, prompt_tokens=2000, completion_tokens=500)
    sheet = plan(size, work, GPUS["h100"], 64, link_gb_s=25)
    assert (sheet.gpus_per_server, sheet.rollout_gpus, sheet.in_flight) == (8, 8, 256)
    assert sheet.decode_tokens_s == pytest.approx(256 / 19.21e-3, rel=1e-3)
    assert sheet.update_s == pytest.approx(141.1 / 25, rel=1e-3)


@pytest.mark.parametrize("gpus", ["0", "1", "-8", "1000000000", "many"])
def test_the_command_refuses_what_is_no_number_of_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpus: str
) -> None:
    monkeypatch.setattr("sys.argv", ["agent-rl", "plan", str(tmp_path), "--gpus", gpus])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "--gpus" in capsys.readouterr().err


def test_the_guide_shows_what_the_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/scale.md").read_text()
    shown = re.search(r"\$ (agent-rl plan .*)\n((?:.*\n)*?)```", guide)
    assert shown is not None
    model = folder(tmp_path, SEVEN_B)
    words = shown[1].replace("./Qwen2.5-7B", str(model)).split()
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out == shown[2]


def test_four_nodes_of_the_guide(tmp_path: Path) -> None:
    """Of 32 GPUs, one node of 8 serves 40 groups of 8 episodes and three train."""
    size = ModelSize.of(folder(tmp_path, SEVEN_B))
    work = Workload(groups=40, group_size=8, turns=4, prompt_tokens=2000, completion_tokens=500)
    sheet = plan(size, work, GPUS["h100"], 32, link_gb_s=25)
    assert (sheet.rollout_gpus, sheet.train_gpus) == (8, 24)


def test_the_command_prints_the_sheet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder(tmp_path, SEVEN_B)
    monkeypatch.setattr("sys.argv", ["agent-rl", "plan", str(model), "--gpus", "8"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "7.62 B" in capsys.readouterr().out
