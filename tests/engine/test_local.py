"""The engine seam as LocalEngine keeps it: what comes back equals a fresh forward pass."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.loading import load_model, load_tokenizer
from agent_rl.engine.local import LocalEngine
from agent_rl.engine.small_model import small_model
from agent_rl.errors import ConfigError, ContextLengthError, RequestError
from agent_rl.types import GenerationConfig, ModelRequest, ModelResponse, TokenDelta

Check = Callable[..., None]


class Letters:
    """Decodes id 10 to "a", 11 to "b", ...; enough of a tokenizer for stop strings."""

    eos_token_id = 2

    def decode(self, ids: list[int], **options: bool) -> str:
        return "".join(chr(ord("a") + token_id - 10) for token_id in ids)


def request(input_ids: list[int], rid: str = "r", **gconfig: object) -> ModelRequest:
    return ModelRequest(rid=rid, input_ids=input_ids, gconfig=GenerationConfig(**gconfig))


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 97), k=length)


@pytest.mark.parametrize(
    "extra", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.5}]
)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_logprobs_equal_a_fresh_forward_pass(
    engine: LocalEngine,
    model: LlamaForCausalLM,
    assert_fresh: Check,
    temperature: float,
    extra: dict[str, float],
) -> None:
    """Tempered, before truncation and penalties (cases B56, B57)."""
    gconfig = {"temperature": temperature, "max_new_tokens": 12, **extra}
    requests = [request(prompt(n, 3 + 7 * n), **gconfig) for n in range(5)]
    for response in await asyncio.gather(*map(engine.agenerate, requests)):
        assert_fresh(model, response, temperature)


async def test_greedy_equals_generate(
    engine: LocalEngine, model: LlamaForCausalLM, assert_fresh: Check
) -> None:
    """Greedy log-probs are those of temperature 1 (case B57)."""
    prompts = [prompt(n, 5 + n) for n in range(4)]
    requests = [request(ids, greedy=True, max_new_tokens=20) for ids in prompts]
    for ids, response in zip(
        prompts, await asyncio.gather(*map(engine.agenerate, requests)), strict=True
    ):
        inputs = torch.tensor([ids])
        plain = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=20
        )
        assert list(response.output_tokens) == plain[0, len(ids) :].tolist()
        assert_fresh(model, response)


async def test_a_seed_gives_the_same_completion_in_any_company(engine: LocalEngine) -> None:
    seeded = request(prompt(1, 9), seed=5, max_new_tokens=15)
    alone = await engine.agenerate(seeded)
    others = [request(prompt(n, 30 + n), max_new_tokens=9 + n) for n in range(6)]
    crowd = await asyncio.gather(*map(engine.agenerate, [*others[:3], seeded, *others[3:]]))
    unlike = await engine.agenerate(request(prompt(1, 9), seed=6, max_new_tokens=15))
    assert crowd[3].output_tokens == alone.output_tokens
    assert unlike.output_tokens != alone.output_tokens


async def test_each_request_keeps_its_own_sampling(
    engine: LocalEngine, model: LlamaForCausalLM, assert_fresh: Check
) -> None:
    """Greedy, cold, truncated, biased and plain requests share one batch."""
    configs: list[dict[str, object]] = [
        {"greedy": True},
        {"temperature": 0.3},
        {"top_k": 1},
        {"logit_bias": {50: 1000.0}},
        {"min_new_tokens": 10, "stop_token_ids": (*range(3, 90),)},
        {},
    ]
    requests = [request(prompt(3, 9), max_new_tokens=10, **config) for config in configs]
    responses = await asyncio.gather(*map(engine.agenerate, requests))
    greedy, cold, top_1, biased, late, _ = responses
    assert top_1.output_tokens == greedy.output_tokens
    assert set(biased.output_tokens) == {50}
    assert late.output_tokens[:9] and not set(late.output_tokens[:9]) & set(range(2, 90))
    assert_fresh(model, cold, 0.3)
    for response in (greedy, top_1, biased, late):
        assert_fresh(model, response)


async def test_top_logprobs(engine: LocalEngine) -> None:
    """Only the request that asks gets them; the first is what greedy takes."""
    asked = request(prompt(4, 8), greedy=True, max_new_tokens=5, top_logprobs=3)
    with_top, without = await asyncio.gather(
        engine.agenerate(asked), engine.agenerate(request(prompt(5, 8), max_new_tokens=5))
    )
    assert without.output_top_logprobs is None
    assert with_top.output_top_logprobs is not None
    for token_id, logprob, top in zip(
        with_top.output_tokens,
        with_top.output_logprobs,
        with_top.output_top_logprobs,
        strict=True,
    ):
        assert len(top) == 3
        assert top[0] == (token_id, logprob)
        assert top[0][1] >= top[1][1] >= top[2][1]


async def test_ends(engine: LocalEngine) -> None:
    """The end id is kept as sampled; the budget is met exactly (case B38)."""
    force = {"logit_bias": {2: 1000.0}}
    by_eos = await engine.agenerate(request([5, 6], max_new_tokens=9, **force))
    by_id = await engine.agenerate(
        request([5, 6], max_new_tokens=9, logit_bias={7: 1000.0}, stop_token_ids=(7,))
    )
    late = await engine.agenerate(request([5, 6], max_new_tokens=9, min_new_tokens=4, **force))
    by_total = await engine.agenerate(
        request([5, 6], max_tokens=6, max_new_tokens=9, logit_bias={7: 1000.0})
    )
    assert (by_eos.output_tokens, by_eos.stop_reason) == ((2,), "stop")
    assert (by_id.output_tokens, by_id.stop_reason) == ((7,), "stop")
    assert (len(late.output_tokens), late.output_tokens[-1]) == (5, 2)
    assert (by_total.output_tokens, by_total.stop_reason) == ((7, 7, 7, 7), "length")


async def test_context_is_the_limit(engine: LocalEngine) -> None:
    """A prompt that leaves no room is refused, one that leaves one token is served (case B39)."""
    with pytest.raises(ContextLengthError, match="400 tokens and the context holds 400"):
        await engine.agenerate(request(prompt(0, 400)))
    response = await engine.agenerate(request(prompt(0, 399), max_new_tokens=50))
    assert len(response.output_tokens) == 1


async def test_stop_strings(model: LlamaForCausalLM) -> None:
    """Ids and log-probs stay as sampled, the stop string's included (case B41)."""
    engine = LocalEngine(model, Letters())  # type: ignore[arg-type]
    letters = dict.fromkeys((10, 11, 12), 500.0)
    gconfig = {"logit_bias": letters, "max_new_tokens": 200}
    response = await engine.agenerate(request([5], seed=3, stop=("abc", "cc"), **gconfig))
    text = Letters().decode(list(response.output_tokens))
    assert response.stop_reason == "stop"
    assert text.endswith(("abc", "cc"))
    assert "abc" not in text[:-1] and "cc" not in text[:-1]
    assert len(response.output_logprobs) == len(response.output_tokens)
    await engine.close()


