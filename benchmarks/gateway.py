"""What the gateway costs besides the model: server CPU per request, beside others in the same run.

    python benchmarks/gateway.py                    # about two minutes on one core
    python benchmarks/gateway.py --profile 128      # where the time of that turn goes
    python benchmarks/gateway.py --load             # 200 sessions x 20 turns, an update each second

Each server runs in a process of its own whose CPU clock is read from outside, so neither the
client nor other processes count. The engine answers at once with 64 tokens. The bare endpoint
reads the same JSON and sends the same JSON back: it is what HTTP itself costs. The recording proxy
of `areal` is measured where it can be imported (see peers.py).

Under load the same three stand beside one another: the bare endpoint, the gateway in a process that
did nothing about Python's collector, and as `agent-rl serve` runs it. What the clients and the
other processes of the machine cost is in all three.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import http.client
import json
import os
import pstats
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from peers import areal_session_key, serve_areal_proxy
from rich.console import Console
from rich.table import Table

TURNS = (1, 8, 32, 128)
TEXT = "The quick brown fox jumps over the lazy dog and then asks what the weather will be. "
ANSWER = "A plain answer of some words. " * 9
LOADED = ("bare Starlette, slow", "gateway concat, slow", "gateway concat, slow, heap kept")
LATENCY_S = 0.5  # of the engine under load
WINDOW = 4  # turns around the one that is named
PEER = "areal proxy"
KINDS = ("bare Starlette", PEER, "gateway hf", "gateway concat", "gateway concat, journal")
KEY = "user"


async def serve(kind: str, folder: str) -> None:
    """In the server's process: print the port, then serve until killed."""
    if kind.startswith("bare"):
        await _serve_bare(LATENCY_S if kind in LOADED else 0.0)
        return
    from client_overhead import InstantEngine
    from transformers import AutoTokenizer

    from agent_rl import ScriptedEngine, small_model
    from agent_rl.config import GatewayConfig
    from agent_rl.gateway.server import Gateway
    from agent_rl.serve import keep_heap

    tokenizer: Any = AutoTokenizer.from_pretrained(small_model())
    scripted = ScriptedEngine([ANSWER], tokenizer=tokenizer, repeat=True, latency_s=LATENCY_S)
    engine: Any = scripted if kind in LOADED else InstantEngine(tokenizer)
    if kind == PEER:
        listener = socket.create_server(("127.0.0.1", 0))
        print(listener.getsockname()[1], flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads on: its log would fill the pipe
        await serve_areal_proxy(engine, tokenizer, listener)
        return
    gateway = Gateway(
        engine,
        tokenizer,
        GatewayConfig(
            api_key=KEY,
            max_sessions=100_000,
            chat_template_type="concat" if "concat" in kind else "hf",
            journal=f"{folder}/journal" if "journal" in kind else None,
        ),
    )
    gateway.app = _profiled(gateway.app)
    await gateway.start()
    if "heap kept" in kind:
        keep_heap()
    print(gateway.base_url.rpartition(":")[2].partition("/")[0], flush=True)
    while True:
        await asyncio.sleep(1.0)
        if kind in LOADED:
            await _update(scripted)


async def _update(engine: Any) -> None:
    from agent_rl import WeightUpdate

    await engine.pause()
    await engine.update_weights(WeightUpdate(version=engine.get_version() + 1))
    await engine.resume()


async def _serve_bare(latency_s: float) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    message = {"role": "assistant", "content": ANSWER}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    body = {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice], "usage": {}}

    async def chat(request: Request) -> JSONResponse:
        await request.json()
        await asyncio.sleep(latency_s)
        return JSONResponse(body)

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
    print(listener.getsockname()[1], flush=True)
    await uvicorn.Server(config).serve(sockets=[listener])


def _profiled(app: Any) -> Any:
    """``GET /profile?on`` and ``?off`` around what is to be profiled."""
    profile = cProfile.Profile()

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") != "/profile":
            await app(scope, receive, send)
            return
        if scope["query_string"] == b"on":
            profile.enable()
        else:
            profile.disable()
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(40)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    return inner


class Server:
    """A running server and its CPU clock.

    Raises:
        ImportError: what it serves is not installed.
    """

    def __init__(self, kind: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        port = process.stdout.readline()
        if not port:
            raise ImportError(f"{kind} did not start")
        self.kind, self.port = kind, int(port)
        # The clock of another process, as clock_getcpuclockid(3) makes its number.
        self._clock = (~process.pid << 3) | 2

    def cpu_s(self) -> float:
        time.sleep(0.002)  # what the server does after its last byte belongs to the request
        return time.clock_gettime(self._clock)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port)


@contextmanager
def running(kind: str) -> Iterator[Server]:
    with TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--serve", kind, "--folder", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield Server(kind, process)
            finally:
                process.kill()


class Conversation:
    """One session's messages, which grow by a turn with each call."""

    def __init__(
        self, server: Server, name: str, connection: http.client.HTTPConnection | None = None
    ) -> None:
        self._connection = connection or server.connect()
        key = areal_session_key(self._connection, name) if server.kind == PEER else KEY
        self._path = "/chat/completions" if server.kind == PEER else "/v1/chat/completions"
        self._headers = {
            "content-type": "application/json",
            "authorization": f"Bearer {key}",
            "x-session-id": name,
        }
        self._messages: list[dict[str, str]] = []

    def turn(self) -> None:
        index = len(self._messages) // 2
        self._messages.append({"role": "user", "content": f"{index}: {TEXT}"})
        body = json.dumps({"model": "m", "messages": self._messages, "max_tokens": 64})
        self._connection.request("POST", self._path, body, self._headers)
        reply = self._connection.getresponse()
        content = reply.read()
        assert reply.status == 200, content
        answer = json.loads(content)["choices"][0]["message"]
        self._messages.append({"role": "assistant", "content": answer["content"]})


