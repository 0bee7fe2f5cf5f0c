"""Masks secrets in a config before it leaves the machine with the metrics.

A key is judged by its words: ``wandb.api_key``, ``adminKey`` and ``AUTH_TOKEN`` are secrets,
``max_tokens`` and ``tokenizer_path`` are not. Passwords inside URLs are masked too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS = {
    "secret", "secrets", "password", "passwords", "passwd", "passphrase",
    "credential", "credentials", "apikey", "authtoken", "authorization",
}  # fmt: skip
_KEY_OWNERS = {"api", "admin", "private", "access", "signing", "encryption"}
_TOKEN_OWNERS = {"auth", "access", "api", "bearer", "refresh", "hf", "hub"}
_URL_PASSWORD = re.compile(r"(\w+://[^/\s:@]*):[^/\s@]+@")


def redact_sensitive_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the tree with secret values replaced by ``***``; empty ones stay as they are.

    {"api_key": "sk-1", "max_tokens": 5, "password": ""} keeps the last two.
    """
    return {key: _redact(str(key), value) for key, value in config.items()}


def _redact(key: str, value: Any) -> Any:
    if _is_secret(key) and not _is_empty(value):
        return MASK
    if isinstance(value, Mapping):
        return redact_sensitive_config(value)
    if isinstance(value, list | tuple):
        return [_redact("", item) for item in value]
    if isinstance(value, str):
        return _URL_PASSWORD.sub(rf"\1:{MASK}@", value)
    return value


def _is_empty(value: Any) -> bool:
    """Nothing to hide: unset, or a switch such as ``use_secrets=true``."""
    return value is None or isinstance(value, bool) or (hasattr(value, "__len__") and not value)


def _is_secret(key: str) -> bool:
    words = [word.lower() for word in _WORDS.findall(key)]
    if words == ["token"] or not _SECRET_WORDS.isdisjoint(words):
        return True
    return any(
        (second in ("key", "keys") and first in _KEY_OWNERS)
        or (second in ("token", "tokens") and first in _TOKEN_OWNERS)
        for first, second in itertools.pairwise(words)
    )
