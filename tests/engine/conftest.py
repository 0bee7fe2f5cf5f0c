"""A tiny random Llama and the plain forward pass that every engine result is compared with."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agent_rl.engine.local import LocalEngine
from agent_rl.types import ModelResponse


def tiny_llama(seed: int) -> LlamaForCausalLM:
    """97 tokens, end-of-turn id 2, two layers."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64}
    depth = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **depth, **ends, max_position_embeddings=512))
    with torch.no_grad():  # as initialised, all next tokens would be about equally likely
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model.eval()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama(0)


@pytest.fixture
def other_model() -> LlamaForCausalLM:
    """The same architecture with other weights: what training makes of ``model``."""
    return tiny_llama(1)


@pytest_asyncio.fixture
async def engine(model: LlamaForCausalLM) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(model, max_batch_size=8, max_seq_len=400)
    yield engine
    await engine.close()


@pytest.fixture
def assert_fresh() -> Callable[..., None]:
    """Log-probs from position ``start`` on equal those of one plain forward pass."""

    @torch.no_grad()
    def check(
        model: LlamaForCausalLM, response: ModelResponse, temperature: float = 1.0, start: int = 0
    ) -> None:
        ids = torch.tensor([[*response.input_tokens, *response.output_tokens]])
        logits = model(input_ids=ids).logits[0, len(response.input_tokens) - 1 : -1]
        chosen = torch.tensor(response.output_tokens)[:, None]
        expected = (logits.float() / temperature).log_softmax(-1).gather(1, chosen)[:, 0]
        difference = torch.tensor(response.output_logprobs) - expected
        assert len(difference[start:]) > 0
        assert difference[start:].abs().max() < 1e-4

    return check


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tiny_llama`` with a tokenizer: id 3 is "a0", id 4 "b0", ... Or, for tests of a real server,
    the model that it serves."""
    if "AGENT_RL_SERVED_MODEL" in os.environ:
        return Path(os.environ["AGENT_RL_SERVED_MODEL"])
    folder = tmp_path_factory.mktemp("served") / "model"
    words = [f"{chr(97 + n % 26)}{n // 26}" for n in range(94)]
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", *words])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.decoder = decoders.ByteFallback()  # llguidance asks for one that it knows
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="</s>", bos_token="<s>", pad_token="<pad>"
    )
    tiny_llama(0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
