"""CrewAI: an LLM on a recording client.

CrewAI calls its model in worker threads, also under ``kickoff_async``; so this one uses
``client.sync``. Tool calls go to CrewAI as the SDK's own objects.
"""

from __future__ import annotations

from typing import Any

from crewai import BaseLLM
from pydantic import PrivateAttr

from agent_rl import ArealOpenAI


class CrewArealLLM(BaseLLM):  # type: ignore[misc]
    """``LLM(...)`` of CrewAI whose every call is recorded by ``client``."""

    _client: ArealOpenAI = PrivateAttr()
    _parameters: dict[str, Any] = PrivateAttr()

    def __init__(self, client: ArealOpenAI, **parameters: Any) -> None:
        """``parameters`` are those of every request: temperature, max_tokens, ..."""
        super().__init__(model="local")
        self._client = client
        self._parameters = parameters

    def call(
        self,
        messages: str | list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        available_functions: dict[str, Any] | None = None,
        from_task: Any = None,
        from_agent: Any = None,
        response_model: Any = None,
    ) -> Any:
        body = self._body(messages, tools, response_model)
        completion = self._client.sync.chat.completions.create(**body)
        return _answer(completion, response_model)

    async def acall(
        self,
        messages: str | list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        available_functions: dict[str, Any] | None = None,
        from_task: Any = None,
        from_agent: Any = None,
        response_model: Any = None,
    ) -> Any:
        body = self._body(messages, tools, response_model)
        return _answer(await self._client.chat.completions.create(**body), response_model)

    def supports_function_calling(self) -> bool:
        return True

    def _body(
        self, messages: str | list[dict[str, Any]], tools: Any, response_model: Any
    ) -> dict[str, Any]:
        body = {
            "model": self.model,
            "messages": self._format_messages(messages),
            **self._parameters,
        }
        if self.stop_sequences:
            body["stop"] = list(self.stop_sequences)
        if tools:
            body["tools"] = tools
        if response_model is not None:
            schema = {"name": response_model.__name__, "schema": response_model.model_json_schema()}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body


def _answer(completion: Any, response_model: Any) -> Any:
    message = completion.choices[0].message
    if message.tool_calls:
        return list(message.tool_calls)
    if response_model is not None:
        return response_model.model_validate_json(message.content)
    return message.content
