"""The conversation tree: who is whose parent, and the ids that are sent."""

from __future__ import annotations

import pytest
from fix_format import PROMPT, Talk, assistant, user

from agent_rl.record.export import export_interactions


def test_second_turn_extends_the_sampled_ids() -> None:
    """case B2: 20, 21 stay as sampled although the encoder would merge them to 22."""
    talk = Talk()
    talk.say("c1", [user("hi")], [20, 21, 2])
    c2 = talk.say("c2", [user("hi"), assistant("ab"), user("yo")], [24, 2])
    sent = (*PROMPT, 20, 21, 2, 3, 1, 5, 3, 24, 2, 3, 1, 6, 3)
    assert c2.tokens == (*sent, 24, 2)
    assert c2.parent is talk.cache["c1"] and c2.fork_reason is None
    (row,) = export_interactions(talk.cache, "concat").values()
    tensors = row.to_tensor_dict()
    assert tensors["input_ids"].tolist() == [[*sent, 24, 2]]
    assert tensors["loss_mask"].tolist() == [[0] * 9 + [1] * 3 + [0] * 10 + [1] * 2]
    assert tensors["logprobs"][0, 9:12].tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert "ab" not in talk.fmt.encoded
