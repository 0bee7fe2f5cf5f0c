"""ServerApi: what an engine asks of an inference server, whichever protocol it speaks.

``sglang.py`` and ``vllm.py`` implement it. An implementation keeps no state of a server: it turns
calls into HTTP and answers into the types here, and never decides where a request goes.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from agent_rl.engine.http import ServerConnection
from agent_rl.engine.scoring import ScoredToken
from agent_rl.errors import AgentRLError, EngineError
from agent_rl.types import GenerationConfig

PauseMode: TypeAlias = Literal["abort", "retract", "in_place"]
"""What becomes of running requests: they end with what they have and are sent again; they stay
and their keys and values are computed anew; they stay and keep the old ones."""

Finish: TypeAlias = Literal["stop", "length", "abort"]
TopLogprobs: TypeAlias = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """``weight_version`` is the server's own label of its base weights, "default" at first;
    ``folder`` where those are, if it tells; ``adapters`` the LoRA adapters it has loaded."""

    max_seq_len: int
    weight_version: str
    supported: frozenset[str]
    folder: Path | None
    adapters: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at the rest of a completion.

    ``input_ids`` end with the ``num_sampled`` tokens that earlier attempts got; ``budget`` more may
    come. ``adapter`` names a LoRA adapter the server has loaded.
    """

    rid: str
    input_ids: Sequence[int]
    num_sampled: int
    budget: int
    gconfig: GenerationConfig
    image_data: Sequence[str] | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens [start, end) of an attempt were sampled by the weights the server calls ``label``."""

    label: str
    start: int
    end: int


@contextmanager
def reading(server: ServerConnection) -> Iterator[None]:
    """An answer of another form than the protocol's is an EngineError: it would be so again."""
    try:
        yield
    except AgentRLError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise EngineError(
            f"{server.address} does not answer in the form of its protocol ({why}); check "
            "engine.backend and the server's version"
        ) from error


def read_spans(spans: Sequence[Mapping[str, Any]] | None) -> tuple[Span, ...] | None:
    """From the JSON that SGLang and vLLM both use; None where a server tells none."""
    if spans is None:
        return None
    return tuple(
        Span(label=str(span["version"]), start=int(span["start"]), end=int(span["end"]))
        for span in spans
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The next tokens of an attempt, in order. The last piece has ``finish``, and ``spans`` of
    the whole attempt where the server tells them. ``num_cached`` of the attempt's input ids the
    server did not have to compute; None: it does not tell. ``is_forced``, of pieces sampled by a
    grammar, says which tokens were the only ones allowed."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    finish: Finish | None = None
    spans: tuple[Span, ...] | None = None
    num_cached: int | None = None
    is_forced: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, self.logprobs)):
            raise ValueError(f"log-probs of sampled tokens must be finite, got {self.logprobs}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """A server's place in the process group over which a trainer broadcasts weights."""

    address: str
    port: int
    rank: int
    world_size: int
    group: str
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a broadcast tensor is: its name in the checkpoint, ``float32``, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class ServerApi(Protocol):
    pause_modes: frozenset[PauseMode]

    async def describe(self, server: ServerConnection) -> ServerInfo: ...

    def generate(
        self, server: ServerConnection, attempt: Attempt, *, streams: bool
    ) -> AsyncGenerator[Piece, None]:
        """One piece, or with ``streams`` one as soon as there are new tokens."""

    async def score(
        self,
        server: ServerConnection,
        input_ids: Sequence[int],
        num_scored: int,
        *,
        num_top: int = 0,
        adapter: str | None = None,
    ) -> tuple[ScoredToken, ...]:
        """Log-probs, at temperature 1, of the last ``num_scored`` ids given those before."""

    async def abort(self, server: ServerConnection, rid: str) -> None: ...

    async def pause(self, server: ServerConnection, mode: PauseMode) -> None: ...

    async def resume(self, server: ServerConnection) -> None: ...

    async def load_folder(
        self, server: ServerConnection, folder: Path, label: str, *, keeps_cache: bool
    ) -> None:
        """Load the safetensors of a folder in place; the server is paused."""

    async def set_label(self, server: ServerConnection, label: str) -> None:
        """Rename the weights the server has; running requests go on."""

    async def load_adapter(self, server: ServerConnection, name: str, folder: Path) -> None: ...

    async def unload_adapter(self, server: ServerConnection, name: str) -> None: ...

    async def drop_update(self, server: ServerConnection) -> None:
        """Close an update that was broken off, if there is one: its weights are then anything, and
        it can take new ones."""

    # Weights from a process group

    async def num_workers(self, server: ServerConnection) -> int:
        """Processes of the server that hold weights: its ranks in a group."""

    async def join_group(self, server: ServerConnection, member: GroupMember) -> None: ...

    async def leave_group(self, server: ServerConnection, group: str) -> None: ...

    async def begin_receiving(self, server: ServerConnection) -> None:
        """What comes until ``end_receiving`` is one update."""

    async def end_receiving(self, server: ServerConnection) -> None: ...

    async def receive(
        self,
        server: ServerConnection,
        group: str,
        tensors: Sequence[TensorSpec],
        label: str | None,
        *,
        keeps_cache: bool,
    ) -> None:
        """Take the tensors as rank 0 broadcasts them, in this order; ``label`` with the last."""


@runtime_checkable
class SharedMemoryApi(ServerApi, Protocol):
    """Of servers that can also take weights from the memory of this machine."""

    async def receive_shared(
        self,
        server: ServerConnection,
        handles: Sequence[bytes],
        label: str | None,
        *,
        keeps_cache: bool,
    ) -> None:
        """Take the tensors that lie in shared memory, each worker by its handle; ``label`` with the
        last."""
