"""Pausing, failing and ending: nobody waits forever, no thread outlives its engine."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from transformers import LlamaForCausalLM

from agent_rl.engine.local import LocalEngine
from agent_rl.engine.sequence import Sequence
from agent_rl.errors import EngineError
from agent_rl.types import GenerationConfig, ModelRequest, ModelResponse


def request(num_new: int, rid: str = "r") -> ModelRequest:
    gconfig = GenerationConfig(min_new_tokens=num_new, max_new_tokens=num_new)
    return ModelRequest(rid=rid, input_ids=[5, 6, 7], gconfig=gconfig)


async def test_pause_stops_decoding_and_loses_nothing(engine: LocalEngine) -> None:
    """Requests that come while paused wait (case B134); the budget is met exactly (B35, B36)."""
    stream = engine.astream(request(30))
    await anext(stream)
    await engine.pause()
    await engine.pause()
    steps = engine.counters.decode_steps
    late = asyncio.create_task(engine.agenerate(request(2)))
    await asyncio.sleep(0.05)
    assert engine.counters.decode_steps == steps
    assert not late.done()
    await engine.resume()
    *_, response = [item async for item in stream]
    assert isinstance(response, ModelResponse)
    assert len(response.output_tokens) == 30
    assert response.stop_reason == "length"
    assert len((await late).output_tokens) == 2


async def test_a_version_that_changes_between_steps_keeps_every_token(engine: LocalEngine) -> None:
    """Versions never decrease, and each is the one its forward pass ran under (case B61)."""
    stream = engine.astream(request(40))
    for version in range(1, 6):
        await anext(stream)
        engine.set_version(version)
    *_, response = [item async for item in stream]
    assert isinstance(response, ModelResponse)
    assert len(response.output_tokens) == 40
    assert list(response.output_versions) == sorted(response.output_versions)
    assert response.output_versions[0] == 0
    assert response.output_versions[-1] == 5


async def test_closing_fails_what_is_left(model: LlamaForCausalLM) -> None:
    engine = LocalEngine(model, max_batch_size=1)
    running = asyncio.create_task(engine.agenerate(request(500)))
    waiting = asyncio.create_task(engine.agenerate(request(500)))
    await asyncio.sleep(0.02)
    await engine.close()
    await engine.close()
    for task in (running, waiting):
        with pytest.raises(EngineError, match="the engine is closed"):
            await task
    with pytest.raises(EngineError, match="the engine is closed"):
        await engine.agenerate(request(1))
    assert not await engine.health()


async def test_closing_while_paused(model: LlamaForCausalLM) -> None:
    engine = LocalEngine(model)
    await engine.pause()
    waiting = asyncio.create_task(engine.agenerate(request(5)))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineError):
        await waiting


async def test_a_failing_model_fails_the_requests(model: LlamaForCausalLM) -> None:
    """Case B131: the cause reaches everyone who waits, and the engine says it is broken."""
    engine = LocalEngine(model)
    assert await engine.health()

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    engine._decoder._model.register_forward_pre_hook(out_of_memory)
    results = await asyncio.gather(
        *(engine.agenerate(request(5)) for _ in range(3)), return_exceptions=True
    )
    for result in results:
        assert isinstance(result, EngineError)
        assert isinstance(result.__cause__, torch.OutOfMemoryError)
        assert "no memory left" in str(result)
    assert not await engine.health()
    with pytest.raises(EngineError, match="broke down"):
        await engine.agenerate(request(1))
    await engine.pause()
    await engine.close()


async def test_broken_weights_are_named(model: LlamaForCausalLM) -> None:
    engine = LocalEngine(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="the logits are NaN"):
        await engine.agenerate(request(5))
    await engine.close()


async def test_a_dropped_engine_ends_its_thread(model: LlamaForCausalLM) -> None:
    """Case B133: collecting it does not wait; its thread ends soon after."""
    before = threading.enumerate()
    engine = LocalEngine(model)
    await engine.agenerate(request(1))
    assert [t.name for t in threading.enumerate() if t not in before].count("decode") == 1
    del engine
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "decode" and thread not in before:
            thread.join(60.0)
            assert not thread.is_alive()


async def test_an_engine_is_collected_in_the_middle_of_a_pass(model: LlamaForCausalLM) -> None:
    """Case B133: whoever collects garbage, such as the event loop, waits for no forward pass."""
    is_inside, may_go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    has_waited_in_vain = []

    def hold(*_: object) -> None:
        loop.call_soon_threadsafe(is_inside.set)
        has_waited_in_vain.append(not may_go_on.wait(60.0))

    before = threading.enumerate()
    engine = LocalEngine(model)
    engine._decoder._model.register_forward_pre_hook(hold)
    asking = asyncio.create_task(engine.agenerate(request(1)))
    await is_inside.wait()
    asking.cancel()
    await asyncio.wait({asking})
    (thread,) = (t for t in threading.enumerate() if t.name == "decode" and t not in before)
    del engine, asking
    gc.collect()
    may_go_on.set()
    await asyncio.to_thread(thread.join, 60.0)
    assert not thread.is_alive()
    assert has_waited_in_vain == [False]


async def test_nothing_is_kept_of_finished_requests(engine: LocalEngine) -> None:
    """Case B144: neither by the engine nor by anybody else."""

    def sequences() -> list[Sequence]:
        gc.collect()
        return [found for found in gc.get_objects() if type(found) is Sequence]

    before = sequences()
    await asyncio.gather(*(engine.agenerate(request(2, rid=str(n))) for n in range(30)))
    await engine.abort("gone")
    await engine.agenerate(request(1))
    await engine.pause()
    assert len(engine._thread._aborted_rids) == 0
    assert [found for found in sequences() if found not in before] == []


_PROGRAM = """
import asyncio, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from agent_rl import GenerationConfig, LocalEngine, ModelRequest
torch.set_num_threads(1)
sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
engine = LocalEngine(model)
gconfig = GenerationConfig(min_new_tokens=2000)
async def main():
    stream = engine.astream(ModelRequest(rid="r", input_ids=[5], gconfig=gconfig))
    await anext(stream)
    print("started", flush=True)
    if "wait" in sys.argv:
        await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.slow
def test_forgetting_close_does_not_hang_the_exit() -> None:
    """The thread is in the middle of 2000 tokens when the program ends."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")


@pytest.mark.slow
def test_an_engine_that_is_dropped_at_the_exit_frees_its_model_first() -> None:
    """Its thread is the last to hold the model, and frees it while the interpreter ends."""
    drops = "\ndel engine, model\n"
    many_layers = _PROGRAM.replace("num_hidden_layers=2", "num_hidden_layers=64")
    done = subprocess.run(
        [sys.executable, "-c", many_layers.replace("2000", "2") + drops],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")


@pytest.mark.slow
def test_ctrl_c_leaves_no_process() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert errors.strip().endswith("KeyboardInterrupt")
    assert process.returncode != 0
