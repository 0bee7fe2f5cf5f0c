"""Runs a real vLLM server on a machine without a GPU: serve_vllm.py --model FOLDER ...

torchvision next to a CPU build of torch lacks two operators that its import refers to. At the top
level, because vLLM's worker processes run this file again.
"""

from __future__ import annotations

import sys

import torch

torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float limit) -> Tensor")
torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float limit) -> Tensor")

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    main()
