"""A test server that speaks SGLang 0.5.23's HTTP protocol over a real model on the CPU.

Also a program: python sglang_server.py --model-path FOLDER --port 30000
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import pickle
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar

from live_server import serve_process
from served_model import ServedModel, unless_gone
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agent_rl.errors import ModelLoadError, RequestError
from agent_rl.types import ModelResponse, TokenDelta

IMAGE_ID = 96
Handler = Callable[[ServedModel, Request, dict[str, Any]], Awaitable[Response]]


async def generate(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    faults = model.faults
    faults.log.append(("generate", body))
    if faults.take("drop"):
        request.app.state.drop(request.scope["client"])
    if faults.take("error_500"):
        return JSONResponse({"error": {"message": "out of order"}}, status_code=500)
    if faults.take("busy"):
        return JSONResponse({"error": {"message": "the queue is full"}}, status_code=503)
    sampling = body["sampling_params"]
    ids, budget = body["input_ids"], sampling["max_new_tokens"]
    if body.get("image_data"):
        ids = with_images(ids, body["image_data"], request.app.state.reads_images)
    limit = model.engine.max_seq_len
    if len(ids) > limit - 7 or len(ids) + budget > limit:
        raise RequestError(f"{len(ids)} + {budget} tokens are longer than the context")
    adapter = body.get("lora_path")
    if adapter is not None and adapter not in model.adapters:
        raise RequestError(f"the adapter {adapter} is not loaded")
    if budget == 0:
        return JSONResponse(await score(model, ids, body))
    gconfig = {
        "max_new_tokens": budget,
        "temperature": sampling.get("temperature", 1.0),
        "top_p": sampling.get("top_p", 1.0),
        "top_k": max(0, sampling.get("top_k", -1)),
        "min_p": sampling.get("min_p", 0.0),
        "stop": tuple(sampling.get("stop") or ()),
        "stop_token_ids": tuple(sampling.get("stop_token_ids") or ()),
        "top_logprobs": body.get("top_logprobs_num", 0),
        "grammar": read_grammar(sampling, request.app.state.grammar_backend),
    }
    rid = body.get("rid") or secrets.token_hex(16)
    wanted = model.request(rid, ids, gconfig)
    engine = model.engine_for(adapter)
    if faults.take("abort_at_once"):
        empty = ModelResponse(
            input_tokens=tuple(ids),
            output_tokens=(),
            output_logprobs=(),
            output_versions=(),
            stop_reason="abort",
        )
        answer = reply(model, rid, empty)
        if body.get("stream"):
            return StreamingResponse(once(answer), media_type="text/event-stream")
        return JSONResponse(answer)

    async def plain() -> dict[str, Any]:
        with model.counted(rid):
            response = await engine.agenerate(wanted)
            if wanted.gconfig.grammar is not None and response.stop_reason != "abort":
                response = model.under_grammar(response, wanted.gconfig)
            return reply(model, rid, response)

    async def events() -> AsyncIterator[str]:
        """Everything so far in each event; version spans only in the last."""
        deltas: list[TokenDelta] = []
        with model.counted(rid):
            async for item in engine.astream(wanted):
                if isinstance(item, ModelResponse):
                    yield f"data: {json.dumps(reply(model, rid, item))}\n\n"
                else:
                    deltas.append(item)
                    if len(deltas) == 3 and faults.take("drop_stream"):
                        request.app.state.drop(request.scope["client"])
                    yield f"data: {json.dumps(partial(rid, ids, deltas))}\n\n"
        yield "data: [DONE]\n\n"

    if body.get("stream"):
        return StreamingResponse(events(), media_type="text/event-stream")
    return JSONResponse(await unless_gone(request, plain()))


def with_images(ids: list[int], images: list[str], reads_images: bool) -> list[int]:
    """The prompt has one placeholder for each image, in order, which becomes as many tokens as the
    image is large: here, as its base64 is long. The other ids stay as they are."""
    if not reads_images or ids.count(IMAGE_ID) != len(images):
        raise RequestError(f"{ids.count(IMAGE_ID)} placeholders for {len(images)} images")
    left = iter(images)
    return [
        token_id
        for sent in ids
        for token_id in ([sent] if sent != IMAGE_ID else [sent] * len(next(left).split(",")[1]))
    ]


def read_grammar(sampling: dict[str, Any], backend: str) -> str | None:
    """Only llguidance reads its own Lark dialect; xgrammar takes it for a faulty EBNF."""
    given = [name for name in ("json_schema", "ebnf") if sampling.get(name) is not None]
    if len(given) > 1:
        raise RequestError("Only one of json_schema, regex, ebnf, or structural_tag can be set.")
    if not given:
        return None
    if backend == "none":
        raise RequestError("not supported when the server is launched with --grammar-backend none")
    if given == ["json_schema"]:
        return f"start: %json {sampling['json_schema']}\n"
    if backend != "llguidance":
        raise RequestError("Failed to compile ebnf grammar")
    return str(sampling["ebnf"])


async def once(answer: dict[str, Any]) -> AsyncIterator[str]:
    yield f"data: {json.dumps(answer)}\n\n"
    yield "data: [DONE]\n\n"


def partial(rid: str, ids: list[int], deltas: list[TokenDelta]) -> dict[str, Any]:
    pairs = [(delta.token_ids[0], delta.logprobs[0]) for delta in deltas]
    meta = {
        "id": rid,
        "finish_reason": None,
        "prompt_tokens": len(ids),
        "completion_tokens": len(pairs),
        "output_token_logprobs": [[logprob, token_id, None] for token_id, logprob in pairs],
    }
    return {"text": "", "output_ids": [token_id for token_id, _ in pairs], "meta_info": meta}


def reply(model: ServedModel, rid: str, response: ModelResponse) -> dict[str, Any]:
    ids = list(response.output_tokens)
    kind = response.stop_reason
    detail = {"length": len(ids)} if kind == "length" else {"matched": ids[-1:]}
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": {"type": kind, **detail},
        "prompt_tokens": len(response.input_tokens),
        "cached_tokens": response.num_cached_tokens or 0,
        "completion_tokens": len(ids),
        "output_token_logprobs": [
            [logprob, token_id, None]
            for token_id, logprob in zip(ids, response.output_logprobs, strict=True)
        ],
    }
    if not model.faults.hides_versions:
        meta["weight_version"] = model.label
        meta["weight_versions"] = model.spans(response)
    if response.output_top_logprobs is not None:
        meta["output_top_logprobs"] = [
            [[logprob, token_id, None] for token_id, logprob in top]
            for top in response.output_top_logprobs
        ]
    return {"text": "", "output_ids": ids, "meta_info": meta}


async def score(model: ServedModel, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
    start, num_top = body["logprob_start_len"], body.get("top_logprobs_num", 0)
    engine = model.engine_for(body.get("lora_path"))
    logprobs = await engine.score(ids, len(ids) - start - 1)
    entries = [
        [logprob, token_id, None]
        for token_id, logprob in zip(ids[start:], (None, *logprobs), strict=True)
    ]
    tops = await engine.score_top(ids, len(ids) - start - 1, num_top) if num_top else ()
    meta = {
        "finish_reason": {"type": "length", "length": 0},
        "input_token_logprobs": entries,
        "input_top_logprobs": [None, *([[p, i, None] for i, p in top] for top in tops)],
        "output_token_logprobs": [],
        "completion_tokens": 0,
        "weight_version": model.label,
    }
    return {"text": "", "output_ids": [], "meta_info": meta}


async def abort_request(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    """By prefix, as the real one."""
    model.faults.log.append(("abort_request", body))
    rid = body.get("rid") or ""
    found = [name for name in model.running if body.get("abort_all") or name.startswith(rid)]
    await model.abort(found)
    return Response()


async def pause_generation(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    model.faults.log.append(("pause_generation", body))
    request.app.state.pause_mode = body["mode"]
    await model.pause(aborts=body["mode"] == "abort")
    return JSONResponse({"status": "ok"})


async def continue_generation(
    model: ServedModel, request: Request, body: dict[str, Any]
) -> Response:
    model.faults.log.append(("continue_generation", body))
    request.app.state.pause_mode = None
    await model.resume()
    return JSONResponse({"status": "ok"})


async def update_weights_from_disk(
    model: ServedModel, request: Request, body: dict[str, Any]
) -> Response:
    model.faults.log.append(("update_weights_from_disk", body))
    mode = request.app.state.pause_mode
    if body.get("abort_all_requests"):
        await model.abort(list(model.running))
    if mode is None:
        await model.is_idle.wait()
    if model.faults.fail_update:
        return failed("the weights cannot be loaded")
    try:
        await model.load(body["model_path"], body.get("weight_version") or model.labels[-1])
    except ModelLoadError as error:
        return failed(str(error))
    if mode == "in_place" and model.running and body.get("flush_cache", True):
        return failed("weights were updated, but the cache was not flushed")
    return JSONResponse({"success": True, "message": "", "num_paused_requests": 0})


async def update_weight_version(
    model: ServedModel, request: Request, body: dict[str, Any]
) -> Response:
    model.faults.log.append(("update_weight_version", body))
    if body.get("abort_all_requests", True):
        await model.abort(list(model.running))
    model.rename(body["new_version"])
    return JSONResponse({"success": True, "new_version": body["new_version"]})


async def load_lora_adapter(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    if body["lora_name"] in model.adapters:
        return failed(f"{body['lora_name']} is already loaded")
    await asyncio.to_thread(model.add_adapter, body["lora_name"], body["lora_path"])
    return JSONResponse({"success": True, "error_message": ""})


async def unload_lora_adapter(
    model: ServedModel, request: Request, body: dict[str, Any]
) -> Response:
    await model.adapters.pop(body["lora_name"]).close()
    return JSONResponse({"success": True, "error_message": ""})


async def init_weights_update_group(
    model: ServedModel, request: Request, body: dict[str, Any]
) -> Response:
    await asyncio.to_thread(
        model.join,
        body["group_name"],
        body["master_address"],
        body["master_port"],
        body["rank_offset"],
        body["world_size"],
    )
    return JSONResponse({"success": True, "message": ""})


async def destroy_weights_update_group(
    model: ServedModel, request: Request, body: dict[str, Any]
) -> Response:
    model.leave(body["group_name"])
    return JSONResponse({"success": True, "message": ""})


async def begin_weight_update(
    model: ServedModel, request: Request, body: dict[str, Any]
) -> Response:
    if model.is_receiving:
        return failed("a weight-update session is already open; call end_weight_update() first")
    model.is_receiving = True
    return JSONResponse({"success": True, "message": ""})


async def end_weight_update(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    if not model.is_receiving:
        return failed("no weight update was begun")
    model.is_receiving = False
    return JSONResponse({"success": True, "message": ""})


async def update_weights_from_distributed(
    model: ServedModel, request: Request, body: dict[str, Any]
) -> Response:
    model.faults.log.append(("update_weights_from_distributed", body))
    if not model.is_receiving:
        return failed("must run between begin_weight_update() and end_weight_update()")
    try:
        await asyncio.to_thread(model.receive, body["group_name"], body["names"], body["shapes"])
    except RuntimeError as error:
        return failed(str(error))
    model.received(body.get("weight_version"))
    return JSONResponse({"success": True, "message": ""})


class SafeUnpickler(pickle.Unpickler):
    """What the real server lets a pickle name, as far as these weights need it."""

    allowed: ClassVar[set[tuple[str, str]]] = {
        ("torch.multiprocessing.reductions", "rebuild_tensor"),
        ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
        ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
        ("torch.storage", "UntypedStorage"),
        ("torch", "Tensor"),
        ("torch", "Size"),
        ("torch", "uint8"),
        ("torch", "float32"),
        ("torch", "bfloat16"),
        ("types", "SimpleNamespace"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise RuntimeError(f"Blocked unsafe global ({module}.{name})")
        return super().find_class(module, name)


async def update_weights_from_tensor(
    model: ServedModel, request: Request, body: dict[str, Any]
) -> Response:
    """One payload for each worker, of which this server has one."""
    model.faults.log.append(("update_weights_from_tensor", body))
    if not model.is_receiving:
        return failed("must run between begin_weight_update() and end_weight_update()")
    if body["load_format"] != "flattened_bucket" or len(body["serialized_named_tensors"]) != 1:
        return failed("this test server knows no other form")
    if model.faults.fail_update:
        return failed("the weights cannot be loaded")
    data = base64.b64decode(body["serialized_named_tensors"][0], validate=True)
    bucket = SafeUnpickler(io.BytesIO(data)).load()
    model.copy_in(
        {
            place.name: bucket["flattened_tensor"][place.start_idx : place.end_idx]
            .view(place.dtype)
            .reshape(place.shape)
            for place in bucket["metadata"]
        }
    )
    model.received(body.get("weight_version"))
    return JSONResponse({"success": True, "message": ""})


async def model_info(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    info = {"model_path": model.folder, "weight_version": model.label}
    return JSONResponse({**info, "has_image_understanding": request.app.state.reads_images})


async def models(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    await model.faults.wait_to_tell()
    base = {"id": model.folder, "max_model_len": model.engine.max_seq_len}
    adapters = [{"id": name, "parent": model.folder} for name in model.adapters]
    return JSONResponse({"object": "list", "data": [base, *adapters]})


async def server_info(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    backend = request.app.state.grammar_backend
    return JSONResponse({"tp_size": 1, "grammar_backend": backend})


async def health(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    return Response(status_code=503 if request.app.state.pause_mode else 200)


def failed(message: str) -> Response:
    return JSONResponse({"success": False, "message": message}, status_code=400)


POSTS: tuple[Handler, ...] = (
    generate,
    abort_request,
    pause_generation,
    continue_generation,
    update_weights_from_disk,
    update_weight_version,
    load_lora_adapter,
    unload_lora_adapter,
    init_weights_update_group,
    destroy_weights_update_group,
    begin_weight_update,
    end_weight_update,
    update_weights_from_distributed,
    update_weights_from_tensor,
)


def sglang_app(
    model: ServedModel,
    api_key: str | None = None,
    *,
    grammar_backend: str = "llguidance",
    reads_images: bool = False,
) -> Starlette:
    def served(handler: Handler, is_open: bool = False) -> Callable[..., Any]:
        async def endpoint(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if api_key is not None and not is_open and given != f"Bearer {api_key}":
                return JSONResponse({"error": "Unauthorized"}, status_code=401)
            body = await request.json() if request.method == "POST" else {}
            try:
                return await handler(model, request, body)
            except (RequestError, ValueError) as error:
                return JSONResponse({"error": {"message": str(error)}}, status_code=400)

        return endpoint

    routes = [Route(f"/{post.__name__}", served(post), methods=["POST"]) for post in POSTS]
    routes += [
        Route("/v1/models", served(models)),
        Route("/model_info", served(model_info)),
        Route("/server_info", served(server_info)),
        Route("/health", served(health, is_open=True)),
        Route("/ready", served(health, is_open=True)),
    ]
    app = Starlette(routes=routes)
    app.state.pause_mode = None
    app.state.grammar_backend = grammar_backend
    app.state.reads_images = reads_images
    app.state.model = model
    return app


if __name__ == "__main__":
    serve_process(sglang_app)
