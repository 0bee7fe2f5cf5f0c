"""Reading completions: content, reasoning and tool calls, whole and streamed alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from families import family_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.tokens.format import ChatFormat
from agent_rl.tokens.parse import ParsedMessage
from agent_rl.types import StopReason

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "x": {"type": "integer"},
                    "items": {"type": "array"},
                    "text": {"type": "string"},
                    "flag": {"type": "boolean"},
                },
            },
        },
    }
    for name in ("f", "g", "write", "now", "add")
]


def read(
    tokenizer: Any,
    text: str,
    stop_reason: StopReason = "stop",
    tools: Any = TOOLS,
    stop: tuple[str, ...] = (),
    **options: Any,
) -> ParsedMessage:
    """Parse the canonical ids of a text, check that one token at a time gives the same."""
    format = ChatFormat.of(tokenizer, **options)
    ids = [*tokenizer.encode(text, add_special_tokens=False)]
    if stop_reason == "stop":
        ids.append(format.stop_token_ids[0])
    whole = format.parse(ids, tools=tools, stop_reason=stop_reason, stop=stop)
    reader = format.decoder(tools=tools, stop=stop)
    deltas = [*(reader.feed([id]) for id in ids), reader.finish(stop_reason)]
    assert "".join(delta.content for delta in deltas) == whole.content
    assert "".join(d.reasoning_content for d in deltas) == (whole.reasoning_content or "")
    assert tuple(call for delta in deltas for call in delta.tool_calls) == whole.tool_calls
    assert reader.message == whole
    return whole


@pytest.fixture(params=["text", "tokens"])
def hermes(request: pytest.FixtureRequest, smollm: Any) -> Any:
    """Tags spelled by ordinary tokens (SmolLM2) and tags that are tokens (Qwen)."""
    return smollm if request.param == "text" else family_tokenizer("qwen3")


def tagged(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def test_a_closing_tag_inside_a_string_is_part_of_it(hermes: Any) -> None:
    """Case B20."""
    arguments = '{"t":"use </tool_call> here"}'
    parsed = read(hermes, tagged('{"name":"write","arguments":' + arguments + "}"))
    assert parsed == ParsedMessage(tool_calls=(("write", arguments),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    ['{"cmd":"mkdir -p t/{a,b"}', '{"cmd":"echo })] ok"}', '{"a":{"b":{"c":"}"}}}'],
)
def test_braces_in_strings_do_not_count(hermes: Any, arguments: str) -> None:
    """Case B21: whole and one token per chunk."""
    parsed = read(hermes, tagged('{"name": "f", "arguments": ' + arguments + "}"))
    assert parsed.tool_calls == (("f", arguments),)
    assert parsed.content == ""


def test_several_calls_stay_apart(hermes: Any) -> None:
    """Case B22."""
    calls = [
        tagged(f'{{"name": "{n}", "arguments": {{"{a}": {i}}}}}')
        for n, a, i in (("f", "x", 1), ("g", "y", 2))
    ]
    parsed = read(hermes, "I will do both.\n" + "\n".join(calls))
    assert parsed.content == "I will do both."
    assert parsed.tool_calls == (("f", '{"x": 1}'), ("g", '{"y": 2}'))


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "arguments": {"x":1,}}',
        '{"name": "f"',
        '{"arguments": {}}',
        "[1,2]",
        "null",
        '{"name": 5, "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": NaN}',
        '{"name": "\\ud83d", "arguments": {}}',
        '{"name": "f", "arguments": "{\\"x\\": \\"\\ud83d\\"}"}',
        '{"name": "f", "arguments": {"x": 1}} and more',
        "[" * 3000,
    ],
)
def test_malformed_calls_stay_content(hermes: Any, body: str) -> None:
    """Case B23: nothing raises, nothing is repaired, the raw text is there."""
    parsed = read(hermes, tagged(body))
    assert parsed == ParsedMessage(content=tagged(body))


def test_a_good_call_after_a_malformed_one_counts(hermes: Any) -> None:
    bad, good = tagged('{"name": '), tagged('{"name": "now"}')
    parsed = read(hermes, f"{bad}\n{good}")
    assert parsed.content == bad
    assert parsed.tool_calls == (("now", "{}"),)


@pytest.mark.parametrize(
    "rest", ["", ', "arguments": {}', ', "arguments": null', ', "arguments": ""']
)
def test_a_call_without_arguments_has_an_empty_object(hermes: Any, rest: str) -> None:
    """Case B25."""
    assert read(hermes, tagged('{"name": "now"' + rest + "}")).tool_calls == (("now", "{}"),)


def test_arguments_are_the_sampled_text(hermes: Any) -> None:
    """Case B27: escapes, digits and spacing are those of the model."""
    arguments = '{"q":"中文 🙂 \\u00e9", "n": 12345678901234567890,  "f": 1.0}'
    parsed = read(hermes, tagged('{"name": "f", "arguments": ' + arguments + "}"))
    assert parsed.tool_calls == (("f", arguments),)
    value = json.loads(parsed.tool_calls[0].arguments)
    assert value == {"q": "中文 🙂 é", "n": 12345678901234567890, "f": 1.0}


def test_arguments_written_as_a_string_are_unwrapped(hermes: Any) -> None:
    parsed = read(hermes, tagged('{"name": "f", "arguments": "{\\"x\\": 1}"}'))
    assert parsed.tool_calls == (("f", '{"x": 1}'),)


@pytest.mark.parametrize("stop_reason", ["length", "abort"])
def test_a_call_cut_by_the_limit_is_not_a_call(hermes: Any, stop_reason: StopReason) -> None:
    """Case B31: no invented arguments, whole or streamed."""
    text = '<tool_call>\n{"name":"rm","arguments":{"p":"/tm'
    assert read(hermes, text, stop_reason) == ParsedMessage(content=text)
    closed = '<tool_call>\n{"name":"rm","arguments":{"p":"/tmp"}}'
    assert read(hermes, closed, stop_reason).tool_calls == ()
    assert read(hermes, closed).tool_calls == (("rm", '{"p":"/tmp"}'),)


def test_without_tools_a_call_is_text(hermes: Any) -> None:
    """Case B32."""
    text = tagged('{"name": "f"}')
    assert read(hermes, text, tools=None) == ParsedMessage(content=text)
    assert read(hermes, text, tools=[]) == ParsedMessage(content=text)


def test_without_tools_the_mark_of_a_call_is_shown_too() -> None:
    """Case B32: Mistral's mark is a special token, and still part of the raw text."""
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    assert read(family_tokenizer("mistral_3"), text, tools=None) == ParsedMessage(content=text)


