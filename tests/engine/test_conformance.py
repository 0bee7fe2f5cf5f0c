"""One contract, every engine: what a request gives back, whoever serves it.

LocalEngine and the test servers always; a real server too, when its address and its model folder
are in the environment (tests/real_servers). Log-probs are compared with a plain forward pass.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from live_server import LiveServer
from served_model import ServedModel
from sglang_server import sglang_app
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from vllm_server import vllm_app

from agent_rl.engine.base import InferenceEngine, WeightUpdate
from agent_rl.engine.loading import load_model, load_tokenizer
from agent_rl.engine.local import LocalEngine
from agent_rl.engine.remote import RemoteEngine
from agent_rl.engine.server_api import ServerApi
from agent_rl.engine.sglang import SGLang
from agent_rl.engine.vllm import VLLM
from agent_rl.errors import ContextLengthError, EngineError, RequestError
from agent_rl.types import GenerationConfig, ModelRequest, ModelResponse, TokenDelta

CONTEXT = 512
REAL = {
    kind: os.environ[name]
    for kind, name in (("real-sglang", "AGENT_RL_SGLANG"), ("real-vllm", "AGENT_RL_VLLM"))
    if name in os.environ
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine with ``model`` as version 0; ``tolerance`` of its log-probs against a forward."""

    engine: InferenceEngine
    model: PreTrainedModel
    other: PreTrainedModel
    other_folder: Path
    tokenizer: PreTrainedTokenizerBase
    tolerance: float


def make_remote(api: ServerApi, address: str, **options: Any) -> RemoteEngine:
    return RemoteEngine(api, [address], **options)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory, served_folder: Path) -> Path:
    """The same model with every weight a little different: what training makes of it."""
    folder = tmp_path_factory.mktemp("served") / "other"
    model = load_model(served_folder, device=torch.device("cpu"), dtype=torch.float32)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.05 * parameter.std()
            parameter += scale * torch.randn(parameter.shape, generator=noise)
    model.save_pretrained(folder)
    load_tokenizer(served_folder).save_pretrained(folder)
    return folder


@pytest_asyncio.fixture(params=["local", "sglang", "vllm", *REAL])
async def subject(
    request: pytest.FixtureRequest, served_folder: Path, other_folder: Path
) -> AsyncIterator[Subject]:
    kind, cpu = request.param, torch.device("cpu")
    engine: InferenceEngine
    server = None
    api: ServerApi = VLLM() if "vllm" in kind else SGLang()
    if kind == "local":
        engine = LocalEngine(served_folder, device="cpu", max_batch_size=8, max_seq_len=CONTEXT)
    elif kind in REAL:
        engine = await asyncio.to_thread(make_remote, api, REAL[kind])
        await engine.update_weights(WeightUpdate(version=0, method="disk", path=served_folder))
    else:
        served = ServedModel(served_folder, max_batch_size=8, max_seq_len=CONTEXT)
        app = vllm_app(served) if kind == "vllm" else sglang_app(served)
        server = await LiveServer(app).start()
        engine = await asyncio.to_thread(make_remote, api, server.address)
    yield Subject(
        engine=engine,
        model=load_model(served_folder, device=cpu, dtype=torch.float32),
        other=load_model(other_folder, device=cpu, dtype=torch.float32),
        other_folder=other_folder,
        tokenizer=load_tokenizer(served_folder),
        tolerance=2e-3 if kind in REAL else 1e-4,
    )
    await engine.close()
    if server is not None:
        await server.close()


def ask(input_ids: list[int], rid: str = "r", **gconfig: Any) -> ModelRequest:
    return ModelRequest(rid=rid, input_ids=input_ids, gconfig=GenerationConfig(**gconfig))


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 97), k=length)


@torch.no_grad()
def forward_logprobs(
    model: PreTrainedModel, response: ModelResponse, temperature: float = 1.0
) -> torch.Tensor:
    ids = torch.tensor([[*response.input_tokens, *response.output_tokens]])
    logits = model(input_ids=ids).logits[0, len(response.input_tokens) - 1 : -1]
    chosen = torch.tensor(response.output_tokens)[:, None]
    return (logits.float() / temperature).log_softmax(-1).gather(1, chosen)[:, 0]


