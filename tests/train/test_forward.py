"""The packed path through a model gives the log-probs and gradients of the separate rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_batches import tiny_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    StableLmConfig,
)

from agent_rl.errors import ConfigError
from agent_rl.train import forward
from agent_rl.train.batch import Batch, micro_batches
from agent_rl.types import TensorDict


def llama() -> Any:
    return tiny_model(torch.float32).eval()


def gpt2() -> Any:
    """Learned absolute positions."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4, n_positions=32)
    return GPT2LMHeadModel(config).eval()


SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 32,
}


def made_of(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float().eval()


def opt() -> Any:
    """Its layers call dropout as a function."""
    sizes = SIZES | {"ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 32}
    return made_of(OPTConfig(**sizes, dropout=0.5))


def mixtral() -> Any:
    """Its router draws noise while it is in training mode."""
    sizes = SIZES | {"num_local_experts": 4, "router_jitter_noise": 0.5}
    return made_of(MixtralConfig(**sizes))


def phi() -> Any:
    """Its output layer has a bias."""
    model = made_of(PhiConfig(**SIZES))
    torch.nn.init.normal_(model.lm_head.bias)
    return model


ROWS = [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 9, 9], [7, 7]]


def trajectory(side: str) -> TensorDict:
    """Rows of 2 to 9 tokens, padded on one side with a real token id."""
    width = max(map(len, ROWS))
    ids = torch.full((len(ROWS), width), 11)
    attention = torch.zeros(len(ROWS), width, dtype=torch.bool)
    for i, row in enumerate(ROWS):
        where = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, where] = torch.tensor(row)
        attention[i, where] = True
    mask = attention.clone()
    mask[torch.arange(len(ROWS)), attention.int().argmax(1)] = False
    rewards = torch.zeros(len(ROWS))
    return {"input_ids": ids, "attention_mask": attention, "loss_mask": mask, "rewards": rewards}


def alone(model: Any) -> torch.Tensor:
    """Log-probs of each row run by itself, packed; 0 at the first token."""
    result = []
    for row in ROWS:
        ids = torch.tensor(row)
        logits = model(input_ids=ids[None]).logits[0, :-1]
        result += [torch.zeros(1), logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]]
    return torch.cat(result)


@pytest.mark.parametrize("make", [llama, gpt2, opt, mixtral, phi])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("share_prefixes", [True, False])
def test_layouts_agree_with_single_rows(make: Any, side: str, share_prefixes: bool) -> None:
    """Case B123: left-, right-padded, packed and as a tree: the log-probs of the single row."""
    model = make()
    batch = Batch.from_trajectories([trajectory(side)])
    expected = alone(model)
    weights = torch.linspace(-1.0, 1.0, batch.num_tokens) * batch.loss_mask
    (expected * weights).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    got = torch.zeros(batch.num_tokens)
    with forward.segment_attention(model):
        for micro in micro_batches(
            batch, range(len(ROWS)), max_tokens=100, share_prefixes=share_prefixes
        ):
            logprobs, _ = forward.predicted_logprobs(model, micro, 1.0)
            got[micro.tokens] = logprobs.detach()[micro.slots]
            (logprobs[micro.slots] * weights[micro.tokens]).sum().backward()
    torch.testing.assert_close(got, expected.detach(), atol=1e-5, rtol=0.0)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)


def test_attention_is_put_back() -> None:
    model = llama()
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="inside"), forward.segment_attention(model):
        assert model.config._attn_implementation != before
        raise RuntimeError("inside")
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("make", [llama, gpt2, opt, mixtral])
def test_recomputed_layers_change_nothing(make: Any) -> None:
    """Also for a model with dropout or noise, which are never active."""
    gradients = []
    for recompute_layers in (False, True):
        model = make()
        batch = Batch.from_trajectories([trajectory("right")])
        with forward.segment_attention(model, recompute_layers=recompute_layers):
            (micro,) = micro_batches(batch, range(4), max_tokens=100, share_prefixes=True)
            logprobs, _ = forward.predicted_logprobs(model, micro, 1.0)
            logprobs.sum().backward()
        assert all("forward" not in vars(part) for part in model.modules())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1])


