"""The demo: train the shop agent on the small model and show that it learns.

Writes to one folder: config.yaml, metrics.jsonl, rollout/ and eval-rollout/ (every trajectory),
checkpoints/, reward.png and summary.json.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.config import PPOConfig, load_config
from agent_rl.config.files import SMALL_MODEL
from agent_rl.demo.shop import ShopAgent, make_tasks
from agent_rl.errors import MissingDependencyError
from agent_rl.train.trainer import PPOTrainer, StepReport

if TYPE_CHECKING:
    from agent_rl.types import JsonObject

SETTINGS = Path(__file__).with_name("demo.yaml")
_NUM_HELDOUT = 64
_NUM_SHOWN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Contents of summary.json. Rewards are means in [0, 1]; the first and last training step."""

    reward_before: float
    reward_after: float
    heldout_before: float
    heldout_after: float
    steps: int
    wall_s: float
    train_wall_s: float
    tokens_trained: int
    seed: int


def run_demo(*, seed: int, out: Path, overrides: Sequence[str] = ()) -> Summary:
    """Train and compare before with after; returns what was written to ``out/summary.json``.

    An earlier demo in ``out`` is replaced.
    """
    console = Console()
    start_s = time.monotonic()
    config = demo_config(seed=seed, out=out, overrides=overrides)
    _remove_earlier_run(out)
    steps = config.total_train_steps or 1
    tasks = make_tasks(seed=seed, count=steps * config.rollout.consumer_batch_size, split="train")
    heldout = make_tasks(seed=0, count=_NUM_HELDOUT, split="heldout")  # the same for every seed
    console.print(f"[bold]agent_rl demo[/]  seed {seed}, {steps} steps -> {out}/")
    rewards: list[float] = []
    tokens_trained = 0

    def note(report: StepReport) -> None:
        nonlocal tokens_trained
        rewards.append(report.stats["rollout/reward"])
        tokens_trained += int(report.stats["ppo_actor/n_valid_tokens"])

    with PPOTrainer(config, tasks, heldout) as trainer:
        before = trainer.evaluate(ShopAgent)["eval-rollout/reward"]
        console.print(f"held-out reward before: [bold]{before:.2f}[/] ({len(heldout)} tasks)")
        _show_conversations(console, "before", trainer, heldout[:_NUM_SHOWN])
        train_start_s = time.monotonic()
        trainer.train(workflow=ShopAgent, on_step=note)
        train_wall_s = time.monotonic() - train_start_s
        after = trainer.evaluate(ShopAgent)["eval-rollout/reward"]
        _show_conversations(console, "after", trainer, heldout[:_NUM_SHOWN])
    console.print(f"held-out reward: [bold]{before:.2f} -> {after:.2f}[/]")
    summary = Summary(
        reward_before=rewards[0],
        reward_after=rewards[-1],
        heldout_before=before,
        heldout_after=after,
        steps=len(rewards),
        wall_s=round(time.monotonic() - start_s, 1),
        train_wall_s=round(train_wall_s, 1),
        tokens_trained=tokens_trained,
        seed=seed,
    )
    _write(out, summary, rewards)
    console.print(f"wrote {out}/summary.json, reward.png, metrics.jsonl and all trajectories")
    return summary


def demo_config(*, seed: int, out: Path, overrides: Sequence[str] = ()) -> PPOConfig:
    """The shipped settings for this seed and folder, then the user's overrides."""
    _check_plotting()
    return load_config(
        SETTINGS,
        [
            f"seed={seed}",
            f"fileroot={json.dumps(str(out.parent))}",
            f"experiment_name={json.dumps(out.name)}",
            "trial_name=''",
            f"tokenizer_path={SMALL_MODEL}",
            *overrides,
        ],
    )


def _remove_earlier_run(out: Path) -> None:
    """Only what an earlier demo wrote, and only where one was completed or begun."""
    if (out / "config.yaml").is_file():
        for name in ("rollout", "eval-rollout", "checkpoints", "recover"):
            shutil.rmtree(out / name, ignore_errors=True)
        for path in [*out.glob("metrics*.jsonl"), out / "summary.json", out / "reward.png"]:
            path.unlink(missing_ok=True)


def _check_plotting() -> None:
    """Fail before the training, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingDependencyError("the demo needs: pip install matplotlib") from None


def _show_conversations(
    console: Console, label: str, trainer: PPOTrainer, tasks: Sequence[JsonObject]
) -> None:
    for number, task in enumerate(tasks, start=1):
        messages, reward = asyncio.run(_converse(trainer, task))
        text = Text("\n").join(Text(f"{m['role']:>9}: {_one_line(m)}") for m in messages)
        title = f"{label} training, held-out task {number}: reward {reward:.2f}"
        console.print(Panel(text, title=title, title_align="left"))


async def _converse(trainer: PPOTrainer, task: JsonObject) -> tuple[list[JsonObject], float]:
    """One greedy episode outside the collector; the messages from the question on."""
    client = ArealOpenAI(trainer.engine, trainer.tokenizer, gconfig=trainer.eval_gconfig)
    reward = await ShopAgent().run(task, client=client)
    last = list(client.interactions.values())[-1]
    messages = [*last.messages, *last.output_message_list]
    first = max(i for i, message in enumerate(messages) if message["role"] == "user")
    return messages[first:], reward


def _one_line(message: JsonObject) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or []]
    parts = [f"{call['name']}({call['arguments']})" for call in calls]
    return " ".join([*parts, str(message.get("content") or "").replace("\n", "\\n")]).strip()


def _write(out: Path, summary: Summary, rewards: Sequence[float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    text = json.dumps(asdict(summary), indent=2) + "\n"
    (out / "summary.json").write_text(text, encoding="utf-8")
    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(range(1, len(rewards) + 1), rewards, marker="o", label="training, mean of a step")
    ends = (1, len(rewards))
    heldout = (summary.heldout_before, summary.heldout_after)
    axes.plot(ends, heldout, "s--", color="gray", label="held-out, before and after")
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1.02), title=f"demo, seed {summary.seed}")
    axes.legend(loc="lower right")
    figure.savefig(out / "reward.png", dpi=120)
    pyplot.close(figure)
