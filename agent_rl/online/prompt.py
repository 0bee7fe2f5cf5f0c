"""PromptTemplate: the text of a judge's prompt, a readable file that a user can replace.

``$name`` stands for a value, ``$$`` for a dollar sign (string.Template). Values are put in once and
never read as a template, so text of users and models cannot bring in others.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from string import Template

from agent_rl.errors import ConfigError

_SHIPPED = Path(__file__).with_name("prompts")


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    text: str

    @classmethod
    def load(
        cls, name: str, fields: tuple[str, ...], path: str | Path | None = None
    ) -> PromptTemplate:
        """The shipped template of that name, or the user's file in its place.

        Raises:
            ConfigError: the file cannot be read, lacks one of the fields, or has another.
        """
        source = _SHIPPED / f"{name}.txt" if path is None else Path(path)
        try:
            text = source.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the prompt template {source}: {error}") from error
        template = Template(text)
        if not template.is_valid():
            raise ConfigError(f"the prompt template {source} has a $ without a name; write $$")
        found = set(template.get_identifiers())
        if found != set(fields):
            wanted = ", ".join(f"${field}" for field in fields)
            given = ", ".join(f"${field}" for field in sorted(found)) or "none"
            raise ConfigError(f"the prompt template {source} must use {wanted}; it has {given}")
        return cls(text)

    def fill(self, **values: object) -> str:
        return Template(self.text).substitute(values)
