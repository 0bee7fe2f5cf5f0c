"""Guided decoding: every sampled token fits the grammar, whatever the model would like to say."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.local import LocalEngine
from agent_rl.engine.matcher import GrammarCompiler, can_guide, forbidden_tokens
from agent_rl.errors import RequestError
from agent_rl.types import GenerationConfig, ModelRequest, ModelResponse

pytest.importorskip("llguidance")

END = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 999},
        "ok": {"type": "boolean"},
    },
    "required": ["x", "ok"],
    "additionalProperties": False,
}
TIGHT = json.dumps({**SCHEMA, "x-guidance": {"whitespace_flexible": False}})
ANSWER = f"start: %json {TIGHT}\n"
LONG = f'start: "{" word" * 250}"\n'


@pytest.fixture(scope="module")
def guided(tiny_model_dir: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(tiny_model_dir, max_batch_size=8, max_seq_len=300)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, [END], len(tokenizer))


def request(rid: str = "r", **gconfig: object) -> ModelRequest:
    config = GenerationConfig(**{"grammar": ANSWER, "max_new_tokens": 40, **gconfig})
    return ModelRequest(rid=rid, input_ids=[5, 6, 7], gconfig=config)


def texts_of(allowed: int, tokenizer: Any) -> list[str]:
    ids = [i for i in range(allowed.bit_length()) if allowed >> i & 1]
    return sorted(tokenizer.decode([i]) for i in ids)


def test_a_matcher_by_hand(compiler: GrammarCompiler, tokenizer: Any) -> None:
    """What may come next over the real vocabulary, token by token."""
    matcher = compiler.matcher('start: "ab" "c"?\n', [END])
    assert texts_of(matcher.allowed(may_end=True), tokenizer) == ["a", "ab", "abc"]
    matcher.advance(tokenizer.convert_tokens_to_ids("a"))
    assert texts_of(matcher.allowed(may_end=True), tokenizer) == ["b", "bc"]
    matcher.advance(tokenizer.convert_tokens_to_ids("b"))
    assert texts_of(matcher.allowed(may_end=True), tokenizer) == ["<|im_end|>", "c"]
    assert texts_of(matcher.allowed(may_end=False), tokenizer) == ["c"]
    assert not matcher.is_finished
    matcher.advance(tokenizer.convert_tokens_to_ids("c"))
    assert matcher.is_finished


def test_special_ends_of_the_request_may_follow_and_text_may_not(
    compiler: GrammarCompiler, tokenizer: Any
) -> None:
    text_id = tokenizer.convert_tokens_to_ids("z")
    matcher = compiler.matcher('start: "a" "b"?\n', [END, 1, text_id])
    matcher.advance(tokenizer.convert_tokens_to_ids("a"))
    expected = ["<|im_end|>", "<|im_start|>", "b"]
    assert texts_of(matcher.allowed(may_end=True), tokenizer) == expected


def test_an_end_id_that_the_grammar_needs_may_come_early(
    compiler: GrammarCompiler, tokenizer: Any
) -> None:
    """min_new_tokens forbids it, but nothing else fits."""
    matcher = compiler.matcher('start: "cd"\n', [tokenizer.convert_tokens_to_ids("cd")])
    assert texts_of(matcher.allowed(may_end=False), tokenizer) == ["cd"]


def test_matchers_of_one_grammar_do_not_share_their_state(
    compiler: GrammarCompiler, tokenizer: Any
) -> None:
    """A text that leaves no choice is the tokenizer's own spelling of it, token by token."""
    one, two = (compiler.matcher('start: "abc"\n', [END]) for _ in range(2))
    one.advance(tokenizer.convert_tokens_to_ids("abc"))
    assert one.is_finished and not two.is_finished
    assert texts_of(two.allowed(may_end=True), tokenizer) == ["abc"]


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= x",
        "",
        'start: ""\n',
        'start: %json {"type": "strin"}\n',
        'start: %json {"not": {"type": "string"}}\n',
        'start: %json {"$ref": "http://elsewhere/schema"}\n',
        "start: %json " + '{"items":' * 5000 + "{}" + "}" * 5000 + "\n",
        "start: %json " + json.dumps({"enum": [f"value {i}" for i in range(100_000)]}) + "\n",
        "start: %json "
        + json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}})
        + "\n",
    ],
    ids=lambda grammar: grammar[:30],
)
def test_bad_and_huge_grammars_are_refused(compiler: GrammarCompiler, grammar: str) -> None:
    with pytest.raises(RequestError, match="the grammar cannot be used") as caught:
        compiler.matcher(grammar, [END])
    assert caught.value.param == "grammar"
    assert len(str(caught.value)) < 400


def test_recursion_is_fine(compiler: GrammarCompiler) -> None:
    tree = {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            }
        },
    }
    assert not compiler.matcher(f"start: %json {json.dumps(tree)}\n", [END]).is_finished


def test_forbidden_tokens_of_two_rows() -> None:
    """10 ids, sets {0, 3} and {9}; the bits behind the vocabulary are cut."""
    rows, is_forbidden = forbidden_tokens({1: 0b1001, 4: 1 << 9}, 10, torch.device("cpu"))
    assert rows.tolist() == [1, 4]
    assert (~is_forbidden).nonzero().tolist() == [[0, 0], [0, 3], [1, 9]]
    assert is_forbidden.shape == (2, 10)