def assert_logprobs(subject: Subject, response: ModelResponse, temperature: float = 1.0) -> None:
    expected = forward_logprobs(subject.model, response, temperature)
    difference = torch.tensor(response.output_logprobs) - expected
    assert len(difference) > 0
    assert difference.abs().max() < subject.tolerance


async def greedy_run(subject: Subject, length: int = 12) -> ModelResponse:
    """So many tokens, of the first prompt that gives as many."""
    for seed in range(20):
        response = await subject.engine.agenerate(
            ask(prompt(seed, 7), greedy=True, max_new_tokens=length)
        )
        if response.stop_reason == "length":
            return response
    raise AssertionError("the model always ends early")


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_ids_and_logprobs(subject: Subject, temperature: float) -> None:
    """Ids come back as sent; log-probs are tempered and not truncated (cases B56, B57)."""
    requests = [
        ask(prompt(n, 3 + 9 * n), temperature=temperature, max_new_tokens=12) for n in range(5)
    ]
    for req, response in zip(
        requests, await asyncio.gather(*map(subject.engine.agenerate, requests)), strict=True
    ):
        assert list(response.input_tokens) == req.input_ids
        assert response.stop_reason in ("stop", "length")
        assert len(response.output_tokens) == 12 or response.stop_reason == "stop"
        assert set(response.output_versions) == {subject.engine.get_version()}
        assert_logprobs(subject, response, temperature or 1.0)


@pytest.mark.parametrize("extra", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}])
async def test_logprobs_are_those_before_truncation(
    subject: Subject, extra: dict[str, float]
) -> None:
    if next(iter(extra)) not in subject.engine.supported:
        pytest.skip("this engine does not offer it")
    response = await subject.engine.agenerate(
        ask(prompt(1, 9), temperature=1.0, max_new_tokens=20, **extra)
    )
    assert_logprobs(subject, response)


async def test_a_stop_id_ends_and_is_kept(subject: Subject) -> None:
    free = await greedy_run(subject)
    end = free.output_tokens[5]
    stopped = await subject.engine.agenerate(
        ask([*free.input_tokens], greedy=True, max_new_tokens=12, stop_token_ids=(end,))
    )
    length = free.output_tokens.index(end) + 1
    assert stopped.output_tokens == free.output_tokens[:length]
    assert stopped.stop_reason == "stop"
    assert_logprobs(subject, stopped)


async def test_a_stop_string_ends_and_its_ids_are_kept(subject: Subject) -> None:
    """As many log-probs as ids, the stop string's included (case B41)."""
    free = await greedy_run(subject)
    ends = [subject.tokenizer.decode([token_id]) for token_id in free.output_tokens]
    stop = ends[6]
    length = 1 + next(
        index
        for index in range(12)
        if stop in subject.tokenizer.decode(free.output_tokens[: index + 1])
    )
    stopped = await subject.engine.agenerate(
        ask([*free.input_tokens], greedy=True, max_new_tokens=12, stop=(stop,))
    )
    assert stopped.output_tokens == free.output_tokens[:length]
    assert stopped.stop_reason == "stop"
    assert len(stopped.output_logprobs) == length
    assert_logprobs(subject, stopped)


async def test_a_stream_gives_each_token_once_then_the_response(subject: Subject) -> None:
    items = [item async for item in subject.engine.astream(ask(prompt(4, 5), max_new_tokens=16))]
    *deltas, response = items
    assert isinstance(response, ModelResponse)
    assert all(isinstance(delta, TokenDelta) for delta in deltas)
    for name in ("token_ids", "logprobs", "versions"):
        joined = tuple(value for delta in deltas for value in getattr(delta, name))
        assert joined == getattr(
            response, {"token_ids": "output_tokens"}.get(name, f"output_{name}")
        )
    assert_logprobs(subject, response)


