"""A training run of two processes, which divide the weights, on two servers that it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "update"), [("sglang", "distributed"), ("sglang", "tensor"), ("vllm", "distributed")]
)
def test_servers_have_the_weights_of_a_team(tiny_run: list[str], kind: str, update: str) -> None:
    """The first process collects the whole weights and is in two groups, one with the other
    process, one with the servers. What they sampled after an update has the trainer's log-probs."""
    server = f"[{sys.executable}, {HERE / f'{kind}_server.py'}]"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(HERE / "team_on_servers.py"), *tiny_run),
            *(f"engine.backend={kind}", f"engine.update={update}"),
            f"engine.launch={{num_servers: 2, gpus_per_server: 0, command: {server}}}",
        ],
        env=os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["version"] == 2
    assert len(result["errors"]) == 2
    assert max(result["errors"]) < 1e-4