@pytest.mark.parametrize(
    "extra", [{}, {"greedy": True}, {"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.5}]
)
async def test_the_answer_fits_and_logprobs_are_unmasked(
    guided: LocalEngine, tokenizer: Any, assert_fresh: Callable[..., None], extra: dict[str, Any]
) -> None:
    """A random model would not write one brace; its own log-probs of the tokens are recorded."""
    asked = [request(str(n), seed=n, **extra) for n in range(3)]
    plain = ModelRequest(rid="p", input_ids=[5, 6], gconfig=GenerationConfig(max_new_tokens=9))
    *guided_answers, other = await asyncio.gather(*map(guided.agenerate, [*asked, plain]))
    for response in guided_answers:
        answer = json.loads(tokenizer.decode(response.output_tokens))
        assert set(answer) == {"x", "ok"} and type(answer["ok"]) is bool
        assert response.stop_reason == "stop"
        assert_fresh(guided.model, response)
        assert response.output_forced is not None
        assert any(response.output_forced) and not all(response.output_forced)
    assert other.output_forced is None
    assert_fresh(guided.model, other)


async def test_forced_tokens(guided: LocalEngine, tokenizer: Any) -> None:
    """ "ab" or "ac", then "!": the first token may be of one or two letters, the last is forced."""
    grammar = 'start: "a" ("b" | "c") "!"\n'
    response = await guided.agenerate(request(grammar=grammar, seed=4))
    pieces = [tokenizer.decode([i]) for i in response.output_tokens]
    assert "".join(pieces) in ("ab!", "ac!")
    assert response.output_forced == (*[False] * (len(pieces) - 1), True)
    assert response.stop_reason == "stop"


async def test_the_end_comes_only_where_the_grammar_accepts(
    guided: LocalEngine, tokenizer: Any
) -> None:
    """The end id is all the model wants; it gets it after the shortest text."""
    asked = request(grammar='start: "ab" "c"*\n', logit_bias={END: 1000.0})
    response = await guided.agenerate(asked)
    assert tokenizer.decode(response.output_tokens) in ("ab<|im_end|>", "abc<|im_end|>")
    assert response.stop_reason == "stop"
    late = request(grammar='start: "ab" "c"*\n', logit_bias={END: 1000.0}, min_new_tokens=8)
    response = await guided.agenerate(late)
    assert len(response.output_tokens) == 9
    assert response.output_tokens[-1] == END and END not in response.output_tokens[:-1]


async def test_a_finished_grammar_ends_below_min_new_tokens(
    guided: LocalEngine, tokenizer: Any
) -> None:
    response = await guided.agenerate(request(grammar='start: "a"\n', min_new_tokens=9))
    assert (tokenizer.decode(response.output_tokens), response.stop_reason) == ("a", "stop")
    assert response.output_forced == (True,)


async def test_budget_and_stop_strings_cut_the_text(guided: LocalEngine, tokenizer: Any) -> None:
    cut = await guided.agenerate(request(max_new_tokens=1))
    assert (len(cut.output_tokens), cut.stop_reason) == (1, "length")
    stopped = await guided.agenerate(request(stop=('"ok"',)))
    assert stopped.stop_reason == "stop"
    text = tokenizer.decode(stopped.output_tokens)
    assert '"ok"' in text and "}" not in text


async def test_a_pause_and_new_weights_keep_the_place_in_the_grammar(
    guided: LocalEngine, tokenizer: Any
) -> None:
    stream = guided.astream(request(grammar=LONG, max_new_tokens=None))
    await anext(stream)
    await guided.pause()
    await guided.update_weights(WeightUpdate(version=guided.get_version() + 1))
    await guided.resume()
    *_, response = [item async for item in stream]
    assert isinstance(response, ModelResponse)
    assert tokenizer.decode(response.output_tokens) == " word" * 250
    assert response.output_versions[-1] == response.output_versions[0] + 1


async def test_abort_returns_what_there_is(guided: LocalEngine, tokenizer: Any) -> None:
    stream = guided.astream(request("long", grammar=LONG, max_new_tokens=None))
    await anext(stream)
    await guided.abort("long")
    *_, response = [item async for item in stream]
    assert isinstance(response, ModelResponse)
    count = len(response.output_tokens)
    assert (response.stop_reason, response.output_forced) == ("abort", (True,) * count)
    assert tokenizer.decode(response.output_tokens) == " word" * count


async def test_a_grammar_that_fails_on_the_way_fails_its_own_request(guided: LocalEngine) -> None:
    """Behind the first x are 3000 readings: too many for the parser. The neighbour goes on."""
    rules = [f'r{n}: "x" r{n} | "x" "y"' for n in range(3000)]
    choice = " | ".join(f"r{n}" for n in range(3000))
    bad = request("bad", grammar="\n".join([f"start: {choice}", *rules, ""]))
    results = await asyncio.gather(
        guided.agenerate(bad), guided.agenerate(request("good")), return_exceptions=True
    )
    assert isinstance(results[0], RequestError) and results[0].param == "grammar"
    assert isinstance(results[1], ModelResponse)
    assert await guided.health()


async def test_without_the_package_it_is_not_supported(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "grammar" in LocalEngine.supported
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = LocalEngine(tiny_model_dir)
    assert not can_guide(engine._tokenizer)
    assert "grammar" not in engine.supported
    with pytest.raises(RequestError, match="pip install llguidance") as caught:
        await engine.agenerate(request())
    assert caught.value.param == "grammar"
    await engine.close()
