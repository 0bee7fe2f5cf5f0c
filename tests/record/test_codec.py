from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from fix_format import Talk, assistant, user

from agent_rl.errors import JournalError
from agent_rl.record.cache import InteractionCache
from agent_rl.record.codec import (
    decode_interaction,
    decode_trajectory,
    encode_interaction,
    encode_trajectory,
)
from agent_rl.record.export import export_interactions
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.types import ModelResponse, RolloutGroup


def through_json(encoded: dict[str, Any]) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not strict JSON")

    return json.loads(json.dumps(encoded, allow_nan=False), parse_constant=refuse)


def conversation() -> Talk:
    """c1 -> c2 -> c3, and c4 from c1; "a" is 20, the end of a turn 2."""
    talk = Talk()
    first = [user("hi")]
    talk.say("c1", first, [20, 2], temperature=0.5)
    second = [*first, assistant("a"), user("yo")]
    talk.say("c2", second, [21, 2], output_versions=[3, 4], latency_s=0.25, num_cached_tokens=3)
    talk.say("c3", [*second, assistant("b"), user("hi")], [22, 2], output_forced=(False, True))
    talk.say("c4", [*first, assistant("a"), user("hi")], [20, 20], stop_reason="length")
    talk.cache.set_reward("c3", 0.1)
    return talk


def same_rows(one: InteractionWithTokenLogpReward, other: InteractionWithTokenLogpReward) -> None:
    first, second = one.to_tensor_dict(), other.to_tensor_dict()
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key


@pytest.mark.parametrize("is_linked", [False, True])
def test_each_interaction_comes_back_the_same(is_linked: bool) -> None:
    talk = conversation()
    decoded: dict[str, InteractionWithTokenLogpReward] = {}
    for name, interaction in talk.cache.items():
        known = decoded if is_linked else {}
        copy = decode_interaction(through_json(encode_interaction(interaction, known)), decoded)
        assert copy.model_response == interaction.model_response
        assert copy.messages == interaction.messages
        assert copy.output_message_list == interaction.output_message_list
        assert (copy.reward, copy.temperature) == (interaction.reward, interaction.temperature)
        assert (copy.is_leaf, copy.created_at) == (interaction.is_leaf, interaction.created_at)
        assert copy.chat_template_type == interaction.chat_template_type
        parent = interaction.parent
        assert copy.parent is (None if parent is None else decoded[parent.interaction_id])
        same_rows(copy, interaction)
        decoded[name] = copy


def test_against_known_interactions_only_what_is_new_is_written() -> None:
    interaction = conversation().cache["c3"]
    encoded = encode_interaction(interaction, {"c2"})
    assert encoded["messages"] == [assistant("b"), user("hi")]
    assert len(encoded["path"]) == 1
    assert encoded["path"][0]["output"] == [22, 2]
    assert len(encode_interaction(interaction)["path"]) == 3


def test_an_unknown_base_is_an_error_that_names_it() -> None:
    encoded = encode_interaction(conversation().cache["c3"], {"c2"})
    with pytest.raises(JournalError, match="encoded against 'c2', which is not known"):
        decode_interaction(encoded)


def test_a_decoded_record_exports_the_same_rows() -> None:
    talk = conversation()
    again = InteractionCache()
    for interaction in talk.cache.values():
        again.append(
            decode_interaction(through_json(encode_interaction(interaction, again)), again)
        )
    rows, copies = (export_interactions(c, "concat") for c in (talk.cache, again))
    assert list(rows) == list(copies) == ["c3", "c4"]
    for name in rows:
        same_rows(copies[name], rows[name])
    assert copies["c4"].to_row().loss_mask.tolist()[-2:] == [1, 1]
    assert sum(copies["c4"].to_row().loss_mask) == 2, "c1 is trained by the row of c3"


def test_exported_rows_keep_what_they_train() -> None:
    rows = export_interactions(conversation().cache, "concat")
    for row in rows.values():
        copy = decode_interaction(through_json(encode_interaction(row)))
        same_rows(copy, row)
        assert copy.trained_from == row.trained_from


