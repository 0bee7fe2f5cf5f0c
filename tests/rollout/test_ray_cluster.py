"""Which Ray cluster an address means. What needs Ray itself is in test_ray_pool.py."""

from __future__ import annotations

import socket

import pytest

from agent_rl.errors import AgentHostError
from agent_rl.rollout.ray_cluster import _is_same, _reach


@pytest.mark.parametrize(
    ("wanted", "is_same"),
    [
        ("10.0.0.5:6379", True),
        ("10.0.0.5:6380", False),
        ("10.0.0.6:6379", False),
        ("localhost:6379", True),
        ("127.0.0.1:6379", True),
        ("no.such.host.invalid:6379", False),
        ("ray://10.0.0.5:10001", False),
        ("nonsense", False),
    ],
)
def test_the_same_cluster(wanted: str, is_same: bool) -> None:
    assert _is_same("10.0.0.5:6379", wanted, "10.0.0.5") is is_same


def test_a_name_of_another_machine() -> None:
    assert not _is_same("10.0.0.5:6379", "localhost:6379", "10.0.0.7")


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_nobody_listens_there(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{scheme}127.0.0.1:{server.getsockname()[1]}"
        _reach(address, 10.0)
    with pytest.raises(AgentHostError, match=rf"ray\.address={address}: no Ray cluster can be"):
        _reach(address, 10.0)


def test_what_is_no_host_and_port_is_left_to_ray() -> None:
    _reach("auto", 10.0)
    _reach("nonsense", 10.0)
