"""vLLM's token endpoint (--enable-scale-out) and its weight-update routes, which are there with
VLLM_SERVER_DEV_MODE=1 in its environment; as of 0.32.

What its log-probs are depends on how it was started (``--logprobs-mode``), which one token tells:

    processed_logprobs   after temperature and truncation: right as long as nothing is truncated
    raw_logprobs         of the model itself: right at temperature 1 and for greedy requests

A request is refused if its log-probs would not be log_softmax(logits / temperature); for grammars
see ``guided.py``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from agent_rl.engine.guided import server_grammar
from agent_rl.engine.http import ServerConnection
from agent_rl.engine.scoring import ScoredToken
from agent_rl.engine.server_api import (
    Attempt,
    GroupMember,
    PauseMode,
    Piece,
    ServerInfo,
    TensorSpec,
    TopLogprobs,
    read_spans,
    reading,
)
from agent_rl.errors import EngineError, RequestError, ServerBusyError, ServerError
from agent_rl.types import GenerationConfig, JsonObject

# With another backend it reads no grammar but a JSON schema, or its first request decides.
GRAMMAR_ARGS = ("--structured-outputs-config.backend", "guidance")
# The token endpoint, log-probs at any temperature, grammars of any kind.
VLLM_ARGS = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs", *GRAMMAR_ARGS)
# Teaches its workers to take weights from a process group.
RECEIVER_ARGS = ("--worker-extension-cls", "agent_rl.engine.vllm_receiver.WeightReceiver")

# vLLM samples at this temperature where a lower one is asked for (its _MAX_TEMP).
_LEAST_TEMPERATURE = 0.01

_GENERATE = "/inference/v1/generate"
_ALWAYS = frozenset({"stop", "seed", "top_logprobs", "grammar"})
_WITH_RAW = frozenset(
    {"top_p", "top_k", "min_p", "min_new_tokens", "logit_bias", "repetition_penalty"}
)


class VLLM:
    pause_modes: frozenset[PauseMode] = frozenset({"abort", "in_place"})

    def __init__(self) -> None:
        self._gives_raw: dict[str, bool] = {}
        self._reads_grammars: dict[str, bool] = {}

    async def describe(self, server: ServerConnection) -> ServerInfo:
        models = await server.get("/v1/models")
        info = await server.get("/weight_info")
        if server.address not in self._gives_raw:
            self._gives_raw[server.address] = await _gives_raw_logprobs(server)
            self._reads_grammars[server.address] = await _reads_grammars(server)
        with reading(server):
            model, *adapters = models["data"]
            label = str(info["weight_version"])
            return ServerInfo(
                max_seq_len=int(model["max_model_len"]),
                weight_version=label,
                supported=_ALWAYS | _WITH_RAW if self._gives_raw[server.address] else _ALWAYS,
                folder=Path(model["root"]) if label == "default" else None,
                adapters=frozenset(adapter["id"] for adapter in adapters),
            )

    async def generate(
        self, server: ServerConnection, attempt: Attempt, *, streams: bool
    ) -> AsyncGenerator[Piece, None]:
        self._check(server, attempt.gconfig)
        body, num_top = _generate_body(attempt, streams), attempt.gconfig.top_logprobs
        if attempt.gconfig.grammar is not None:
            body["sampling_params"]["structured_outputs"] = server_grammar(
                attempt.gconfig.grammar,
                schema_field="json",
                text_field="grammar",
                reads_text=self._reads_grammars,
                args=GRAMMAR_ARGS,
            )
        if not streams:
            answer = await server.post(_GENERATE, body)
            with reading(server):
                piece = _read_piece(answer, num_top)
            yield piece
            return
        async with aclosing(server.events(_GENERATE, body)) as events:
            async for event in events:
                with reading(server):
                    if "error" in event:
                        raise ServerError(f"{server.address}: {event['error'].get('message')}")
                    if not event.get("choices"):
                        continue
                    piece = _read_piece(event, num_top)
                yield piece

    async def score(
        self,
        server: ServerConnection,
        input_ids: Sequence[int],
        num_scored: int,
        *,
        num_top: int = 0,
        adapter: str | None = None,
    ) -> tuple[ScoredToken, ...]:
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": num_top}
        body: JsonObject = {"token_ids": list(input_ids), "sampling_params": sampling}
        if adapter is not None:
            body["model"] = adapter
        answer = await server.post(_GENERATE, body, is_idempotent=True)
        with reading(server):
            if answer["choices"][0]["finish_reason"] == "abort":
                raise ServerBusyError(f"{server.address} ended the scoring of a request")
            entries = answer["prompt_logprobs"][-num_scored:]
            pairs = zip(input_ids[-num_scored:], entries, strict=True)
            return tuple(_read_score(entry, token_id, num_top) for token_id, entry in pairs)

    async def abort(self, server: ServerConnection, rid: str) -> None:
        body = {"request_ids": [f"generate-tokens-{rid}"]}
        await server.post("/abort_requests", body, is_idempotent=True)

    async def pause(self, server: ServerConnection, mode: PauseMode) -> None:
        kind = "abort" if mode == "abort" else "keep"
        await server.post(f"/pause?mode={kind}", {}, is_idempotent=True)

    async def resume(self, server: ServerConnection) -> None:
        await server.post("/resume", {}, is_idempotent=True)

    async def load_folder(
        self, server: ServerConnection, folder: Path, label: str, *, keeps_cache: bool
    ) -> None:
        await _on_workers(server, "reload_weights", weights_path=str(folder))
        await self._take_over(server, label, keeps_cache)

    async def set_label(self, server: ServerConnection, label: str) -> None:
        await server.post("/update_weight_version", {"new_version": label}, is_idempotent=True)

    async def load_adapter(self, server: ServerConnection, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        await server.post("/v1/load_lora_adapter", body)

    async def unload_adapter(self, server: ServerConnection, name: str) -> None:
        await server.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def drop_update(self, server: ServerConnection) -> None:
        """Without that, layers that got a part of their weights would take the next ones wrongly:
        vLLM counts what a layer got. Loading nothing ends it."""
        await _on_workers(server, "reload_weights", weights_iterator=[])

    async def num_workers(self, server: ServerConnection) -> int:
        answer = await server.get("/get_world_size")
        with reading(server):
            return int(answer["world_size"])

    async def join_group(self, server: ServerConnection, member: GroupMember) -> None:
        try:
            await _on_workers(
                server,
                "join_weights_group",
                address=member.address,
                port=member.port,
                first_rank=member.rank,
                world_size=member.world_size,
                name=member.group,
                backend=member.backend,
            )
        except ServerError as error:
            raise ServerError(f"{error}; is it started with {' '.join(RECEIVER_ARGS)}?") from error

    async def leave_group(self, server: ServerConnection, group: str) -> None:
        await _on_workers(server, "leave_weights_group")

    async def begin_receiving(self, server: ServerConnection) -> None:
        await _on_workers(server, "begin_weights")

    async def receive(
        self,
        server: ServerConnection,
        group: str,
        tensors: Sequence[TensorSpec],
        label: str | None,
        *,
        keeps_cache: bool,
    ) -> None:
        await _on_workers(
            server,
            "receive_weights",
            names=[tensor.name for tensor in tensors],
            dtypes=[tensor.dtype for tensor in tensors],
            shapes=[list(tensor.shape) for tensor in tensors],
        )
        if label is not None:
            await _on_workers(server, "end_weights")
            await self._take_over(server, label, keeps_cache)

    async def end_receiving(self, server: ServerConnection) -> None:
        """The label of the last tensors has ended it."""

    async def _take_over(self, server: ServerConnection, label: str, keeps_cache: bool) -> None:
        """The workers have new weights: what was computed with the old ones goes."""
        if not keeps_cache:
            await server.post("/reset_prefix_cache", {}, is_idempotent=True)
        await self.set_label(server, label)

    def _check(self, server: ServerConnection, gconfig: GenerationConfig) -> None:
        if gconfig.is_greedy or gconfig.temperature == 1.0:
            return
        if gconfig.temperature < _LEAST_TEMPERATURE:
            raise RequestError(
                f"temperature is {gconfig.temperature:g}, but vLLM samples at {_LEAST_TEMPERATURE} "
                f"instead; ask for 0 (greedy) or for {_LEAST_TEMPERATURE} and more",
                param="temperature",
            )
        if self._gives_raw.get(server.address):
            raise RequestError(
                f"temperature is {gconfig.temperature:g}, but {server.address} states log-probs at "
                "temperature 1; start vLLM with --logprobs-mode processed_logprobs",
                param="temperature",
            )


async def _on_workers(server: ServerConnection, method: str, **kwargs: Any) -> None:
    """Call a method that each of its workers has: vLLM's own, or WeightReceiver's."""
    await server.post("/collective_rpc", {"method": method, "kwargs": kwargs})


async def _gives_raw_logprobs(server: ServerConnection) -> bool:
    """With top_k=1 the token is certain: log-prob 0 after truncation, below 0 before it."""
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0}
    answer = await server.post(
        _GENERATE, {"token_ids": [0], "sampling_params": sampling}, is_idempotent=True
    )
    with reading(server):
        return bool(_read_piece(answer, 0).logprobs[0] < 0.0)


async def _reads_grammars(server: ServerConnection) -> bool:
    answer = await server.get("/server_info?config_format=json")
    with reading(server):
        return bool(answer["vllm_config"]["structured_outputs_config"]["backend"] == "guidance")


def _generate_body(attempt: Attempt, streams: bool) -> JsonObject:
    gconfig = attempt.gconfig
    sampling: JsonObject = {
        "max_tokens": attempt.budget,
        "min_tokens": max(0, gconfig.min_new_tokens - attempt.num_sampled),
        "temperature": 0.0 if gconfig.is_greedy else gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": gconfig.top_k or -1,
        "min_p": gconfig.min_p,
        "repetition_penalty": gconfig.repetition_penalty,
        "stop": list(gconfig.stop),
        "stop_token_ids": list(gconfig.stop_token_ids),
        "logprobs": gconfig.top_logprobs,
    }
    if gconfig.logit_bias:
        sampling["logit_bias"] = {str(id_): bias for id_, bias in gconfig.logit_bias.items()}
    if gconfig.seed is not None:
        # What is sampled after an interruption must not repeat the noise of the start.
        sampling["seed"] = gconfig.seed + attempt.num_sampled
    body: JsonObject = {
        "request_id": attempt.rid,
        "token_ids": list(attempt.input_ids),
        "sampling_params": sampling,
        "stream": streams,
    }
    if attempt.adapter is not None:
        body["model"] = attempt.adapter
    return body


def _read_piece(answer: Mapping[str, Any], num_top: int) -> Piece:
    choice = answer["choices"][0]
    ids = choice.get("token_ids") or []
    entries = (choice.get("logprobs") or {}).get("content") or []
    if [entry["token_id"] for entry in entries] != list(ids):
        raise EngineError(
            f"the server sent {len(ids)} token ids and {len(entries)} log-probs, which are not of "
            "the same tokens"
        )
    finish = choice.get("finish_reason")
    if finish not in (None, "stop", "length", "abort"):
        raise EngineError(f"the server ended a request with {finish!r}, which is not known here")
    return Piece(
        token_ids=tuple(ids),
        logprobs=tuple(float(entry["logprob"]) for entry in entries),
        top_logprobs=tuple(_read_top(entry, num_top) for entry in entries),
        finish=finish,
        spans=read_spans(choice.get("weight_versions")),
        # Only with --enable-prompt-tokens-details, and not in streams.
        num_cached=((answer.get("usage") or {}).get("prompt_tokens_details") or {}).get(
            "cached_tokens"
        ),
    )


def _read_top(entry: Mapping[str, Any], num_top: int) -> TopLogprobs:
    """The highest; the server puts the sampled token before them, also when it is lower."""
    tops = entry.get("top_logprobs") or []
    pairs = {int(top["token_id"]): float(top["logprob"]) for top in tops}
    return tuple(sorted(pairs.items(), key=lambda pair: -pair[1])[:num_top])


def _read_score(entry: Mapping[str, Any], token_id: int, num_top: int) -> ScoredToken:
    """{id: {"logprob": ...}} of the token and of the most likely ones."""
    pairs = [(int(key), float(value["logprob"])) for key, value in entry.items()]
    pairs.sort(key=lambda pair: -pair[1])
    return ScoredToken(logprob=dict(pairs)[token_id], top_logprobs=tuple(pairs[:num_top]))
