"""Agents in Ray actors: the same rows as on the event loop, and an actor that dies is a failure.

Ray is initialised by the first test that needs it and serves all of them, as in a training run. No
test hangs: each has a limit, which is far above what it takes on a busy machine.
"""

from __future__ import annotations

import asyncio
import builtins
import importlib.util
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_agents
import torch

from agent_rl.config import AgentConfig, RayConfig, RolloutConfig
from agent_rl.engine.local import LocalEngine
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import AgentHostError, EpisodeError, MissingDependencyError
from agent_rl.gateway.server import Gateway
from agent_rl.rollout.dataloader import DataLoader
from agent_rl.rollout.executor import RolloutEngine

HAS_RAY = importlib.util.find_spec("ray") is not None
LIMIT_S = 300


def with_ray(test: Callable[..., None]) -> Callable[..., None]:
    for mark in (
        pytest.mark.slow,
        pytest.mark.skipif(not HAS_RAY, reason="Ray is missing: pip install -e '.[ray]'"),
        pytest.mark.usefixtures("ray_ends", "limited"),
        pytest.mark.filterwarnings("ignore"),  # Ray's own
    ):
        test = mark(test)
    return test


@pytest.fixture
def make(
    open_rollout: Callable[..., RolloutEngine], tokenizer: Any
) -> Callable[..., RolloutEngine]:
    def build(
        mode: str = "ray", engine: Any = None, address: str | None = None, **keys: Any
    ) -> RolloutEngine:
        engine = engine or ScriptedEngine(["four", "five"], tokenizer=tokenizer, repeat=True)
        agent = AgentConfig(
            mode=mode, ray=RayConfig(num_actors=2, address=address), turn_discount=0.0
        )
        return open_rollout(engine, RolloutConfig(agent=agent, **keys), tokenizer=tokenizer)

    return build


@pytest.fixture(scope="module")
def ray_ends() -> Iterator[None]:
    yield
    import ray

    ray.shutdown()


@pytest.fixture
def limited() -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        raise TimeoutError(f"the test takes longer than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pid_in(file: Path) -> int:
    """What the agent writes there, when it has."""
    while not (file.exists() and file.read_text()):
        time.sleep(0.01)
    return int(file.read_text())


def wait_for_end(pid: int) -> None:
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)


def rows(groups: list[Any]) -> list[dict[str, Any]]:
    return [
        {name: value.tolist() for name, value in group.items() if isinstance(value, torch.Tensor)}
        for group in groups
    ]


@with_ray
def test_the_same_rows_as_on_the_event_loop(
    make: Callable[..., RolloutEngine], tiny_model_dir: Path
) -> None:
    """Ids, log-probs, rewards and versions, for the same seed."""
    found = {}
    for mode in ("inline", "ray"):
        engine = LocalEngine(tiny_model_dir, device="cpu", max_seq_len=256)
        rollout = make(mode, engine, consumer_batch_size=3)
        loader = DataLoader([{"i": index} for index in range(6)], 3, seed=1)
        found[mode] = rows(rollout.prepare_batch(loader, ray_agents.Talker, group_size=2))
        assert rollout.counts().accepted == 3
        rollout.close()
        asyncio.run(engine.close())
    for far, near in zip(found["ray"], found["inline"], strict=True):
        # The last digit depends on who shared the batch.
        assert torch.allclose(
            torch.tensor(far.pop("logprobs")), torch.tensor(near.pop("logprobs")), atol=1e-4
        )
        assert far == near


@with_ray
def test_an_actor_that_is_killed_is_a_failed_episode(make: Callable[..., RolloutEngine]) -> None:
    """Its group fails, the others are accepted, the counts add up, and a new actor goes on."""
    rollout = make()
    data = [{"i": index} for index in range(8)]
    groups = rollout.rollout_batch(data, ray_agents.Mortal)
    assert [group is None for group in groups] == [index == 3 for index in range(8)]
    counts = rollout.counts()
    assert (counts.submitted, counts.accepted, counts.failed) == (8, 7, 1)
    again = rollout.rollout_batch(data[:2], ray_agents.Mortal)
    assert all(group is not None for group in again)


