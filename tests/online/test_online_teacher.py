"""The teacher's log-probs: of the sampled ids as they are, behind the prompt with the hint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from agent_rl.api.session import Session
from agent_rl.engine.local import LocalEngine
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.online.hints import teacher_messages
from agent_rl.online.teacher import Teacher
from agent_rl.record.cache import InteractionCache
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.tokens.format import ChatFormat
from agent_rl.types import GenerationConfig, ModelRequest

MESSAGES = [{"role": "user", "content": "when?"}]


@pytest_asyncio.fixture
async def engine(tiny_model_dir: Path) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(tiny_model_dir, max_batch_size=2, max_seq_len=200)
    yield engine
    await engine.close()


async def answered(engine: LocalEngine, session: Session) -> InteractionWithTokenLogpReward:
    """Eight tokens at temperature 0.7, recorded."""
    plan = session.cache.plan(MESSAGES, None, session.format, "hf")
    gconfig = GenerationConfig(max_new_tokens=8, min_new_tokens=8, temperature=0.7, seed=3)
    request = ModelRequest(rid="r", input_ids=plan.input_ids, gconfig=gconfig)
    return plan.interaction(
        interaction_id="chatcmpl-1",
        model_response=await engine.agenerate(request),
        output_message_list=[{"role": "assistant", "content": "whatever the text is"}],
        temperature=0.7,
    )


def session_of(engine: object, tokenizer) -> Session:
    return Session(engine=engine, format=ChatFormat.of(tokenizer), cache=InteractionCache())


async def test_the_sampled_ids_are_scored_behind_the_prompt_with_the_hint(
    engine: LocalEngine, tokenizer
) -> None:
    """Case B1: no id of the answer is decoded and encoded again."""
    session = session_of(engine, tokenizer)
    interaction = await answered(engine, session)
    scores = await Teacher(engine, top_k=3).scores(session, interaction, "Give the date.")
    prompt = session.format.render(teacher_messages(MESSAGES, "Give the date."))
    sampled = list(interaction.path.output)
    assert len(sampled) == 8
    with torch.no_grad():
        logits = engine.model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1]
    expected = (logits / 0.7).log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(sampled)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(scores.logprobs), chosen, atol=1e-4)
    best = expected.topk(3).values
    found = torch.tensor([[value for _, value in place] for place in scores.top])
    assert torch.allclose(found, best, atol=1e-4)


async def test_a_hint_that_changes_nothing_scores_as_the_policy_did(
    engine: LocalEngine, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The distillation term is then 0 for every token: same weights, same temperature."""
    session = session_of(engine, tokenizer)
    interaction = await answered(engine, session)
    monkeypatch.setattr("agent_rl.online.teacher.teacher_messages", lambda messages, hint: messages)
    scores = await Teacher(engine).scores(session, interaction, "anything")
    assert scores.logprobs == pytest.approx(list(interaction.path.logprobs), abs=1e-4)
    assert scores.top is None


async def test_a_hint_that_does_not_fit_leaves_the_turn_without_teacher(
    engine: LocalEngine, tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    session = session_of(engine, tokenizer)
    interaction = await answered(engine, session)
    assert await Teacher(engine).scores(session, interaction, "long " * 300) is None
    assert "chatcmpl-1 has no teacher" in caplog.text


async def test_so_many_sequences_at_once(tokenizer) -> None:
    running, peak = 0, 0

    class Slow(ScriptedEngine):
        async def score(self, input_ids, num_scored, *, temperature=1.0):
            nonlocal running, peak
            running, peak = running + 1, max(peak, running + 1)
            for _ in range(3):
                await asyncio.sleep(0)
            running -= 1
            return await super().score(input_ids, num_scored, temperature=temperature)

    engine = Slow([[5, 6, 7]], repeat=True)
    session = session_of(engine, tokenizer)
    plan = session.cache.plan(MESSAGES, None, session.format, "hf")
    response = await engine.agenerate(ModelRequest(rid="r", input_ids=plan.input_ids))
    interaction = plan.interaction(
        interaction_id="chatcmpl-1", model_response=response, output_message_list=[]
    )
    teacher = Teacher(engine, max_concurrent=2)
    scores = await asyncio.gather(*(teacher.scores(session, interaction, "x") for _ in range(7)))
    assert [each.logprobs for each in scores] == [(-0.1, -0.2, -0.3)] * 7
    assert peak == 2
