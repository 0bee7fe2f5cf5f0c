"""One interaction: alignment, lazily derived history, memory, tensors."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from fix_format import PROMPT, T2, Talk, answer_of, assistant, fix_format, tool, user

from agent_rl.record.export import export_interactions
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.types import ModelResponse, StopReason


def response(prompt: list[int], output: list[int], **fields: object) -> ModelResponse:
    count = len(output)
    return ModelResponse(
        input_tokens=tuple(prompt),
        output_tokens=tuple(output),
        output_logprobs=tuple(-0.5 for _ in range(count)),
        output_versions=tuple(range(count)),
        stop_reason="stop",
        **fields,
    )


def test_sampled_ids_are_exported_as_sampled() -> None:
    """case B1: 12 ids, the encoder's 22 nowhere, the tokenizer never sees the output."""
    talk = Talk("hf")
    talk.say("c1", [user("hi")], [20, 21, 2])
    (row,) = export_interactions(talk.cache, "individual").values()
    tensors = row.to_tensor_dict()
    assert tensors["input_ids"].tolist() == [[*PROMPT, 20, 21, 2]]
    assert tensors["loss_mask"].tolist() == [[0] * 9 + [1] * 3]
    assert tensors["logprobs"][0].tolist() == pytest.approx([0.0] * 9 + [-0.1, -0.2, -0.3])
    assert tensors["versions"].tolist() == [[-1] * 9 + [0] * 3]
    assert tensors["attention_mask"].tolist() == [[True] * 12]
    assert not any("ab" in text for text in talk.fmt.tokenizer.encoded)


def test_tensors_have_the_documented_dtypes_and_shapes() -> None:
    one = InteractionWithTokenLogpReward(
        interaction_id="c", model_response=response([1, 2], [3, 4, 5]), reward=1.0
    )
    tensors = one.to_tensor_dict()
    assert {key: (value.dtype, tuple(value.shape)) for key, value in tensors.items()} == {
        "input_ids": (torch.int32, (1, 5)),
        "attention_mask": (torch.bool, (1, 5)),
        "loss_mask": (torch.int32, (1, 5)),
        "logprobs": (torch.float32, (1, 5)),
        "versions": (torch.int32, (1, 5)),
        "temperatures": (torch.float32, (1, 5)),
        "rewards": (torch.float32, (1,)),
        "is_truncated": (torch.bool, (1,)),
    }
    assert tensors["versions"].tolist() == [[-1, -1, 0, 1, 2]]
    assert tensors["rewards"].tolist() == [1.0]


def test_normalised_reward_keeps_the_original_beside_it() -> None:
    """case B79: the raw reward is kept, also when it is asked for twice."""
    one = InteractionWithTokenLogpReward(interaction_id="c", model_response=response([1], [2]))
    assert one.to_tensor_dict()["rewards"].tolist() == [0.0]
    one.reward, one.original_reward = -1.0, 0.25
    for _ in range(2):
        tensors = one.to_tensor_dict()
        assert tensors["rewards"].tolist() == [-1.0]
        assert tensors["original_rewards"].tolist() == [0.25]


def test_model_response_is_put_together_again() -> None:
    talk = Talk()
    top = (((20, -0.1), (21, -2.0)), ((2, -0.2),))
    talk.say("c1", [user("hi")], [22, 2])
    plan = talk.plan([user("hi"), assistant("ab"), user("yo")])
    sent = answer_of(
        plan,
        [20, 2],
        output_logprobs=[-0.123456789, -5e-324],
        output_versions=[3, 4],
        stop_reason="length",
        latency_s=1.5,
        ttft_s=0.5,
        output_top_logprobs=top,
    )
    one = plan.interaction(interaction_id="c2", model_response=sent, output_message_list=[])
    assert one.model_response == sent
    assert one.stop_reason == "length"


@pytest.mark.parametrize(
    ("reason", "is_truncated"),
    [("stop", False), ("tool_calls", False), ("length", True), ("abort", True)],
)
def test_a_row_says_whether_a_limit_ended_it(reason: StopReason, is_truncated: bool) -> None:
    """The last token does not: a stop string ends an answer in front of any end token."""
    sampled = replace(response([1], [5, 6]), stop_reason=reason)
    one = InteractionWithTokenLogpReward(interaction_id="c", model_response=sampled)
    assert one.to_tensor_dict()["is_truncated"].tolist() == [is_truncated]