@with_ray
def test_rewards_set_on_the_way_and_errors(make: Callable[..., RolloutEngine]) -> None:
    rollout = make()
    [group] = rollout.rollout_batch([{"i": 0}], ray_agents.Rewarding)
    assert group is not None
    assert sorted(group["rewards"].tolist()) == [0.5, 1.0]
    [none] = rollout.rollout_batch([{"i": 0}], ray_agents.Broken)
    assert none is None
    assert rollout.counts().failed == 1


@with_ray
def test_what_agents_print_is_shown(
    make: Callable[..., RolloutEngine], capfd: pytest.CaptureFixture[str]
) -> None:
    assert make().rollout_batch([{}], ray_agents.Printing)[0] is not None
    shown, deadline_s = "", time.monotonic() + 60
    while "printed in an actor" not in shown:
        assert time.monotonic() < deadline_s, shown
        time.sleep(0.05)
        shown += "".join(capfd.readouterr())


HOSTILE = {
    "exit": "agent raised SystemExit: 3",
    "vanish": "the Ray actor of Hostile died: The actor died unexpectedly",
    "mute": "agent raised UnspeakableError, whose message cannot be read",
    "loud": "agent raised ValueError: zzz",
    "object": "a reward must be one finite number, got <object",
    "bytes": "a reward must be one finite number, got b'1'",
    "keys": "run returned rewards for [('a', 'b')]; give each interaction's id",
}


@with_ray
def test_what_cannot_be_sent_back_costs_its_episode_only(
    make: Callable[..., RolloutEngine], caplog: pytest.LogCaptureFixture
) -> None:
    rollout = make()
    for how, message in HOSTILE.items():
        caplog.clear()
        rollout._runner._logged.clear()
        data = [{"how": how, "i": 0}]
        assert rollout.rollout_batch(data, ray_agents.Hostile) == [None]
        assert any(message in said for said in caplog.messages)
        assert max(map(len, caplog.messages)) < 30_000
    [group] = rollout.rollout_batch([{"i": 1}], ray_agents.Talker)
    assert group is not None
    assert rollout.counts().failed == len(HOSTILE)


@with_ray
def test_an_agent_that_no_actor_can_import(
    make: Callable[..., RolloutEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = types.ModuleType("only_here")
    monkeypatch.setitem(sys.modules, "only_here", here)
    agent = type("Agent", (ray_agents.Talker,), {"__module__": "only_here"})
    monkeypatch.setattr(here, "Agent", agent, raising=False)
    rollout = make(on_error="raise")
    with pytest.raises(EpisodeError, match="ModuleNotFoundError: No module named 'only_here'"):
        rollout.rollout_batch([{"i": 0}], agent)


@with_ray
def test_others_go_on_beside_a_blocking_agent_and_closing_ends_it(
    make: Callable[..., RolloutEngine], tmp_path: Path
) -> None:
    rollout, file = make(), tmp_path / "pid"
    rollout.submit({"file": str(file)}, ray_agents.Blocking)
    pid = pid_in(file)
    for index in range(3):
        rollout.submit({"i": index}, ray_agents.Talker)
    assert len(rollout.wait(3)) == 3
    assert rollout.counts().running == 1
    rollout.close()
    wait_for_end(pid)


@with_ray
def test_the_deadline_frees_the_place_of_a_blocking_agent(
    make: Callable[..., RolloutEngine], tmp_path: Path
) -> None:
    """Four that never end find their places, of two: each is ended for the next."""
    rollout = make(episode_timeout_s=2.0)
    data = [{"file": str(tmp_path / str(index))} for index in range(4)]
    assert rollout.rollout_batch(data, ray_agents.Blocking) == [None] * 4
    assert rollout.export_stats()["rollout/failed/timeout"] == 1.0


@with_ray
def test_an_actor_that_died_while_idle_costs_nothing(
    make: Callable[..., RolloutEngine], tmp_path: Path
) -> None:
    rollout, file = make(), tmp_path / "pid"
    for _ in range(2):
        assert rollout.rollout_batch([{"file": str(file)}], ray_agents.Leaving)[0] is not None
        pid = pid_in(file)
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
    assert rollout.counts().accepted == 2


@with_ray
def test_engines_follow_one_another(make: Callable[..., RolloutEngine]) -> None:
    """Ray outlives the engine that initialised it, be it closed while Ray and its actor start."""
    import ray

    ray.shutdown()
    for _ in range(3):
        rollout = make()
        rollout.submit({"i": 0}, ray_agents.Talker)
        rollout.close()
    for _ in range(2):
        rollout = make()
        assert all(rollout.rollout_batch([{"i": 0}, {"i": 1}], ray_agents.Talker))
        rollout.close()


@with_ray
@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("auto", r"ray\.address=auto: Could not find any running Ray"),
        ("nonsense", r"ray\.address=nonsense: Invalid address format"),
        ("127.0.0.1:9", r"ray\.address=127\.0\.0\.1:9: no Ray cluster can be reached there"),
    ],
)
def test_no_cluster_at_the_address(
    make: Callable[..., RolloutEngine], address: str, message: str
) -> None:
    """Said at the start, at once: no episode has failed."""
    import ray

    ray.shutdown()
    rollout = make(address=address)
    with pytest.raises(AgentHostError, match=message):
        rollout.submit({"i": 0}, ray_agents.Talker)
    assert rollout.counts().submitted == 0


