"""Images go to a server as they came, one for each placeholder of the prompt.

SGLang keeps the other ids of such a prompt as they are. No model that reads images is at hand here:
the test server makes more placeholders of one, as the real one does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from live_server import LiveServer
from served_model import ServedModel
from sglang_server import IMAGE_ID, sglang_app

from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.loading import load_model
from agent_rl.engine.remote import RemoteEngine
from agent_rl.engine.sglang import SGLang
from agent_rl.errors import RequestError
from agent_rl.types import GenerationConfig, ModelRequest, ModelResponse

IMAGES = ("data:image/png;base64,AAA", "data:image/png;base64,B")


@pytest_asyncio.fixture
async def server(served_folder: Path) -> AsyncIterator[LiveServer]:
    served = ServedModel(served_folder, max_batch_size=8, max_seq_len=200)
    live = await LiveServer(sglang_app(served, reads_images=True)).start()
    yield live
    await live.close()


@pytest_asyncio.fixture
async def engine(server: LiveServer) -> AsyncIterator[RemoteEngine]:
    made = await asyncio.to_thread(lambda: RemoteEngine(SGLang(), [server.address]))
    yield made
    await made.close()


def ask(**gconfig: object) -> ModelRequest:
    """Two placeholders between the words."""
    config = GenerationConfig(**{"max_new_tokens": 12, "greedy": True, **gconfig})
    ids = [5, IMAGE_ID, 6, IMAGE_ID, 7]
    return ModelRequest(rid="r", input_ids=ids, gconfig=config, image_data=IMAGES)


def sent_images(server: LiveServer) -> list[list[str]]:
    return [body["image_data"] for kind, body in server.model.faults.log if kind == "generate"]


def assert_seen(folder: Path, response: ModelResponse) -> None:
    """Log-probs after three tokens of the first image and one of the second."""
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    prompt = [5, *[IMAGE_ID] * 3, 6, IMAGE_ID, 7]
    ids = torch.tensor([[*prompt, *response.output_tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    chosen = torch.tensor(response.output_tokens)[:, None]
    expected = logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()
    assert response.output_logprobs == pytest.approx(expected, abs=1e-4)


async def test_each_image_stands_where_its_placeholder_is(
    server: LiveServer, engine: RemoteEngine, served_folder: Path
) -> None:
    assert "image_data" in engine.supported
    response = await engine.agenerate(ask())
    assert response.input_tokens == (5, IMAGE_ID, 6, IMAGE_ID, 7)
    assert sent_images(server) == [list(IMAGES)]
    assert response.num_cached_tokens is None  # it counts tokens that our prompt does not have
    assert_seen(served_folder, response)


async def test_an_interrupted_request_sends_its_images_again(
    server: LiveServer, engine: RemoteEngine, served_folder: Path
) -> None:
    stream = engine.astream(ask(max_new_tokens=60))
    items = [await anext(stream)]
    await server.model.engine.pause()
    before = len(sent_images(server))
    await engine.update_weights(WeightUpdate(version=1, method="disk", path=served_folder))
    items += [item async for item in stream]
    response = items[-1]
    assert isinstance(response, ModelResponse)
    assert len(sent_images(server)) - before == (1 in response.output_versions)
    assert all(images == list(IMAGES) for images in sent_images(server))
    assert_seen(served_folder, response)


async def test_images_without_placeholders_are_refused_by_the_server(
    engine: RemoteEngine,
) -> None:
    with pytest.raises(RequestError, match="0 placeholders for 2 images"):
        await engine.agenerate(ModelRequest(rid="r", input_ids=[5, 6], image_data=IMAGES))


async def test_a_grammar_with_images_is_refused(server: LiveServer, engine: RemoteEngine) -> None:
    with pytest.raises(RequestError, match="no grammar together with images"):
        await engine.agenerate(ask(grammar='start: "a0"\n'))
    assert sent_images(server) == []


async def test_a_model_without_eyes_offers_none(served_folder: Path) -> None:
    served = ServedModel(served_folder, max_batch_size=8, max_seq_len=200)
    blind = await LiveServer(sglang_app(served)).start()
    engine = await asyncio.to_thread(lambda: RemoteEngine(SGLang(), [blind.address]))
    assert "image_data" not in engine.supported
    await engine.close()
    await blind.close()