def test_forced_tokens_are_context_in_the_row() -> None:
    """Their probability was 1 whatever the weights; ids and log-probs stay in the record."""
    sampled = response([1], [5, 6, 7], output_forced=(True, False, True))
    one = InteractionWithTokenLogpReward(
        interaction_id="c", model_response=sampled, temperature=0.5
    )
    tensors = one.to_tensor_dict()
    assert tensors["input_ids"].tolist() == [[1, 5, 6, 7]]
    assert tensors["temperatures"].tolist() == [[1.0, 1.0, 0.5, 1.0]]
    assert tensors["loss_mask"].tolist() == [[0, 0, 1, 0]]
    assert tensors["logprobs"].tolist() == [[0.0, 0.0, -0.5, 0.0]]
    assert tensors["versions"].tolist() == [[-1, -1, 1, -1]]
    assert one.model_response == sampled
    plain = InteractionWithTokenLogpReward(interaction_id="d", model_response=response([1], [5]))
    assert plain.model_response is not None and plain.model_response.output_forced is None


def test_forced_tokens_of_an_earlier_turn_stay_context() -> None:
    first = InteractionWithTokenLogpReward(
        interaction_id="a", model_response=response([1], [5, 6], output_forced=(False, True))
    )
    second = InteractionWithTokenLogpReward(
        interaction_id="b",
        parent=first,
        chat_template_type="concat",
        model_response=response([1, 5, 6, 9], [7]),
    )
    assert second.to_tensor_dict()["loss_mask"].tolist() == [[0, 1, 0, 0, 1]]


def test_messages_are_derived_along_the_history() -> None:
    """The answer stands as the agent replayed it at that time, the rest is not copied."""
    talk = Talk()
    talk.say("c1", [user("hi")], [20, 2])
    second = [user("hi"), {"role": "assistant", "content": "a", "name": "me"}, user("yo")]
    talk.say("c2", second, [21, 2])
    third = [*second, assistant("b"), user("hi")]
    c3 = talk.say("c3", third, [24, 2])
    assert c3.messages == third
    assert c3.output_message_list == [assistant("yo")]
    assert c3.num_messages == 5


def test_own_output_in_hf_mode_and_the_path_in_concat_mode() -> None:
    for style, ones in (("hf", 2), ("concat", 4)):
        talk = Talk(style)
        talk.say("c1", [user("hi")], [20, 2])
        c2 = talk.say("c2", [user("hi"), assistant("a"), user("yo")], [24, 2])
        assert sum(c2.to_row().loss_mask) == ones


def test_parent_given_by_hand_must_begin_the_prompt() -> None:
    parent = InteractionWithTokenLogpReward(
        interaction_id="c1", model_response=response([1, 2], [3]), messages=[user("hi")]
    )
    child = InteractionWithTokenLogpReward(
        interaction_id="c2", model_response=response([1, 2, 3, 4], [5]), parent=parent
    )
    assert child.tokens == (1, 2, 3, 4, 5)
    with pytest.raises(ValueError, match="differ at index 2"):
        InteractionWithTokenLogpReward(
            interaction_id="c3", model_response=response([1, 2, 9, 4], [5]), parent=parent
        )


def test_call_without_ids_is_no_row() -> None:
    """A call to an external API, or one that never finished."""
    one = InteractionWithTokenLogpReward(interaction_id="c", messages=[user("hi")])
    assert not one.is_complete and one.model_response is None
    with pytest.raises(ValueError, match="no token ids"):
        one.to_tensor_dict()


@pytest.mark.parametrize("stop_reason", ["stop", "abort"])
def test_empty_output(stop_reason: str) -> None:
    """case B45: a row with nothing to train, in a batch that is otherwise unchanged."""
    talk = Talk("hf")
    talk.say("c1", [user("hi")], [], assistant(""), stop_reason=stop_reason)
    (row,) = export_interactions(talk.cache, "individual").values()
    tensors = row.to_tensor_dict()
    assert tensors["input_ids"].tolist() == [list(PROMPT)]
    assert tensors["loss_mask"].sum().item() == 0


