from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from agent_rl import PPOConfig, load_config
from agent_rl.errors import ConfigError


def test_defaults_run_and_overrides_are_yaml() -> None:
    config = load_config(None, ["rollout.group_size=4", "actor.optimizer.lr=3e-5"])
    assert config.rollout.group_size == 4
    assert config.actor.optimizer.lr == 3e-5


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ppo.yaml"
    path.write_text("seed: 7\nrollout:\n  group_size: 2\n  consumer_batch_size: 3\n")
    config = load_config(path, ["rollout.group_size=8"])
    assert (config.seed, config.rollout.group_size, config.rollout.consumer_batch_size) == (7, 8, 3)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "rollout.groupsize=4",
            "unknown config key 'rollout.groupsize'; did you mean 'group_size'",
        ),
        ("gconfig.temprature=1", "did you mean 'temperature'"),
        ("actor.reward_norm.level=group", "unknown config key 'actor.reward_norm.level'"),
        ("rollout.group_size=0", "'rollout.group_size' = 0"),
        ("rollout.episode_timeout_s=0", "'rollout.episode_timeout_s' = 0"),
        ("gconfig.temperature=-1", "gconfig.temperature is -1"),
        ("actor.optimizer.lr=fast", "'actor.optimizer.lr' = 'fast'"),
        ("seed", "must look like key=value"),
        ("seed=[", "not valid YAML"),
        ("rollout=3", "'rollout' = 3"),
        ("rollout.agent.export_style=concat", "needs chat_template_type=concat"),
        ("gconfig.n_samples=8", "the episodes of a datum are rollout.group_size"),
        ("eval_gconfig.n_samples=2", "eval_gconfig.n_samples=2 is of no use"),
    ],
)
def test_bad_keys_and_values_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "engine.routing=prefix engine.update=tensor",
            "update=tensor has no effect: it needs back",
        ),
        ("engine.backend=vllm engine.launch={} engine.max_seq_len=64", "it needs backend=local"),
        ("rollout.budget.reward=1.0", "it needs max_turns, max_tokens or max_tool_calls"),
        ("rollout.reward_normalization_use_std=false", "it needs reward_normalization=true"),
        ("rollout.journal_fsync=never", "it needs journal=true"),
        ("rollout.fileroot=x", "it needs journal=true or dump_to_file=true"),
        ("actor.max_new_tokens=8", "it needs overlong_reward_penalty=true"),
        ("actor.rejection_sampling.action=clamp", "rejection_sampling has no effect"),
        ("actor.rejection_sampling.agg=sum", "agg=sum has no effect: it needs level=sequence"),
        ("actor.kl_estimator=k3", "it needs kl_ctl above 0"),
        ("actor.kl_loss_estimator=k1", "it needs kl_loss_coef above 0"),
        ("actor.sapo_tau_neg=2.0", "it needs policy_loss=sapo"),
        ("actor.policy_loss=sapo actor.eps_clip=0.1", "eps_clip=0.1 has no effect"),
        ("actor.reward_norm.running_decay=0.5", "it needs mean_level=running"),
        ("actor.optimizer.min_lr_ratio=0.1", "lr_scheduler_type linear or cosine"),
        ("critic.loss_coef=1.0", "it needs trunk=shared"),
        ("critic.trunk=shared critic.path=x", "path=x has no effect: it needs trunk=separate"),
        ("recover.freq_steps=5", "it needs mode=auto"),
        ("gconfig.top_logprobs=2", "gconfig.top_logprobs=2 is of no use"),
        ("gconfig.seed=7", "every episode of a group would sample the same"),
    ],
)
def test_values_that_nobody_would_read_are_refused(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides.split(" "))
    assert message in str(caught.value)


def waits(section: type[BaseModel], path: str = "") -> Iterator[str]:
    """The keys of seconds in a section and those below it: "engine.timeout_s" and so on."""
    for name, field in section.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from waits(kind, f"{path}{name}.")
        if name.endswith("_s"):
            yield f"{path}{name}"


def written(key: str, text: str) -> Any:
    """The value of the key where it is written so; "refused" if it may not be."""
    is_of_servers = key.startswith("engine.")
    servers = ["engine.backend=sglang"] if is_of_servers else []
    if is_of_servers and not key.startswith("engine.launch"):
        servers.append("engine.addresses=[http://one:1]")
    try:
        value: Any = load_config(None, [f"{key}={text}", *servers])
    except ConfigError:
        return "refused"
    for name in key.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("key", list(waits(PPOConfig)))
def test_waits_without_limit_are_written_null_or_inf(key: str) -> None:
    """Case B146: a wait takes both or, where it has to end, neither; never 0, -1 or nan."""
    assert written(key, "7.5") == 7.5
    no_limit = {written(key, text) for text in ("null", ".inf", "inf")}
    assert no_limit in ({None}, {"refused"})
    assert {written(key, text) for text in ("0", "-1", "-.inf", ".nan")} == {"refused"}


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [1\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=str(path)):
        load_config(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load_config(tmp_path / "nowhere.yaml")


def test_a_config_reads_back_from_its_own_dump() -> None:
    config = load_config(None, ["gconfig.stop=[a]", "rollout.group_size=2"])
    assert PPOConfig.model_validate(config.model_dump(mode="json")) == config


def undescribed(section: type[BaseModel], path: str = "") -> Iterator[str]:
    """Keys of which nothing says what they mean; a section says it itself."""
    for name, field in section.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        sections = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        for kind in sections:
            yield from undescribed(kind, f"{path}{name}.")
        if not sections and not field.description:
            yield f"{path}{name}"


def test_every_key_says_what_it_means() -> None:
    assert list(undescribed(PPOConfig)) == []


def test_a_key_where_the_file_belongs() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_path=small: .*; key=value comes behind a"):
        load_config("tokenizer_path=small")
