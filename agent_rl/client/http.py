"""The HTTP library of the installed openai package: httpx2 for openai 3.x, httpx for 2.x.

A response must be built from the classes of the library whose client receives it, so everything
in this folder takes them from here. For the type checker both are httpx.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import openai

if TYPE_CHECKING:
    import httpx as hx
else:
    hx = importlib.import_module(
        openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0]
    )

__all__ = ["hx"]
