from __future__ import annotations

import asyncio

import pytest

from agent_rl.errors import EngineError, EpisodeError, RequestError, boundary


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