async def test_abort_keeps_what_was_sampled(subject: Subject) -> None:
    """It never ends by itself: by the abort, or on a machine that stands still, by its budget."""
    start = (await greedy_run(subject, 400)).input_tokens
    stream = subject.engine.astream(ask([*start], rid="gone", greedy=True, max_new_tokens=400))
    response, num_seen = None, 0
    async for item in stream:
        if isinstance(item, ModelResponse):
            response = item
        else:
            num_seen += len(item.token_ids)
            if num_seen >= 3:
                await subject.engine.abort("gone")
    assert response is not None
    assert response.stop_reason == ("abort" if len(response.output_tokens) < 400 else "length")
    assert len(response.output_tokens) >= 3
    assert_logprobs(subject, response)
    await subject.engine.abort("unknown")


async def test_64_at_once(subject: Subject) -> None:
    requests = [
        ask(prompt(n, 4 + n % 13), rid=f"r{n}", max_new_tokens=5 + n % 7) for n in range(64)
    ]
    responses = await asyncio.gather(*map(subject.engine.agenerate, requests))
    for req, response in zip(requests, responses, strict=True):
        assert list(response.input_tokens) == req.input_ids
        assert len(response.output_tokens) == req.gconfig.max_new_tokens or (
            response.stop_reason == "stop"
        )
        assert_logprobs(subject, response)


async def test_the_context_is_the_limit(subject: Subject) -> None:
    """A prompt that leaves no room is refused here, one that leaves a token served (case B39)."""
    limit = subject.engine.max_seq_len
    with pytest.raises(ContextLengthError, match=f"the context holds {limit}"):
        await subject.engine.agenerate(ask(prompt(0, limit)))
    response = await subject.engine.agenerate(ask(prompt(0, limit - 1), max_new_tokens=50))
    assert len(response.output_tokens) == 1
    by_total = await subject.engine.agenerate(ask(prompt(0, 9), max_tokens=13, max_new_tokens=50))
    assert len(by_total.output_tokens) == 4 or by_total.stop_reason == "stop"


async def test_top_logprobs(subject: Subject) -> None:
    response = await subject.engine.agenerate(
        ask(prompt(6, 8), greedy=True, max_new_tokens=5, top_logprobs=3)
    )
    assert response.output_top_logprobs is not None
    for token_id, logprob, top in zip(
        response.output_tokens,
        response.output_logprobs,
        response.output_top_logprobs,
        strict=True,
    ):
        assert len(top) == 3
        assert top[0] == (token_id, pytest.approx(logprob, abs=1e-6))
        assert top[0][1] >= top[1][1] >= top[2][1]


async def test_score_equals_what_was_sampled(subject: Subject) -> None:
    response = await subject.engine.agenerate(ask(prompt(7, 8), max_new_tokens=10))
    ids = (*response.input_tokens, *response.output_tokens)
    scores = await subject.engine.score(ids, len(response.output_tokens))  # type: ignore[attr-defined]
    assert scores == pytest.approx(response.output_logprobs, abs=subject.tolerance)


async def test_it_says_how_much_of_the_prompt_was_cached(subject: Subject) -> None:
    """As LocalEngine does; vLLM only with --enable-prompt-tokens-details."""
    ids = prompt(11, 40)
    first = await subject.engine.agenerate(ask(ids, max_new_tokens=2))
    again = await subject.engine.agenerate(ask(ids, max_new_tokens=2))
    stream = subject.engine.astream(ask(ids, max_new_tokens=2))
    streamed = [item async for item in stream][-1]
    if again.num_cached_tokens is None:
        pytest.skip("this server does not tell")
    assert first.num_cached_tokens == 0
    # All but the token whose logits are needed; vLLM caches blocks of 16 or more only.
    assert 0 < again.num_cached_tokens <= 39
    assert isinstance(streamed, ModelResponse)
    assert streamed.num_cached_tokens in (again.num_cached_tokens, None)


async def test_a_grammar_is_obeyed(subject: Subject) -> None:
    """Log-probs are those of the model, not of what the grammar left of it. A server samples the
    end of the turn too."""
    if "grammar" not in subject.engine.supported:
        pytest.skip("llguidance is missing")
    grammar = 'start: "a0" ("b0" | "c0"){5} "d0"\n'
    requests = [
        ask(prompt(20 + n, 9), rid=f"g{n}", max_new_tokens=60, grammar=grammar) for n in range(4)
    ]
    for response in await asyncio.gather(*map(subject.engine.agenerate, requests)):
        text = subject.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        assert re.fullmatch("a0(b0|c0){5}d0", text)
        assert response.stop_reason == "stop"
        assert_logprobs(subject, response)
        forced = response.output_forced
        assert forced is not None
        assert len(forced) == len(response.output_tokens)
        assert True in forced
        assert False in forced


