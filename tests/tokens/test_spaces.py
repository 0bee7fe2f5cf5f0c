"""Vocabularies whose pieces begin with a space: none is lost, and none makes a turn a branch."""

from __future__ import annotations

import json
from typing import Any

import pytest
from families import FAMILIES, Family, family_tokenizer, new_tokenizer
from tokenizers import Tokenizer

from agent_rl.record.cache import InteractionCache
from agent_rl.tokens.format import ChatFormat
from agent_rl.types import ModelResponse

USER = {"role": "user", "content": "hello the fox"}
# The rest trim the answers, write a space behind them, or open an answer with marks of their own.
PLAIN = (
    *("chatml", "granite", "mistral_1", "mistral_3", "mistral_7", "phi_3", "phi_4", "phi_4_mini"),
    *("qwen2_5", "qwen3", "qwen3_coder", "tulu", "vicuna", "zephyr"),
)


def legacy_tokenizer(chat_template: str) -> Any:
    """As Llama 2's: a space is put before the text behind each mark."""
    tokenizer = new_tokenizer(chat_template, Family(eos="</s>", bos="<s>"), has_pieces=True)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["pre_tokenizer"]["prepend_scheme"] = "always"
    backend["decoder"]["decoders"][1]["prepend_scheme"] = "always"
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(backend))
    return tokenizer


def parents(fmt: ChatFormat, answers: list[str]) -> tuple[list[str], list[bool]]:
    """The contents of a conversation in hf mode, and whether each turn extends the one before."""
    cache = InteractionCache()
    messages = [USER]
    contents, are_extended = [], []
    for turn, answer in enumerate(answers):
        plan = cache.plan(messages, None, fmt, "hf")
        are_extended.append(plan.parent is not None)
        output = (*fmt.vocabulary.encode(answer), fmt.stop_token_ids[0])
        response = ModelResponse(
            input_tokens=plan.input_ids,
            output_tokens=output,
            output_logprobs=(0.0,) * len(output),
            output_versions=(0,) * len(output),
            stop_reason="stop",
        )
        content = fmt.parse(output, prompt_ids=plan.input_ids).content
        said = {"role": "assistant", "content": content}
        cache.append(
            plan.interaction(
                interaction_id=f"c{turn}", model_response=response, output_message_list=[said]
            )
        )
        contents.append(content)
        messages = [*messages, said, USER]
    return contents, are_extended


@pytest.mark.parametrize("name", PLAIN)
def test_a_conversation_in_pieces_stays_one(name: str) -> None:
    """The first piece of the answer is "▁the": a space and "the"."""
    fmt = ChatFormat.of(family_tokenizer(name, has_pieces=True))
    assert fmt.decode([fmt.vocabulary.encode("the")[0]]).startswith("t")
    contents, are_extended = parents(fmt, ["the quick dog", "a fox", "hello"])
    assert are_extended == [False, True, True]
    space = "" if name == "vicuna" else " "  # Vicuna's template writes that space itself
    assert contents == [f"{space}the quick dog", f"{space}a fox", f"{space}hello"]


def test_a_space_that_the_tokenizer_puts_behind_a_mark_is_no_text() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    fmt = ChatFormat.of(legacy_tokenizer(template))
    assert fmt.decode(fmt.vocabulary.encode("[INST]the[/INST]")) == "[INST] the[/INST]"
    assert parents(fmt, ["the quick dog", "a fox"]) == (["the quick dog", "a fox"], [False, True])


@pytest.mark.parametrize("answer", ["the quick dog", " the quick dog", "  the", " ", ""])
def test_a_streams_space_is_that_of_the_whole(answer: str) -> None:
    for name in sorted(FAMILIES):
        fmt = ChatFormat.of(family_tokenizer(name, has_pieces=True))
        prompt = fmt.render([USER])
        output = (*fmt.vocabulary.encode(answer), fmt.stop_token_ids[0])
        reader = fmt.decoder(prompt_ids=prompt)
        shown = [reader.feed([token_id]).content for token_id in output]
        whole = fmt.parse(output, prompt_ids=prompt).content
        assert "".join([*shown, reader.finish().content]) == whole


def test_space_of_a_template_is_not_repeated() -> None:
    """Vicuna opens an answer with "ASSISTANT:"; the space behind it is its template's."""
    fmt = ChatFormat.of(family_tokenizer("vicuna"))
    assert fmt.parse(fmt.vocabulary.encode(" hello")).content == "hello"
    assert fmt.parse(fmt.vocabulary.encode("  hello")).content == " hello"
    assert fmt.parse(fmt.vocabulary.encode("hello")).content == "hello"
