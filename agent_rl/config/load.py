"""How a config is read: YAML file, then ``key=value`` overrides, then one check of everything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from agent_rl.config.explain import explained
from agent_rl.config.ppo import PPOConfig
from agent_rl.errors import ConfigError, WrongTypeError, shown

_EXPONENT = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?[eE][+-]?[0-9]+")
"""2e-5 is a number to everyone but YAML 1.1, which wants 2.0e-5."""
_REFERENCE = re.compile(r"\$\{[\w.:]+\}")
"""What OmegaConf and Hydra would replace: ${actor.path}."""


def load_config(
    path: str | Path | None = None, overrides: Iterable[str] = (), *, base: PPOConfig | None = None
) -> PPOConfig:
    """Read YAML, apply ``a.b=value`` overrides (values are YAML too), check everything.

    ``base`` gives the values that neither mentions, in place of the defaults.

    Raises:
        ConfigError: the file cannot be read, a key is unknown or a value out of range.
        WrongTypeError: no path, or a string in place of a list of overrides.
    """
    if path is not None and not isinstance(path, str | Path):
        raise WrongTypeError(
            f"load_config reads a path or None, not {shown(path)}; make a config of values with "
            "PPOConfig(**values)"
        )
    if isinstance(overrides, str):
        raise WrongTypeError(f"the overrides are a list of key=value, [{overrides!r}], not a str")
    tree: dict[str, Any] = base.model_dump(exclude_unset=True) if base is not None else {}
    if path is not None:
        _merge(tree, _read_yaml(Path(path)))
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"override {override!r} must look like key=value")
        _set(tree, key.strip().split("."), _parse_value(override, text))
    _refuse_references(tree)
    try:
        return PPOConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explained(error, PPOConfig)) from None


def _refuse_references(tree: Mapping[str, Any]) -> None:
    found = [f"{key} = {value}" for key, value in _texts(tree) if _REFERENCE.match(value)]
    if found:
        raise ConfigError(
            "references to other keys are not replaced here, write the values themselves: "
            + ", ".join(found)
        )


def _texts(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every text of the tree with its key: ("actor.path", "small")."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _texts(value, f"{prefix}{key}.")
        elif isinstance(value, str):
            yield f"{prefix}{key}", value


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        hint = "; key=value comes behind a YAML file" if "=" in path.name else ""
        raise ConfigError(f"cannot read the config {path}: {error}{hint}") from error
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