async def test_what_it_cannot_do_is_refused(engine: LocalEngine, model: LlamaForCausalLM) -> None:
    refused = [
        (request([5], grammar="root ::= x"), "grammar"),
        (request([5], stop=("x",)), "stop"),
        (request([5, 97]), "input_ids"),
        (request([5, -1]), "input_ids"),
        (request([5], logit_bias={97: 1.0}), "logit_bias"),
        (ModelRequest(rid="r", input_ids=[5], image_data=["x"]), "image_data"),
    ]
    for req, param in refused:
        with pytest.raises(RequestError) as caught:
            await engine.agenerate(req)
        assert caught.value.param == param
    assert "stop" not in engine.supported and "stop" in LocalEngine.supported
    assert "grammar" not in engine.supported and "grammar" in LocalEngine.supported
    with pytest.raises(ConfigError, match="bfloat16"):
        LocalEngine(model, dtype="bfloat16")
    with pytest.raises(ConfigError, match="max_batch_size is 0"):
        LocalEngine(model, max_batch_size=0)


async def test_stream_gives_each_token_then_the_response(engine: LocalEngine) -> None:
    items = [item async for item in engine.astream(request(prompt(1, 5), max_new_tokens=6))]
    deltas = [item for item in items if isinstance(item, TokenDelta)]
    response = items[-1]
    assert isinstance(response, ModelResponse)
    assert len(items) == len(deltas) + 1
    assert tuple(delta.token_ids[0] for delta in deltas) == response.output_tokens
    assert tuple(delta.logprobs[0] for delta in deltas) == response.output_logprobs


