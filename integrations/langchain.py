"""LangChain and LangGraph: a chat model on a recording client, and ``wrap`` for whole agents.

``langchain_openai.ChatOpenAI`` also works on our client as it is:

    ChatOpenAI(model="local", async_client=client.chat.completions, root_async_client=client)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.utils import convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, Field

from agent_rl import ArealOpenAI


class ChatArealOpenAI(BaseChatModel):
    """A LangChain chat model whose every call is recorded by ``client``.

    The interaction id is in ``message.response_metadata["id"]``. Tool-call arguments and reasoning
    go back to the client exactly as they were sampled.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    client: ArealOpenAI
    model: str = "local"
    model_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "areal-openai"

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        choice = {} if tool_choice is None else {"tool_choice": tool_choice}
        schemas = [convert_to_openai_tool(tool) for tool in tools]
        return self.bind(tools=schemas, **choice, **kwargs)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        body = self._body(messages, stop, kwargs)
        return _result(await self.client.chat.completions.create(**body))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        body = self._body(messages, stop, kwargs)
        return _result(self.client.sync.chat.completions.create(**body))

    def _body(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        stop_field = {} if stop is None else {"stop": stop}
        history = [_to_openai(message) for message in messages]
        return {
            "model": self.model,
            "messages": history,
            **self.model_kwargs,
            **stop_field,
            **kwargs,
        }


def _to_openai(message: BaseMessage) -> dict[str, Any]:
    """Our own answers go back as they came; LangChain would write their arguments anew."""
    sampled = message.additional_kwargs.get("areal_message")
    if isinstance(message, AIMessage) and sampled is not None:
        return dict(sampled)
    converted = convert_to_openai_messages(message)
    assert isinstance(converted, dict)
    return converted


def _result(completion: Any) -> ChatResult:
    generations = []
    for choice in completion.choices:
        sampled = choice.message.to_dict()
        message = AIMessage(
            content=sampled.get("content") or "",
            additional_kwargs={"areal_message": sampled},
            response_metadata={"id": completion.id, "finish_reason": choice.finish_reason},
            usage_metadata=UsageMetadata(
                input_tokens=completion.usage.prompt_tokens,
                output_tokens=completion.usage.completion_tokens,
                total_tokens=completion.usage.total_tokens,
            ),
            **_tool_calls(sampled),
        )
        generations.append(ChatGeneration(message=message))
    return ChatResult(generations=generations)


def _tool_calls(sampled: dict[str, Any]) -> dict[str, Any]:
    from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call

    valid, invalid = [], []
    for call in sampled.get("tool_calls") or []:
        try:
            valid.append(parse_tool_call(call, return_id=True))
        except ValueError as error:  # OutputParserException: arguments are not a JSON object
            invalid.append(make_invalid_tool_call(call, str(error)))
    return {"tool_calls": valid, "invalid_tool_calls": invalid}


def wrap(
    build: Callable[[ChatArealOpenAI], Runnable[Any, Any]],
    *,
    reward: Callable[[dict[str, Any], Any], float],
    to_input: Callable[[dict[str, Any]], Any],
) -> type:
    """An agent class for ``PPOTrainer.train`` from a Runnable or LangGraph graph.

    ``build`` makes the runnable on a chat model, ``to_input`` turns a datum into its input and
    ``reward(data, output)`` scores what it returned; it may be a coroutine function.
    """

    class WrappedRunnable:
        async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
            output = await build(ChatArealOpenAI(client=client)).ainvoke(to_input(data))
            score = reward(data, output)
            return await score if inspect.isawaitable(score) else score

    return WrappedRunnable
