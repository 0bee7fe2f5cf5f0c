"""A real model behind a test server: what SGLang's and vLLM's test servers have in common.

Real tokens, log-probs and weights of a LocalEngine, with the labels, aborts and pauses of a server,
and switches for the faults that servers have. Nothing of either protocol is here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from starlette.requests import Request

from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.broadcast import join_group
from agent_rl.engine.loading import load_tokenizer
from agent_rl.engine.local import LocalEngine
from agent_rl.engine.matcher import GrammarCompiler, forbidden_tokens
from agent_rl.types import GenerationConfig, ModelRequest, ModelResponse


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong next. Counters are used up by generation requests."""

    drop: int = 0
    error_500: int = 0
    busy: int = 0
    drop_stream: int = 0
    abort_at_once: int = 0
    fail_update: bool = False
    foreign_label: str | None = None
    hides_versions: bool = False
    log: deque[tuple[str, Any]] = field(default_factory=lambda: deque(maxlen=1000))
    may_tell: asyncio.Event | None = None
    update_begins: asyncio.Event | None = None
    update_may_end: asyncio.Event | None = None

    async def wait_to_tell(self) -> None:
        self.log.append(("tell", None))
        if self.may_tell is not None:
            await self.may_tell.wait()

    def take(self, name: str) -> bool:
        left = getattr(self, name)
        if left:
            setattr(self, name, left - 1)
        return bool(left)