def test_every_bit_of_a_log_prob_is_kept() -> None:
    logprobs = (-1 / 3, -5e-324, -1e308)
    response = ModelResponse(
        input_tokens=(1,),
        output_tokens=(2, 3, 4),
        output_logprobs=logprobs,
        output_versions=(0, 0, 1),
        stop_reason="length",
        output_top_logprobs=(((2, -0.5), (7, -math.inf)), (), ((4, -0.1),)),
    )
    interaction = InteractionWithTokenLogpReward(interaction_id="c", model_response=response)
    copy = decode_interaction(through_json(encode_interaction(interaction)))
    assert copy.model_response == response


def test_a_call_without_ids_stays_one() -> None:
    interaction = InteractionWithTokenLogpReward(
        interaction_id="c", messages=[user("hi")], completion={"id": "c"}, reward=1.0
    )
    copy = decode_interaction(through_json(encode_interaction(interaction)))
    assert copy.model_response is None
    assert (copy.messages, copy.completion, copy.reward) == ([user("hi")], {"id": "c"}, 1.0)


@pytest.mark.parametrize(
    "change",
    [
        {"path": [{"shared": 1}]},
        {"path": None, "reward": "much"},
        {"stop_reason": "tired"},
        {"messages": None},
        {"trained_from": "x"},
    ],
)
def test_what_is_no_encoded_interaction_is_refused(change: dict[str, Any]) -> None:
    encoded = {**encode_interaction(conversation().cache["c1"]), **change}
    with pytest.raises(JournalError, match="no encoded interaction"):
        decode_interaction(encoded)
    with pytest.raises(JournalError, match="no encoded interaction"):
        decode_interaction({})


def bits(tensor: torch.Tensor) -> list[int]:
    flat = tensor.reshape(-1)
    return list(flat.view(torch.uint8).tolist()) if len(flat) else []


def test_a_trajectory_comes_back_bit_for_bit() -> None:
    trajectory: dict[str, Any] = {
        "input_ids": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        "attention_mask": torch.tensor([[True, True], [True, False]]),
        "logprobs": torch.tensor([[0.0, -1 / 3], [math.nan, -math.inf]]),
        "half": torch.tensor([1.0, 0.1], dtype=torch.bfloat16),
        "empty": torch.zeros(2, 0),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "rollout_group": RolloutGroup(row_counts=(1, 1), rewards=(0.1, None)),
        "names": ["a", "b"],
        "weight": 0.5,
    }
    copy = decode_trajectory(through_json(encode_trajectory(trajectory)))
    assert copy.keys() == trajectory.keys()
    for key, value in trajectory.items():
        if isinstance(value, torch.Tensor):
            found = copy[key]
            assert isinstance(found, torch.Tensor)
            assert (found.dtype, found.shape) == (value.dtype, value.shape)
            assert bits(found) == bits(value), key
        else:
            assert copy[key] == value


def test_a_trajectory_with_something_else_is_refused_by_key() -> None:
    with pytest.raises(JournalError, match="trajectory: extra cannot be written as JSON"):
        encode_trajectory({"extra": [object()]})
    with pytest.raises(JournalError, match="trajectory: z has the dtype complex64"):
        encode_trajectory({"z": torch.zeros(1, dtype=torch.complex64)})


@pytest.mark.parametrize(
    "value",
    [
        {"dtype": "int32", "shape": [2], "data": "AAAA"},
        {"dtype": "__import__", "shape": [0], "data": ""},
        {"dtype": "int32", "shape": [1], "data": "!!!!"},
        {"row_counts": [0], "rewards": [None]},
        {"other": 1},
        "text",
    ],
)
def test_what_is_no_encoded_trajectory_is_refused(value: Any) -> None:
    with pytest.raises(JournalError, match="no encoded trajectory"):
        decode_trajectory({"input_ids": value})