def test_look_alike_tags_are_text() -> None:
    """Tags that are tokens count by id: the same text spelled out is content."""
    tokenizer = family_tokenizer("qwen3")
    ids = [id for char in tagged('{"name": "f"}') for id in tokenizer.encode(char)]
    parsed = ChatFormat.of(tokenizer).parse(ids, tools=TOOLS)
    assert parsed == ParsedMessage(content=tagged('{"name": "f"}'))


def test_a_stop_string_ends_the_content(fix: Any) -> None:
    """Case B41: the content stops before it; the ids are not touched."""
    format = ChatFormat.of(fix())
    assert format.parse([20, 21, 60], stop=("END",)).content == "ab"
    reader = format.decoder(stop=("bEN",))
    assert [reader.feed([id]).content for id in (20, 21, 60, 24)] == ["a", "", "", ""]
    assert reader.finish().content == ""


def test_what_could_be_a_stop_string_is_held_back(smollm: Any) -> None:
    assert read(smollm, "one E EN E", stop=("END",)).content == "one E EN E"
    assert read(smollm, "one END two", stop=("nope", "END")).content == "one "


@pytest.mark.parametrize("output", [(2,), (0,), (), (2, 0, 0)])
def test_an_empty_answer_is_empty_content(fix: Any, output: tuple[int, ...]) -> None:
    """Case B33 and case B45."""
    assert ChatFormat.of(fix()).parse(output) == ParsedMessage()


