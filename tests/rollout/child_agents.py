"""Agents that a child process imports by name; all but one without the openai package: it is slow
to import."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from agent_rl import workflow_context


def ask(text: str = "hi", base_url: str | None = None, api_key: str | None = None) -> Any:
    """A model call by the environment's address, or the given one."""
    url = (base_url or os.environ["OPENAI_BASE_URL"]) + "/chat/completions"
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    key = api_key or os.environ["OPENAI_API_KEY"]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


class Environment:
    """Synchronous, and finds its model by the environment."""

    def __init__(self, factor: int = 1) -> None:
        self.factor = factor

    def run(self, data: Any) -> float:
        ask(f"number {data['i']}")
        return data["i"] * self.factor


class Anthropic:
    """What Anthropic's SDK sends when the environment is all that it is given."""

    def run(self, data: Any) -> float:
        url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "m", "max_tokens": 8, "messages": messages}
        headers = {
            "x-api-key": os.environ["ANTHROPIC_API_KEY"],
            "anthropic-version": "2023-06-01",
            "Content-Type": "application/json",
        }
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["role"] == "assistant"
        return 1.0


class Coroutine:
    async def run(self, data: Any, base_url: str, api_key: str) -> dict[str, float]:
        first, second = ask("one", base_url, api_key), ask("two", base_url, api_key)
        return {first["id"]: 0.25, second["id"]: 0.75}


class Sdk:
    """The SDK's clients, both kinds, and rewards through them."""

    async def run(self, data: Any, client: Any, http_client: Any) -> None:
        import openai

        messages = [{"role": "user", "content": "hi"}]
        first = await client.chat.completions.create(model="m", messages=messages)
        await openai.AsyncOpenAI(http_client=http_client).chat.completions.create(
            model="m", messages=messages
        )
        client.set_reward(first.id, 0.5)
        client.set_last_reward(1)


class Rewards:
    """Every way of setting rewards wrongly raises where the agent is, as it does inline."""

    def run(self, data: Any, session: Any) -> None:
        raised = []
        for reward in (lambda: session.set_last_reward(1.0), lambda: session.set_reward("x", 1)):
            try:
                reward()
            except (KeyError, RuntimeError) as error:
                raised.append(type(error).__name__)
        first = ask("one")
        session.set_last_reward(0.5)
        ask("two")
        session.set_last_reward(1.5)
        session.set_reward(first["id"], 0.25)
        try:
            session.set_reward(first, 1.0)
        except TypeError as error:
            raised.append(type(error).__name__)
        try:
            session.set_last_reward(float("nan"))
        except ValueError as error:
            raised.append(type(error).__name__)
        assert raised == ["RuntimeError", "KeyError", "TypeError", "ValueError"], raised


class Returns:
    def __init__(self, value: Any) -> None:
        self.value = value

    def run(self, data: Any) -> Any:
        ask()
        odd = {"tuple": (1.0,), "nan": float("nan"), "keys": {("a", 1): 1.0}}
        return odd.get(str(self.value), self.value)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("there is no text")


class Fails:
    """Ends as ``how`` says, after it has printed something."""

    def __init__(self, how: str) -> None:
        self.how = how

    def run(self, data: Any) -> float:
        ask()
        print("the last words")
        if self.how == "raise":
            raise LookupError("the tool is gone")
        if self.how == "exit":
            sys.exit(3)
        if self.how == "mute":
            raise UnspeakableError
        if self.how == "loud":
            raise ValueError("z" * 20_000_000)
        os.kill(os.getpid(), signal.SIGSEGV)
        return 1.0


class Talks:
    def run(self, data: Any) -> float:
        ask()
        print("to standard output")
        print("to standard error", file=sys.stderr)
        logging.getLogger("talks").warning("to the log")
        return 1.0


class Hangs:
    """Writes its process ids, with a grandchild's, and blocks."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def run(self, data: Any) -> float:
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        name = self.folder / f"{data['i']}"
        name.with_suffix(".new").write_text(f"{os.getpid()} {sleeper.pid}")
        name.with_suffix(".new").rename(name)
        time.sleep(600)
        return 1.0


class Alarm:
    """Needs the main thread of its process."""

    def run(self, data: Any) -> float:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(0)
        ask()
        return 1.0


class AlarmInTask:
    """Likewise, as a coroutine."""

    async def run(self, data: Any) -> float:
        return Alarm().run(data)


class Context:
    def run(self, data: Any) -> float:
        ask()
        context = workflow_context.get()
        assert context.is_eval and context.task_id is not None
        return 1.0


class Leaves:
    """Returns, and leaves a process behind that holds its pipes open."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def run(self, data: Any) -> float:
        ask()
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (self.folder / "left").write_text(str(sleeper.pid))
        return 1.0
