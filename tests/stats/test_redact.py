"""Secrets are masked by the words of their key; everything else is left alone."""

from __future__ import annotations

import pytest

from agent_rl.config import load_config
from agent_rl.stats.redact import redact_sensitive_config

SECRET = [
    "api_key", "apiKey", "APIKey", "OPENAI_API_KEY", "x-api-key", "apikey", "api_keys", "admin_key",
    "admin_api_key", "secret", "client_secret", "secrets", "password", "db.password", "auth_token",
    "authToken", "AUTH_TOKEN", "access_token", "hf_token", "token", "private_key", "credentials",
]  # fmt: skip
HARMLESS = [
    "max_tokens", "max_new_tokens", "max_tokens_per_mb", "engine_max_tokens", "tokenizer_path",
    "stop_token_ids", "eos_token", "pad_token_id", "n_tokens", "tokens", "key", "keys",
    "key_sync_group", "author", "secretary", "keyboard", "monkey", "api_base",
]  # fmt: skip


@pytest.mark.parametrize("key", SECRET)
def test_secret_keys(key: str) -> None:
    assert redact_sensitive_config({"a": {key: "sk-1"}}) == {"a": {key: "***"}}
    assert redact_sensitive_config({"a": [{key: ["x", "y"]}]}) == {"a": [{key: "***"}]}


@pytest.mark.parametrize("key", HARMLESS)
def test_harmless_keys(key: str) -> None:
    config = {"a": {key: "value", "b": [{key: 5}]}}
    assert redact_sensitive_config(config) == config


def test_empty_values_and_switches_stay() -> None:
    config = {"api_key": None, "password": "", "secrets": [], "use_secret": True, "credentials": {}}
    assert redact_sensitive_config(config) == config
    assert redact_sensitive_config({"password": 0, "secrets": {"a": 1}}) == {
        "password": "***",
        "secrets": "***",
    }


def test_passwords_inside_urls() -> None:
    config = {"base_url": "https://me:pw@host:80/a", "plain": "https://host:80/a@b"}
    assert redact_sensitive_config(config) == {
        "base_url": "https://me:***@host:80/a",
        "plain": "https://host:80/a@b",
    }


def test_the_config_itself_is_left_alone() -> None:
    config = load_config(None, ["stats_logger.wandb.api_key=sk-1", "rollout.group_size=4"])
    tree = config.model_dump(mode="json")
    redacted = redact_sensitive_config(tree)
    assert redacted["stats_logger"]["wandb"]["api_key"] == "***"
    assert tree["stats_logger"]["wandb"]["api_key"] == "sk-1"
    redacted["stats_logger"]["wandb"]["api_key"] = "sk-1"
    assert redacted == tree
    assert "sk-1" not in repr(config)
