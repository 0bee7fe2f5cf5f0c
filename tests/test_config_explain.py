"""Faults of a config: the key, the value, and the key that was meant, also by other names."""

from __future__ import annotations

import json

import pytest

from agent_rl import PPOConfig, load_config
from agent_rl.config import AgentConfig, RolloutConfig
from agent_rl.config.describe import config_keys
from agent_rl.config.explain import nearest
from agent_rl.config.foreign_names import FOREIGN_NAMES, NO_KEYS
from agent_rl.errors import ConfigError


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value)


def test_every_foreign_name_leads_to_a_key_of_ours() -> None:
    keys = config_keys()
    for name, meaning in FOREIGN_NAMES.items():
        ours = meaning.replace(",", " ").replace("=", " ").split()[0]
        assert ours in keys, f"{name} -> {meaning}"
        assert name not in keys, f"{name} is a key of ours"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("allocation_mode=sglang:d4", "'allocation_mode'; here it is engine.launch for servers"),
        ("cluster.n_nodes=2", "'cluster'; here it is engine.launch for servers"),
        ("actor.group_size=4", "'actor.group_size'; here it is rollout.group_size"),
        ("actor.n_samples=4", "here it is rollout.group_size"),
        ("train_dataset.path=a.jsonl", "'train_dataset.path'; here it is train_dataset, which"),
        ("train_dataset.batch_size=8", "here it is rollout.consumer_batch_size"),
        ("data.train_batch_size=8", "here it is rollout.consumer_batch_size"),
        ("actor_rollout_ref.rollout.n=8", "here it is rollout.group_size"),
        ("rollout.n=8", "unknown config key 'rollout.n'; here it is rollout.group_size"),
        ("trainer.total_epochs=3", "'trainer.total_epochs'; here it is total_train_epochs"),
        ("trainer.experiment_name=x", "'trainer.experiment_name'; here it is trial_name"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "here it is actor.kl_ctl"),
        ("kl_coef=0.1", "here it is actor.kl_ctl"),
        ("num_generations=8", "here it is rollout.group_size"),
        ("max_completion_length=64", "here it is gconfig.max_new_tokens"),
        ("learning_rate=1e-6", "here it is actor.optimizer.lr"),
    ],
)
def test_names_of_other_frameworks_have_ours(override: str, expected: str) -> None:
    assert expected in message(override)


def test_a_key_without_a_counterpart_says_what_to_do() -> None:
    assert message("actor.init_from_scratch=false") == (
        "unknown config key 'actor.init_from_scratch'; nothing here needs it; leave it out"
    )
    assert "no key but an argument, train(should_accept_fn=" in message("actor.dynamic_sampling=1")
    assert not NO_KEYS.keys() & FOREIGN_NAMES.keys() and not NO_KEYS.keys() & config_keys()


def test_every_fault_has_a_line_and_keys_are_listed_once() -> None:
    lines = message("clusters=1", "zzz=2", "rollout.group_size=0").split("\n  ")
    assert lines[0] == "3 faults:"
    assert lines[1].startswith("config key 'rollout.group_size' = 0: ")
    assert lines[2].startswith("unknown config key 'clusters'; valid keys: experiment_name, ")
    assert lines[3] == "unknown config key 'zzz'; valid keys: as above"


def test_references_of_another_config_library_are_refused() -> None:
    """They would be a folder's name, or no integer."""
    said = message("tokenizer_path=${actor.path}", "rollout.group_size=${gconfig.n_samples}")
    assert said == (
        "references to other keys are not replaced here, write the values themselves: "
        "tokenizer_path = ${actor.path}, rollout.group_size = ${gconfig.n_samples}"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor.lr=1e-6", "did you mean 'actor.optimizer.lr'?"),
        ("lr=1e-6", "did you mean 'actor.optimizer.lr' or 'critic.optimizer.lr'?"),
        ("max_requests=3", "did you mean 'rollout.agent.max_requests' or 'gateway.max_requests'?"),
        ("rollout.budgets.max_turns=3", "did you mean 'budget'?"),
        ("rollout.agent.modes=inline", "did you mean 'mode'?"),
    ],
)
def test_a_key_in_the_wrong_place_or_misspelt(override: str, expected: str) -> None:
    assert expected in message(override)


def test_what_is_near_nothing_gets_the_valid_keys() -> None:
    for key in ("clusters", "trainer", "zzz"):
        assert f"unknown config key '{key}'; valid keys: experiment_name, trial_name" in message(
            f"{key}=1"
        )


def test_values_of_a_section_are_no_foreign_names() -> None:
    """``model`` is a key of the judge: its fault is another one."""
    said = message("online.judge.model=x", "online.judge.base_url=3")
    assert "here it is" not in said and "online.judge" in said


@pytest.mark.parametrize(
    ("word", "meant"),
    [("groupsize", "group_size"), ("sead", "seed"), ("cluster", None), ("trainer", None)],
)
def test_nearest(word: str, meant: str | None) -> None:
    assert nearest(word, ["group_size", "seed", "saver", "train_dataset"]) == meant


@pytest.mark.parametrize(
    ("section", "values", "expected"),
    [
        (RolloutConfig, {"group_size": 0}, "config key 'group_size' = 0: Input should be greater"),
        (RolloutConfig, {"groupsize": 4}, "unknown config key 'groupsize'; did you mean 'group_si"),
        (RolloutConfig, {"n_samples": 4}, "here it is rollout.group_size"),
        (RolloutConfig, {"agent": {"mode": "fast"}}, "config key 'agent.mode' = 'fast': Input"),
        (AgentConfig, {"export_style": "concat"}, "export_style=concat needs chat_template_type"),
        (PPOConfig, {"gconfig": {"temprature": 1}}, "'gconfig.temprature'; did you mean 'tempera"),
        (PPOConfig, {"rollout": {"agent": {"mode": "fast"}}}, "'rollout.agent.mode' = 'fast'"),
    ],
)
def test_python_and_yaml_fail_in_the_same_words(section, values, expected) -> None:
    with pytest.raises(ConfigError) as caught:
        section(**values)
    said = str(caught.value)
    assert expected in said and "pydantic" not in said and "validation error" not in said
    if section is PPOConfig:
        [(name, inner)] = values.items()
        assert said == message(f"{name}={json.dumps(inner)}")
