"""A training run whose rollouts come from servers: every version it trains on was published."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer
from served_model import ServedModel
from sglang_server import sglang_app
from vllm_server import vllm_app

from agent_rl import PPOTrainer, load_config
from agent_rl.config import EngineConfig
from agent_rl.loop_thread import LoopThread
from agent_rl.train.trainer import StepReport

HERE = Path(__file__).parent
ROWS = [{"question": f"say {index}"} for index in range(4)]


class LetterAgent:
    """Rewards what a random model says: it differs within each group."""

    async def run(self, data: dict[str, Any], client: Any) -> float:
        messages = [{"role": "user", "content": data["question"]}]
        completion = await client.chat.completions.create(model="m", messages=messages)
        return float(sum(map(ord, completion.choices[0].message.content)) % 7)


@contextmanager
def serving(kind: str, folder: Path) -> Iterator[LiveServer]:
    """A server on an event loop of its own thread: the trainer blocks this one."""

    async def start() -> LiveServer:
        served = ServedModel(folder, max_batch_size=8, max_seq_len=256)
        app = sglang_app(served) if kind == "sglang" else vllm_app(served)
        return await LiveServer(app).start()

    with closing(LoopThread("server")) as thread:
        server = thread.call(start())
        try:
            yield server
        finally:
            thread.call(server.close())


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_two_steps_with_a_server(
    kind: str, tiny_run: list[str], tiny_model_dir: Path, tmp_path: Path
) -> None:
    reports: list[StepReport] = []
    with serving(kind, tiny_model_dir) as server:
        servers = [f"engine.backend={kind}", f"engine.addresses=[{server.address}]"]
        config = load_config(None, [*tiny_run, *servers])
        with PPOTrainer(config, ROWS) as trainer:
            first = trainer.actor.model.get_input_embeddings().weight.clone()
            trainer.train(LetterAgent, on_step=reports.append)
            assert trainer.engine.get_version() == 2
        assert server.model.label == "2"
        mine = trainer.actor.model.get_input_embeddings().weight
        assert not mine.equal(first)
        assert server.model.engine.model.get_input_embeddings().weight.equal(mine)
    weights = tmp_path / "exp/one/weights"
    assert [folder.name for folder in weights.iterdir()] == ["v2"]
    for report in reports:
        assert report.stats["ppo_actor/n_seqs"] == 4
        assert report.stats["rollout/max_staleness"] == 0
        # The trainer's log-probs of what the server sampled are the server's own.
        assert report.stats["ppo_actor/update/behave_logp_error/max"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "update"), [("sglang", "distributed"), ("sglang", "tensor"), ("vllm", "distributed")]
)
def test_weights_go_from_memory_to_a_server_that_the_run_starts(
    tiny_run: list[str], tmp_path: Path, kind: str, update: str
) -> None:
    """Over gloo, or by shared memory, into another process; the server is gone afterwards."""
    launch = f"{{gpus_per_server: 0, command: [{sys.executable}, {HERE / f'{kind}_server.py'}]}}"
    config = load_config(
        None,
        [
            *tiny_run,
            f"engine.backend={kind}",
            f"engine.launch={launch}",
            f"engine.update={update}",
        ],
    )
    reports: list[StepReport] = []
    with PPOTrainer(config, ROWS) as trainer:
        trainer.train(LetterAgent, on_step=reports.append)
        assert trainer.engine.get_version() == 2
    assert len(reports) == 2
    assert not (tmp_path / "exp/one/weights").exists()
    assert (tmp_path / "exp/one/servers/server-0.log").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backend": "sglang"}, "needs either addresses or launch, and has neither"),
        ({"addresses": ("http://x",)}, "addresses needs backend=sglang or backend=vllm"),
        ({"backend": "sglang", "addresses": ("http://x",), "launch": {}}, "has both"),
        ({"backend": "vllm", "launch": {}, "on_update": "retract"}, "cannot do on_update=retract"),
        ({"backend": "vllm", "launch": {}, "update": "tensor"}, "cannot do update=tensor"),
    ],
)
def test_config_names_its_servers_once(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)
