"""Run by torchrun: a training run on servers, with the config's KEY=VALUE as arguments. Prints how
far the servers' log-probs were from the trainer's in each step."""

from __future__ import annotations

import json
import sys

from test_train_on_servers import ROWS, LetterAgent

from agent_rl import PPOTrainer, load_config
from agent_rl.train.trainer import StepReport

errors: list[float] = []


def note(report: StepReport) -> None:
    errors.append(report.stats["ppo_actor/update/behave_logp_error/max"])


with PPOTrainer(load_config(None, sys.argv[1:]), ROWS) as trainer:
    trainer.train(LetterAgent, on_step=note)
    print(json.dumps({"version": trainer.engine.get_version(), "errors": errors}), flush=True)
