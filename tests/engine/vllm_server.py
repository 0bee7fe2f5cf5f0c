"""A test server that speaks vLLM 0.32's token protocol over a real model on the CPU.

Its log-probs are those of --logprobs-mode processed_logprobs, for requests that truncate nothing.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from live_server import serve_process
from served_model import ServedModel, unless_gone
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agent_rl.engine.local import LocalEngine
from agent_rl.errors import ModelLoadError, RequestError
from agent_rl.types import ModelResponse, TokenDelta

Handler = Callable[[ServedModel, Request, dict[str, Any]], Awaitable[Response]]


async def generate(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    faults = model.faults
    faults.log.append(("generate", body))
    if model.is_receiving:
        model.is_dead = True  # its layers have no tensors meanwhile
        return dead()
    if faults.take("drop"):
        request.app.state.drop(request.scope["client"])
    if faults.take("error_500"):
        return JSONResponse({"error": {"message": "out of order"}}, status_code=500)
    if faults.take("busy"):
        return JSONResponse({"error": {"message": "too many requests"}}, status_code=429)
    sampling, ids = body["sampling_params"], body["token_ids"]
    if len(ids) + sampling["max_tokens"] > model.engine.max_seq_len:
        raise RequestError("longer than the context")
    adapter = body.get("model")
    if adapter is not None and adapter not in model.adapters:
        raise RequestError(f"the model {adapter} does not exist")
    if sampling.get("top_k") == 1:  # certain, after truncation
        return JSONResponse(certain(ids[-1]))
    if "prompt_logprobs" in sampling:
        return JSONResponse(await score(model.engine_for(adapter), ids, sampling))
    gconfig = {
        "max_new_tokens": sampling["max_tokens"],
        "min_new_tokens": sampling.get("min_tokens", 0),
        "temperature": sampling["temperature"],
        "stop": tuple(sampling.get("stop") or ()),
        "stop_token_ids": tuple(sampling.get("stop_token_ids") or ()),
        "top_logprobs": sampling.get("logprobs", 0),
        "seed": sampling.get("seed"),
        "grammar": read_grammar(sampling.get("structured_outputs")),
    }
    rid = f"generate-tokens-{body.get('request_id') or secrets.token_hex(16)}"
    wanted = model.request(rid, ids, gconfig)
    engine = model.engine_for(adapter)
    if faults.take("abort_at_once"):
        empty = choice((), (), "abort")
        return JSONResponse({"request_id": rid, "choices": [{**empty, "weight_versions": []}]})

    async def plain() -> dict[str, Any]:
        with model.counted(rid):
            response = await engine.agenerate(wanted)
            if wanted.gconfig.grammar is not None and response.stop_reason != "abort":
                response = model.under_grammar(response, wanted.gconfig)
        cached = {"cached_tokens": response.num_cached_tokens or 0}
        usage = {"prompt_tokens": len(ids), "prompt_tokens_details": cached}
        return {"request_id": rid, "choices": [whole(model, response)], "usage": usage}

    async def events() -> AsyncIterator[str]:
        """Only what is new in each event; version spans only in the last."""
        num_sent = 0
        with model.counted(rid):
            async for item in engine.astream(wanted):
                num_sent += 1
                if num_sent == 3 and faults.take("drop_stream"):
                    request.app.state.drop(request.scope["client"])
                if isinstance(item, TokenDelta):
                    new = choice(item.token_ids, item.logprobs, None)
                else:
                    new = {**choice((), (), item.stop_reason)}
                    new["weight_versions"] = spans(model, item)
                yield f"data: {json.dumps({'request_id': rid, 'choices': [new]})}\n\n"
        yield "data: [DONE]\n\n"

    if body.get("stream"):
        return StreamingResponse(events(), media_type="text/event-stream")
    return JSONResponse(await unless_gone(request, plain()))


def dead() -> Response:
    error = {"message": "EngineCore encountered an issue. See stack trace (above)"}
    return JSONResponse({"error": error}, status_code=500)


def choice(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    finish: str | None,
    tops: Sequence[Sequence[tuple[int, float]]] | None = None,
) -> dict[str, Any]:
    content = []
    for index, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        sampled = {"token_id": token_id, "logprob": logprob}
        others = [] if tops is None else tops[index]
        top = [{"token_id": other, "logprob": value} for other, value in others]
        content.append({**sampled, "top_logprobs": [sampled, *top]})
    return {
        "index": 0,
        "token_ids": list(token_ids),
        "logprobs": {"content": content},
        "finish_reason": finish,
    }


def whole(model: ServedModel, response: ModelResponse) -> dict[str, Any]:
    filled = choice(
        response.output_tokens,
        response.output_logprobs,
        response.stop_reason,
        response.output_top_logprobs,
    )
    return {**filled, "weight_versions": spans(model, response)}


def spans(model: ServedModel, response: ModelResponse) -> list[dict[str, Any]] | None:
    return None if model.faults.hides_versions else model.spans(response)


def certain(token_id: int) -> dict[str, Any]:
    return {"request_id": "probe", "choices": [choice((token_id,), (0.0,), "length")]}


def read_grammar(outputs: dict[str, Any] | None) -> str | None:
    """As with --structured-outputs-config.backend guidance."""
    if outputs is None:
        return None
    (kind, text), *others = outputs.items()
    assert not others and kind in ("json", "grammar")
    return f"start: %json {text}\n" if kind == "json" else str(text)


async def score(engine: LocalEngine, ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
    num_top = sampling["prompt_logprobs"]
    logprobs = await engine.score(ids, len(ids) - 1)
    tops = await engine.score_top(ids, len(ids) - 1, num_top) if num_top else [()] * len(logprobs)
    entries = [
        {str(other): {"logprob": value} for other, value in ((token_id, logprob), *top)}
        for token_id, logprob, top in zip(ids[1:], logprobs, tops, strict=True)
    ]
    return {**certain(ids[-1]), "prompt_logprobs": [None, *entries]}


async def abort_requests(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    model.faults.log.append(("abort_requests", body))
    await model.abort(body.get("request_ids") or list(model.running))
    return JSONResponse({"status": "aborted"})


async def pause(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    mode = request.query_params.get("mode", "abort")
    model.faults.log.append(("pause", mode))
    await model.pause(aborts=mode == "abort")
    return JSONResponse({"status": "paused"})


async def resume(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    model.faults.log.append(("resume", None))
    await model.resume()
    return JSONResponse({"status": "resumed"})


async def collective_rpc(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    """vLLM's own reload_weights, and what WeightReceiver adds. The label stays: another call sets
    it. What goes wrong in a worker is an answer of 500."""
    method, kwargs = body["method"], body["kwargs"]
    model.faults.log.append((method, kwargs))
    if model.faults.fail_update and method in ("reload_weights", "receive_weights"):
        return JSONResponse({"error": "the weights cannot be loaded"}, status_code=500)
    try:
        await WORKER_METHODS[method](model, kwargs)
    except (AssertionError, KeyError, ModelLoadError, RuntimeError) as error:
        return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=500)
    return JSONResponse({"results": [None]})


async def reload_weights(model: ServedModel, kwargs: dict[str, Any]) -> None:
    """From a folder; from an empty list of tensors, which ends an update that was broken off."""
    if kwargs.get("weights_iterator") == []:
        model.is_receiving = False
        return
    assert not model.is_receiving, "vLLM would mix what it got with what comes"
    await model.load(kwargs["weights_path"], model.labels[-1])


async def join_weights_group(model: ServedModel, kwargs: dict[str, Any]) -> None:
    group, address, port = kwargs["name"], kwargs["address"], kwargs["port"]
    rank, world_size = kwargs["first_rank"], kwargs["world_size"]
    await asyncio.to_thread(model.join, group, address, port, rank, world_size)


async def leave_weights_group(model: ServedModel, kwargs: dict[str, Any]) -> None:
    model.groups.clear()


async def begin_weights(model: ServedModel, kwargs: dict[str, Any]) -> None:
    assert not model.is_receiving, "vLLM would mix what it got with what comes"
    model.is_receiving = True


async def receive_weights(model: ServedModel, kwargs: dict[str, Any]) -> None:
    assert model.is_receiving
    [group] = model.groups
    await asyncio.to_thread(model.receive, group, kwargs["names"], kwargs["shapes"])


async def end_weights(model: ServedModel, kwargs: dict[str, Any]) -> None:
    assert model.is_receiving
    model.is_receiving = False
    model.received(model.labels[-1])


WORKER_METHODS: dict[str, Callable[[ServedModel, dict[str, Any]], Awaitable[None]]] = {
    method.__name__: method
    for method in (
        reload_weights,
        join_weights_group,
        leave_weights_group,
        begin_weights,
        receive_weights,
        end_weights,
    )
}


async def reset_prefix_cache(
    model: ServedModel, request: Request, body: dict[str, Any]
) -> Response:
    return Response()


async def update_weight_version(
    model: ServedModel, request: Request, body: dict[str, Any]
) -> Response:
    model.rename(body["new_version"])
    return JSONResponse({"success": True})


async def weight_info(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    return JSONResponse({"weight_version": model.label})


async def load_lora_adapter(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    await asyncio.to_thread(model.add_adapter, body["lora_name"], body["lora_path"])
    return Response()


async def unload_lora_adapter(
    model: ServedModel, request: Request, body: dict[str, Any]
) -> Response:
    await model.adapters.pop(body["lora_name"]).close()
    return Response()


async def world_size(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    return JSONResponse({"world_size": 1})


async def models(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    await model.faults.wait_to_tell()
    base = {"id": "base", "root": model.first_folder, "max_model_len": model.engine.max_seq_len}
    adapters = [{"id": name, "parent": "base"} for name in model.adapters]
    return JSONResponse({"object": "list", "data": [base, *adapters]})


async def server_info(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    assert request.query_params["config_format"] == "json"
    return JSONResponse({"vllm_config": {"structured_outputs_config": {"backend": "guidance"}}})


async def health(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    return Response()


def vllm_app(model: ServedModel, api_key: str | None = None) -> Starlette:
    def served(handler: Handler, is_open: bool = False) -> Callable[..., Any]:
        async def endpoint(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if api_key is not None and not is_open and given != f"Bearer {api_key}":
                return JSONResponse({"error": "Unauthorized"}, status_code=401)
            if model.is_dead:
                return dead()
            content = await request.body()
            try:
                return await handler(model, request, json.loads(content) if content else {})
            except (RequestError, ValueError) as error:
                return JSONResponse({"error": {"message": str(error)}}, status_code=400)

        return endpoint

    posts = {
        "/inference/v1/generate": generate,
        "/abort_requests": abort_requests,
        "/pause": pause,
        "/resume": resume,
        "/collective_rpc": collective_rpc,
        "/reset_prefix_cache": reset_prefix_cache,
        "/update_weight_version": update_weight_version,
        "/v1/load_lora_adapter": load_lora_adapter,
        "/v1/unload_lora_adapter": unload_lora_adapter,
    }
    routes = [Route(path, served(post), methods=["POST"]) for path, post in posts.items()]
    routes += [
        Route("/v1/models", served(models)),
        Route("/weight_info", served(weight_info)),
        Route("/server_info", served(server_info)),
        Route("/get_world_size", served(world_size)),
        Route("/health", served(health, is_open=True)),
    ]
    app = Starlette(routes=routes)
    app.state.model = model
    return app


if __name__ == "__main__":
    serve_process(vllm_app)
