"""Guided decoding: what llguidance and xgrammar cost on the same schemas.

    python benchmarks/grammar.py [--tokens 200]

For each package that is installed: milliseconds to read the vocabulary, to compile a grammar for
the first time, and microseconds for each token (its mask over the vocabulary, then the token
taken). Texts are JSON of the schema, spelled by the real SmolLM2 tokenizer. All CPU time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from agent_rl import small_model

STRING = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "one tool": {
        "type": "object",
        "properties": {"city": STRING, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "20 tools": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": f"tool_{i}"}, "text": STRING},
                "required": ["name", "text"],
                "additionalProperties": False,
            }
            for i in range(20)
        ]
    },
    "nested": {
        "type": "object",
        "properties": {
            "items": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"id": {"type": "integer"}, "tags": {"type": "array"}},
                    "required": ["id"],
                },
            }
        },
        "required": ["items"],
    },
}


class Guide(Protocol):
    """One package: compile a schema, then ask for masks and take tokens."""

    name: str

    def compile(self, schema: str) -> Callable[[], Callable[[int], None]]:
        """The compiled grammar: each call of it starts a text; tokens are then given one by one."""
        ...


class LLGuidance:
    name = "llguidance"

    def __init__(self, tokenizer: Any) -> None:
        from llguidance.hf import from_tokenizer

        self._vocabulary = from_tokenizer(tokenizer, len(tokenizer), None)

    def compile(self, schema: str) -> Callable[[], Callable[[int], None]]:
        from llguidance import LLMatcher

        compiled = LLMatcher(self._vocabulary, f"start: %json {schema}", log_level=0)
        assert not compiled.is_error(), compiled.get_error()

        def start() -> Callable[[int], None]:
            matcher = compiled.deep_copy()

            def take(token_id: int) -> None:
                mask = int.from_bytes(matcher.compute_bitmask(), "little")
                assert mask >> token_id & 1, "the text does not fit the grammar"
                matcher.consume_token(token_id)

            return take

        return start


class XGrammar:
    name = "xgrammar"

    def __init__(self, tokenizer: Any) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
        self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False, max_threads=1)
        self._mask = xgrammar.allocate_token_bitmask(1, len(tokenizer))

    def compile(self, schema: str) -> Callable[[], Callable[[int], None]]:
        compiled = self._compiler.compile_json_schema(schema, strict_mode=False)

        def start() -> Callable[[int], None]:
            matcher = self._xgrammar.GrammarMatcher(compiled)

            def take(token_id: int) -> None:
                matcher.fill_next_token_bitmask(self._mask)
                assert matcher.accept_token(token_id), "the text does not fit the grammar"

            return take

        return start


GUIDES: dict[str, Callable[[Any], Guide]] = {"llguidance": LLGuidance, "xgrammar": XGrammar}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    compile_ms: float
    token_us: list[float]


def text_of(name: str, dice: random.Random, num_words: int) -> str:
    words = " ".join(dice.choice(("the", "cat", "sat", "日本")) for _ in range(num_words))
    texts: dict[str, Any] = {
        "one tool": {"city": words, "days": 3},
        "20 tools": {"name": "tool_13", "text": words},
        "nested": {"items": [{"id": i, "tags": [word]} for i, word in enumerate(words.split())]},
    }
    return json.dumps(texts[name], ensure_ascii=False)


def measure(guide: Guide, schema: dict[str, Any], texts: list[list[int]]) -> Figures:
    before = time.process_time()
    start = guide.compile(json.dumps(schema))
    compile_ms = (time.process_time() - before) * 1e3
    costs = []
    for ids in texts:
        take = start()
        for token_id in ids:
            before = time.process_time()
            take(token_id)
            costs.append((time.process_time() - before) * 1e6)
    return Figures(compile_ms=compile_ms, token_us=costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=200, help="length of a text, about")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(small_model())
    console = Console(width=100)
    table = Table(title="guided decoding, CPU time", title_justify="left")
    for column in ("package", "schema", "compile ms", "µs / token", "99th percentile"):
        table.add_column(column, justify="left" if column in ("package", "schema") else "right")
    for name, make in GUIDES.items():
        if importlib.util.find_spec(name) is None:
            console.print(f"{name} is not installed and is left out")
            continue
        before = time.process_time()
        guide = make(tokenizer)
        console.print(f"{name}: vocabulary read in {(time.process_time() - before) * 1e3:.0f} ms")
        for schema_name, schema in SCHEMAS.items():
            dice = random.Random(0)
            texts = [text_of(schema_name, dice, args.tokens) for _ in range(5)]
            ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
            figures = measure(guide, schema, ids)
            late = statistics.quantiles(figures.token_us, n=100)[98]
            row = (figures.compile_ms, statistics.median(figures.token_us), late)
            table.add_row(name, schema_name, *[f"{value:.1f}" for value in row])
    console.print(table)


if __name__ == "__main__":
    main()
