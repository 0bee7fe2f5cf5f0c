"""Whole conversations over public families: what is trained is what was sampled, in both modes."""

from __future__ import annotations

from typing import Any

import pytest
from families import FAMILIES, family_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.errors import TokenError
from agent_rl.record.cache import InteractionCache
from agent_rl.record.export import export_interactions
from agent_rl.tokens.format import ChatFormat
from agent_rl.types import ModelResponse

TURNS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 250), max_size=6),  # random ids, hardly ever canonical
        st.sampled_from(["stop", "length"]),
        st.text(alphabet="ab \n🙂<", min_size=1, max_size=4),
    ),
    min_size=2,
    max_size=4,
)


def response_to(plan: Any, output: tuple[int, ...], stop_reason: Any) -> ModelResponse:
    return ModelResponse(
        input_tokens=plan.input_ids,
        output_tokens=output,
        output_logprobs=(-0.5,) * len(output),
        output_versions=(3,) * len(output),
        stop_reason=stop_reason,
    )


@pytest.mark.parametrize("mode", ["hf", "concat"])
@pytest.mark.parametrize("name", sorted(FAMILIES))
@settings(max_examples=4, deadline=None)
@given(turns=TURNS, has_pieces=st.booleans())
def test_a_conversation_keeps_its_sampled_ids(
    name: str, mode: Any, has_pieces: bool, turns: Any
) -> None:
    """Each prompt begins with its parent's ids, or a reason says why it has none."""
    fmt = ChatFormat.of(family_tokenizer(name, has_pieces=has_pieces))
    cache = InteractionCache()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    sampled: list[tuple[int, ...]] = []
    for index, (ids, stop_reason, text) in enumerate(turns):
        try:
            plan = cache.plan(messages, None, fmt, mode)
        except TokenError:
            break  # some templates refuse an empty answer
        if plan.parent is not None:
            assert plan.input_ids[: plan.parent.num_tokens] == plan.parent.tokens
        elif index:
            assert plan.fork_reason
        output = (*ids, *(fmt.stop_token_ids[:1] if stop_reason == "stop" else ()))
        sampled.append(output)
        said = fmt.parse(output, stop_reason=stop_reason, prompt_ids=plan.input_ids)
        answer: dict[str, Any] = {"role": "assistant", "content": said.content}
        if said.reasoning_content:
            answer["reasoning_content"] = said.reasoning_content
        cache.append(
            plan.interaction(
                interaction_id=f"c{index}",
                model_response=response_to(plan, output, stop_reason),
                output_message_list=[answer],
            )
        )
        messages = [*messages, answer, {"role": "user", "content": text}]
    cache.set_last_reward(1.0)
    rows = export_interactions(cache, "individual" if mode == "hf" else "concat").values()
    trained = [
        token_id
        for row in rows
        for token_id, mask in zip(row.to_row().token_ids, row.to_row().loss_mask, strict=True)
        if mask
    ]
    assert sorted(trained) == sorted(token_id for output in sampled for token_id in output)
