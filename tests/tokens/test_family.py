"""Families of the `renderers` package behind our seams, on a tokenizer with their tokens."""

from __future__ import annotations

import socket
from functools import cache
from typing import Any

import pytest
from families import FAMILIES, Family, family_tokenizer, new_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_rl.errors import ConfigError, TokenError
from agent_rl.tokens.bridge import NoBridge
from agent_rl.tokens.certify import certify
from agent_rl.tokens.family import family_of
from agent_rl.tokens.format import ChatFormat
from agent_rl.tokens.parse import ParsedMessage

USER: dict[str, Any] = {"role": "user", "content": "hi"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    }
]
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "functions.add:0",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": "b"}'},
        }
    ],
}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "functions.add:0", "content": "R"}
MARKS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_user|>", "<|im_assistant|>"),
    *("<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    *("<|tool_calls_section_end|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"),
    *("[gMASK]", "<sop>", "]~!b[", "]~b]", "[e~[", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
TAGS = "".join(
    f"<{tag}></{tag}>"
    for tag in ("think", "tool_call", "tool_response", "minimax:tool_call", "arg_key", "arg_value")
)
NAMES = ("glm-4.5", "kimi-k2", "llama-3", "minimax-m2", "nemotron-3", "qwen3", "qwen3.5")


@cache
def tokenizer() -> Any:
    """One vocabulary for all: byte-level, with the marks and tags of these families."""
    template = "{# " + TAGS + " #}{{ messages[0].content }}"
    return new_tokenizer(template, Family(pad="<|endoftext|>", marks=MARKS))


@pytest.fixture(params=NAMES)
def format(request: pytest.FixtureRequest) -> ChatFormat:
    return ChatFormat.of(tokenizer(), renderer=request.param)


def answer_ids(format: ChatFormat, answer: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Text after closed reasoning, and the family's first end token."""
    thought = ""
    if format.reasoning_name != "none":
        opened = format.decode(prompt).rstrip().endswith("<think>")
        thought = "</think>\n\n" if opened else "<think></think>\n"
    return (*format.vocabulary.encode(thought + answer), format.stop_token_ids[0])


def test_a_familys_bridge_keeps_the_sampled_ids(format: ChatFormat) -> None:
    prompt = format.render([USER], TOOLS)
    output = answer_ids(format, "yo", prompt)
    bridge = format.bridge((*prompt, *output), [USER], TOOLS)
    assert isinstance(bridge, tuple), bridge
    text = format.decode(bridge)
    full = format.template.text([USER, {"role": "assistant", "content": "yo"}, USER], TOOLS)
    assert full.endswith(text.lstrip("\n"))


def test_a_familys_calls_are_read_back(format: ChatFormat) -> None:
    """The family writes a call; read whole and as a stream it is the call again."""
    prompt = format.render([USER], TOOLS)
    closed = format.template.text([USER, CALL], TOOLS, add_generation_prompt=False)
    written = closed[closed.rindex("hi") :]
    start = min(
        place
        for mark in ("<tool_call>", "<minimax:tool_call>", "<|tool_calls_section_begin|>", '{"name')
        if (place := written.find(mark)) >= 0
    )
    ids = format.vocabulary.encode(written[start:])
    ends = [index for index, token_id in enumerate(ids) if token_id in format.stop_token_ids]
    output = ids[: ends[0] + 1] if ends else ids
    if format.decode(prompt).rstrip().endswith("<think>"):
        output = [*format.vocabulary.encode("</think>\n\n"), *output]
    parsed = format.parse(output, tools=TOOLS, prompt_ids=prompt)
    assert parsed.tool_calls == (("add", '{"a": "b"}'),)
    assert parsed.content == ""
    reader = format.decoder(tools=TOOLS, prompt_ids=prompt)
    deltas = [*(reader.feed([token_id]) for token_id in output), reader.finish()]
    assert [call for delta in deltas for call in delta.tool_calls] == list(parsed.tool_calls)
    bare = format.parse(output, prompt_ids=prompt)
    assert bare.tool_calls == () and "add" in bare.content


def test_text_and_ids_of_a_family_agree(format: ChatFormat) -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": "S"}]}, USER]
    ids = format.render(messages, TOOLS)
    assert tuple(format.vocabulary.encode(format.template.text(messages, TOOLS))) == ids
    assert "S" in format.template.text(messages, TOOLS)


def test_a_known_model_is_found_by_name_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    named = new_tokenizer(
        family_tokenizer("qwen3").chat_template, Family(pad="<|endoftext|>", marks=MARKS)
    )
    named.name_or_path = "Qwen/Qwen3-8B"
    assert family_of(named) == "qwen3"
    assert ChatFormat.of(named).renderer_name == "renderers: qwen3"
    assert ChatFormat.of(named, renderer="template").renderer_name.startswith("chat template")
    named.name_or_path = "nobody/unknown-vision-model"
    assert family_of(named) is None
    named.name_or_path = "openai/gpt-oss-20b"
    assert family_of(named) is None


def test_a_template_of_ones_own_wins_over_the_known_model(caplog: pytest.LogCaptureFixture) -> None:
    own = new_tokenizer("{{ messages[-1].content }}", Family(marks=MARKS))
    own.name_or_path = "Qwen/Qwen3-8B"
    assert ChatFormat.of(own).renderer_name.startswith("chat template")
    bare = new_tokenizer("{{ messages[-1].content }}", Family())
    bare.name_or_path = "zai-org/GLM-4.5-Air"
    assert ChatFormat.of(bare).renderer_name.startswith("chat template")
    assert len([record for record in caplog.records if "renderer" in record.message]) == 2


def test_template_kwargs_are_those_of_the_family() -> None:
    qwen = ChatFormat.of(tokenizer(), renderer="qwen3")
    off = qwen.template.text([USER], None, {"enable_thinking": False})
    assert off.endswith("<think>\n\n</think>\n\n")
    assert "enable_thinking" in qwen.template.source
    with pytest.raises(TokenError, match="nonsense"):
        qwen.render([USER], None, {"nonsense": 1})


def test_reasoning_is_kept_over_a_new_user_message() -> None:
    """Qwen3 alone would render anew: the concat rule is the same for families and templates."""
    qwen = ChatFormat.of(tokenizer(), renderer="qwen3")
    parent = (*qwen.render([USER]), *qwen.vocabulary.encode("<think>\na\n</think>\n\nb<|im_end|>"))
    bridge = qwen.bridge(parent, [USER])
    assert isinstance(bridge, tuple)
    assert qwen.decode(bridge) == ("\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_family_says_why_it_has_no_bridge() -> None:
    qwen = ChatFormat.of(tokenizer(), renderer="qwen3")
    prompt = qwen.render([USER])
    by_hand = [{"role": "assistant", "content": "a"}]
    assert isinstance(qwen.bridge((*prompt, 5), by_hand), NoBridge)
    padded = qwen.bridge((*prompt, 5, *qwen.stop_token_ids, 5), [USER])
    assert padded == NoBridge(reason="the turn ended with ids that the renderer leaves out")
    stray = qwen.bridge((5, 5), [USER])
    assert isinstance(stray, NoBridge) and "generation prompt" in stray.reason


def test_a_wrong_family_is_a_config_error(smollm: Any) -> None:
    with pytest.raises(ConfigError, match=r"renderer is 'qwen33'.*qwen3"):
        ChatFormat.of(smollm, renderer="qwen33")
    with pytest.raises(ConfigError, match=r"renderer 'glm-4.5' does not fit"):
        ChatFormat.of(smollm, renderer="glm-4.5")


@pytest.mark.parametrize("name", ["qwen3", "llama-3"])
def test_families_are_certified(name: str) -> None:
    certification = certify(tokenizer(), renderer=name)
    assert certification.is_multi_turn_exact
    assert certification.feature("tool call").status == "exact"


def test_gpt_oss_channels_are_read_with_its_own_template() -> None:
    format = ChatFormat.of(family_tokenizer("gpt_oss"))
    ends = [format.decode([token_id]) for token_id in format.stop_token_ids]
    assert ends == ["<|return|>", "<|call|>"]
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yo"
    assert format.parse(format.vocabulary.encode(text + "<|return|>")) == ParsedMessage(
        content="yo", reasoning_content="hm"
    )
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a":  1.0}<|call|>'
    ids = format.vocabulary.encode(call)
    assert format.parse(ids, tools=TOOLS).tool_calls == (("add", '{"a":  1.0}'),)
    assert format.parse(ids[:-4], tools=TOOLS, stop_reason="length").tool_calls == ()
    assert format.decoder(stop=("o",)).feed(ids).content == ""


CALLS = {
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"a": "b"}<|tool_call_end|><|tool_calls_section_end|>',
    "minimax-m2": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">b</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_familys_text_is_shown_as_it_comes(name: str) -> None:
    """Reasoning and text leave before the call is there; the space around them does not."""
    format = ChatFormat.of(tokenizer(), renderer=name)
    prompt = format.render([USER], TOOLS)
    thought = "" if format.decode(prompt).rstrip().endswith("<think>") else "<think>"
    text = f"{thought}hm \n</think>\n\n yo so \n{CALLS[name]}"
    output = (*format.vocabulary.encode(text), format.stop_token_ids[0])
    reader = format.decoder(tools=TOOLS, prompt_ids=prompt)
    deltas = [reader.feed([token_id]) for token_id in output]
    last = reader.finish()
    assert "".join(delta.reasoning_content for delta in deltas) == "hm"
    assert "".join(delta.content for delta in deltas) == "yo so"
    assert (last.content, last.reasoning_content) == ("", "")
    assert last.tool_calls == (("add", '{"a": "b"}'),)
    assert reader.message == format.parse(output, tools=TOOLS, prompt_ids=prompt)


def test_channels_are_shown_as_they_come() -> None:
    format = ChatFormat.of(family_tokenizer("gpt_oss"))
    text = (
        "<|channel|>analysis<|message|> hm <|end|><|start|>assistant<|channel|>final<|message|>"
        " yo so \n<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    reader = format.decoder(tools=TOOLS)
    deltas = [reader.feed([token_id]) for token_id in format.vocabulary.encode(text)]
    assert "".join(delta.reasoning_content for delta in deltas) == "hm"
    assert "".join(delta.content for delta in deltas) == "yo so"
    assert reader.finish().tool_calls == (("add", '{"a": 1}'),)


FRAGMENTS = (
    *("yo", " ", "\n", "<think>", "</think>", "\u00e9", "🙂", "<", "think>", "{", "<|im_end|>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", "<|tool_calls_section_begin|>"),
    *("<|tool_call_begin|>", "<|tool_call_end|>", "<|channel|>", "<|message|>", "<|start|>"),
    *("final", "analysis", "<|end|>", "<|return|>", "<|call|>", "commentary to=functions.add"),
    *CALLS.values(),
)


@pytest.mark.parametrize("name", ["kimi-k2", "minimax-m2", "gpt_oss", "deepseek_r1", "deepseek_v3"])
@settings(max_examples=60, deadline=None)
@example(parts=[" ", "yo", "🙂"], size=1, num_cut=1)
@given(
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=10),
    size=st.integers(1, 4),
    num_cut=st.integers(0, 2),
)
def test_what_a_stream_shows_is_the_message(
    name: str, parts: list[str], size: int, num_cut: int
) -> None:
    """Whatever a model writes: nothing that was shown is missing from the message, or twice.

    The message is the same however its ids arrive, also where it ends inside a character.
    """
    is_template = name in FAMILIES
    format = ChatFormat.of(
        family_tokenizer(name) if is_template else tokenizer(),
        renderer="template" if is_template else name,
    )
    prompt = format.render([USER])
    output = format.vocabulary.encode("".join(parts))
    output = output[: len(output) - num_cut]
    reader = format.decoder(tools=TOOLS, prompt_ids=prompt)
    deltas = [reader.feed(output[i : i + size]) for i in range(0, len(output), size)]
    deltas.append(reader.finish())
    assert "".join(delta.content for delta in deltas) == reader.message.content
    reasoning = "".join(delta.reasoning_content for delta in deltas)
    assert reasoning == (reader.message.reasoning_content or "")
    assert reader.message == format.parse(output, tools=TOOLS, prompt_ids=prompt)