class ServedModel:
    """``labels[v]`` is what the server calls the weights that LocalEngine calls version v."""

    def __init__(self, folder: str | Path, *, max_batch_size: int, max_seq_len: int) -> None:
        self.folder = str(folder)
        self.first_folder = str(folder)
        self.engine = LocalEngine(
            folder, device="cpu", max_batch_size=max_batch_size, max_seq_len=max_seq_len
        )
        self.labels = ["default"]
        self.running: dict[str, int] = {}
        self.adapters: dict[str, LocalEngine] = {}
        self.faults = Faults()
        model = self.engine.model
        self._end_id = int(model.generation_config.eos_token_id)
        self._grammars = GrammarCompiler(
            load_tokenizer(folder), [self._end_id], model.config.vocab_size
        )
        self.is_idle = asyncio.Event()
        self.is_idle.set()
        self.groups: dict[str, torch.distributed.ProcessGroup] = {}
        self.is_receiving = False
        self.is_dead = False

    @property
    def label(self) -> str:
        return self.faults.foreign_label or self.labels[-1]

    def engine_for(self, adapter: str | None) -> LocalEngine:
        return self.engine if adapter is None else self.adapters[adapter]

    @contextmanager
    def counted(self, rid: str) -> Iterator[None]:
        self.running[rid] = self.running.get(rid, 0) + 1
        self.is_idle.clear()
        try:
            yield
        finally:
            self.running[rid] -= 1
            if not self.running[rid]:
                del self.running[rid]
            if not self.running:
                self.is_idle.set()

    def request(self, rid: str, input_ids: list[int], sampling: Mapping[str, Any]) -> ModelRequest:
        return ModelRequest(rid=rid, input_ids=input_ids, gconfig=GenerationConfig(**sampling))

    @torch.no_grad()
    def under_grammar(self, response: ModelResponse, gconfig: GenerationConfig) -> ModelResponse:
        """As servers answer: the end of the turn is sampled too, and log-probs are those of what
        the grammar allowed. The weights are the present ones."""
        assert gconfig.grammar is not None
        ids, end_ids = list(response.output_tokens), (self._end_id, *gconfig.stop_token_ids)
        has_room = len(ids) < (gconfig.max_new_tokens or 0)
        if response.stop_reason == "stop" and ids[-1] not in end_ids and has_room:
            ids.append(self._end_id)
        whole = torch.tensor([[*response.input_tokens, *ids]])
        logits_TV = self.engine.model(input_ids=whole).logits[0, len(response.input_tokens) - 1 :]
        matcher = self._grammars.matcher(gconfig.grammar, end_ids)
        logprobs = []
        for token_id, logits_V in zip(
            ids, logits_TV.float() / gconfig.logprob_temperature, strict=False
        ):
            allowed = matcher.allowed(may_end=True)
            _, is_forbidden_1V = forbidden_tokens({0: allowed}, len(logits_V), logits_V.device)
            masked_V = logits_V.masked_fill(is_forbidden_1V[0], -torch.inf)
            logprobs.append(float(masked_V.log_softmax(-1)[token_id]))
            if token_id not in end_ids:
                matcher.advance(token_id)
        versions = response.output_versions
        return replace(
            response,
            output_tokens=ids,
            output_logprobs=logprobs,
            output_versions=versions + versions[-1:] * (len(ids) - len(versions)),
            output_forced=None,
            output_top_logprobs=None,
        )

    def spans(self, response: ModelResponse) -> list[dict[str, Any]]:
        """Versions [0, 0, 1] -> [{"version": "default", "start": 0, "end": 2}, ...]."""
        spans: list[dict[str, Any]] = []
        for index, version in enumerate(response.output_versions):
            label = self.faults.foreign_label or self.labels[version]
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = index + 1
            else:
                spans.append({"version": label, "start": index, "end": index + 1})
        return spans

    async def abort(self, rids: list[str]) -> None:
        for rid in rids:
            for engine in (self.engine, *self.adapters.values()):
                await engine.abort(rid)

    async def pause(self, *, aborts: bool) -> None:
        if aborts:
            await self.abort(list(self.running))
            await self.is_idle.wait()
        for engine in (self.engine, *self.adapters.values()):
            await engine.pause()

    async def resume(self) -> None:
        for engine in (self.engine, *self.adapters.values()):
            await engine.resume()

    async def load(self, folder: str, label: str) -> None:
        """Raises ModelLoadError, with the old weights kept."""
        if self.faults.update_begins is not None:
            self.faults.update_begins.set()
        if self.faults.update_may_end is not None:
            await self.faults.update_may_end.wait()
        update = WeightUpdate(version=len(self.labels), method="disk", path=Path(folder))
        await self.engine.update_weights(update)
        self.labels.append(label)
        self.folder = folder

    def rename(self, label: str) -> None:
        self.labels[-1] = label

    def add_adapter(self, name: str, folder: str) -> None:
        """Its own model with the adapter merged in: W + (alpha / r) B A."""
        engine = LocalEngine(
            self.folder, device="cpu", max_batch_size=8, max_seq_len=self.engine.max_seq_len
        )
        merge_adapter(engine.model, Path(folder))
        self.adapters[name] = engine

    def join(self, name: str, address: str, port: int, rank: int, world_size: int) -> None:
        store = torch.distributed.TCPStore(address, port, world_size, is_master=False)
        self.groups[name] = join_group(
            store, rank=rank, world_size=world_size, name=name, backend="gloo", timeout_s=60.0
        )

    def leave(self, name: str) -> None:
        del self.groups[name]

    def receive(self, group: str, names: list[str], shapes: list[list[int]]) -> None:
        """Straight into the parameters, as rank 0 sends them."""
        parameters = self.engine.model.state_dict()
        for name, shape in zip(names, shapes, strict=True):
            value = torch.empty(shape)
            self.groups[group].broadcast(value, 0).wait()
            parameters[name].copy_(value)

    def copy_in(self, values: Mapping[str, torch.Tensor]) -> None:
        """Names that it does not have are passed over, as by the real SGLang."""
        parameters = self.engine.model.state_dict()
        for name in values.keys() & parameters.keys():
            parameters[name].copy_(values[name])

    def received(self, label: str | None) -> None:
        if label is not None:
            self.engine.set_version(len(self.labels))
            self.labels.append(label)

    async def close(self) -> None:
        for engine in (self.engine, *self.adapters.values()):
            await engine.close()


@torch.no_grad()
def merge_adapter(model: Any, folder: Path) -> None:
    import json

    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    tensors = load_file(folder / "adapter_model.safetensors")
    for key, low in tensors.items():
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            high = tensors[key.replace("lora_A", "lora_B")]
            model.get_submodule(name).weight += scale * high @ low


async def unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Its result; when the client goes away, the work ends, as on the real servers."""
    task = asyncio.ensure_future(work)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        return await task
    except asyncio.CancelledError:
        if not watcher.done():
            raise
        return None
    finally:
        watcher.cancel()
