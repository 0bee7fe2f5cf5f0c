"""SGLang's HTTP protocol, as of 0.5.23: ids to ``/generate``, control calls for new weights.

Log-probs are ``log_softmax(logits / temperature)`` before top-p, top-k and min-p. What changes the
logits before that (penalties, logit_bias, min_new_tokens) would change the log-probs too, so it is
not offered; for grammars see ``guided.py``. Spans in the answer say which weights sampled which
token.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
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
from agent_rl.types import JsonObject

# Grammars of any kind.
SGLANG_ARGS = ("--grammar-backend", "llguidance")
# Places of the context that a prompt may not fill.
_RESERVED = 6


class SGLang:
    pause_modes: frozenset[PauseMode] = frozenset({"abort", "retract", "in_place"})
    supported = frozenset(
        {"top_p", "top_k", "min_p", "stop", "top_logprobs", "image_data", "grammar"}
    )

    def __init__(self) -> None:
        self._grammar_backends: dict[str, str] = {}

    async def describe(self, server: ServerConnection) -> ServerInfo:
        models = await server.get("/v1/models")
        info = await server.get("/model_info")
        supported = self.supported
        if server.address not in self._grammar_backends:
            how = await server.get("/server_info")
            with reading(server):
                self._grammar_backends[server.address] = how["grammar_backend"] or "none"
        if self._grammar_backends[server.address] == "none":
            supported = supported - {"grammar"}
        with reading(server):
            if not info.get("has_image_understanding"):
                supported = supported - {"image_data"}
            model, *adapters = models["data"]
            return ServerInfo(
                max_seq_len=int(model["max_model_len"]) - _RESERVED,
                weight_version=str(info["weight_version"]),
                supported=supported,
                folder=Path(info["model_path"]),
                adapters=frozenset(adapter["id"] for adapter in adapters),
            )

    async def generate(
        self, server: ServerConnection, attempt: Attempt, *, streams: bool
    ) -> AsyncGenerator[Piece, None]:
        body = _generate_body(attempt, streams)
        if attempt.gconfig.grammar is not None:
            body["sampling_params"] |= server_grammar(
                attempt.gconfig.grammar,
                schema_field="json_schema",
                text_field="ebnf",
                reads_text={
                    address: backend == "llguidance"
                    for address, backend in self._grammar_backends.items()
                },
                args=SGLANG_ARGS,
            )
        if not streams:
            answer = await server.post("/generate", body)
            with reading(server):
                piece = _read_piece(answer, num_seen=0)
            yield piece
            return
        num_seen = 0
        async with aclosing(server.events("/generate", body)) as events:
            async for event in events:
                with reading(server):
                    if "error" in event:
                        raise RequestError(str(event["error"].get("message")))
                    piece = _read_piece(event, num_seen)
                num_seen += len(piece.token_ids)
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
        body: JsonObject = {
            "input_ids": list(input_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": len(input_ids) - num_scored - 1,
            "top_logprobs_num": num_top,
        }
        if adapter is not None:
            body["lora_path"] = adapter
        answer = await server.post("/generate", body, is_idempotent=True)
        with reading(server):
            meta = answer["meta_info"]
            if _read_finish(meta["finish_reason"]) == "abort":  # by a pause, perhaps half done
                raise ServerBusyError(f"{server.address} ended the scoring of a request")
            entries = meta["input_token_logprobs"][-num_scored:]
            ids = [entry[1] for entry in entries]
            if ids != list(input_ids[-num_scored:]):
                raise EngineError(
                    f"{server.address} scored the ids {ids}, not those that were sent"
                )
            tops = meta["input_top_logprobs"][-num_scored:] if num_top else [()] * num_scored
            return tuple(
                ScoredToken(logprob=float(entry[0]), top_logprobs=_read_top(top))
                for entry, top in zip(entries, tops, strict=True)
            )

    async def abort(self, server: ServerConnection, rid: str) -> None:
        await server.post("/abort_request", {"rid": rid}, is_idempotent=True)

    async def pause(self, server: ServerConnection, mode: PauseMode) -> None:
        await server.post("/pause_generation", {"mode": mode}, is_idempotent=True)

    async def resume(self, server: ServerConnection) -> None:
        await server.post("/continue_generation", {}, is_idempotent=True)

    async def load_folder(
        self, server: ServerConnection, folder: Path, label: str, *, keeps_cache: bool
    ) -> None:
        body = {
            "model_path": str(folder),
            "weight_version": label,
            "flush_cache": not keeps_cache,
            "abort_all_requests": False,
            "keep_pause": True,
        }
        await _control(server, "/update_weights_from_disk", body, is_idempotent=True)

    async def set_label(self, server: ServerConnection, label: str) -> None:
        body = {"new_version": label, "abort_all_requests": False}
        await _control(server, "/update_weight_version", body, is_idempotent=True)

    async def load_adapter(self, server: ServerConnection, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        await _control(server, "/load_lora_adapter", body)

    async def unload_adapter(self, server: ServerConnection, name: str) -> None:
        await _control(server, "/unload_lora_adapter", {"lora_name": name})

    async def drop_update(self, server: ServerConnection) -> None:
        with suppress(RequestError):  # it has none
            await _control(server, "/end_weight_update", {})

    async def num_workers(self, server: ServerConnection) -> int:
        return int((await server.get("/server_info"))["tp_size"])

    async def join_group(self, server: ServerConnection, member: GroupMember) -> None:
        body = {
            "master_address": member.address,
            "master_port": member.port,
            "rank_offset": member.rank,
            "world_size": member.world_size,
            "group_name": member.group,
            "backend": member.backend,
        }
        await _control(server, "/init_weights_update_group", body)

    async def leave_group(self, server: ServerConnection, group: str) -> None:
        await _control(server, "/destroy_weights_update_group", {"group_name": group})

    async def begin_receiving(self, server: ServerConnection) -> None:
        await _control(server, "/begin_weight_update", {})

    async def end_receiving(self, server: ServerConnection) -> None:
        await _control(server, "/end_weight_update", {})

    async def receive(
        self,
        server: ServerConnection,
        group: str,
        tensors: Sequence[TensorSpec],
        label: str | None,
        *,
        keeps_cache: bool,
    ) -> None:
        body = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": group,
            "weight_version": label,
            "flush_cache": label is not None and not keeps_cache,
            "abort_all_requests": False,
        }
        await _control(server, "/update_weights_from_distributed", body)

    async def receive_shared(
        self,
        server: ServerConnection,
        handles: Sequence[bytes],
        label: str | None,
        *,
        keeps_cache: bool,
    ) -> None:
        body = {
            "serialized_named_tensors": [b64encode(handle).decode() for handle in handles],
            "load_format": "flattened_bucket",
            "weight_version": label,
            "flush_cache": label is not None and not keeps_cache,
            "abort_all_requests": False,
        }
        await _control(server, "/update_weights_from_tensor", body)


def _generate_body(attempt: Attempt, streams: bool) -> JsonObject:
    """Ids only: a text beside them would be ignored silently by the server."""
    gconfig = attempt.gconfig
    sampling: JsonObject = {
        "max_new_tokens": attempt.budget,
        "temperature": 0.0 if gconfig.is_greedy else gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": gconfig.top_k or -1,
        "min_p": gconfig.min_p,
        "stop": list(gconfig.stop),
        "stop_token_ids": list(gconfig.stop_token_ids),
    }
    body: JsonObject = {
        "rid": attempt.rid,
        "input_ids": list(attempt.input_ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": streams,
    }
    if gconfig.top_logprobs:
        body["top_logprobs_num"] = gconfig.top_logprobs
    if attempt.image_data:
        body["image_data"] = list(attempt.image_data)
    if attempt.adapter is not None:
        body["lora_path"] = attempt.adapter
    return body


def _read_piece(answer: Mapping[str, Any], num_seen: int) -> Piece:
    """The tokens after the first ``num_seen``; streams tell all so far, or only the new ones."""
    meta = answer["meta_info"]
    ids = answer.get("output_ids") or []
    entries = meta.get("output_token_logprobs") or []
    if len(ids) != len(entries):
        raise EngineError(
            f"the server sent {len(ids)} token ids and {len(entries)} log-probs; each token needs "
            "its own"
        )
    is_cumulative = len(ids) == meta.get("completion_tokens", len(ids))
    start = num_seen if is_cumulative else 0
    if [entry[1] for entry in entries[start:]] != list(ids[start:]):
        raise EngineError("the server's log-probs are of other tokens than its ids")
    tops = meta.get("output_top_logprobs")
    return Piece(
        token_ids=tuple(ids[start:]),
        logprobs=tuple(float(entry[0]) for entry in entries[start:]),
        top_logprobs=None if tops is None else tuple(map(_read_top, tops[start:])),
        finish=_read_finish(meta.get("finish_reason")),
        spans=read_spans(meta.get("weight_versions")),
        num_cached=meta.get("cached_tokens"),
    )


def _read_top(entries: Sequence[Sequence[Any]]) -> TopLogprobs:
    return tuple((int(entry[1]), float(entry[0])) for entry in entries)


def _read_finish(reason: Mapping[str, Any] | None) -> Any:
    """An abort with a status is a failure of the server, one without is ours."""
    if reason is None:
        return None
    kind, status = reason["type"], reason.get("status_code")
    if kind == "abort" and status is not None:
        message = f"the request was aborted: {reason.get('message')}"
        if status in (429, 503):
            raise ServerBusyError(message)
        raise RequestError(message) if status < 500 else ServerError(message)
    if kind not in ("stop", "length", "abort"):
        raise EngineError(f"the server ended a request with {kind!r}, which is not known here")
    return kind


async def _control(
    server: ServerConnection, path: str, body: JsonObject, *, is_idempotent: bool = False
) -> None:
    answer = await server.post(path, body, is_idempotent=is_idempotent)
    if isinstance(answer, dict) and answer.get("success") is False:
        why = answer.get("message") or answer.get("error_message")
        raise EngineError(f"{server.address}{path}: {why}")
