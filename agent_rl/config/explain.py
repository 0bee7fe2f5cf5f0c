"""Why values are no config, in lines that name the key, its value and what may stand there.

    unknown config key 'rollout.groupsize'; did you mean 'group_size'?
    unknown config key 'rollout.n'; here it is rollout.group_size

It knows any section, by its fields; nothing of files and overrides.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from agent_rl.config.foreign_names import our_name, why_no_key
from agent_rl.errors import WrongTypeError, shown
from agent_rl.types import GenerationConfig

_NEAR = 0.75
_MAX_INNER = 5
_VALID = "valid keys: "
Model = TypeVar("Model", bound=BaseModel)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """What was probably meant, if anything: 'groupsize' is 'group_size', 'cluster' is nothing."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=_NEAR)
    return found[0] if found else None


def explained(error: ValidationError, root: type[BaseModel]) -> str:
    """What is wrong with what should have become a ``root``: several faults have a line each."""
    lines = _listed_once(line for fault in error.errors() for line in _lines(fault, root))
    return lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} faults:", *lines])


def key_hint(
    name: str, keys: Sequence[str], names: Sequence[str], places: Sequence[str] = ()
) -> str:
    """What to write in place of ``name``, the part of ``keys`` that is unknown.

    ``names`` may stand there; ``places`` are keys elsewhere that end so.
    """
    if ours := our_name(keys):
        return f"here it is {ours}"
    if why := why_no_key(keys):
        return why
    if near := nearest(name, names):
        return f"did you mean {near!r}?"
    if places:
        return f"did you mean {' or '.join(map(repr, places))}?"
    return f"{_VALID}{', '.join(names) or 'none'}"


def require_section(value: object, section: type[Model], owner: str) -> None:
    """Raises WrongTypeError naming ``owner``, the call that was given something else."""
    if isinstance(value, section):
        return
    name = section.__name__
    fix = f"{name}(**values)" if isinstance(value, Mapping) else f"{name}(...)"
    if name == "PPOConfig":
        fix = f"load_config(path, ['key=value', ...]) or {fix}"
    raise WrongTypeError(f"{owner} needs a {name}, not {shown(value)}; make one: {fix}")


def _listed_once(lines: Iterable[str]) -> list[str]:
    """The keys of a section stand in the first line that ends with them."""
    seen: set[str] = set()
    found = []
    for line in lines:
        head, separator, names = line.partition(_VALID)
        found.append(f"{head}{separator}as above" if names in seen else line)
        seen |= {names} - {""}
    return found


def _lines(fault: Any, root: type[BaseModel]) -> Iterator[str]:
    keys = [str(part) for part in fault["loc"] if not str(part).startswith("function-")]
    is_unknown = fault["type"] in ("extra_forbidden", "unexpected_keyword_argument")
    inner = [[*keys, *path] for path in _paths(fault["input"])]
    known_abroad = [path for path in inner if our_name(path)]
    is_misplaced = is_unknown or fault["type"].endswith("_type")
    if is_misplaced and known_abroad and inner != [keys]:
        for path in known_abroad[:_MAX_INNER]:
            yield _unknown(path, root)
    elif is_unknown:
        yield _unknown(keys, root)
    else:
        message = fault["msg"].removeprefix("Value error, ")
        where = f"config key {'.'.join(keys)!r} = {fault['input']!r}: "
        yield where + message if keys else message  # of the section as a whole: it names its keys


def _paths(value: object) -> Iterator[list[str]]:
    """To every value below: {"a": {"b": 1}} has ["a", "b"]."""
    if not isinstance(value, Mapping):
        yield []
        return
    for key, inner in value.items():
        for path in _paths(inner):
            yield [str(key), *path]


def _unknown(keys: Sequence[str], root: type[BaseModel]) -> str:
    name = keys[-1]
    names = _field_names(keys[:-1], root)
    places = [key for key in _all_keys(root) if key.rpartition(".")[2] == name]
    own_places = [key for key in places if key.startswith(f"{keys[0]}.")]
    hint = key_hint(name, keys, names, own_places or places)
    return f"unknown config key {'.'.join(keys)!r}; {hint}"


def _all_keys(section: type[BaseModel]) -> Iterator[str]:
    for name in section.model_fields:
        yield name
        inner = _section_at(section, name)
        if inner is not None and issubclass(inner, BaseModel):
            yield from (f"{name}.{key}" for key in _all_keys(inner))


def _field_names(keys: Sequence[str], root: type[BaseModel]) -> list[str]:
    """The keys that are valid inside the section that ``keys`` leads to."""
    section: Any = root
    for key in keys:
        section = _section_at(section, key) if issubclass(section, BaseModel) else None
        if section is None:
            return []
    if section is GenerationConfig:
        return list(GenerationConfig.__dataclass_fields__)
    return list(section.model_fields)


def _section_at(section: type[BaseModel], key: str) -> Any:
    """The section under a key, None where the key is unknown or has a plain value."""
    if key not in section.model_fields:
        return None
    annotation = section.model_fields[key].annotation
    for option in (annotation, *get_args(annotation)):
        if isinstance(option, type) and (
            issubclass(option, BaseModel) or option is GenerationConfig
        ):
            return option
    return None
