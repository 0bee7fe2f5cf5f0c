"""Certification: what a template can do exactly, and why not."""

from __future__ import annotations

from typing import Any

import pytest
from families import FAMILIES, family_tokenizer

from agent_rl.tokens.certify import certify
from agent_rl.tokens.format import ChatFormat

FEATURES = (
    *("plain", "multi-turn", "system", "reasoning", "unicode", "empty output", "length stop"),
    *("tool call", "parallel calls", "tool error", "system + tools", "tools, then user"),
)
SMOLLM_TABLE = """
tools             hermes (described in the system turn: the template has no place for tools)
reasoning         none
stop tokens       <|im_end|>

feature           status       reason
plain             exact
multi-turn        exact
system            exact
reasoning         unsupported  neither template nor vocabulary has reasoning tags
unicode           exact
empty output      exact
length stop       exact
tool call         exact        hermes form, tools described in the system turn
parallel calls    exact        hermes form, tools described in the system turn
tool error        exact        hermes form, tools described in the system turn
system + tools    exact        hermes form, tools described in the system turn
tools, then user  exact        hermes form, tools described in the system turn"""
# Families that do everything exactly, but for reasoning where they have none.
WHOLE = (
    *("chatml", "command_r", "gemma_3", "glm_4_5", "llama_3", "llama_4", "mistral_7"),
    *("nemotron_3", "phi_3", "phi_4", "phi_4_mini", "qwen2_5", "qwen3", "qwen3_coder"),
    *("deepseek_r1", "deepseek_v3", "minimax_m2", "qwen3_thinking", "tulu", "vicuna", "zephyr"),
)
# Their tool calls have a wire format that nothing here reads.
UNREAD = ("command_a", "function_gemma", "granite", "kimi_k2")


def statuses(name: str) -> dict[str, str]:
    return {item.name: item.status for item in certify(family_tokenizer(name)).features}


def test_the_table_of_the_small_model(smollm: Any) -> None:
    certification = certify(smollm)
    assert certification.table().endswith(SMOLLM_TABLE)
    assert certification.is_multi_turn_exact
    assert certification.summary().endswith("11 of 12 features exact (reasoning: unsupported)")


def test_the_battery_is_run_once(smollm: Any) -> None:
    assert certify(smollm) is certify(smollm)
    assert certify(smollm, tool_call_parser="none") is not certify(smollm)


@pytest.mark.parametrize("name", WHOLE)
def test_families_that_are_exact_throughout(name: str) -> None:
    found = statuses(name)
    assert tuple(found) == FEATURES
    has_reasoning = ChatFormat.of(family_tokenizer(name)).reasoning_name != "none"
    assert found.pop("reasoning") == ("exact" if has_reasoning else "unsupported")
    assert set(found.values()) == {"exact"}


def test_at_least_twenty_families_keep_conversations_in_one_row() -> None:
    exact = [name for name in FAMILIES if certify(family_tokenizer(name)).is_multi_turn_exact]
    assert len(exact) >= 29
    assert set(FAMILIES) - set(exact) == {"alpaca", "gpt_oss"}


@pytest.mark.parametrize("name", UNREAD)
def test_calls_that_no_parser_reads_are_unsupported(name: str) -> None:
    found = statuses(name)
    assert found["plain"] == found["multi-turn"] == found["system"] == "exact"
    assert found["tool call"] == found["parallel calls"] == "unsupported"


@pytest.mark.parametrize(
    ("name", "feature", "status", "reason"),
    [
        ("alpaca", "plain", "branch", "the turn ended with </s>, which the template omits"),
        ("llama_2", "length stop", "branch", "end mark is not clear"),
        ("llama_3_1", "parallel calls", "unsupported", "only one tool call at once"),
        ("gemma_2", "system", "unsupported", "System role not supported"),
        ("mistral_3", "system", "branch", "changes the earlier prompt when messages follow"),
        ("mistral_3", "tool call", "exact", ""),
        ("gpt_oss", "plain", "branch", "the turn ended with <|return|>"),
        ("gpt_oss", "tool call", "exact", ""),
        ("qwen3", "reasoning", "exact", "keeps what the template drops"),
    ],
)
def test_reasons_say_why(name: str, feature: str, status: str, reason: str) -> None:
    found = certify(family_tokenizer(name)).feature(feature)
    assert found.status == status
    assert reason in found.reason


def test_sentencepiece_like_vocabularies_are_exact_too() -> None:
    certification = certify(family_tokenizer("mistral_7", has_pieces=True))
    found = {item.name: (item.status, item.reason) for item in certification.features}
    assert found.pop("reasoning")[0] == "unsupported"
    assert set(found.values()) == {("exact", "")}
