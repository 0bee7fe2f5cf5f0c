from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.config import load_config
from agent_rl.engine.local import LocalEngine
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import EngineError, EpisodeError, RequestError, WrongTypeError, boundary
from agent_rl.gateway.server import Gateway
from agent_rl.rollout.executor import RolloutEngine
from agent_rl.train.trainer import PPOTrainer


def test_foreign_errors_carry_their_owner_and_cause() -> None:
    with (
        pytest.raises(EpisodeError, match="agent raised KeyError: 'x'") as caught,
        boundary("agent"),
    ):
        {}["x"]
    assert caught.value.boundary == "agent"
    assert isinstance(caught.value.__cause__, KeyError)


def test_our_own_errors_pass_unchanged() -> None:
    with pytest.raises(EngineError, match="down"), boundary("agent"):
        raise EngineError("down")
    with pytest.raises(RequestError), boundary("agent"):
        raise RequestError("no", param="n")


@pytest.mark.parametrize("signal", [KeyboardInterrupt, asyncio.CancelledError])
def test_signals_to_stop_are_no_failures(signal: type[BaseException]) -> None:
    with pytest.raises(signal), boundary("agent"):
        raise signal


def test_system_exit_in_an_agent_is_a_failure_of_the_agent() -> None:
    """Case B195."""
    with pytest.raises(EpisodeError, match="SystemExit"), boundary("agent"):
        raise SystemExit(1)


WRONG = [
    (lambda t, e: ArealOpenAI(e, "./model"), r"AutoTokenizer.from_pretrained\('./model'\)"),
    (lambda t, e: ArealOpenAI(e, Path("m")), r"the tokenizer is the PosixPath .*pretrained\('m'\)"),
    (lambda t, e: ArealOpenAI(t, e), "ArealOpenAI: the engine must have the methods of Inference"),
    (lambda t, e: ArealOpenAI("./model", t), "the str './model' is none"),
    (lambda t, e: Gateway(None, t), "Gateway: the engine must have .* None is none"),
    (lambda t, e: Gateway(e, t, {"port": 0}), r"needs a GatewayConfig, not the dict .*\*\*"),
    (lambda t, e: LocalEngine(None), "a transformers model or its folder, not None"),
    (lambda t, e: LocalEngine("./model", "./model"), "the tokenizer is the str './model'"),
    (lambda t, e: ScriptedEngine("four"), r"a list of replies: \['four'\]"),
    (lambda t, e: ScriptedEngine(["four"], tokenizer="./model"), "the tokenizer is the str"),
    (lambda t, e: Gateway(e, None), "the tokenizer is None; load one"),
    (lambda t, e: RolloutEngine(None), "RolloutEngine: the engine must have"),
    (lambda t, e: RolloutEngine(e, {"group_size": 2}), r"needs a RolloutConfig.*RolloutConfig\("),
    (lambda t, e: RolloutEngine(e, tokenizer="./model"), "the tokenizer is the str './model'"),
    (lambda t, e: load_config(None, "seed=1"), r"a list of key=value, \['seed=1'\]"),
    (lambda t, e: load_config({"seed": 1}), r"a path or None, not the dict .*PPOConfig\(\*\*"),
    (lambda t, e: PPOTrainer({"seed": 1}, [{}]), "PPOTrainer needs a PPOConfig, not the dict"),
    (lambda t, e: PPOTrainer("ppo.yaml", [{}]), "not the str 'ppo.yaml'; make one: load_config"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_arguments_of_the_wrong_type_say_what_is_needed(call, message, tokenizer) -> None:
    with pytest.raises(WrongTypeError, match=message):
        call(tokenizer, ScriptedEngine(["four"], tokenizer=tokenizer))
