from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from agent_rl.errors import CheckpointError
from agent_rl.train.random_states import random_states, restore_random_states, seed_everything


def draws() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0.0, 1.0), np.random.rand(), float(torch.rand(()))


def test_all_generators_go_on_where_they_stood_also_through_json() -> None:
    seed_everything(3)
    draws()
    states = json.loads(json.dumps(random_states()))
    expected = draws()
    draws()
    restore_random_states(states)
    assert draws() == expected


def test_a_seed_starts_all_of_them() -> None:
    seed_everything(5)
    first = draws()
    seed_everything(5)
    assert draws() == first


@pytest.mark.parametrize("states", [{}, {"python": [3, [1, 2], None]}])
def test_what_is_no_state_is_named_as_that(states: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="random states"):
        restore_random_states(states)