def kept_bytes(turns: int) -> list[int]:
    """Bytes that belong to each interaction alone: its ids and its messages' list."""
    talk = Talk()
    messages = [user("hi")]
    for turn in range(turns):
        talk.say(f"c{turn}", messages, [20] * 39 + [2])
        messages = [*messages, assistant("a" * 39), user("yo")]
    return [
        sys.getsizeof(one.path.own)
        + sys.getsizeof(one.path.logprobs)
        + sys.getsizeof(one.path.versions)
        + sys.getsizeof(one._new_messages)
        for one in talk.cache.values()
    ]


def test_memory_is_that_of_the_new_tokens() -> None:
    sizes = kept_bytes(60)
    assert len(set(sizes[1:])) == 1
    assert sizes[0] < 2000 and sizes[1] < 2000


def test_memory_is_that_of_the_new_tokens_where_reasoning_is_stripped() -> None:
    """Every turn is a branch; it shares the ids up to where the turn before was rewritten."""
    talk = Talk("hf", fix_format(T2))
    thought = assistant("b", reasoning_content="a")
    messages = [user("hi")]
    for turn in range(20):
        talk.say(f"c{turn}", messages, [8, 20, 9, 21, 2], thought)
        messages = [*messages, thought, user("yo")]
    branches = list(talk.cache.values())[1:]
    assert {len(one.path.own) for one in branches} == {17}
    assert all(one.parent is None and one.fork_reason for one in branches)
    last = branches[-1]
    assert last.tokens[:-5] == fix_format(T2).render(last.messages)
    assert sum(last.as_row(0).to_row().loss_mask) == 5


def test_only_recent_leaves_hold_their_ids_as_a_tuple() -> None:
    talk = Talk()
    messages = [user("hi")]
    for turn in range(3):
        talk.say(f"c{turn}", messages, [20, 2])
        messages = [*messages, assistant("a"), user("yo")]
    held = [one.path.whole() is one.path.whole() for one in talk.cache.values()]
    assert held == [False, False, True]
    for number in range(20):
        talk.say(f"d{number}", [user(f"q{number}")], [20, 2])
    assert talk.cache["c2"].path.whole() is not talk.cache["c2"].path.whole()
    last = talk.say("c3", messages, [20, 2])
    assert last.parent is talk.cache["c2"]


def test_tools_are_kept_once() -> None:
    talk = Talk()
    c1 = talk.say("c1", [user("hi")], [20, 2], tools=[tool("f")])
    c2 = talk.say("c2", [user("hi"), assistant("a"), user("yo")], [24, 2], tools=[tool("f")])
    assert c2.tools is c1.tools


def test_fields() -> None:
    talk = Talk(fmt=fix_format())
    one = talk.say("c1/1", [user("hi")], [20, 2], tools=[tool("f")], temperature=0.5)
    assert (one.request_id, one.temperature, one.is_leaf) == ("c1", 0.5, True)
    assert one.tools == [tool("f")]
    assert one.num_tokens == len(one.tokens)
    assert one.metadata == {} and one.completion is None and one.response is None
    assert "c1/1" in repr(one)


def test_each_turn_of_a_row_keeps_its_own_temperature() -> None:
    """Case B56: the trainer recomputes under the temperature that each turn was sampled with."""
    first = InteractionWithTokenLogpReward(
        interaction_id="a",
        messages=[user("hi")],
        output_message_list=[assistant("a")],
        model_response=response([1, 5], [20, 2]),
        temperature=0.5,
    )
    second = InteractionWithTokenLogpReward(
        interaction_id="b",
        messages=[*first.messages, *first.output_message_list, user("more")],
        output_message_list=[assistant("b")],
        model_response=response([1, 5, 20, 2, 7], [21]),
        parent=first,
        chat_template_type="concat",
        temperature=2.0,
    )
    temperatures = second.to_tensor_dict()["temperatures"]
    assert temperatures.tolist() == [[1.0, 1.0, 0.5, 0.5, 1.0, 2.0]]
