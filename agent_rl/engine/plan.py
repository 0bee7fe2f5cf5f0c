"""Capacity sheet: from a model, a workload and GPUs to servers, trainers and the time of a step.

Rules of thumb, each with its formula; nothing is measured and nothing is loaded. A decode step
reads the weights, and keys and values of each sequence; training a token costs 6 operations for
each parameter, and 2 more for each further forward pass (https://arxiv.org/abs/2001.08361).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_rl.engine.small_model import model_folder
from agent_rl.errors import ConfigError

# Of the data sheet's numbers, what a tuned server or trainer reaches.
_BANDWIDTH_SHARE = 0.6
_DECODE_FLOPS_SHARE = 0.4
_TRAIN_FLOPS_SHARE = 0.35
_MEMORY_SHARE = 0.85
_WEIGHT_BYTES = 2  # bfloat16
# bfloat16 weights and gradients, float32 master weights and two AdamW moments.
_TRAINED_BYTES = 2 + 2 + 4 + 8
# Forward and backward, recomputed activations, and a forward pass for proximal log-probs.
_TRAIN_FLOPS = 6 + 2 + 2
# Fields of models whose weights, or keys and values, follow other formulas.
_EXPERTS = "a mixture of experts"
_OTHER_MODELS = {
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "kv_lora_rank": "a model with compressed keys and values",
    "linear_num_value_heads": "a model with linear attention",
    "mamba_d_state": "a model with state spaces",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    memory_gb: float
    bandwidth_gb_s: float
    tflops: float


GPUS = {
    "a100": Gpu(name="A100", memory_gb=80, bandwidth_gb_s=2039, tflops=312),
    "h100": Gpu(name="H100", memory_gb=80, bandwidth_gb_s=3350, tflops=989),
    "h200": Gpu(name="H200", memory_gb=141, bandwidth_gb_s=4800, tflops=989),
    "l40s": Gpu(name="L40S", memory_gb=48, bandwidth_gb_s=864, tflops=362),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """``kv_bytes`` of one token: keys and values of all layers in bfloat16."""

    num_parameters: int
    kv_bytes: int

    @property
    def weight_bytes(self) -> int:
        return _WEIGHT_BYTES * self.num_parameters

    @classmethod
    def of(cls, folder: str | Path) -> ModelSize:
        """From ``config.json`` alone, for dense decoders with gated MLPs.

        Raises:
            ConfigError: there is no such file, or it describes another kind of model.
        """
        path = Path(model_folder(folder)) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        config = config.get("text_config", config) if isinstance(config, dict) else config
        if not isinstance(config, dict):
            raise ConfigError(f"{path} holds no object")
        for name, kind in _OTHER_MODELS.items():
            if config.get(name):
                raise ConfigError(f"{path} has {name}, so it is {kind}; plan knows dense decoders")
        try:
            return cls._of_config(config)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}; plan knows dense decoders") from error

    @classmethod
    def _of_config(cls, config: Mapping[str, Any]) -> ModelSize:
        hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
        kv_heads = _count(config, "num_key_value_heads", heads)
        head = _count(config, "head_dim", max(1, hidden // heads))
        layers = _count(config, "num_hidden_layers")
        attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
        mlp = 3 * hidden * _count(config, "intermediate_size")
        norms = 2 * hidden
        vocabulary = _count(config, "vocab_size")
        embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
        return cls(
            num_parameters=embeddings + layers * (attention + mlp + norms) + hidden,
            kv_bytes=2 * layers * kv_heads * head * _WEIGHT_BYTES,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training step: ``groups`` data, ``group_size`` episodes each, of several turns.

    ``prompt_tokens`` are all tokens of an episode that are given: messages, tools, their results.
    """

    groups: int
    group_size: int
    turns: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def num_episodes(self) -> int:
        return self.groups * self.group_size

    @property
    def sampled_tokens(self) -> int:
        return self.num_episodes * self.turns * self.completion_tokens

    @property
    def episode_tokens(self) -> int:
        """Of a whole episode: what its keys and values take, and what a row trains on."""
        return self.prompt_tokens + self.turns * self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """``gpus_per_server`` hold one copy; ``rollout_gpus`` and ``train_gpus`` are all GPUs."""

    model: ModelSize
    workload: Workload
    gpu: Gpu
    link_gb_s: float
    gpus_per_server: int
    rollout_gpus: int
    train_gpus: int
    in_flight: int
    decode_tokens_s: float
    train_tokens_s: float
    update_s: float

    @property
    def rollout_s(self) -> float:
        return self.workload.sampled_tokens / self.decode_tokens_s

    @property
    def train_s(self) -> float:
        return self.workload.num_episodes * self.workload.episode_tokens / self.train_tokens_s

    @property
    def step_s(self) -> float:
        """Rollouts run ahead while the last batch is trained on; the update stops both."""
        return max(self.rollout_s, self.train_s) + self.update_s

    def assumptions(self) -> str:
        gpu, work = self.gpu, self.workload
        return (
            f"GPU: {gpu.name}, {gpu.memory_gb:g} GB, {gpu.bandwidth_gb_s:g} GB/s, {gpu.tflops:g} "
            f"TFLOP/s in bfloat16; weights travel at {self.link_gb_s:g} GB/s\n"
            f"A step: {work.groups} groups of {work.group_size} episodes; an episode: {work.turns} "
            f"turns, {work.prompt_tokens} tokens given in all, {work.completion_tokens} sampled in "
            "each turn\n"
            f"Reached of them: {_MEMORY_SHARE:.0%} of the memory, {_BANDWIDTH_SHARE:.0%} of the "
            f"bandwidth, {_DECODE_FLOPS_SHARE:.0%} (decoding) and {_TRAIN_FLOPS_SHARE:.0%} "
            "(training) of the TFLOP/s"
        )

    def table(self) -> str:
        model, servers = self.model, self.rollout_gpus // self.gpus_per_server
        rows = (
            ("parameters", f"{model.num_parameters / 1e9:.2f} B"),
            ("bytes of weights per update", f"{model.weight_bytes / 1e9:.1f} GB"),
            ("keys and values of a token", f"{model.kv_bytes / 1e3:.0f} kB"),
            ("servers", f"{servers} x {self.gpus_per_server} GPU"),
            ("trainer", f"{self.train_gpus} GPU"),
            ("episodes in flight", f"{self.in_flight}"),
            ("sampled tokens", f"{self.decode_tokens_s:,.0f} /s"),
            ("trained tokens", f"{self.train_tokens_s:,.0f} /s"),
            ("rollouts of a step", f"{self.rollout_s:.0f} s"),
            ("training of a step", f"{self.train_s:.0f} s"),
            ("weight update", f"{self.update_s:.1f} s"),
            ("a step, overlapped", f"{self.step_s:.0f} s"),
        )
        lines = (f"{name:<28} {value:>16}" for name, value in rows)
        return "\n".join([self.assumptions(), "", *lines])


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}, not a number above 0")
    return value