@with_ray
def test_an_address_is_honoured_or_refused_by_a_process_that_has_ray(
    make: Callable[..., RolloutEngine],
) -> None:
    import ray

    assert all(make().rollout_batch([{"i": 0}], ray_agents.Talker))
    present = ray.get_runtime_context().gcs_address
    for address in ("auto", present, f"localhost:{present.rpartition(':')[2]}"):
        rollout = make(address=address)
        assert all(rollout.rollout_batch([{"i": 0}], ray_agents.Talker))
        rollout.close()  # its actor keeps a CPU from the next one
    message = rf"ray\.address=10\.9\.8\.7:1, but this process belongs .* at {present}: set"
    with pytest.raises(AgentHostError, match=message):
        make(address="10.9.8.7:1").submit({"i": 0}, ray_agents.Talker)


MUTE = """
import socket
from agent_rl.config import RayConfig
from agent_rl.errors import AgentHostError
from agent_rl.rollout.ray_cluster import connect

with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    try:
        connect(RayConfig(address=f"127.0.0.1:{port}", connect_timeout_s=0.5))
    except AgentHostError as error:
        print(str(error).replace(str(port), "PORT"), flush=True)
import os
os._exit(0)  # Ray goes on trying
"""


@with_ray
def test_a_cluster_that_does_not_answer() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", MUTE], capture_output=True, text=True, check=True
    ).stdout
    assert shown.endswith(
        "rollout.agent.ray.address=127.0.0.1:PORT: Ray was not ready after "
        "rollout.agent.ray.connect_timeout_s=0.5 s\n"
    )


@with_ray
def test_two_engines_share_a_machine(make: Callable[..., RolloutEngine]) -> None:
    """Idle actors of the one do not keep those of the other from starting."""
    one, other = make(), make()
    data = [{"i": index} for index in range(4)]
    assert all(one.rollout_batch(data, ray_agents.Talker))
    assert all(other.rollout_batch(data, ray_agents.Talker))


@with_ray
def test_a_gateway_out_of_reach_is_a_failed_episode(
    make: Callable[..., RolloutEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = make(on_error="raise")
    monkeypatch.setattr(Gateway, "_url_of", lambda self, live: "http://127.0.0.1:9/s/x/v1")
    with pytest.raises(EpisodeError, match="APIConnectionError"):
        rollout.rollout_batch([{"i": 0}], ray_agents.Talker)


def test_without_ray_the_command_is_named(
    make: Callable[..., RolloutEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_ray(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(MissingDependencyError, match="pip install ray"):
        make().submit({"i": 0}, ray_agents.Talker)
