from __future__ import annotations

import pytest
import torch

from agent_rl.record.rows import pad_concat


def test_rows_of_widths_three_and_five_become_five_wide() -> None:
    narrow = {
        "input_ids": torch.tensor([[1, 2, 3]], dtype=torch.int32),
        "attention_mask": torch.ones(1, 3, dtype=torch.bool),
        "rewards": torch.tensor([0.5]),
        "names": ["a"],
        "kept": 7.0,
    }
    wide = {
        "input_ids": torch.tensor([[4, 5, 6, 7, 8]], dtype=torch.int32),
        "attention_mask": torch.ones(1, 5, dtype=torch.bool),
        "rewards": torch.tensor([1.5]),
        "names": ["b"],
        "kept": 8.0,
    }
    joined = pad_concat([narrow, wide])
    assert joined["input_ids"].tolist() == [[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]]
    assert joined["attention_mask"].tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    assert joined["rewards"].tolist() == [0.5, 1.5]
    assert joined["names"] == ["a", "b"]
    assert joined["kept"] == 7.0
    assert joined["input_ids"].dtype == torch.int32
    assert narrow["input_ids"].shape == (1, 3)


def test_different_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['a'\] and \['b'\]"):
        pad_concat([{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    with pytest.raises(ValueError, match="no rows"):
        pad_concat([])
