"""Runs a real SGLang server on a machine without a GPU: serve_sglang.py --model-path FOLDER ...

SGLang imports its CUDA kernels, and torchvision its own operators, though nothing on the CPU path
calls them. Stand-ins are put in their place; one that is called raises. At the top level, because
SGLang's worker processes run this file again.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any, ClassVar

import torch


class Absent:
    """Anything that is imported from a kernel package; calling it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{self._name} needs a GPU")


class StandIn(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = "0.0.0"  # type: ignore[attr-defined]


sys.meta_path.insert(0, StandInFinder())
torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float limit) -> Tensor")
torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float limit) -> Tensor")

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