def test_reasoning_is_split_at_its_tags(fix: Any) -> None:
    """Case B5 and case B6: with the opening tag, and opened by the prompt."""
    expected = ParsedMessage(content="b", reasoning_content="a")
    assert ChatFormat.of(fix("T2")).parse([8, 20, 9, 21, 2]) == expected
    t3 = ChatFormat.of(fix("T3"))
    assert t3.parse([20, 9, 21, 2]) == expected
    prompt = t3.render([{"role": "user", "content": "hi"}])
    assert t3.parse([20, 9, 21, 2], prompt_ids=prompt) == expected
    assert t3.parse([21, 2], prompt_ids=prompt[:-1]) == ParsedMessage(content="b")


def test_reasoning_keeps_its_inner_text() -> None:
    tokenizer = family_tokenizer("qwen3")
    parsed = read(tokenizer, "<think>\nfirst\n\n  then\n</think>\n\nanswer\n")
    assert parsed == ParsedMessage(content="answer\n", reasoning_content="first\n\n  then")
    calls = read(tokenizer, "<think>\nhm\n</think>\n\n" + tagged('{"name": "now"}'))
    assert calls.reasoning_content == "hm"
    assert calls.content == "" and calls.tool_calls == (("now", "{}"),)


def test_unfinished_reasoning_is_reasoning() -> None:
    parsed = read(family_tokenizer("qwen3"), "<think>\nlong", "length")
    assert parsed == ParsedMessage(reasoning_content="long")
    empty = read(family_tokenizer("qwen3"), "<think>\n\n</think>\n\nb")
    assert empty == ParsedMessage(content="b", reasoning_content="")


def test_a_model_without_reasoning_keeps_think_tags_as_text(smollm: Any) -> None:
    text = "<think>a</think>b"
    assert read(smollm, text) == ParsedMessage(content=text)
    split = read(smollm, text, reasoning_parser="qwen3")
    assert split == ParsedMessage(content="b", reasoning_content="a")
    forced = read(smollm, "a</think>b", reasoning_parser="deepseek_r1")
    assert forced == ParsedMessage(content="b", reasoning_content="a")
    assert read(smollm, "x < y <think", reasoning_parser="qwen3").content == "x < y <think"


def test_qwen_xml() -> None:
    text = (
        "go\n<tool_call>\n<function=f>\n<parameter=x>\n1.0\n</parameter>\n<parameter=text>\n12\n"
        "</parameter>\n<parameter=flag>\nTrue\n</parameter>\n</function>\n</tool_call>"
    )
    parsed = read(family_tokenizer("qwen3_coder"), text)
    assert parsed.content == "go"
    assert parsed.tool_calls == (("f", '{"x": 1.0, "text": "12", "flag": true}'),)


def test_nothing_sampled_is_evaluated(tmp_path: Path) -> None:
    """Case B29: the value stays a string, the file is not made."""
    target = tmp_path / "pwn_b"
    code = f'__import__("pathlib").Path("{target}").write_text("x")'
    text = tagged(f"<function=f>\n<parameter=items>\n{code}\n</parameter>\n</function>")
    parsed = read(family_tokenizer("qwen3_coder"), text)
    assert json.loads(parsed.tool_calls[0].arguments) == {"items": code}
    assert read(family_tokenizer("llama_4"), f"[f(items={code})]").tool_calls == ()
    assert not target.exists()


def test_glm() -> None:
    text = (
        "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>12345678901234567890</arg_value>\n"
        "<arg_key>text</arg_key>\n<arg_value>a < b</arg_value>\n</tool_call>"
    )
    parsed = read(family_tokenizer("glm_4_5"), text)
    assert parsed.tool_calls == (("f", '{"x": 12345678901234567890, "text": "a < b"}'),)
    assert read(family_tokenizer("glm_4_5"), "<tool_call>now</tool_call>").tool_calls == (
        ("now", "{}"),
    )
    assert read(family_tokenizer("glm_4_5"), "<tool_call>f <arg_key>").tool_calls == ()


