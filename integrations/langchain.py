"""LangChain and LangGraph: a chat model on a recording client, and ``wrap`` for whole agents.

Answers go back to the client exactly as they were sampled (LangChain writes the arguments of tool
calls anew), unless the agent changed them. ``langchain_openai.ChatOpenAI`` works on our client too:

    ChatOpenAI(model="local", async_client=client.chat.completions, root_async_client=client)
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.utils import convert_to_openai_messages
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from pydantic import BaseModel, ConfigDict, Field

from agent_rl import ArealOpenAI

from .langchain_messages import as_chunk, as_message, as_result, says

_CLIENT: ContextVar[ArealOpenAI] = ContextVar("client of the running agent")


class ChatArealOpenAI(BaseChatModel):
    """A LangChain chat model whose every call is recorded by ``client``.

    Without a client it uses that of the episode (see ``wrap``, ``use_client``), so a graph can be
    compiled once for all episodes. ``message.response_metadata["id"]`` is the interaction id.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    client: ArealOpenAI | None = None
    model: str = "local"
    model_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="parameters of every request: temperature, seed, ..."
    )

    @property
    def _llm_type(self) -> str:
        return "areal-openai"

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """``tool_choice``: "auto", "none", "any" (also "required", True) or a tool's name."""
        if tool_choice:
            kwargs["tool_choice"] = _tool_choice(tool_choice)
        return self.bind(tools=[convert_to_openai_tool(t, strict=strict) for t in tools], **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: Literal["json_schema", "function_calling"] = "json_schema",
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """An answer of this form: a dict, or an instance where ``schema`` is a pydantic model.

        Both methods need an engine with guided decoding.
        """
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        form = convert_to_json_schema(schema)
        named = {"name": form.get("title", "answer"), "schema": form, "strict": True}
        model = self.bind(response_format={"type": "json_schema", "json_schema": named}, **kwargs)
        is_model = isinstance(schema, type) and issubclass(schema, BaseModel)
        parser: Any = PydanticOutputParser(pydantic_object=schema) if is_model else None
        parser = parser or JsonOutputParser()
        if not include_raw:
            chain: Runnable[LanguageModelInput, Any] = model | parser
            return chain
        parsed = RunnablePassthrough.assign(
            parsed=(lambda found: found["raw"]) | parser, parsing_error=lambda _: None
        )
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks(
            [failed], exception_key="parsing_error"
        )

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        body = self._body(messages, stop, kwargs)
        return as_result(await self._client.chat.completions.create(**body))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        body = self._body(messages, stop, kwargs)
        return as_result(self._client.sync.chat.completions.create(**body))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        body = self._body(messages, stop, kwargs, is_streamed=True)
        async with await self._client.chat.completions.create(**body) as events:
            async for event in events:
                chunk = as_chunk(event)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        body = self._body(messages, stop, kwargs, is_streamed=True)
        with self._client.sync.chat.completions.create(**body) as events:
            for event in events:
                chunk = as_chunk(event)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    @property
    def _client(self) -> ArealOpenAI:
        client = self.client or _CLIENT.get(None)
        if client is None:
            raise ValueError(
                "ChatArealOpenAI() has no client: give it client=, or call it in use_client(client)"
            )
        return client

    def _body(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        kwargs: dict[str, Any],
        *,
        is_streamed: bool = False,
    ) -> dict[str, Any]:
        body = {"model": self.model, **self.model_kwargs, **kwargs}
        body["messages"] = [self._to_openai(message) for message in messages]
        if stop is not None:
            body["stop"] = stop
        if is_streamed:
            if body.get("n", 1) != 1:
                raise ValueError("n > 1 cannot be streamed: LangChain has one message a stream")
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def _to_openai(self, message: BaseMessage) -> dict[str, Any]:
        """The recorded answer where the message says the same, else what LangChain makes of it."""
        if isinstance(message, AIMessage):
            known = self._client.interactions.get(message.response_metadata.get("id", ""))
            for sampled in known.output_message_list if known is not None else ():
                if says(message) == says(as_message(sampled)):
                    return dict(sampled)
        converted = convert_to_openai_messages(message)
        assert isinstance(converted, dict), "one message gives one"
        reasoning = message.additional_kwargs.get("reasoning_content")
        return converted if reasoning is None else {**converted, "reasoning_content": reasoning}


def _tool_choice(choice: str | dict[str, Any] | bool) -> str | dict[str, Any]:
    if isinstance(choice, dict) or choice in ("auto", "none", "required"):
        return choice
    if isinstance(choice, bool) or choice == "any":
        return "required"
    return {"type": "function", "function": {"name": choice}}


@contextmanager
def use_client(client: ArealOpenAI) -> Iterator[None]:
    """Every ``ChatArealOpenAI()`` without a client that is called inside uses this one."""
    token = _CLIENT.set(client)
    try:
        yield
    finally:
        _CLIENT.reset(token)


def wrap(
    agent: Runnable[Any, Any] | Callable[[ChatArealOpenAI], Runnable[Any, Any]],
    *,
    reward: Callable[[dict[str, Any], Any], Any],
    to_input: Callable[[dict[str, Any]], Any] = lambda data: data,
) -> type:
    """An agent class for ``PPOTrainer.train`` from a Runnable or LangGraph graph.

    ``agent`` is a runnable whose chat model is ``ChatArealOpenAI()``, or a function that makes one
    on the model it is given. ``to_input`` turns a datum into its input and ``reward(data, output)``
    scores what it returned; both see one episode, and ``reward`` may be a coroutine function.
    """

    class WrappedRunnable:
        async def run(self, data: dict[str, Any], client: ArealOpenAI) -> Any:
            with use_client(client):
                runnable = agent
                if not isinstance(runnable, Runnable):
                    runnable = runnable(ChatArealOpenAI(client=client))
                output = await runnable.ainvoke(to_input(data))
            score = reward(data, output)
            return await score if inspect.isawaitable(score) else score

    return WrappedRunnable
