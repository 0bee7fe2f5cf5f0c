"""Record one conversation and print what training needs of it. Runs in seconds on a CPU.

python examples/quickstart.py
"""

from __future__ import annotations

import asyncio

from transformers import AutoTokenizer

from agent_rl import ArealOpenAI, LocalEngine, small_model


async def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(small_model())
    engine = LocalEngine(small_model(), tokenizer)
    client = ArealOpenAI(engine, tokenizer, chat_template_type="concat")

    # From here on it is the openai SDK as you know it.
    messages = [{"role": "user", "content": "What is 2+2?"}]
    for question in ("And 3+3?", "And 4+4?"):
        completion = await client.chat.completions.create(
            model="local", messages=messages, max_tokens=16
        )
        answer = completion.choices[0].message
        print(f"user: {messages[-1]['content']}\nassistant: {answer.content}")
        messages += [answer, {"role": "user", "content": question}]

    client.set_last_reward(1.0)
    client.apply_reward_discount(turn_discount=0.9)
    for interaction in client.interactions.values():
        sampled = interaction.model_response
        print(f"\n{interaction.interaction_id}  reward {interaction.reward}")
        print(f"  ids        {list(sampled.output_tokens[:6])} ...")
        print(f"  log-probs  {[round(x, 3) for x in sampled.output_logprobs[:6]]} ...")
        print(f"  versions   {list(sampled.output_versions[:6])} ...")

    for style in ("individual", "concat"):
        for key, row in client.export_interactions(style).items():
            tensors = row.to_tensor_dict()
            trained = int(tensors["loss_mask"].sum())
            print(
                f"\n{style}: row {key}: {tensors['input_ids'].shape[1]} tokens, {trained} trained"
            )
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
