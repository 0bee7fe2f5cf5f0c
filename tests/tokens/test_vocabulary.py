"""Template text to ids: what a tokenizer is never given."""

from __future__ import annotations

from typing import Any

from families import family_tokenizer

from agent_rl.tokens.vocabulary import Vocabulary


def test_half_of_a_surrogate_pair_is_the_replacement_character(smollm: Any) -> None:
    """Arguments '{"q": "\\\\ud83d"}' become such text in a template that prints mappings."""
    for tokenizer in (smollm, family_tokenizer("qwen3")):
        vocabulary = Vocabulary(tokenizer)
        assert vocabulary.encode("a\ud83db") == vocabulary.encode("a\ufffdb")
        assert vocabulary.encode("\ud83d\ude42") == vocabulary.encode("🙂")


def test_calls_of_others_do_not_change_our_ids(smollm: Any) -> None:
    """The Rust tokenizer under a fast one keeps the options of whoever called last."""
    vocabulary = Vocabulary(smollm)
    ids = [1, *smollm.encode("user\nhi", add_special_tokens=False)]
    rust = smollm.backend_tokenizer
    try:
        rust.enable_padding(length=32)
        rust.enable_truncation(max_length=2)
        rust.encode_special_tokens = True
        assert vocabulary.encode("<|im_start|>user\nhi") == ids
    finally:
        rust.no_padding()
        rust.no_truncation()
        rust.encode_special_tokens = False
    assert vocabulary.encode("<|im_start|>user\nhi") == ids


def test_a_class_with_a_way_of_its_own_is_asked(smollm: Any) -> None:
    class Shouting(type(smollm)):  # type: ignore[misc]
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super()._decode(*args, **kwargs)).upper()

    tokenizer = Shouting(tokenizer_object=smollm.backend_tokenizer, eos_token="<|im_end|>")
    assert Vocabulary(tokenizer).decode(smollm.encode("quiet")) == "QUIET"
    assert Vocabulary(smollm).decode(smollm.encode("quiet")) == "quiet"
