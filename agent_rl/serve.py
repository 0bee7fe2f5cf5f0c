"""``agent-rl serve``: a local model as an OpenAI-compatible endpoint that may learn from its users.

Puts the parts together and shows what goes on; what is served is the gateway's, what is learnt the
trainer's.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from agent_rl.config import PPOConfig, load_config
from agent_rl.engine.loading import load_tokenizer
from agent_rl.engine.local import LocalEngine
from agent_rl.errors import ConfigError
from agent_rl.gateway.server import Gateway, check_address
from agent_rl.online.service import OnlineService
from agent_rl.train import setup
from agent_rl.train.interrupt import Interrupts
from agent_rl.train.run_folder import RunFolder
from agent_rl.train.trainer import PPOTrainer, StepReport

_REFRESHES_PER_S = 2
# One pass over 16 turns at a small learning rate; turns are groups of one, so the baseline is the
# running mean of earlier rewards. Served again, the model goes on from what it learnt.
_LEARNING = (
    "rollout.agent.mode=online",
    "rollout.consumer_batch_size=16",
    "total_train_steps=1000000",
    "recover.mode=auto",
    "actor.optimizer.lr=1e-5",
    "actor.optimizer.warmup_steps_proportion=0.0",
    "actor.reward_norm={mean_level: running, std_level: null}",
)

_READ_BY_SERVING = (
    "gateway",
    "engine.max_batch_size",
    "engine.max_seq_len",
    "tokenizer_path",
    "actor.path",
    "actor.device",
    "actor.dtype",
)


def serve_config(
    model: str,
    *,
    learn: str | None,
    host: str = "127.0.0.1",
    port: int = 8000,
    overrides: Sequence[str] = (),
) -> PPOConfig:
    """The settings of ``serve``, then the user's overrides.

    Raises:
        ConfigError: also for a key that has no effect where nothing is learnt.
    """
    settings = [
        f"tokenizer_path={json.dumps(model)}",
        "experiment_name=serve",
        "stats_logger.console=off",
        f"gateway.host={json.dumps(host)}",
        f"gateway.port={port}",
    ]
    if learn is not None:
        settings += [*_LEARNING, f"online.method={learn}"]
    if learn in ("opd", "combine"):
        settings.append("actor.distillation.weight=1.0")
    config = load_config(None, [*settings, *overrides])
    if config.rollout.agent.mode != "online":
        _refuse_what_only_learning_reads(overrides)
    return config


def _refuse_what_only_learning_reads(overrides: Sequence[str]) -> None:
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not any(key == read or key.startswith(f"{read}.") for read in _READ_BY_SERVING):
            raise ConfigError(
                f"{key} has no effect where nothing is learnt: give --learn, or leave it out; "
                f"without --learn, these are read: {', '.join(_READ_BY_SERVING)}"
            )


def serve(config: PPOConfig, console: Console | None = None) -> None:
    """Serve until Ctrl-C, SIGTERM, SIGHUP, or until all steps are done; calls that run may finish.

    The weights learnt are kept at the end.
    """
    console = console or Console()
    check_address(config.gateway)
    _say(console, f"loading {setup.model_path(config)}")
    with Interrupts():
        if config.rollout.agent.mode == "online":
            _serve_and_learn(config, console)
        else:
            _serve_only(config, console)


def _serve_only(config: PPOConfig, console: Console) -> None:
    path = setup.model_path(config)
    tokenizer = load_tokenizer(path)
    engine = LocalEngine(
        path,
        tokenizer,
        device=config.actor.device,
        dtype=config.actor.dtype,
        max_batch_size=config.engine.max_batch_size,
        max_seq_len=config.engine.max_seq_len,
    )
    gateway = Gateway(engine, tokenizer, config.gateway)
    try:
        with gateway.run_in_thread():
            keep_heap()
            announce(console, gateway)
            with _live_line(console, lambda: Text(gateway_line(gateway))):
                threading.Event().wait()
    finally:
        asyncio.run(engine.close())


def _serve_and_learn(config: PPOConfig, console: Console) -> None:
    with PPOTrainer(config) as trainer:
        source = trainer.source
        assert source is not None, "mode=online makes a source"
        keep_heap()
        announce(console, source.gateway)
        _say(
            console,
            f"learning from conversations: {config.online.method}, "
            f"{config.rollout.consumer_batch_size} turns a step -> {trainer.run_dir}/",
        )
        reports: list[StepReport] = []

        def line() -> Text:
            return Text(status_line(source, reports[-1] if reports else None))

        def show(report: StepReport) -> None:
            reports[:] = [report]
            if not console.is_terminal:
                console.print(line(), soft_wrap=True)

        with _live_line(console, line):
            trainer.train(on_step=show)
        _say(console, RunFolder(config).farewell(source.version))


def keep_heap() -> None:
    """Let Python's collector never look again at what is loaded by now.

    Torch, transformers and the tokenizer are some 400,000 objects. A full collection visits them
    all, for about a quarter of a second in which nobody is answered, and never finds anything.
    """
    gc.collect()
    gc.freeze()


def gateway_line(gateway: Gateway) -> str:
    """Where nothing is learnt: sessions that are open, and requests."""
    return (
        f"sessions {gateway.num_sessions}  "
        f"requests {gateway.num_answered} ({gateway.num_running} running)"
    )


def status_line(service: OnlineService, report: StepReport | None) -> str:
    """Sessions, turns, queue, votes, version of the weights and the last step's mean reward."""
    learner, usage = service.learner, service.judge_model.usage
    reward = report.stats.get("online/reward") if report is not None else None
    return "  ".join(
        [
            f"sessions {learner.num_sessions}",
            f"turns {learner.num_turns} ({learner.num_judging} being judged)",
            f"queue {learner.num_waiting}",
            f"votes {usage.votes} ({usage.failed} failed)",
            f"version {service.version}",
            f"reward {'-' if reward is None else format(reward, '+.2f')}",
        ]
    )


def announce(console: Console, gateway: Gateway) -> None:
    """Keys that somebody chose are not shown: what is printed ends up in logs."""
    config = gateway.config
    lines = (
        f"serving at  {gateway.base_url}",
        f"api key     {gateway.api_key if config.api_key is None else '(gateway.api_key)'}",
        f"admin key   {gateway.admin_key if config.admin_key is None else '(gateway.admin_key)'}",
        "name each conversation in the header X-Session-Id; Ctrl-C stops",
    )
    for line in lines:
        _say(console, line)


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _live_line(console: Console, line: Callable[[], Text]) -> Iterator[None]:
    """The line at the bottom of a terminal, always up to date; nothing elsewhere."""
    if not console.is_terminal:
        yield
        return
    with Live(
        console=console,
        get_renderable=line,
        refresh_per_second=_REFRESHES_PER_S,
        transient=True,
    ):
        yield