def one_logprob(temperature: float) -> float:
    """Logits 2 and 0, target 0."""
    logprobs, _ = forward.token_logprobs(
        torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0]]), None, torch.tensor([0]), temperature
    )
    return float(logprobs)


def test_temperature_divides_the_logits() -> None:
    """Cases B56, B57: T 0.5 gives -0.018150; neither -0.126928 nor its double."""
    assert one_logprob(0.5) == pytest.approx(-0.018150, abs=1e-6)
    assert one_logprob(1.0) == pytest.approx(-0.126928, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.7, torch.tensor([0.5, 0.7, 1.0, 2.0, 1.5])])
@pytest.mark.parametrize("kept_elements", [0, 1 << 26])
@pytest.mark.parametrize("chunk_elements", [1, 7 * 3, 1 << 25])
def test_chunked_logprobs_and_entropy(
    chunk_elements: int,
    kept_elements: int,
    temperature: float | torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against log_softmax by autograd, gradients through both outputs, kept or made again."""
    monkeypatch.setattr(forward, "_CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(forward, "_KEPT_ELEMENTS", kept_elements)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 4, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(7, 4, dtype=torch.float64, generator=generator).requires_grad_()
    bias = torch.randn(7, dtype=torch.float64, generator=generator).requires_grad_()
    targets = torch.tensor([0, 6, 3, 3, 1])
    coefficients = torch.randn(2, 5, dtype=torch.float64, generator=generator)
    divisor = temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature
    every = ((hidden @ weight.T + bias) / divisor).log_softmax(-1)
    expected = every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
    got = forward.token_logprobs(hidden, weight, bias, targets, temperature)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)

    def gradients(pair: tuple[torch.Tensor, torch.Tensor]) -> Any:
        total = (coefficients[0] * pair[0] + coefficients[1] * pair[1]).sum()
        return torch.autograd.grad(total, (hidden, weight, bias), retain_graph=True)

    for ours, theirs in zip(gradients(got), gradients(expected), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_several_targets_of_one_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target and two choices, one of them the target again: values, gradients, entropies."""
    monkeypatch.setattr(forward, "_CHUNK_ELEMENTS", 14)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 4, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(7, 4, dtype=torch.float64, generator=generator).requires_grad_()
    targets = torch.tensor([[0, 1, 2], [6, 6, 3], [3, 0, 1], [3, 4, 5], [1, 2, 3]])
    factors = torch.randn(5, 3, dtype=torch.float64, generator=generator)
    expected = (hidden @ weight.T / 0.7).log_softmax(-1).gather(1, targets)
    got, _ = forward.token_logprobs(hidden, weight, None, targets, 0.7)
    torch.testing.assert_close(got, expected)
    gradients = torch.autograd.grad((got * factors).sum(), (hidden, weight))
    theirs = torch.autograd.grad((expected * factors).sum(), (hidden, weight))
    for ours, other in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(ours, other)


def test_model_that_does_more_than_a_linear_head_is_refused() -> None:
    model = llama()
    plain = model.forward

    def capped(**kwargs: Any) -> Any:
        output = plain(**kwargs)
        output.logits = torch.tanh(output.logits * 30.0)
        return output

    model.forward = capped
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        forward.check_model(model)
    for make in (llama, gpt2, opt, mixtral, phi):
        forward.check_model(make())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]), "Lfm2ForCausalLM"),
        (BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=4), "BloomForCausalLM"),
        (Gemma2Config(**SIZES, head_dim=4), "Gemma2Attention is not supported"),
        (StableLmConfig(**SIZES), "StableLmAttention is not supported"),
    ],
    ids=["convolution", "own attention", "capped scores", "plans are dropped"],
)
def test_model_that_sees_more_than_the_path_to_the_root_is_refused(
    config: PreTrainedConfig, message: str
) -> None:
    """As they are made, when all tokens are about as likely: what is missed is small then."""
    with pytest.raises(ConfigError, match=message):
        forward.check_model(made_of(config))
