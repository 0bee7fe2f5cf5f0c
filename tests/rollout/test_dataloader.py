from __future__ import annotations

import json

import numpy as np
import pytest

from agent_rl.errors import CheckpointError, DatasetError, WrongTypeError
from agent_rl.rollout.dataloader import DataLoader, as_data, as_native, patience


def items(count: int) -> list[dict[str, int]]:
    return [{"i": i} for i in range(count)]


def ids(rows) -> list[int]:
    return [row["i"] for row in rows]


def test_each_epoch_is_another_permutation_of_all_items() -> None:
    loader = DataLoader(items(10), 4, seed=1)
    epochs = [ids(loader.take(10)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] == ids(DataLoader(items(10), 4, seed=1).take(10))
    assert epochs[0] != ids(DataLoader(items(10), 4, seed=2).take(10))
    assert len(loader) == 2


def test_order_of_the_dataset_without_shuffling() -> None:
    assert ids(DataLoader(items(3), 2, shuffle=False).take(7)) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("step", [0, 4, 9, 10, 11, 15])
def test_resume_at_any_point_goes_on_with_the_same_items(step) -> None:
    """cases B148, B149: also exactly at the end of an epoch; the state is plain JSON."""
    whole = ids(DataLoader(items(10), 2, seed=3).take(30))
    first = DataLoader(items(10), 2, seed=3)
    first.take(step)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = DataLoader(items(10), 2, seed=3)
    resumed.load_state_dict(state)
    assert ids(resumed.take(30 - step)) == whole[step:]


def test_another_dataset_is_refused() -> None:
    state = DataLoader(items(10), 2).state_dict()
    with pytest.raises(CheckpointError, match=r"10 rows .* 11"):
        DataLoader(items(11), 2).load_state_dict(state)


@pytest.mark.parametrize("count", [0, 3])
def test_dataset_smaller_than_the_batch(count) -> None:
    """case B152"""
    with pytest.raises(DatasetError, match=f"has {count} rows but one batch needs 4"):
        DataLoader(items(count), 4)


def test_numpy_values_become_native() -> None:
    """case B154"""
    row = {
        "messages": np.array([{"role": "user", "content": "hi"}], dtype=object),
        "tools": np.array([]),
        "level": np.int64(3),
        "ok": np.bool_(True),
        "nested": {"scores": [np.float32(0.5), (np.int8(1),)]},
    }
    datum = as_native(row)
    assert datum == {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [],
        "level": 3,
        "ok": True,
        "nested": {"scores": [0.5, (1,)]},
    }
    assert type(datum["level"]) is int and type(datum["ok"]) is bool
    assert json.loads(json.dumps(datum))["ok"] is True


def test_one_row_in_place_of_a_batch() -> None:
    """Its keys would be the rows."""
    assert as_data([{"text": "a"}]) == [{"text": "a"}]
    with pytest.raises(
        WrongTypeError, match=r"a list of rows, not the dict {'text': 'a'}; write \[row"
    ):
        as_data({"text": "a"})


def test_another_library_s_loader_is_told_ours() -> None:
    with pytest.raises(
        WrongTypeError, match=r"draws from .*DataLoader\(rows, batch_size\), not from"
    ):
        patience([{"text": "a"}])
