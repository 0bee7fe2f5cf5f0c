"""What is read off the signature of an agent's ``run``."""

from __future__ import annotations

from typing import Any

import pytest

from agent_rl.errors import WorkflowResolutionError
from agent_rl.rollout.arguments import Wanted, wanted_arguments


def wanted(run: Any) -> Wanted:
    return wanted_arguments(type("A", (), {"run": run}), "A")


def test_which_arguments_are_wanted() -> None:
    async def plain(self, data): ...
    async def client(self, data, *, client, temperature=1.0): ...
    async def http(self, data, base_url, http_client, api_key): ...
    async def either(self, data, client, base_url=None): ...
    async def anything(self, data, **kwargs): ...

    assert wanted(plain).names == ()
    assert wanted(client).names == ("client",)
    assert wanted(http).names == ("http_client", "base_url", "api_key")
    assert wanted(either).names == ("client",)
    assert wanted(anything).names == ("client", "session", "http_client", "base_url", "api_key")
    for run in (plain, client, http, either, anything):
        assert not wanted(run).needs_address


def test_who_needs_an_address_of_its_own() -> None:
    async def address(self, data, base_url): ...
    async def key(self, data, api_key=None): ...
    async def both(self, data, client, base_url): ...

    assert wanted(address) == Wanted(names=("base_url",), needs_address=True, is_async=True)
    assert wanted(key) == Wanted(names=("api_key",), needs_address=True, is_async=True)
    assert wanted(both).names == ("client", "base_url") and wanted(both).needs_address


def test_static_methods_instances_and_sync_code() -> None:
    class Static:
        @staticmethod
        async def run(data, client): ...

    class Sync:
        def run(self, data, session): ...

    assert wanted_arguments(Static, "Static").names == ("client",)
    found = wanted_arguments(Sync(), "Sync")
    assert (found.names, found.is_async) == (("session",), False)


def test_signatures_that_cannot_be_served() -> None:
    async def unknown(self, data, client, browser): ...
    async def nothing(self): ...

    with pytest.raises(WorkflowResolutionError, match="needs browser, which nobody passes"):
        wanted(unknown)

    async def no_datum(self, client): ...
    async def asynchronous(self, data):
        yield 1.0

    def plain(self, data):
        yield 1.0

    with pytest.raises(WorkflowResolutionError, match="must take the datum"):
        wanted(nothing)
    with pytest.raises(WorkflowResolutionError, match=r"write `run\(self, data, client\)`"):
        wanted(no_datum)
    for run in (asynchronous, plain):
        with pytest.raises(WorkflowResolutionError, match="has `yield`; `return` the reward"):
            wanted(run)


def test_a_decorator_that_hides_the_arguments_is_named() -> None:
    def hidden(run):
        async def wrapper(*args, **kwargs):
            return await run(*args, **kwargs)

        return wrapper

    class Decorated:
        @hidden
        async def run(self, data, client): ...

    with pytest.raises(WorkflowResolutionError, match=r"needs functools\.wraps"):
        wanted_arguments(Decorated, "Decorated")