def one_conversation(
    server: Server, number: int, costs: dict[int, list[float]], *, profile_at: int | None = None
) -> None:
    """Adds the CPU ms per request over a window of turns, for each turn of ``costs``."""
    talk = Conversation(server, f"talk{number}")
    done = 0
    for turn in TURNS:
        while done < turn - 1:
            talk.turn()
            done += 1
        if turn == profile_at:
            _profile(server, "on")
        start = server.cpu_s()
        for _ in range(WINDOW):
            talk.turn()
        costs[turn].append((server.cpu_s() - start) / WINDOW * 1e3)
        if turn == profile_at:
            _profile(server, "off")
        done += WINDOW


def _profile(server: Server, switch: str) -> None:
    connection = server.connect()
    connection.request("GET", f"/profile?{switch}")
    connection.getresponse().read()
    connection.close()


def concurrent(server: Server, number: int, *, clients: int, turns: int) -> float:
    """CPU ms per request of whole conversations that run at once."""

    def run(client: int) -> None:
        talk = Conversation(server, f"at-once{number}-{client}")
        for _ in range(turns):
            talk.turn()

    start = server.cpu_s()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(run, range(clients)))
    return (server.cpu_s() - start) / (clients * turns) * 1e3


@dataclass(frozen=True, slots=True)
class Load:
    """``first_ms`` and ``later_ms``: what each call took beyond the engine's time, sorted.

    The first turns of all sessions come at the same moment, so the last of them waits for all.
    """

    calls_per_s: float
    cpu_ms: float
    first_ms: list[float]
    later_ms: list[float]


def under_load(server: Server, number: int, *, sessions: int, turns: int) -> Load:
    """Closed loop: each session asks again as soon as it is answered."""
    times: list[list[float]] = [[] for _ in range(turns)]

    def run(client: int) -> None:
        talk = Conversation(server, f"load{number}-{client}")
        for turn in range(turns):
            start = time.perf_counter()
            talk.turn()
            times[turn].append((time.perf_counter() - start - LATENCY_S) * 1e3)

    start, cpu = time.perf_counter(), server.cpu_s()
    with ThreadPoolExecutor(sessions) as pool:
        list(pool.map(run, range(sessions)))
    wall_s, cpu_s = time.perf_counter() - start, server.cpu_s() - cpu
    count = sessions * turns
    later = sorted(ms for turn in times[1:] for ms in turn)
    return Load(count / wall_s, cpu_s / count * 1e3, sorted(times[0]), later)


def compare_load(rounds: int) -> Table:
    """The servers take turns, so what else the machine does slows all of them."""
    with ExitStack() as stack:
        servers = [stack.enter_context(running(kind)) for kind in LOADED]
        loads: dict[str, list[Load]] = {kind: [] for kind in LOADED}
        for number in range(rounds):
            for server in servers:
                loads[server.kind].append(under_load(server, number, sessions=200, turns=20))
    table = Table(
        title=f"200 sessions x 20 turns, engine {LATENCY_S:g} s, an update each second: the median "
        f"of {rounds} rounds; ms beyond the engine's time"
    )
    for column in ("server", "calls/s", "CPU ms a call", "first turns p50, p99", "later p50, p99"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for kind, each in loads.items():
        table.add_row(
            kind,
            f"{median(load.calls_per_s for load in each):.0f}",
            f"{median(load.cpu_ms for load in each):.2f}",
            _percentiles([load.first_ms for load in each]),
            _percentiles([load.later_ms for load in each]),
        )
    return table


def _percentiles(rounds: list[list[float]]) -> str:
    p50, p99 = (median(ms[len(ms) * p // 100] for ms in rounds) for p in (50, 99))
    return f"{p50:.0f} {p99:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--profile", type=int, choices=TURNS)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="of --load")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        sys.path.insert(0, str(Path(__file__).parent))
        asyncio.run(serve(options.serve, options.folder))
        return
    if options.load:
        Console().print(compare_load(options.rounds))
        return
    if options.profile is not None:
        with running(KINDS[2]) as server:
            for number in range(options.conversations):
                costs = {turn: [] for turn in TURNS}
                one_conversation(server, number, costs, profile_at=options.profile)
        return
    Console().print(compare(options.conversations))


def compare(conversations: int) -> Table:
    """All servers in turn, conversation by conversation: what slows one slows the next as well."""
    with ExitStack() as stack:
        servers = []
        for kind in KINDS:
            try:
                servers.append(stack.enter_context(running(kind)))
            except ImportError as error:
                Console().print(f"not measured: {error}")
        costs = {server.kind: {turn: [] for turn in TURNS} for server in servers}
        at_once = {server.kind: [] for server in servers}
        for number in range(conversations):
            for server in servers:
                one_conversation(server, number, costs[server.kind])
                at_once[server.kind].append(concurrent(server, number, clients=32, turns=8))
    table = Table(title="server CPU ms per request: the least and the median of the conversations")
    table.add_column("server")
    for turn in TURNS:
        table.add_column(f"turn {turn}", justify="right")
    table.add_column("32 at once", justify="right")
    for kind, by_turn in costs.items():
        columns = [*by_turn.values(), at_once[kind]]
        table.add_row(kind, *[f"{min(each):.2f} {median(each):.2f}" for each in columns])
    return table


if __name__ == "__main__":
    main()
