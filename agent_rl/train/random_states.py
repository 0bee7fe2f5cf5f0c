"""The states of all random generators of this process: Python's, numpy's and torch's.

The embedded engine draws the noise of its requests from Python's generator, so sampling is part of
them. As plain JSON values: nothing has to run to read them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from agent_rl.errors import CheckpointError
from agent_rl.types import JsonObject


def seed_everything(seed: int) -> None:
    """Start all generators from ``seed``."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def random_states() -> JsonObject:
    """What ``restore_random_states`` takes."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().tolist(),
        "cuda": [state.tolist() for state in torch.cuda.get_rng_state_all()],
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """
    Raises:
        CheckpointError: these are no states of generators. GPU states are left out where this
            machine has another number of GPUs.
    """
    try:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
        keys, position, has_gauss, cached = states["numpy"]
        legacy = ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached)
        np.random.set_state(legacy)
        torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
        if len(states["cuda"]) == torch.cuda.device_count():
            for device, state in enumerate(states["cuda"]):
                torch.cuda.set_rng_state(torch.tensor(state, dtype=torch.uint8), device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the saved random states cannot be used: {error}") from error
