"""Agents that Ray actors import by name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


async def say(client: Any, text: str) -> Any:
    messages = [{"role": "user", "content": text}]
    return await client.chat.completions.create(model="m", messages=messages, max_tokens=6)


class Talker:
    async def run(self, data: Any, client: Any) -> float:
        await say(client, f"number {data['i']}")
        return float(data["i"])


class Printing:
    async def run(self, data: Any, client: Any) -> float:
        await say(client, "hi")
        print("printed in an actor")
        return 1.0


class Rewarding:
    """Rewards on the way; one for an id that does not exist is refused there."""

    async def run(self, data: Any, client: Any) -> None:
        first = await say(client, "one")
        await say(client, "two")
        client.set_reward(first.id, 0.5)
        client.set_last_reward(1)
        try:
            client.set_reward("nothing", 1.0)
        except KeyError:
            return
        raise AssertionError("an unknown id was taken")


class Mortal:
    """Datum 3 kills the process it runs in."""

    async def run(self, data: Any, client: Any) -> float:
        await say(client, "hi")
        if data["i"] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0


class Broken:
    async def run(self, data: Any, client: Any) -> float:
        raise LookupError("the database is gone")


class Leaving:
    """Leaves its process id behind."""

    async def run(self, data: Any, client: Any) -> float:
        await say(client, "hi")
        with open(data["file"], "w") as file:  # noqa: ASYNC230 - nobody else runs here
            file.write(str(os.getpid()))
        return 1.0


class Blocking:
    """Never lets go of its process, whose id it leaves behind."""

    async def run(self, data: Any, client: Any) -> None:
        with open(data["file"], "w") as file:  # noqa: ASYNC230 - nobody else runs here
            file.write(str(os.getpid()))
        time.sleep(600)  # noqa: ASYNC251 - that is the point


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("there is no text")


class Hostile:
    """What cannot be sent back, each in its own way."""

    async def run(self, data: Any, client: Any) -> Any:
        await say(client, "hi")
        how = data["how"]
        if how == "exit":
            raise SystemExit(3)
        if how == "vanish":
            os._exit(0)
        if how == "mute":
            raise UnspeakableError
        if how == "loud":
            raise ValueError("z" * 10**7)
        return {"object": object(), "keys": {("a", "b"): 1.0}, "bytes": b"1"}[how]
