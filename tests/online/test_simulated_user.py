"""Does it learn? A user who wants short answers, a real small model, and nothing but conversation.

The user asks a question; when the answer is long the next message is "Too long. Answer in one short
sentence.", else thanks and another question. The judge is a rule: that message is -1, any other +1;
for combine the hint is a rule too. Everything goes over TCP through the gateway.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from statistics import mean

import openai
import pytest
from transformers import AutoTokenizer

from agent_rl import small_model
from agent_rl.config import PPOConfig, load_config
from agent_rl.engine.local import LocalEngine
from agent_rl.online.service import OnlineService
from agent_rl.online.verdict import JudgedTurn, Verdict
from agent_rl.train.trainer import PPOTrainer, StepReport

COMPLAINT = "Too long. Answer in one short sentence."
LONGEST, MAX_TOKENS = 20, 32  # tokens of a short answer; of any
NUM_STEPS, TURNS_PER_STEP, NUM_USERS = 24, 12, 12
EDGE = 5  # steps at either end that are compared
TOPICS = ("rain", "bread", "the moon", "sleep", "tea", "trees", "clocks", "bees", "gold", "the sea")
QUESTIONS = ("Tell me about {}.", "What is {}?", "Why do people like {}?", "What about {}?")


class Rule:
    """Judge and source of hints."""

    async def judge(self, turn: JudgedTurn) -> Verdict:
        return Verdict(score=-1.0 if turn.next_state["content"] == COMPLAINT else 1.0)

    async def hint(self, turn: JudgedTurn) -> str | None:
        is_complaint = turn.next_state["content"] == COMPLAINT
        return "Answer in one short sentence." if is_complaint else None


def settings(method: str, seed: int, folder: Path) -> PPOConfig:
    taught = ["actor.distillation.weight=1.0"] if method != "binary" else []
    values = [
        f"tokenizer_path={small_model()}",
        f"fileroot={folder}",
        f"seed={seed}",
        f"total_train_steps={NUM_STEPS}",
        "stats_logger.console=false",
        "rollout.agent.mode=online",
        f"rollout.consumer_batch_size={TURNS_PER_STEP}",
        f"online.method={method}",
        "actor.reward_norm={mean_level: running, std_level: null}",
        "actor.optimizer={lr: 3.0e-5, weight_decay: 0.0, beta2: 0.95, "
        "warmup_steps_proportion: 0.1}",
        "actor.max_tokens_per_mb=512",
    ]
    return load_config(None, values + taught)


def converse(client: openai.OpenAI, session_id: str, dice: random.Random) -> None:
    """One session of four requests; the last one ends it."""

    def question() -> str:
        return dice.choice(QUESTIONS).format(dice.choice(TOPICS))

    messages = [{"role": "user", "content": question()}]
    for number in range(4):
        headers = {"X-Session-Id": session_id, "X-Session-Done": str(number == 3).lower()}
        completion = client.chat.completions.create(
            model="any", messages=messages, max_tokens=MAX_TOKENS, extra_headers=headers
        )
        is_short = completion.usage.completion_tokens <= LONGEST
        said = f"Thanks. {question()}" if is_short else COMPLAINT
        message = completion.choices[0].message
        messages += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": said},
        ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("method", ["binary", "combine"])
def test_answers_become_short(method: str, seed: int, tmp_path: Path) -> None:
    """The judge's mean score is clearly higher in the last steps than in the first."""
    config = settings(method, seed, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(small_model())
    engine = LocalEngine(small_model(), tokenizer, max_batch_size=NUM_USERS, max_seq_len=512)
    service = OnlineService(engine, tokenizer, config.online, judge=Rule(), hints=Rule())
    steps: list[StepReport] = []
    is_over = threading.Event()

    def use(number: int) -> None:
        dice = random.Random(100 * seed + number)
        with openai.OpenAI(base_url=service.base_url, api_key=service.api_key) as client:
            count = 0
            while not is_over.is_set():
                converse(client, f"user{number}-{count}", dice)
                count += 1

    with service, PPOTrainer(config, tokenizer=tokenizer, engine=engine, source=service) as trainer:
        users = [threading.Thread(target=use, args=(number,)) for number in range(NUM_USERS)]
        for user in users:
            user.start()
        try:
            trainer.train(on_step=steps.append)
        finally:
            is_over.set()
            for user in users:
                user.join()
    scores = [step.stats["online/score"] for step in steps]
    lengths = [step.stats["online/num_sampled_tokens"] for step in steps]
    print(f"\n{method} seed {seed}: scores {[round(score, 2) for score in scores]}")
    print(f"tokens of an answer {[round(length, 1) for length in lengths]}")
    assert mean(scores[-EDGE:]) > mean(scores[:EDGE]) + 0.25
    assert mean(lengths[-EDGE:]) < mean(lengths[:EDGE])
