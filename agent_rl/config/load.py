"""How a config is read: YAML file, then ``key=value`` overrides, then one check of everything."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from agent_rl.config.ppo import PPOConfig
from agent_rl.errors import ConfigError
from agent_rl.types import GenerationConfig

_EXPONENT = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?[eE][+-]?[0-9]+")
"""2e-5 is a number to everyone but YAML 1.1, which wants 2.0e-5."""


def load_config(
    path: str | Path | None = None, overrides: Iterable[str] = (), *, base: PPOConfig | None = None
) -> PPOConfig:
    """Read YAML, apply ``a.b=value`` overrides (values are YAML too), check everything.

    ``base`` gives the values that neither mentions, in place of the defaults.

    Raises:
        ConfigError: the file cannot be read, a key is unknown or a value out of range.
    """
    tree: dict[str, Any] = base.model_dump(exclude_unset=True) if base is not None else {}
    if path is not None:
        _merge(tree, _read_yaml(Path(path)))
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"override {override!r} must look like key=value")
        _set(tree, key.strip().split("."), _parse_value(override, text))
    try:
        return PPOConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the config {path} is not valid YAML: {error}") from error
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"the config {path} must be a mapping, not {type(tree).__name__}")
    return tree or {}


def _parse_value(override: str, text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {error}") from error
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        return float(value)
    return value


def _merge(tree: dict[str, Any], update: Mapping[str, Any]) -> None:
    for key, value in update.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


def _set(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        child = tree.get(key)
        if not isinstance(child, dict):
            child = tree[key] = {}
        tree = child
    tree[keys[-1]] = value


def _explain(error: ValidationError) -> str:
    """One line for each fault: the key, what is wrong, the nearest valid key."""
    lines = []
    for fault in error.errors():
        keys = [str(part) for part in fault["loc"] if not str(part).startswith("function-")]
        key = ".".join(keys)
        if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            names = _field_names(keys[:-1])
            near = difflib.get_close_matches(keys[-1], names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(names)}"
            lines.append(f"unknown config key {key!r}; {hint}")
        else:
            message = fault["msg"].removeprefix("Value error, ")
            lines.append(f"config key {key!r} = {fault['input']!r}: {message}")
    return "; ".join(lines)


def _field_names(keys: list[str]) -> list[str]:
    """The keys that are valid inside the section that ``keys`` leads to."""
    section: Any = PPOConfig
    for key in keys:
        annotation = section.model_fields[key].annotation
        options = [annotation, *get_args(annotation)]
        section = next(
            option
            for option in options
            if isinstance(option, type)
            and (issubclass(option, BaseModel) or option is GenerationConfig)
        )
    if section is GenerationConfig:
        return list(GenerationConfig.__dataclass_fields__)
    return list(section.model_fields)
