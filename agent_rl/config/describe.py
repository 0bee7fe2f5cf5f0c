"""The config as text: YAML of every key with its default, under a comment on what it means.

It is read off the config classes, so it cannot lag behind them, and ``load_config`` reads it back
to the defaults. A section that is absent by default stands in comments, ready to be used:

    # null: no critic
    critic: null
    # critic:
    #   # a model of its own, or a value head on the actor's (separate | shared)
    #   trunk: separate
"""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from agent_rl.config.explain import key_hint
from agent_rl.config.ppo import PPOConfig
from agent_rl.errors import ConfigError
from agent_rl.types import JsonObject

_WIDTH = 100
_INDENT = "  "
_UNBROKEN = "\N{NO-BREAK SPACE}"


def describe_config(key: str = "") -> str:
    """YAML of the whole config, or of what ``key`` names, such as ``rollout.agent``.

    Raises:
        ConfigError: there is no such key.
    """
    schema = PPOConfig.model_json_schema()
    sections: dict[str, JsonObject] = schema["$defs"]
    defaults: Any = PPOConfig().model_dump(mode="json")
    if not key:
        return "\n".join(_section(schema, defaults, sections)) + "\n"
    lines: list[str] = []
    node = schema
    parts = key.split(".")
    for depth, part in enumerate(parts):
        fields: JsonObject = node.get("properties", {})
        if part not in fields:
            hint = key_hint(part, parts, list(fields))
            raise ConfigError(f"there is no config key {key!r}; {hint}")
        if depth < len(parts) - 1:
            lines.append(f"{_INDENT * depth}{part}:")
        field = fields[part]
        node = sections.get(_section_name(field) or "", {})
        defaults = _defaults(node) if defaults[part] is None and node else defaults[part]
    shown = _key(part, field, defaults, sections)
    lines.extend(_indented(shown, len(parts) - 1))
    return "\n".join(lines) + "\n"


def config_keys() -> frozenset[str]:
    """Every key that a config may have, sections too: ``rollout``, ``rollout.group_size``, ..."""
    schema = PPOConfig.model_json_schema()

    def below(section: JsonObject, path: str) -> Iterator[str]:
        for name, field in section["properties"].items():
            yield f"{path}{name}"
            if inner := _section_name(field):
                yield from below(schema["$defs"][inner], f"{path}{name}.")

    return frozenset(below(schema, ""))


def _section(
    section: JsonObject, values: Mapping[str, Any], sections: Mapping[str, JsonObject]
) -> Iterator[str]:
    """Simple keys as they are declared, each section between empty lines."""
    was_section = False
    for number, (name, field) in enumerate(section["properties"].items()):
        is_section = _section_name(field) is not None
        if number and (is_section or was_section):
            yield ""
        yield from _key(name, field, values[name], sections)
        was_section = is_section


def _key(
    name: str, field: JsonObject, value: Any, sections: Mapping[str, JsonObject]
) -> Iterator[str]:
    inner = _section_name(field)
    if inner is None:
        yield from _comment(f"{field['description']} ({_type(field).replace(' ', _UNBROKEN)})")
        yield f"{name}: {_plain(value)}"
        return
    section = sections[inner]
    told = field.get("description") or inspect.cleandoc(section["description"]).split("\n\n")[0]
    yield from _comment(told)
    if value is not None:
        yield f"{name}:"
        yield from _indented(_section(section, value, sections), 1)
        return
    yield f"{name}: null"
    yield f"# {name}:"
    for line in _indented(_section(section, _defaults(section), sections), 1):
        yield f"# {line}".rstrip()


def _section_name(field: JsonObject) -> str | None:
    """The class of a field that is a section, or may be one."""
    for option in (field, *field.get("anyOf", ())):
        if "$ref" in option:
            return str(option["$ref"]).removeprefix("#/$defs/")
    return None


def _defaults(section: JsonObject) -> JsonObject:
    """A schema leaves out defaults that are made anew each time: here, empty maps."""
    return {name: field.get("default", {}) for name, field in section["properties"].items()}


def _type(field: JsonObject) -> str:
    """``{"type": "integer", "minimum": 1}`` -> ``integer >= 1``."""
    if "anyOf" in field:
        return " or ".join(_type(option) for option in field["anyOf"])
    if "enum" in field:
        return " | ".join(field["enum"])
    if field["type"] == "array":
        return f"list of {_type(field['items'])}"
    if field["type"] == "object":
        values = [field.get("additionalProperties"), *field.get("patternProperties", {}).values()]
        return f"map to {_type(next(value for value in values if value))}"
    word = str(field["type"])
    word = {"string": "text", "boolean": "true | false"}.get(word, word)
    signs = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}
    bounds = [f"{sign} {field[name]:g}" for sign, name in signs.items() if name in field]
    return f"{word} {', '.join(bounds)}".strip()


def _plain(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
    return text.removesuffix("...\n").strip()


def _comment(text: str) -> Iterator[str]:
    lines = textwrap.wrap(text.replace("``", "`"), _WIDTH - 10, break_on_hyphens=False)
    return (f"# {line.replace(_UNBROKEN, ' ')}" for line in lines)


def _indented(lines: Iterator[str], depth: int) -> Iterator[str]:
    return (f"{_INDENT * depth}{line}".rstrip() for line in lines)
