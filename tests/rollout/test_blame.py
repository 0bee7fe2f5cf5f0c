from __future__ import annotations

import openai
import pytest

from agent_rl.client.http import hx
from agent_rl.rollout.blame import owner_of

REQUEST = hx.Request("POST", "http://agent-rl.local/v1/chat/completions")


def status_error(kind: type[openai.APIStatusError], status: int) -> openai.APIStatusError:
    return kind("no", response=hx.Response(status, request=REQUEST), body=None)


def raised_from(cause: BaseException) -> BaseException:
    """What a framework makes of it."""
    try:
        raise RuntimeError("the model call failed") from cause
    except RuntimeError as error:
        return error


SERVER = status_error(openai.InternalServerError, 500)
REFUSED = status_error(openai.BadRequestError, 400)


@pytest.mark.parametrize(
    ("error", "owner"),
    [
        (SERVER, "engine"),
        (openai.APITimeoutError(request=REQUEST), "engine"),
        (REFUSED, "client"),
        (KeyError("gold"), "agent"),
        (raised_from(SERVER), "engine"),
        (raised_from(raised_from(REFUSED)), "client"),
        (raised_from(KeyError("gold")), "agent"),
        (ExceptionGroup("tasks", [SERVER]), "engine"),
        (ExceptionGroup("tasks", [KeyError("gold"), SERVER]), "agent"),
    ],
)
def test_the_owner_of_an_exception(error: BaseException, owner: str) -> None:
    assert owner_of(error) == owner


def test_a_bug_while_an_sdk_error_is_handled_is_the_agents() -> None:
    try:
        try:
            raise SERVER
        except openai.InternalServerError:
            _ = {}["gold"]
    except KeyError as error:
        assert owner_of(error) == "agent"


def test_causes_in_a_circle() -> None:
    one, two = KeyError("one"), KeyError("two")
    one.__cause__, two.__cause__ = two, one
    assert owner_of(one) == "agent"