def plan(
    model: ModelSize, workload: Workload, gpu: Gpu, num_gpus: int, *, link_gb_s: float
) -> Sheet:
    """The split of ``num_gpus`` with the shortest step.

    Raises:
        ConfigError: the model does not fit, or ``link_gb_s`` is no speed.
    """
    if not 0 < link_gb_s < math.inf:
        raise ConfigError(f"--link-gb-s is {link_gb_s:g}; it has to be above 0 and finite")
    sheets = [
        sheet
        for train_gpus in range(1, num_gpus)
        if (sheet := _split(model, workload, gpu, num_gpus, train_gpus, link_gb_s)) is not None
    ]
    if not sheets:
        need = (model.weight_bytes + _TRAINED_BYTES * model.num_parameters) / 1e9
        episode = model.kv_bytes * workload.episode_tokens / 1e9
        raise ConfigError(
            f"{num_gpus} GPUs of {gpu.memory_gb:g} GB cannot hold a server and a trainer of this "
            f"model ({need:,.0f} GB), room to work, and keys and values of an episode "
            f"({episode:,.1f} GB); add GPUs, shorten episodes or train with LoRA"
        )
    # Where rollouts are the bottleneck, what they cannot use is the trainer's.
    return min(sheets, key=lambda sheet: (sheet.step_s, -sheet.train_gpus))


def _split(
    model: ModelSize,
    workload: Workload,
    gpu: Gpu,
    num_gpus: int,
    train_gpus: int,
    link_gb_s: float,
) -> Sheet | None:
    room = _MEMORY_SHARE * gpu.memory_gb * 1e9
    if train_gpus * room < _TRAINED_BYTES * model.num_parameters:
        return None
    # Half of a server's memory at most for weights, the rest for keys and values.
    per_server = 2 ** math.ceil(math.log2(max(1.0, 2 * model.weight_bytes / room)))
    servers = (num_gpus - train_gpus) // per_server
    if servers == 0:
        return None
    kv_room = servers * (per_server * room - model.weight_bytes)
    # On average an episode in flight is half grown.
    in_flight = int(kv_room / (model.kv_bytes * workload.episode_tokens / 2))
    in_flight = min(in_flight, 2 * workload.num_episodes)
    if in_flight == 0:
        return None
    return Sheet(
        model=model,
        workload=workload,
        gpu=gpu,
        link_gb_s=link_gb_s,
        gpus_per_server=per_server,
        rollout_gpus=servers * per_server,
        train_gpus=train_gpus,
        in_flight=in_flight,
        decode_tokens_s=_decode_tokens_s(model, workload, gpu, servers, per_server, in_flight),
        train_tokens_s=train_gpus
        * gpu.tflops
        * 1e12
        * _TRAIN_FLOPS_SHARE
        / (_TRAIN_FLOPS * model.num_parameters),
        update_s=model.weight_bytes / (link_gb_s * 1e9),
    )


def _decode_tokens_s(
    model: ModelSize, workload: Workload, gpu: Gpu, servers: int, per_server: int, in_flight: int
) -> float:
    """A step of a server with n sequences takes the longer of reading and computing:

    (weights + n * keys and values) / bandwidth,  2 * parameters * n / flops
    """
    sequences = max(1, in_flight // servers)
    read = model.weight_bytes + sequences * model.kv_bytes * workload.episode_tokens / 2
    read_s = read / (per_server * gpu.bandwidth_gb_s * 1e9 * _BANDWIDTH_SHARE)
    compute = 2 * model.num_parameters * sequences
    compute_s = compute / (per_server * gpu.tflops * 1e12 * _DECODE_FLOPS_SHARE)
    return servers * sequences / max(read_s, compute_s)
