"""CAMEL: a model for ``ChatAgent`` on a recording client, asynchronous and synchronous."""

from __future__ import annotations

from typing import Any

from camel.models import OpenAICompatibleModel
from camel.utils import BaseTokenCounter

from agent_rl import ArealOpenAI


class LengthCounter(BaseTokenCounter):  # type: ignore[misc]
    """Four characters are a token: CAMEL only asks whether its memory is full.

    Its own counter wants to download an encoding. The engine counts real tokens.
    """

    def count_tokens_from_messages(self, messages: list[Any]) -> int:
        return sum(len(str(message)) for message in messages) // 4

    def encode(self, text: str) -> list[int]:
        return [0] * (len(text) // 4)

    def decode(self, token_ids: list[int]) -> str:
        raise NotImplementedError("LengthCounter counts tokens, it has no vocabulary")


def camel_model(client: ArealOpenAI, **parameters: Any) -> OpenAICompatibleModel:
    """``parameters`` are those of every request: temperature, max_tokens, stream, ..."""
    return OpenAICompatibleModel(
        model_type="local",
        model_config_dict=parameters,
        api_key=client.api_key,
        url=str(client.base_url),
        token_counter=LengthCounter(),
        async_client=client,
        client=client.sync,
    )