async def test_abort_returns_what_there_is(engine: LocalEngine, assert_fresh: Check) -> None:
    """Also while paused and before the first token: an empty completion (case B45)."""
    stream = engine.astream(request(prompt(1, 5), "long", stop_token_ids=()))
    seen = [await anext(stream) for _ in range(3)]
    await engine.abort("long")
    items = [*seen, *[item async for item in stream]]
    response = items[-1]
    assert isinstance(response, ModelResponse)
    assert response.stop_reason == "abort"
    assert len(response.output_tokens) == len(items) - 1

    await engine.pause()
    waiting = asyncio.create_task(engine.agenerate(request([5, 6], "w")))
    await asyncio.sleep(0)
    await engine.abort("w")
    empty = await waiting
    assert (empty.output_tokens, empty.stop_reason) == ((), "abort")
    await engine.abort("nobody")
    await engine.resume()


async def test_leaving_frees_the_slot(model: LlamaForCausalLM) -> None:
    """Cancelling a task and closing a stream: the next request gets the only slot."""
    engine = LocalEngine(model, max_batch_size=1, max_seq_len=400)
    endless = {"min_new_tokens": 300}
    task = asyncio.create_task(engine.agenerate(request([5], **endless)))
    stream = engine.astream(request([6], **endless))
    queued = asyncio.create_task(engine.agenerate(request([7], max_new_tokens=2)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert len((await queued).output_tokens) <= 2
    await engine.close()


async def test_more_requests_than_slots_start_in_order(model: LlamaForCausalLM) -> None:
    engine = LocalEngine(model, max_batch_size=2)
    finished: list[int] = []

    async def one(n: int) -> None:
        await engine.agenerate(request(prompt(n, 6), max_new_tokens=4, min_new_tokens=4))
        finished.append(n)

    await engine.pause()
    tasks = [asyncio.create_task(one(n)) for n in range(8)]
    await asyncio.sleep(0)
    await engine.resume()
    await asyncio.gather(*tasks)
    assert finished == list(range(8))
    await engine.close()


async def test_new_weights_in_process(
    engine: LocalEngine,
    model: LlamaForCausalLM,
    other_model: LlamaForCausalLM,
    assert_fresh: Check,
) -> None:
    """Running requests go on from their tokens under the new weights (cases B61, B134, B136)."""
    streams = [
        engine.astream(request(prompt(n, 20), min_new_tokens=30, max_new_tokens=30))
        for n in range(3)
    ]
    for stream in streams:
        await anext(stream)
    await engine.pause()
    with torch.no_grad():
        for mine, new in zip(model.parameters(), other_model.parameters(), strict=True):
            mine.copy_(new)
    await engine.update_weights(WeightUpdate(version=1))
    await engine.resume()
    for stream in streams:
        *_, response = [item async for item in stream]
        assert isinstance(response, ModelResponse)
        num_old = response.output_versions.count(0)
        assert 1 <= num_old < 30
        assert response.output_versions == (0,) * num_old + (1,) * (30 - num_old)
        assert_fresh(other_model, response, start=num_old)
    assert engine.get_version() == 1


async def test_no_stale_prefix_after_an_update(
    engine: LocalEngine,
    model: LlamaForCausalLM,
    other_model: LlamaForCausalLM,
    assert_fresh: Check,
) -> None:
    req = request(prompt(2, 40), max_new_tokens=5)
    await engine.agenerate(req)
    with torch.no_grad():
        for mine, new in zip(model.parameters(), other_model.parameters(), strict=True):
            mine.copy_(new)
    engine.set_version(7)
    response = await engine.agenerate(req)
    assert engine.counters.reused_tokens == 0
    assert set(response.output_versions) == {7}
    assert_fresh(other_model, response)


async def test_new_weights_from_disk(
    engine: LocalEngine,
    model: LlamaForCausalLM,
    other_model: LlamaForCausalLM,
    assert_fresh: Check,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """They are loaded into the same parameters, so a trainer that shares them sees them too."""
    folder = tmp_path_factory.mktemp("weights")
    other_model.save_pretrained(folder)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    await engine.update_weights(WeightUpdate(version=3, method="disk", path=folder))
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    response = await engine.agenerate(request(prompt(2, 9), max_new_tokens=5))
    assert response.output_versions == (3,) * len(response.output_tokens)
    assert_fresh(other_model, response)


async def test_training_flags_of_the_shared_model_do_not_matter(
    engine: LocalEngine, model: LlamaForCausalLM, assert_fresh: Check
) -> None:
    model.train()
    model.model.gradient_checkpointing = True
    response = await engine.agenerate(request(prompt(2, 9), max_new_tokens=5))
    assert_fresh(model.eval(), response)


def test_several_event_loops_at_once(model: LlamaForCausalLM) -> None:
    """Case B142: nothing is bound to the loop that came first."""
    engine = LocalEngine(model)
    counts: list[int] = []

    def use(seed: int) -> None:
        async def main() -> None:
            requests = [request(prompt(seed, 9), min_new_tokens=8, max_new_tokens=8)] * 3
            for response in await asyncio.gather(*map(engine.agenerate, requests)):
                counts.append(len(response.output_tokens))

        asyncio.run(main())

    threads = [threading.Thread(target=use, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [8] * 9
    asyncio.run(engine.close())


@pytest.mark.gpu
async def test_on_a_gpu(model: LlamaForCausalLM, assert_fresh: Check) -> None:
    """Prompts of a group and of their own, plain and truncated, against the CPU."""
    engine = LocalEngine(copy.deepcopy(model), device="cuda")
    prompts = [prompt(0, 50)] * 4 + [prompt(n, 20 + n) for n in range(4)]
    requests = [request(ids, top_p=0.9, seed=n, top_k=20) for n, ids in enumerate(prompts)]
    for response in await asyncio.gather(*map(engine.agenerate, requests)):
        assert_fresh(model, response)
    await engine.close()


async def test_real_model(assert_fresh: Check) -> None:
    """The small model answers, and its log-probs are those of a fresh pass."""
    model = load_model(small_model(), device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = load_tokenizer(small_model())
    engine = LocalEngine(model, tokenizer, max_seq_len=256)
    text = "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    greedy, cold, nucleus = await asyncio.gather(
        engine.agenerate(request(ids, greedy=True, stop=("4",))),
        engine.agenerate(request(ids, temperature=0.7, max_new_tokens=6)),
        engine.agenerate(request(ids, top_p=0.9, max_new_tokens=6)),
    )
    assert tokenizer.decode(greedy.output_tokens).endswith("4")
    assert_fresh(model, greedy)
    assert_fresh(model, cold, 0.7)
    assert_fresh(model, nucleus)
    assert engine.counters.prefill_tokens == len(ids) - 1
    await engine.close()


async def test_without_a_seed_sampling_follows_the_global_one(engine: LocalEngine) -> None:
    async def sample() -> tuple[int, ...]:
        gconfig = GenerationConfig(max_new_tokens=12, min_new_tokens=12)
        req = ModelRequest(rid="r", input_ids=[5, 6, 7], gconfig=gconfig)
        return (await engine.agenerate(req)).output_tokens

    random.seed(3)
    first, second = await sample(), await sample()
    random.seed(3)
    assert (await sample(), await sample()) == (first, second)
    assert first != second
