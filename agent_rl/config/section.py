"""What every config section has in common, and the value types that several use."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from agent_rl.config.explain import explained
from agent_rl.errors import ConfigError
from agent_rl.types import ChatTemplateType


def _no_limit_is_none(value: float | None) -> float | None:
    return None if value == math.inf else value


TimeoutS = Annotated[Annotated[float, Field(gt=0)] | None, AfterValidator(_no_limit_is_none)]
"""Seconds; None and inf mean no limit, 0 and negatives are refused."""

LimitS = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Seconds of a wait that has to end: None and inf are refused."""


def _one_folder(name: str) -> str:
    if name in (".", "..") or any(sign in name for sign in "/\\\0"):
        raise ValueError("it must name one folder: no slashes, not . or ..")
    return name


Dtype: TypeAlias = Literal["float32", "bfloat16"]
Fsync: TypeAlias = Literal["always", "never"]
FolderName = Annotated[str, AfterValidator(_one_folder)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    if not TYPE_CHECKING:  # to the type checker, pydantic's own signature

        def __init__(self, /, **values: Any) -> None:
            """Raises ConfigError, as a YAML file of the same values does."""
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ConfigError(explained(error, type(self))) from None

        # Else sections inside of this one would be made by calling it, each fault without its path.
        __init__.__pydantic_base_init__ = True

    def refuse_idle(self, *names: str, need: str) -> None:
        """Refuse fields that were given a value of their own, though nobody will read it.

        Raises:
            ValueError: one of ``names`` differs from its default; ``need`` says when it has effect.
        """
        for name in names:
            value = getattr(self, name)
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            if value != default:
                shown = "" if isinstance(value, BaseModel) else f"={value}"
                raise ValueError(f"{name}{shown} has no effect: it needs {need}")


class ChatSection(Section):
    """Shared by the doors to the model: how a session's messages become ids and back."""

    chat_template_type: ChatTemplateType = Field(
        "hf", description="hf: render each turn; concat: extend the parent's ids"
    )
    tool_call_parser: str = Field("auto", description="name of the tool-call format")
    reasoning_parser: str = Field("auto", description="name of the reasoning format")
    engine_max_tokens: int | None = Field(
        None, gt=0, description="cap on prompt and completion tokens of one call"
    )