def test_llama_json() -> None:
    llama = family_tokenizer("llama_3_1")
    one = '{"name": "f", "parameters": {"x": 1}}'
    assert read(llama, one) == ParsedMessage(tool_calls=(("f", '{"x": 1}'),))  # type: ignore[arg-type]
    both = read(llama, one + '; {"name": "now"}')
    assert both.tool_calls == (("f", '{"x": 1}'), ("now", "{}"))
    for text in ('{"name": "Bob", "parameters": {}}', '{"x": 1}', one + " done", "no " + one):
        assert read(llama, text) == ParsedMessage(content=text)
    assert read(llama, one[:-3], "length") == ParsedMessage(content=one[:-3])


def test_mistral() -> None:
    array = '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "now", "arguments": {}}]'
    parsed = read(family_tokenizer("mistral_3"), "ok " + array)
    assert parsed.content == "ok"
    assert parsed.tool_calls == (("f", '{"x": 1}'), ("now", "{}"))
    named = '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]now[ARGS]{}'
    assert read(family_tokenizer("mistral_7"), named).tool_calls == parsed.tool_calls
    assert read(family_tokenizer("mistral_3"), array[:-4], "length").tool_calls == ()


def test_pythonic() -> None:
    llama = family_tokenizer("llama_4")
    parsed = read(llama, '[f(x=-1, items=[1, {"a": None}], flag=true), now()]')
    assert parsed.tool_calls == (
        ("f", '{"x": -1, "items": [1, {"a": null}], "flag": true}'),
        ("now", "{}"),
    )
    for text in ("[1, 2]", "[f(1)]", "[f(x=g())]", "[f(**x)]", "[f(x=1)] done", "[", "[nope()]"):
        assert read(llama, text) == ParsedMessage(content=text)


@pytest.mark.parametrize(
    "value",
    [
        *("{[1]: 2}", "{**{'a': 1}}", "{'a': 1, **{}}", "1e999", "[-1e999]"),
        *("[" * 150 + "]" * 150, "-" * 20_000 + "1"),
    ],
)
def test_python_that_json_cannot_write_is_no_call(value: str) -> None:
    """Nothing is dropped or invented, and nothing that a model writes raises."""
    text = f"[f(x={value})]"
    assert read(family_tokenizer("llama_4"), text) == ParsedMessage(content=text)


@pytest.mark.parametrize(
    ("alias", "text"),
    [
        ("qwen25", tagged('{"name": "f"}')),
        ("qwen", tagged('{"name": "f"}')),
        ("llama3", '{"name": "f"}'),
        ("llama4_pythonic", "[f()]"),
        ("qwen3_xml", tagged("<function=f>\n</function>")),
        ("glm45", tagged("f")),
    ],
)
def test_names_of_sglang_and_vllm_are_aliases(smollm: Any, alias: str, text: str) -> None:
    assert read(smollm, text, tool_call_parser=alias).tool_calls == (("f", "{}"),)


def test_the_parser_can_be_switched_off(smollm: Any) -> None:
    text = tagged('{"name": "f"}')
    assert read(smollm, text, tool_call_parser="none") == ParsedMessage(content=text)


_FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {"x": 1}}',
        '{"name": ',
        "<think>",
        "</think>",
        "\n",
        " ",
        "text ",
        "🙂",
        "</tool",
        "EN",
        "END",
        "}",
        '"',
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(_FRAGMENTS, max_size=9),
    is_text=st.booleans(),
    reason=st.sampled_from(["stop", "length"]),
)
def test_streamed_equals_whole(smollm: Any, parts: list[str], is_text: bool, reason: Any) -> None:
    """Whatever is sampled; ``read`` compares the two."""
    tokenizer = smollm if is_text else family_tokenizer("qwen3")
    parsed = read(tokenizer, "".join(parts), reason, stop=("END",), reasoning_parser="qwen3")
    assert "END" not in parsed.content
    assert all(json.loads(call.arguments) == {"x": 1} for call in parsed.tool_calls)
