"""Grammars of tool calls admit what the format's parser reads back as those calls, and no less."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from families import family_tokenizer

from agent_rl.api.grammar import after_reasoning, answer_grammar, tool_grammar
from agent_rl.errors import RequestError
from agent_rl.tokens.format import ChatFormat

pytest.importorskip("llguidance")

USER = {"role": "user", "content": "hi"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "s": {"type": "string"},
                    "k": {"type": "string", "enum": ["x", "y"]},
                    "n": {"$ref": "#/$defs/N"},
                },
                "required": ["a"],
                "$defs": {"N": {"type": "array", "items": {"type": "boolean"}}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ADD = {"type": "function", "function": {"name": "add"}}
NOW = {"type": "function", "function": {"name": "now"}}
HERMES_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
XML_ADD = "<tool_call>\n<function=add>\n"
XML_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"


@cache
def vocabulary(name: str) -> Any:
    from llguidance.hf import from_tokenizer

    tokenizer = family_tokenizer(name)
    return from_tokenizer(tokenizer, len(tokenizer), None)


def refused_at(name: str, choice: Any, text: str, *, is_parallel: bool = True) -> str | None:
    """The text up to the token that the grammar refuses, None if it takes it as a whole answer."""
    from llguidance import LLMatcher

    fmt = ChatFormat.of(family_tokenizer(name))
    _, grammar = tool_grammar(choice, TOOLS, is_parallel=is_parallel, fmt=fmt)
    assert grammar is not None
    grammar = after_reasoning(grammar, fmt, fmt.render([USER], TOOLS))
    matcher = LLMatcher(vocabulary(name), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = fmt.vocabulary.encode(text)
    for index, token_id in enumerate(ids):
        if not int.from_bytes(matcher.compute_bitmask(), "little") >> token_id & 1:
            return fmt.decode(ids[:index])
        matcher.consume_token(token_id)
    return None if matcher.is_accepting() else text


def read(name: str, text: str) -> list[tuple[str, str]]:
    fmt = ChatFormat.of(family_tokenizer(name))
    output = [*fmt.vocabulary.encode(text), fmt.stop_token_ids[0]]
    prompt = fmt.render([USER], TOOLS)
    return [tuple(call) for call in fmt.parse(output, tools=TOOLS, prompt_ids=prompt).tool_calls]


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("qwen3", HERMES_ADD, [("add", '{"a": 1}')]),
        ("qwen3", f"{HERMES_NOW}\n{HERMES_ADD}", [("now", "{}"), ("add", '{"a": 1}')]),
        ("qwen3", f"<think>\nhm\n</think>\n\n{HERMES_NOW}", [("now", "{}")]),
        ("qwen3_thinking", f"hm\n</think>\n\n{HERMES_NOW}", [("now", "{}")]),
        (
            "qwen3_coder",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n<b>\n</p>"
            "\n\n</parameter>\n<parameter=k>\ny\n</parameter>\n<parameter=n>\n[true]\n</parameter>\n"
            "</function>\n</tool_call>",
            [("add", '{"a": 1, "s": "<b>\\n</p>\\n", "k": "y", "n": [true]}')],
        ),
        ("qwen3_coder", f"{XML_NOW}\n{XML_NOW}", [("now", "{}"), ("now", "{}")]),
        ("nemotron_3", f"hm</think>\n{XML_NOW}", [("now", "{}")]),
        (
            "llama_3_1",
            '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {"q": 1}}',
            [("add", '{"a": 1}'), ("now", '{"q": 1}')],
        ),
        (
            "mistral_3",
            '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, '
            '{"name": "now", "arguments": {}}]',
            [("add", '{"a": 1}'), ("now", "{}")],
        ),
        (
            "mistral_7",
            '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}',
            [("add", '{"a": 1}'), ("now", "{}")],
        ),
        (
            "glm_4_5",
            "<think>hm</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
            "<arg_key>s</arg_key>\n<arg_value>yo <b> 1</arg_value>\n</tool_call>",
            [("add", '{"a": 1, "s": "yo <b> 1"}')],
        ),
    ],
)
def test_calls_fit_and_are_read_back(name: str, text: str, calls: list[Any]) -> None:
    assert refused_at(name, "required", text) is None
    assert read(name, text) == calls


@pytest.mark.parametrize(
    ("name", "choice", "text", "refused"),
    [
        ("qwen3", "required", "yo", ""),
        ("qwen3", ADD, HERMES_NOW, '<tool_call>\n{"name": "'),
        ("qwen3", NOW, f"{HERMES_NOW}\n{HERMES_NOW}", HERMES_NOW),
        ("qwen3_thinking", "required", HERMES_NOW, ""),
        ("qwen3_coder", "required", f"{XML_ADD}</", f"{XML_ADD}<"),
        ("llama_3_1", ADD, '{"name": "now', '{"name": "'),
        ("mistral_7", "required", "now[ARGS]{}", ""),
        ("glm_4_5", "required", "<tool_call>add\n</tool_call>", "<tool_call>add\n"),
    ],
)
def test_what_does_not_fit(name: str, choice: Any, text: str, refused: str) -> None:
    assert refused_at(name, choice, text) == refused


def test_a_tag_in_letters_is_no_tag() -> None:
    """Only the token <tool_call> is read as a tag, so only it can be sampled for one."""
    assert refused_at("qwen3", "required", "<too") == ""
    assert read("qwen3", "<" + HERMES_ADD[1:].replace("<", "< ")) == []


def test_one_call_without_parallel_calls() -> None:
    two = f"{XML_NOW}\n{XML_NOW}"
    assert refused_at("qwen3_coder", "required", two, is_parallel=False) == XML_NOW


def test_reasoning_where_its_tags_are_text() -> None:
    from llguidance import LLMatcher

    fmt = ChatFormat.of(family_tokenizer("phi_4"), reasoning_parser="think")
    assert fmt.vocabulary.id_of("</think>") is None
    plain = answer_grammar({"type": "json_object"}, where="f") or ""
    matcher = LLMatcher(vocabulary("phi_4"), after_reasoning(plain, fmt, (1,)), log_level=0)
    for token_id in fmt.vocabulary.encode("<think>a</b></think>\n{}"):
        assert int.from_bytes(matcher.compute_bitmask(), "little") >> token_id & 1
        matcher.consume_token(token_id)
    assert matcher.is_accepting()


def test_a_grammar_of_the_users_own_stays_as_it_is() -> None:
    fmt = ChatFormat.of(family_tokenizer("qwen3_thinking"))
    assert after_reasoning('start: "yo"', fmt, fmt.render([USER])) == 'start: "yo"'


@pytest.mark.parametrize("name", ["kimi_k2", "gpt_oss", "deepseek_v3", "minimax_m2"])
def test_forms_without_a_grammar_are_refused(name: str) -> None:
    fmt = ChatFormat.of(family_tokenizer(name))
    with pytest.raises(RequestError, match="there is no grammar") as caught:
        tool_grammar("required", TOOLS, is_parallel=True, fmt=fmt)
    assert caught.value.param == "tool_choice"
