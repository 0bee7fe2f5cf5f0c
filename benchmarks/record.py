"""What planning and recording one turn costs, and what it keeps, as a conversation grows.

    python benchmarks/record.py [--turns 200] [--conversations 5] [--style concat]

A stub in place of an engine; the real SmolLM2 tokenizer and template. Each turn adds a user message
of about 60 tokens and a sampled answer of 40. Timed are ``cache.plan`` and ``cache.append`` with
messages decoded anew from JSON, as a client gets them; the JSON itself is not timed. Compared with
rendering and encoding all messages at each turn.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
import tracemalloc
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from agent_rl import small_model
from agent_rl.record.cache import InteractionCache
from agent_rl.tokens.format import ChatFormat
from agent_rl.types import ChatTemplateType, ModelResponse

NUM_CONTEXT, NUM_SAMPLED = 60, 40
SHOWN = (1, 8, 32, 128, 200)


@dataclass
class Conversation:
    """One growing conversation in one cache; the answers are random ids ending in end-of-turn."""

    fmt: ChatFormat
    style: ChatTemplateType
    seed: int
    cache: InteractionCache = field(default_factory=InteractionCache)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)

    def turn(self, name: str) -> float:
        """CPU seconds of plan + append."""
        self.messages.append({"role": "user", "content": self._text(NUM_CONTEXT - 5)})
        messages = json.loads(json.dumps(self.messages))
        output = (*self._ids(NUM_SAMPLED - 1), self.fmt.stop_token_ids[0])
        answer = {"role": "assistant", "content": self.fmt.parse(output).content}
        start = time.process_time()
        plan = self.cache.plan(messages, None, self.fmt, self.style)
        planned = time.process_time()
        response = ModelResponse(
            input_tokens=plan.input_ids,
            output_tokens=output,
            output_logprobs=tuple(-self._dice.random() for _ in output),
            output_versions=(0,) * len(output),
            stop_reason="stop",
        )
        answered = time.process_time()
        self.cache.append(
            plan.interaction(
                interaction_id=name, model_response=response, output_message_list=[answer]
            )
        )
        self.messages.append(answer)
        return planned - start + time.process_time() - answered

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._dice.randrange(1000, 40_000) for _ in range(count))

    def _text(self, count: int) -> str:
        return " ".join(self._dice.choice(("the", "cat", "sat", "on", "a")) for _ in range(count))


def render_s(conversation: Conversation) -> float:
    """CPU seconds to render and encode the whole request once."""
    start = time.process_time()
    conversation.fmt.render(conversation.messages[:-1])
    return time.process_time() - start


def kept_bytes(fmt: ChatFormat, style: ChatTemplateType, turns: int) -> list[int]:
    """Memory of one conversation after each turn. The messages are the agent's own too."""
    conversation = Conversation(fmt, style, seed=99)
    sizes = []
    gc.collect()
    tracemalloc.start()
    for turn in range(turns):
        conversation.turn(f"c{turn}")
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--conversations", type=int, default=5)
    parser.add_argument("--style", choices=("concat", "hf"), default="concat")
    args = parser.parse_args()
    fmt = ChatFormat.of(AutoTokenizer.from_pretrained(small_model()))
    Conversation(fmt, args.style, seed=0).turn("warm-up")
    times: list[list[float]] = []
    rendering: list[list[float]] = []
    for seed in range(args.conversations):
        conversation = Conversation(fmt, args.style, seed)
        times.append([])
        rendering.append([])
        for turn in range(args.turns):
            times[-1].append(conversation.turn(f"c{turn}"))
            if seed == 0:
                rendering[-1].append(render_s(conversation))
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    sizes = kept_bytes(fmt, args.style, args.turns)

    table = Table(title=f"plan + append, chat_template_type={args.style}")
    for name in ("turn", "prompt tokens", "us", "x first turn", "us to render all"):
        table.add_column(name, justify="right")
    for turn in (turn for turn in SHOWN if turn <= args.turns):
        table.add_row(
            str(turn),
            str((turn - 1) * (NUM_CONTEXT + NUM_SAMPLED) + NUM_CONTEXT),
            f"{medians[turn - 1] * 1e6:.0f}",
            f"{medians[turn - 1] / medians[0]:.2f}",
            f"{rendering[0][turn - 1] * 1e6:.0f}",
        )
    console = Console()
    console.print(table)
    total, all_rendered = sum(medians), sum(rendering[0])
    console.print(
        f"total {total * 1e3:.1f} ms; rendering everything at each turn {all_rendered * 1e3:.1f} ms"
        f" ({all_rendered / total:.1f} x)"
    )
    half = args.turns // 2
    console.print(
        f"kept per interaction: {sizes[half - 1] / half:.0f} bytes over turns 1-{half}, "
        f"{(sizes[-1] - sizes[half - 1]) / (args.turns - half):.0f} over turns {half + 1}-"
        f"{args.turns}"
    )


if __name__ == "__main__":
    main()
