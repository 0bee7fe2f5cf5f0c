"""ChatFormat: one cheap object for each tokenizer and choice of options."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest

from agent_rl.errors import ConfigError, TokenError
from agent_rl.tokens.format import ChatFormat


def test_a_format_is_built_once_for_each_tokenizer_and_options(fix: Any) -> None:
    tokenizer = fix()
    format = ChatFormat.of(tokenizer)
    assert ChatFormat.of(tokenizer) is format
    assert ChatFormat.of(tokenizer, tool_call_parser="hermes") is not format
    assert ChatFormat.of(fix()) is not format


def test_a_changed_template_gives_a_new_format(fix: Any) -> None:
    tokenizer = fix()
    before = ChatFormat.of(tokenizer)
    tokenizer.chat_template = fix("T3").chat_template
    assert ChatFormat.of(tokenizer) is not before
    assert ChatFormat.of(tokenizer).render([{"role": "user", "content": "hi"}])[-1] == 8


def test_the_format_dies_with_its_tokenizer(fix: Any) -> None:
    tokenizer = fix()
    ChatFormat.of(tokenizer)
    watch = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert watch() is None


def test_a_copied_or_pickled_tokenizer_starts_without_formats(smollm: Any) -> None:
    ChatFormat.of(smollm)
    for clone in (copy.deepcopy(smollm), pickle.loads(pickle.dumps(smollm))):
        assert ChatFormat.of(clone).tokenizer is clone


def test_a_missing_template_and_unknown_names_are_typed_errors(fix: Any) -> None:
    bare = fix()
    bare.chat_template = None
    with pytest.raises(TokenError, match="no chat template"):
        ChatFormat.of(bare)
    bare.chat_template = "{% if %}"
    with pytest.raises(TokenError, match="is not Jinja"):
        ChatFormat.of(bare)
    with pytest.raises(ConfigError, match=r"tool_call_parser is 'quen'.*hermes"):
        ChatFormat.of(fix(), tool_call_parser="quen")
    with pytest.raises(ConfigError, match=r"reasoning_parser is 'r2'.*qwen3"):
        ChatFormat.of(fix(), reasoning_parser="r2")


def test_stop_tokens_are_the_ends_of_turn(fix: Any, smollm: Any) -> None:
    assert ChatFormat.of(fix()).stop_token_ids == (2, 0)
    assert ChatFormat.of(smollm).stop_token_ids == (2,)
