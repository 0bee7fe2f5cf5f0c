"""A LlamaIndex FunctionAgent: only its LLM is ours.

python examples/frameworks/llama_index_agent.py
"""

from __future__ import annotations

from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.openai_like import OpenAILike
from openai import AsyncOpenAI
from shop import INSTRUCTIONS, price, questions, reward, train

from agent_rl.integrations.tools import ToolErrors


def llm_of(client: AsyncOpenAI, **settings: Any) -> OpenAILike:
    return OpenAILike(
        model="local",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=8192,
        temperature=1.0,  # else it sends 0.1
        async_openai_client=client,
        **settings,
    )


class LlamaIndexClerk:
    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        # tokenizer_fn: else it downloads one to see whether the memory is full.
        memory = ChatMemoryBuffer.from_defaults(token_limit=8192, tokenizer_fn=str.split)
        async with ToolErrors() as errors:
            tools = [errors.watch(price)]
            clerk = FunctionAgent(llm=llm_of(client), tools=tools, system_prompt=INSTRUCTIONS)
            for question in questions(data):
                answer = await clerk.run(question, memory=memory)
        return reward(data, str(answer))


if __name__ == "__main__":
    train(LlamaIndexClerk)
