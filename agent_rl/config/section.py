"""What every config section has in common, and the value types that several use."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _no_limit_is_none(value: Any) -> Any:
    return None if isinstance(value, float) and math.isinf(value) and value > 0 else value


TimeoutS = Annotated[Annotated[float, Field(gt=0)] | None, BeforeValidator(_no_limit_is_none)]
"""Seconds; None and inf mean no limit, 0 and negatives are refused."""


def _one_folder(name: str) -> str:
    if name in (".", "..") or any(sign in name for sign in "/\\\0"):
        raise ValueError("it must name one folder: no slashes, not . or ..")
    return name


FolderName = Annotated[str, AfterValidator(_one_folder)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