async def test_a_grammar_that_is_none_is_refused(subject: Subject) -> None:
    if "grammar" not in subject.engine.supported:
        pytest.skip("llguidance is missing")
    with pytest.raises(RequestError, match=r"(?i)grammar") as caught:
        await subject.engine.agenerate(ask(prompt(1, 5), grammar="start: missing\n"))
    assert caught.value.param == "grammar"


async def test_a_pause_stops_all_and_loses_nothing(subject: Subject) -> None:
    """What runs goes on from its tokens; what comes waits (case B134)."""
    engine = subject.engine
    stream = engine.astream(ask(prompt(8, 5), max_new_tokens=60))
    items = [await anext(stream)]
    await engine.pause()
    late = asyncio.ensure_future(engine.agenerate(ask(prompt(9, 5), max_new_tokens=4)))
    await engine.resume()
    items += [item async for item in stream]
    response = items[-1]
    assert isinstance(response, ModelResponse)
    assert len(response.output_tokens) == 60 or response.stop_reason == "stop"
    assert_logprobs(subject, response)
    assert_logprobs(subject, await late)


async def test_new_weights_under_load(subject: Subject) -> None:
    """Each token has the version, and the log-prob, of the weights that sampled it (case B61)."""
    engine = subject.engine
    old = engine.get_version()
    streams = [
        engine.astream(ask(prompt(n, 5 + n), rid=f"r{n}", max_new_tokens=120)) for n in range(4)
    ]
    for stream in streams:
        await anext(stream)
    update = WeightUpdate(version=old + 1, method="disk", path=subject.other_folder)
    await engine.update_weights(update)
    assert engine.get_version() == old + 1
    for stream in streams:
        response = [item async for item in stream][-1]
        assert isinstance(response, ModelResponse)
        versions = response.output_versions
        assert list(versions) == sorted(versions)
        assert set(versions) <= {old, old + 1}
        assert len(versions) == 120 or response.stop_reason == "stop"
        expected = torch.where(
            torch.tensor(versions) == old,
            forward_logprobs(subject.model, response),
            forward_logprobs(subject.other, response),
        )
        difference = torch.tensor(response.output_logprobs) - expected
        assert difference.abs().max() < subject.tolerance
    fresh = await engine.agenerate(ask(prompt(1, 5), max_new_tokens=5))
    assert set(fresh.output_versions) == {old + 1}


async def test_a_folder_that_does_not_fit_changes_nothing(subject: Subject, tmp_path: Path) -> None:
    engine = subject.engine
    with pytest.raises((EngineError, OSError)):
        await engine.update_weights(
            WeightUpdate(version=9, method="disk", path=tmp_path / "absent")
        )
    response = await engine.agenerate(ask(prompt(1, 5), max_new_tokens=5))
    assert set(response.output_versions) == {engine.get_version()} != {9}
    assert_logprobs(subject, response)


async def test_a_method_it_cannot_do_is_named(subject: Subject) -> None:
    method = "lora" if isinstance(subject.engine, LocalEngine) else "in_process"
    with pytest.raises(EngineError, match=method):
        await subject.engine.update_weights(WeightUpdate(version=1, method=method))


async def test_close_fails_what_runs(subject: Subject) -> None:
    engine = subject.engine

    async def collect() -> list[object]:
        return [item async for item in engine.astream(ask(prompt(2, 5), max_new_tokens=40))]

    await engine.pause()
    running = [
        asyncio.ensure_future(engine.agenerate(ask(prompt(1, 5), max_new_tokens=40))),
        asyncio.ensure_future(collect()),
    ]
    await asyncio.sleep(0)
    await engine.close()
    for call in running:
        with pytest.raises(EngineError, match="closed"):
            await call
    with pytest.raises(EngineError, match="closed"):
        await engine.agenerate(ask(prompt(3, 5)))
    assert not await engine.health()
