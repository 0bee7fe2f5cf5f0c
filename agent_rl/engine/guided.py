"""Guided requests on servers: the grammar in a server's words, and log-probs as ours are.

A server samples from what the grammar allows, and its log-probs are those of what was left: 0 where
one token was. Ours are of the model itself, so that what was sampled is scored once more. And its
grammar begins where it begins to sample: what was interrupted cannot go on from its middle.

    sampled  {"a":     1       }       allowed: {"a":  | 0, 1, ... | }
    server   0.0      -1.9     0.0  -> score -> -8.2  -2.3  -4.6, forced: yes, no, yes
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from agent_rl.engine.http import ServerConnection
from agent_rl.engine.server_api import Attempt, Piece, ServerApi
from agent_rl.errors import RequestError
from agent_rl.types import ModelRequest

_ONLY_JSON = re.compile(r"start: (?:answer\nanswer: )?%json (.+)\n?")


def json_schema(grammar: str) -> str | None:
    """The schema, where a grammar (``matcher.py``) says no more than that the answer is of one."""
    match = _ONLY_JSON.fullmatch(grammar)
    if match is None:
        return None
    try:
        json.loads(match[1])
    except json.JSONDecodeError:
        return None
    return match[1]


def server_grammar(
    grammar: str,
    *,
    schema_field: str,
    text_field: str,
    reads_text: Mapping[str, bool],
    args: Sequence[str],
) -> dict[str, str]:
    """The sampling parameter of a server: the text itself, if grammars are llguidance's on all
    servers, else a JSON schema. What one of them refuses is refused, wherever it would be sent.

    Args:
        reads_text: of each server, by its address.
        args: with which a server does.

    Raises:
        RequestError: it needs more than a schema, and a server reads nothing else.
    """
    lacking = [address for address, reads in reads_text.items() if not reads]
    if not lacking:
        return {text_field: grammar}
    schema = json_schema(grammar)
    if schema is None:
        raise RequestError(
            "the grammar is more than one JSON schema, which is all that "
            f"{', '.join(lacking)} can read; start all servers with {' '.join(args)}",
            param="grammar",
        )
    return {schema_field: schema}


def check_guided(req: ModelRequest) -> None:
    """Raises RequestError for what servers cannot score: images, other temperatures than 1."""
    gconfig = req.gconfig
    if req.image_data:
        raise RequestError(
            "inference servers take no grammar together with images; send one of them",
            param="grammar",
        )
    if not gconfig.is_greedy and gconfig.temperature != 1.0:
        raise RequestError(
            f"temperature is {gconfig.temperature:g}, but inference servers state log-probs under "
            "a grammar at temperature 1 only; send temperature=1 or 0",
            param="temperature",
        )


async def generate_guided(
    api: ServerApi, server: ServerConnection, attempt: Attempt
) -> AsyncGenerator[Piece, None]:
    """One piece, whole and scored, or of no tokens where it was interrupted.

    The weights must be the same before and after, or sampled and scored were not by the same ones.

    Raises:
        RequestError: with the param "grammar" where it is that which the server refuses.
    """
    try:
        async with aclosing(api.generate(server, attempt, streams=False)) as pieces:
            async for piece in pieces:
                if piece.finish == "abort":
                    yield Piece(token_ids=(), logprobs=(), finish="abort")
                else:
                    yield await _scored(api, server, attempt, piece)
    except RequestError as error:
        if error.param is None and "grammar" in str(error).lower():
            raise RequestError(str(error), param="grammar") from error
        raise


async def _scored(
    api: ServerApi, server: ServerConnection, attempt: Attempt, piece: Piece
) -> Piece:
    scores = await api.score(
        server,
        (*attempt.input_ids, *piece.token_ids),
        len(piece.token_ids),
        num_top=attempt.gconfig.top_logprobs,
        adapter=attempt.adapter,
    )
    return replace(
        piece,
        logprobs=tuple(score.logprob for score in scores),
        top_logprobs=tuple(score.top_logprobs for score in scores),
        is_forced=tuple(logprob == 0.0 for logprob in piece.logprobs),
    )
