"""Run by torchrun, or alone: a whole training run, with the config of test_recover.

team_run.py MODEL ROOT [--fail-in STEP] [KEY=VALUE]...
"""

from __future__ import annotations

import argparse
from pathlib import Path

from test_recover import ROWS, LetterAgent, config_of, crash_in

from agent_rl import PPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("model", type=Path)
parser.add_argument("root", type=Path)
parser.add_argument("--fail-in", type=int, default=-1)
parser.add_argument("overrides", nargs="*")
arguments = parser.parse_intermixed_args()

config = config_of(arguments.model, arguments.root, *arguments.overrides)
with PPOTrainer(config, ROWS, ROWS[:2]) as trainer:
    trainer.train(LetterAgent(), on_step=crash_in(arguments.fail_in))
    count = trainer.evaluate(LetterAgent())["eval-rollout/reward__count"]
    print(f"only the first process comes here, {count:g} evaluations")
