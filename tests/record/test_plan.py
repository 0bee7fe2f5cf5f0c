"""Which ids go on from a recorded turn where the rendered text goes on from its text."""

from __future__ import annotations

from typing import Any

import pytest
from fix_format import Talk, assistant, user
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agent_rl.tokens.format import ChatFormat

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant{{ '\n' }}"
)
PLAIN = "{% for m in messages %}{{ m.content }}{% if not loop.last %}b{% endif %}{% endfor %}"


def pieces_format(chat_template: str) -> ChatFormat:
    """Like SentencePiece: the start of a text is written with a piece of its own, "▁"."""
    alphabet = "\nabcdefghijklmnopqrstuvwxyz▁"
    vocab = {char: index for index, char in enumerate([*alphabet, "ab"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=chat_template
    )
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    return ChatFormat.of(tokenizer)


@pytest.mark.parametrize("stop_reason", ["stop", "length"])
def test_what_follows_a_turn_has_the_ids_it_has_inside_the_whole(stop_reason: Any) -> None:
    """The newline behind the end of turn is no start of a text: there is no "▁" before it."""
    fmt = pieces_format(CHATML)
    end, *fox = fmt.vocabulary.encode("<|im_end|>fox")
    output = [*fox, end] if stop_reason == "stop" else fox
    talk = Talk("hf", fmt)
    first = talk.say("c1", [user("hi")], output, stop_reason=stop_reason)
    messages = [user("hi"), assistant("fox"), user("dog")]
    plan = talk.plan(messages)
    assert plan.parent is first and plan.fork_reason is None
    assert plan.input_ids == fmt.render(messages)


def test_text_that_merges_with_the_last_token_is_rendered_anew() -> None:
    """ "a" was sampled and cut, the template writes "b" behind it, the vocabulary has "ab"."""
    fmt = pieces_format(PLAIN)
    talk = Talk("hf", fmt)
    a = fmt.vocabulary.encode("xa")[-1]
    talk.say("c1", [user("x")], [a], stop_reason="length")
    messages = [user("x"), assistant("a"), user("y")]
    plan = talk.plan([user("x"), assistant("a"), user("y")])
    assert plan.input_ids == fmt.render(messages)
    assert plan.parent is None
    assert plan.fork_reason is not None and plan.fork_reason.startswith("tokens differ")
