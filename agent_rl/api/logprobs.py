"""Log-probs of the sampled tokens in OpenAI's shape: one entry for each sampled token.

The end-of-turn token and a trimmed stop string are sampled too, so the list is as long as
``usage.completion_tokens``. ``bytes`` are exact even where a token is half a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from agent_rl.tokens.format import ChatFormat
from agent_rl.types import JsonObject, ModelResponse

_HALF = "\ufffd"


def entries(
    fmt: ChatFormat,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    tops: Sequence[Sequence[tuple[int, float]]] | None = None,
) -> list[JsonObject]:
    """``top_logprobs`` is empty where no alternatives were asked for."""
    if tops is None:
        tops = [()] * len(token_ids)
    return [
        {
            **_entry(fmt, token_id, logprob),
            "top_logprobs": [_entry(fmt, *alternative) for alternative in top],
        }
        for token_id, logprob, top in zip(token_ids, logprobs, tops, strict=True)
    ]


def response_entries(fmt: ChatFormat, response: ModelResponse) -> list[JsonObject]:
    return entries(
        fmt, response.output_tokens, response.output_logprobs, response.output_top_logprobs
    )


def token_text(fmt: ChatFormat, token_id: int) -> tuple[str, list[int] | None]:
    """The token's text and bytes. Half a character is written ``bytes:\\xf0\\x9f``, as OpenAI
    does."""
    text = fmt.decode([token_id])
    if _HALF not in text:
        return text, list(text.encode())
    raw = _raw_bytes(fmt, token_id)
    if raw is None:
        return text, None
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def _entry(fmt: ChatFormat, token_id: int, logprob: float) -> JsonObject:
    text, raw = token_text(fmt, token_id)
    return {"token": text, "logprob": logprob, "bytes": raw}


def _raw_bytes(fmt: ChatFormat, token_id: int) -> list[int] | None:
    """From the vocabulary's own spelling: ``<0xF0>``, or one printable character for each byte."""
    spell = getattr(fmt.tokenizer, "convert_ids_to_tokens", None)
    spelling = spell(token_id) if spell is not None else None
    if not isinstance(spelling, str):
        return None
    if spelling.startswith("<0x") and spelling.endswith(">"):
        return [int(spelling[3:-1], 16)]
    table = _byte_of_character()
    return [table[char] for char in spelling] if all(c in table for c in spelling) else None


@cache
def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes byte b as chr(b) where that is printable, else as chr(256 + k), k
    counting the others. https://github.com/openai/gpt-2/blob/master/src/encoder.py"""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(shown)]
    table = {chr(byte): byte for byte in shown}
    return table | {chr(256 + k): byte for k, byte in enumerate(others)}
