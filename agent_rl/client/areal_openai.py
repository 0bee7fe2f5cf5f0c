"""ArealOpenAI: ``openai.AsyncOpenAI`` whose calls go to an engine and are recorded.

A real subclass: construction and the recording API are all that is added. What a call does is in
``api/``; how it gets there is in ``transport.py``. The state lives on the HTTP client, which the
SDK passes on in ``with_options()`` and ``copy()``: every copy is on the same record.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from openai import AsyncOpenAI, OpenAI

from agent_rl.api.session import Sampling, Session
from agent_rl.client.resources import DirectChat, DirectResponses
from agent_rl.client.sync import SyncArealOpenAI, SyncInProcessClient
from agent_rl.client.transport import BASE_URL, InProcessClient
from agent_rl.client.unsendable import refusing_unsendable
from agent_rl.engine.base import InferenceEngine, require_engine
from agent_rl.record.cache import InteractionCache
from agent_rl.record.export import export_interactions
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.record.reward import as_interaction_id
from agent_rl.tokens.format import ChatFormat
from agent_rl.types import ChatTemplateType, ExportStyle, GenerationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ArealOpenAI(AsyncOpenAI):
    """Use it wherever ``AsyncOpenAI`` is used; no key, address or port is needed.

        client = ArealOpenAI(engine, tokenizer)
        completion = await client.chat.completions.create(model="default", messages=[...])
        client.set_reward(completion.id, 1.0)

    Args:
        engine, tokenizer: may be left out only when ``http_client`` is one of ours.
        gconfig: stands in for what a request leaves out.
        sampling: "agent": what a request sends wins; "override": ``gconfig`` wins.
        chat_template_type: "hf": the prompt is what the template renders; "concat": the prompt
            always extends the parent's ids.
        engine_max_tokens: bound on prompt and completion together, below the engine's own.
        max_requests: answer with 429 after so many calls: a loop without end costs no more.
        passthrough: an ordinary ``AsyncOpenAI`` for endpoints that do not generate.
        openai_client_kwargs: those of ``AsyncOpenAI`` (timeout, max_retries, default_headers, ...).
    """

    def __init__(
        self,
        engine: InferenceEngine | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        gconfig: GenerationConfig | None = None,
        sampling: Sampling = "agent",
        chat_template_type: ChatTemplateType = "hf",
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        engine_max_tokens: int | None = None,
        max_requests: int | None = None,
        passthrough: AsyncOpenAI | None = None,
        **openai_client_kwargs: Any,
    ) -> None:
        http_client = openai_client_kwargs.pop("http_client", None)
        if engine is not None and http_client is not None:
            raise TypeError("give ArealOpenAI an engine or one of our http_clients, not both")
        if engine is not None:
            if tokenizer is None:
                raise TypeError("ArealOpenAI(engine, tokenizer): the tokenizer is missing")
            require_engine(engine, "ArealOpenAI")
            session = Session(
                engine=engine,
                format=ChatFormat.of(
                    tokenizer,
                    tool_call_parser=tool_call_parser,
                    reasoning_parser=reasoning_parser,
                ),
                cache=InteractionCache(),
                gconfig=gconfig,
                sampling=sampling,
                chat_template_type=chat_template_type,
                engine_max_tokens=engine_max_tokens,
                max_requests=max_requests,
            )
            http_client = InProcessClient(session, passthrough)
        if not isinstance(http_client, InProcessClient):
            raise TypeError(
                "ArealOpenAI(engine, tokenizer) needs both; without them, http_client must be the "
                f"one of another ArealOpenAI, not {http_client!r}"
            )
        self._session = http_client.session
        defaults = {"api_key": "agent-rl", "base_url": BASE_URL}
        super().__init__(**{**defaults, **openai_client_kwargs, "http_client": http_client})

    @property
    def http_client(self) -> InProcessClient:
        """For another client on the same record: ``AsyncOpenAI(http_client=..., base_url=...)``."""
        http_client = self._client  # the SDK has no public name for it
        assert isinstance(http_client, InProcessClient), "checked in the constructor"
        return http_client

    if not TYPE_CHECKING:

        async def request(self, cast_to: Any, options: Any, **kwargs: Any) -> Any:
            with refusing_unsendable(options):
                return await super().request(cast_to, options, **kwargs)

    @cached_property
    def chat(self) -> DirectChat:
        return DirectChat(self)

    @cached_property
    def responses(self) -> DirectResponses:
        return DirectResponses(self)

    @cached_property
    def sync(self) -> OpenAI:
        """An ``openai.OpenAI`` on the same record, for code that runs in a worker thread.

        A call of it raises RuntimeError on a thread whose event loop is running: it would block
        that loop.
        """
        return SyncArealOpenAI(
            api_key=self.api_key,
            base_url=self.base_url,
            timeout=self.timeout,
            max_retries=self.max_retries,
            default_headers=self._custom_headers,
            # An httpx2 client with openai 3.x, httpx with 2.x; the type checker sees httpx.
            http_client=cast(Any, SyncInProcessClient(self._session)),
        )

    @property
    def interactions(self) -> Mapping[str, InteractionWithTokenLogpReward]:
        """Interaction id -> interaction, in the order of creation. Read it, do not change it."""
        return self._session.cache

    def get_interaction(self, interaction_id: str) -> InteractionWithTokenLogpReward:
        """Raises KeyError for an unknown id, TypeError for what is none."""
        return self._session.cache[as_interaction_id(interaction_id)]

    def set_reward(self, interaction_id: str, reward: float) -> None:
        """A second call replaces the first.

        Raises:
            KeyError: unknown id.
            TypeError: no id, but the completion, say.
            ValueError: the reward is not a finite number.
        """
        self._session.cache.set_reward(interaction_id, reward)

    def set_last_reward(self, reward: float) -> None:
        """Raises RuntimeError when nothing is recorded yet; ValueError as ``set_reward``."""
        self._session.cache.set_last_reward(reward)

    @property
    def total_reward(self) -> float:
        return self._session.cache.total_reward

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Carry rewards back over the turns, once. Raises RuntimeError the second time."""
        self._session.cache.apply_reward_discount(turn_discount)

    def export_interactions(
        self, style: ExportStyle = "individual", reward_discount: float | None = None
    ) -> dict[str, InteractionWithTokenLogpReward]:
        """``individual``: every interaction; ``concat``: one for each leaf of the conversation
        tree. With ``reward_discount``, the discount is applied first."""
        return export_interactions(self._session.cache, style, reward_discount)
