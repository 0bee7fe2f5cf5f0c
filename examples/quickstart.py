"""Record one conversation and print what training needs of it. Runs in seconds on a CPU.

python examples/quickstart.py

It begins: user: What is the capital of France?
           assistant: The capital of France is Paris.
           user: And of Italy?
           assistant: The capital of Italy is Rome.
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
    # At temperature 0 it gives its likeliest answer; training samples, at 1 where nobody says more.
    messages = []
    for question in ("What is the capital of France?", "And of Italy?", "And of Spain?"):
        messages.append({"role": "user", "content": question})
        completion = await client.chat.completions.create(
            model="local", messages=messages, temperature=0
        )
        answer = completion.choices[0].message
        print(f"user: {question}\nassistant: {answer.content}")
        messages.append(answer)

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
