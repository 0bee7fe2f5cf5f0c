"""Grammars on servers: obeyed, log-probs as ours are, and no answer whose parts do not fit."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_rig import Connect, connect_fixture, until  # noqa: F401 - fixtures
from live_server import LiveServer
from served_model import ServedModel
from sglang_server import sglang_app
from transformers import PreTrainedModel

from agent_rl import ArealOpenAI
from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.guided import json_schema, server_grammar
from agent_rl.engine.loading import load_model
from agent_rl.engine.remote import RemoteEngine
from agent_rl.engine.sglang import SGLang
from agent_rl.errors import RequestError
from agent_rl.types import GenerationConfig, ModelRequest, ModelResponse

pytest.importorskip("llguidance")

END = 2
A0, B0, C0, D0 = 3, 4, 5, 6
LETTERS = 'start: "a0" ("b0" | "c0"){20} "d0"\n'


@pytest.fixture
def models(served_folder: Path, other_folder: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    cpu = torch.device("cpu")
    first, second = (
        load_model(folder, device=cpu, dtype=torch.float32)
        for folder in (served_folder, other_folder)
    )
    return first, second


@pytest.fixture
def other_folder(tmp_path: Path, other_model: PreTrainedModel) -> Path:
    other_model.save_pretrained(tmp_path / "other")
    return tmp_path / "other"


def ask(grammar: str = LETTERS, **gconfig: Any) -> ModelRequest:
    config = GenerationConfig(**{"max_new_tokens": 40, "grammar": grammar, **gconfig})
    return ModelRequest(rid="r", input_ids=[10, 20, 30], gconfig=config)


def assert_letters(response: ModelResponse) -> None:
    first, *letters, last, end = response.output_tokens
    assert (first, last, end) == (A0, D0, END)
    assert len(letters) == 20
    assert set(letters) <= {B0, C0}
    assert response.stop_reason == "stop"
    assert response.output_forced == (True, *[False] * 20, True, True)


@torch.no_grad()
def assert_logprobs(model: PreTrainedModel, response: ModelResponse) -> None:
    """Those of a plain forward pass: of all tokens, not of what the grammar allowed."""
    ids = torch.tensor([[*response.input_tokens, *response.output_tokens]])
    logprobs_TV = (
        model(input_ids=ids).logits[0, len(response.input_tokens) - 1 : -1].log_softmax(-1)
    )
    chosen = logprobs_TV.gather(1, torch.tensor(response.output_tokens)[:, None])[:, 0]
    assert response.output_logprobs == pytest.approx(chosen.tolist(), abs=1e-4)


def samplings(server: LiveServer) -> list[dict[str, Any]]:
    """The sampling parameters of its requests, but for those that score."""
    log = server.model.faults.log
    bodies = [body["sampling_params"] for kind, body in log if kind == "generate"]
    return [body for body in bodies if body["max_new_tokens"] > 0]


@pytest.mark.parametrize(
    ("grammar", "schema"),
    [
        ('start: answer\nanswer: %json {"type": "object"}\n', '{"type": "object"}'),
        ("start: %json true", "true"),
        ('start: answer\nanswer: "a"\n', None),
        ('start: %json {"type": "object"} "!"\n', None),
        ('start: answer\nanswer: %json {}\nanswer2: "a"\n', None),
    ],
)
def test_a_grammar_that_is_one_schema(grammar: str, schema: str | None) -> None:
    assert json_schema(grammar) == schema


def test_a_grammar_in_a_servers_words() -> None:
    fields = {"schema_field": "json_schema", "text_field": "ebnf", "args": ("--such", "it")}
    whole = 'start: %json {"type": "integer"}\n'
    assert server_grammar(whole, reads_text={"a": True}, **fields) == {"ebnf": whole}
    assert server_grammar(whole, reads_text={"a": True, "b": False}, **fields) == {
        "json_schema": '{"type": "integer"}'
    }
    message = r"one JSON schema, which is all that b, c can read; start all servers with --such it"
    with pytest.raises(RequestError, match=message) as info:
        server_grammar(LETTERS, reads_text={"a": True, "b": False, "c": False}, **fields)
    assert info.value.param == "grammar"


@pytest.mark.parametrize("gconfig", [{}, {"greedy": True}, {"top_k": 3}])
async def test_a_server_obeys_the_grammar(
    connect: Connect, models: tuple[PreTrainedModel, ...], gconfig: dict[str, Any]
) -> None:
    engine, (server,) = await connect()
    response = await engine.agenerate(ask(top_logprobs=2, **gconfig))
    assert_letters(response)
    assert_logprobs(models[0], response)
    assert response.output_top_logprobs is not None
    tops = [top[0][1] for top in response.output_top_logprobs]
    assert all(top >= own for top, own in zip(tops, response.output_logprobs, strict=True))
    assert [each["ebnf"] for each in samplings(server)] == [LETTERS]


async def test_a_stream_gives_the_whole_answer_at_its_end(connect: Connect) -> None:
    engine, _ = await connect()
    *deltas, response = [item async for item in engine.astream(ask())]
    assert [delta.token_ids for delta in deltas] == [response.output_tokens]
    assert_letters(response)


async def test_a_cut_answer_is_a_beginning_of_one(
    connect: Connect, models: tuple[PreTrainedModel, ...]
) -> None:
    engine, _ = await connect()
    response = await engine.agenerate(ask(max_new_tokens=5))
    assert response.stop_reason == "length"
    assert response.output_tokens[0] == A0
    assert response.output_forced == (True, False, False, False, False)
    assert_logprobs(models[0], response)


async def test_an_answer_may_fill_the_context_but_for_one_place(connect: Connect) -> None:
    """Servers score only what leaves them a place."""
    engine, _ = await connect()
    grammar = 'start: ("b0" | "c0")*\n'
    prompt = [10] * (engine.max_seq_len - 4)
    config = GenerationConfig(grammar=grammar, min_new_tokens=0, greedy=True)
    response = await engine.agenerate(ModelRequest(rid="r", input_ids=prompt, gconfig=config))
    assert 1 <= len(response.output_tokens) <= 3


async def test_a_server_without_llguidance_takes_schemas_only(connect: Connect) -> None:
    engine, (server,) = await connect(grammar_backends=["xgrammar"])
    assert "grammar" in engine.supported
    with pytest.raises(RequestError, match="--grammar-backend llguidance") as info:
        await engine.agenerate(ask())
    assert info.value.param == "grammar"
    schema = json.dumps({"enum": []})
    with pytest.raises(RequestError):  # the model's words spell no JSON: the server says so
        await engine.agenerate(ask(f"start: %json {schema}\n"))
    assert [each["json_schema"] for each in samplings(server)] == [schema]


async def test_servers_of_which_one_takes_schemas_only(connect: Connect) -> None:
    """A grammar is refused or taken, whichever server it would be sent to."""
    engine, servers = await connect(
        count=2, grammar_backends=["llguidance", "xgrammar"], routing="round_robin"
    )
    message = f"all that {servers[1].address} can read; start all servers with --grammar-backend"
    for _ in range(4):
        with pytest.raises(RequestError, match=message):
            await engine.agenerate(ask())
    assert not samplings(servers[0]) and not samplings(servers[1])


async def test_a_server_without_grammars_does_not_offer_them(connect: Connect) -> None:
    engine, _ = await connect(grammar_backends=["none"])
    assert "grammar" not in engine.supported


async def test_a_temperature_that_servers_cannot_score_at_is_refused(connect: Connect) -> None:
    engine, (server,) = await connect()
    with pytest.raises(RequestError, match=r"temperature is 0\.5.*temperature=1 or 0") as info:
        await engine.agenerate(ask(temperature=0.5))
    assert info.value.param == "temperature"
    assert not samplings(server)


@pytest.mark.parametrize("on_update", ["abort", "retract", "in_place"])
async def test_new_weights_in_the_middle_of_an_answer(
    connect: Connect,
    models: tuple[PreTrainedModel, ...],
    other_folder: Path,
    on_update: Any,
) -> None:
    """A server's grammar cannot go on from a middle, and old tokens cannot be scored any more: the
    answer begins anew, and all of it is of the new weights."""
    engine, (server,) = await connect(on_update=on_update)
    gate = Gate(server.model, num_steps=5)
    answer = asyncio.ensure_future(engine.agenerate(ask()))
    await until(gate.is_reached.is_set)
    update = WeightUpdate(version=1, method="disk", path=other_folder)
    updated = asyncio.ensure_future(engine.update_weights(update))
    await until(lambda: ("pause_generation", {"mode": on_update}) in server.model.faults.log)
    gate.may_go.set()
    await updated
    response = await answer
    assert_letters(response)
    assert_logprobs(models[1], response)
    assert set(response.output_versions) == {1}
    assert [each["max_new_tokens"] for each in samplings(server)] == [40, 40]


async def test_weights_that_come_between_sampling_and_scoring(
    connect: Connect, models: tuple[PreTrainedModel, ...], other_folder: Path
) -> None:
    engine, (server,) = await connect(on_update="in_place")
    log, scored = server.model.faults.log, asyncio.Event()
    whole_score = server.model.engine.score

    async def late_score(*args: Any, **options: Any) -> Any:
        if not scored.is_set():
            scored.set()
            await until(lambda: engine.get_version() == 1)
        return await whole_score(*args, **options)

    server.model.engine.score = late_score  # type: ignore[method-assign]
    answer = asyncio.ensure_future(engine.agenerate(ask()))
    await scored.wait()
    await engine.update_weights(WeightUpdate(version=1, method="disk", path=other_folder))
    response = await answer
    assert_letters(response)
    assert_logprobs(models[1], response)
    assert set(response.output_versions) == {1}
    budgets = [b["sampling_params"]["max_new_tokens"] for kind, b in log if kind == "generate"]
    assert budgets == [40, 0, 40, 0]


async def test_a_server_that_dies_in_the_middle_of_an_answer(
    connect: Connect, models: tuple[PreTrainedModel, ...]
) -> None:
    engine, servers = await connect(count=2)
    gates = [Gate(server.model, num_steps=5) for server in servers]
    answer = asyncio.ensure_future(engine.agenerate(ask()))
    await until(lambda: any(gate.is_reached.is_set() for gate in gates))
    await servers[gates[1].is_reached.is_set()].kill()
    for gate in gates:
        gate.may_go.set()
    response = await answer
    assert_letters(response)
    assert_logprobs(models[0], response)


async def test_json_answers_of_an_agent_come_from_a_server(
    tiny_model_dir: Path, tokenizer: Any
) -> None:
    """The whole way: response_format, the server's grammar, and the text without its end."""
    served = ServedModel(tiny_model_dir, max_batch_size=8, max_seq_len=400)
    server = await LiveServer(sglang_app(served, grammar_backend="xgrammar")).start()
    engine = await asyncio.to_thread(lambda: RemoteEngine(SGLang(), [server.address]))
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 999}},
        "required": ["x"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    client = ArealOpenAI(engine, tokenizer)
    completion = await client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "a number"}],
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )
    assert json.loads(completion.choices[0].message.content).keys() == {"x"}
    assert completion.choices[0].finish_reason == "stop"
    assert [json.loads(each["json_schema"]) for each in samplings(server)] == [schema]
    await engine.close()
    await server.close()


class Gate:
    """Holds a server's model before its next step, once it has made so many."""

    def __init__(self, served: ServedModel, *, num_steps: int) -> None:
        self.is_reached, self.may_go = threading.Event(), threading.Event()
        self._num_left = num_steps
        served.engine._decoder._model.register_forward_pre_hook(self._before_step)

    def _before_step(self, module: Any, inputs: Any) -> None:
        self._num_left -= 1
        if self._num_left == -1:
            self.is_reached.set()
            assert self.may_go.wait(60.0)
