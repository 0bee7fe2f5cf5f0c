"""Rendering: messages and tools in the form that each chat template takes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from families import FAMILIES, Family, family_tokenizer, new_tokenizer

from agent_rl.errors import TokenError
from agent_rl.tokens.format import ChatFormat

HI: dict[str, Any] = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer", "description": "a number"}}}
TOOL_A = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
TOOL_B = {
    "function": {
        "strict": False,
        "parameters": {
            "properties": {"x": {"description": "a number", "type": "integer"}},
            "type": "object",
        },
        "description": "d",
        "name": "f",
    },
    "type": "function",
}
TOOL_C = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA}


def call_message(arguments: Any, content: Any = "") -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def text(tokenizer: Any, messages: Any, tools: Any = None, **kwargs: Any) -> str:
    return ChatFormat.of(tokenizer).template.text(messages, tools, kwargs)


def test_the_prompt_has_the_ids_of_the_template(fix: Any) -> None:
    assert ChatFormat.of(fix()).render([HI]) == (1, 5, 3, 23, 2, 3, 1, 6, 3)


def test_text_equals_that_of_transformers(family_name: str) -> None:
    """Our way of running a template gives what ``apply_chat_template`` gives."""
    tokenizer = family_tokenizer(family_name)
    messages = [HI, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "a < b"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text(tokenizer, messages) == expected


@pytest.mark.parametrize("name", ["qwen2_5", "llama_3_1", "mistral_7", "chatml"])
def test_equal_tools_in_other_shapes_give_equal_prompts(name: str) -> None:
    """Case B9: key order, strict=False and the flat form do not show."""
    format = ChatFormat.of(family_tokenizer(name))
    prompts = {format.render([HI], [tool]) for tool in (TOOL_A, TOOL_B, TOOL_C)}
    assert len(prompts) == 1
    assert format.render([HI], [TOOL_A, {"type": "function"}]) in prompts


@pytest.mark.parametrize(
    ("arguments", "written"),
    [('{"x": 1}', "<parameter=x>\n1\n</parameter>"), ("", "<function=f>\n</function>")],
)
def test_arguments_become_a_mapping(arguments: str, written: str) -> None:
    """Case B8: the template iterates over ``arguments.items()``; the caller's object stays."""
    messages = [HI, call_message(arguments), {"role": "tool", "tool_call_id": "c1", "content": "R"}]
    before = copy.deepcopy(messages)
    assert written in text(family_tokenizer("qwen3_coder"), messages, [TOOL_A])
    assert messages == before


def test_arguments_that_are_not_json_stay_text() -> None:
    """Case B8: no exception, the raw string is shown."""
    rendered = text(family_tokenizer("qwen3"), [HI, call_message("not json")], [TOOL_A])
    assert '{"name": "f", "arguments": not json}' in rendered


@pytest.mark.parametrize("name", ["qwen3_coder", "glm_4_5", "minimax_m2"])
@pytest.mark.parametrize("arguments", ["not json", "[1]"])
def test_arguments_that_are_not_json_are_seen_where_items_are_asked_for(
    name: str, arguments: str
) -> None:
    """Case B8: a template with ``arguments.items()`` shows the raw string, without exception."""
    rendered = text(family_tokenizer(name), [HI, call_message(arguments)], [TOOL_A])
    assert "arguments" in rendered and arguments in rendered


def test_calls_that_are_no_list_are_refused() -> None:
    with pytest.raises(TokenError, match=r"messages\[1\].tool_calls is a int"):
        text(family_tokenizer("qwen3"), [HI, {"role": "assistant", "tool_calls": 5}])


def test_a_template_that_wants_text_arguments_and_null_content_gets_them() -> None:
    """DeepSeek's template concatenates the arguments and looks for ``content is none``."""
    rendered = text(family_tokenizer("deepseek_v3"), [HI, call_message('{"x": 1}')], [TOOL_A])
    assert 'f\n```json\n{"x": 1}\n```' in rendered


def test_a_template_that_wants_short_ids_gets_them() -> None:
    """Mistral's template refuses tool-call ids that have not nine characters."""
    result = {"role": "tool", "tool_call_id": "c1", "content": "R"}
    rendered = text(family_tokenizer("mistral_3"), [HI, call_message("{}"), result], [TOOL_A])
    short = rendered.partition('"id": "')[2][:9]
    assert short.isalnum() and f'"call_id": "{short}"' in rendered


@pytest.mark.parametrize("content", [None, "", []])
def test_absent_content_is_empty_text(smollm: Any, content: Any) -> None:
    """Case B11: SmolLM2's template concatenates the content and would crash on None."""
    expected = text(smollm, [HI, {"role": "assistant", "content": ""}])
    assert text(smollm, [HI, {"role": "assistant", "content": content}]) == expected
    assert text(smollm, [HI, {"role": "assistant"}]) == expected


def test_text_parts_are_joined(smollm: Any) -> None:
    """Case B190: also for a tool message."""
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    for role in ("user", "tool"):
        joined = text(smollm, [HI, {"role": role, "content": "abc"}])
        assert text(smollm, [HI, {"role": role, "content": parts}]) == joined


def test_an_image_part_is_refused_by_name(smollm: Any) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}
    with pytest.raises(TokenError, match=r"messages\[0\]\.content\[1\] has type 'image_url'"):
        text(smollm, [message])


def test_a_template_with_images_gets_the_parts() -> None:
    template = (
        "{% for m in messages %}{% for part in m.content %}"
        "{{ '<|image|>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}"
    )
    tokenizer = new_tokenizer(template, Family(marks=("<|image|>",)))
    parts = [{"type": "image_url", "image_url": {"url": "u"}}, {"type": "text", "text": "what?"}]
    assert text(tokenizer, [{"role": "user", "content": parts}]) == "<|image|>what?"


def test_developer_is_system_unless_the_template_knows_it(fix: Any) -> None:
    developer = {"role": "developer", "content": "S"}
    assert text(fix(), [developer, HI]) == text(fix(), [{**developer, "role": "system"}, HI])
    assert "<|start|>developer<|message|>S" in text(family_tokenizer("gpt_oss"), [developer, HI])


def test_numpy_values_are_plain(fix: Any) -> None:
    """Case B154: arrays of messages and tools, numbers inside."""
    messages = np.array([{"role": "user", "content": "hi", "level": np.int64(3)}], dtype=object)
    assert ChatFormat.of(fix()).render(messages, np.array([])) == (1, 5, 3, 23, 2, 3, 1, 6, 3)
    tool = {"name": "f", "parameters": {"type": "object", "required": np.array(["x"])}}
    tools = np.array([tool, tool], dtype=object)
    assert '"required": ["x"]' in text(fix(), [HI], tools)
    bridge = ChatFormat.of(fix()).bridge((1, 6, 3, 20, 2), [HI], tools)
    assert bridge == (3, 1, 5, 3, 23, 2, 3, 1, 6, 3)


def test_a_refusal_of_the_template_is_a_token_error() -> None:
    with pytest.raises(TokenError, match="System role not supported"):
        text(family_tokenizer("gemma_2"), [{"role": "system", "content": "S"}, HI])
    with pytest.raises(TokenError, match=r"messages\[0\] has no role"):
        text(family_tokenizer("gemma_2"), [{"content": "S"}])
    with pytest.raises(TypeError, match=r"messages\[1\] is a str"):
        text(family_tokenizer("gemma_2"), [HI, "hi"])


def test_template_kwargs_reach_the_template() -> None:
    tokenizer = family_tokenizer("qwen3")
    assert text(tokenizer, [HI], enable_thinking=False).endswith("<think>\n\n</think>\n\n")


def test_a_template_without_tools_gets_the_hermes_form(smollm: Any) -> None:
    """Schemas in the system message, the call as sampled, both results in one user turn."""
    messages = [
        HI,
        call_message('{"x":  1}', "ok"),
        {"role": "tool", "tool_call_id": "c1", "content": "R1"},
        {"role": "tool", "tool_call_id": "c2", "content": "R2"},
    ]
    rendered = text(smollm, messages, [TOOL_A])
    system, _, rest = rendered.partition("<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n")
    assert '<tools>\n{"type": "function", "function": {"name": "f",' in system
    assert rest == (
        '<|im_start|>assistant\nok\n<tool_call>\n{"name": "f", "arguments": {"x":  1}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<result>\nR1\n</result>\n"
        "<result>\nR2\n</result><|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_image_in_a_tool_result_stays_an_image(smollm: Any) -> None:
    """Case B190: a template that takes images and knows no tools."""
    tokenizer = copy.deepcopy(smollm)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [
        {"role": "system", "content": [image]},
        call_message('{"x": 1}', "ok"),
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "R1"}, image]},
        {"role": "tool", "tool_call_id": "c2", "content": "R2"},
    ]
    rendered = text(tokenizer, messages, [TOOL_A])
    assert rendered.startswith("[system]<image>\n\nYou can call functions")
    assert rendered.endswith("[user]<result>\nR1<image>\n</result>\n<result>\nR2\n</result>")


def test_a_system_message_keeps_its_text_before_the_tools(smollm: Any) -> None:
    rendered = text(smollm, [{"role": "system", "content": "Be terse."}, HI], [TOOL_A])
    assert rendered.startswith("<|im_start|>system\nBe terse.\n\nYou can call functions")


def test_tools_are_known_by_rendering(family_name: str) -> None:
    """A template knows tools if it writes them; those that do not get the hermes form."""
    without = {
        *("alpaca", "chatml", "command_r", "gemma_2", "gemma_3", "llama_2", "llama_3"),
        *("mistral_1", "phi_3", "phi_4", "phi_4_mini", "tulu", "vicuna", "zephyr"),
    }
    assert family_name in FAMILIES
    template = ChatFormat.of(family_tokenizer(family_name)).template
    assert template.knows_tools == (family_name not in without)


def test_a_tokenizers_own_way_to_render_is_respected(fix: Any) -> None:
    class Own(type(fix())):  # type: ignore[misc]
        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            return "<|im_start|>" + messages[-1]["content"]

    assert ChatFormat.of(Own()).render([HI]) == (1, 23)


def test_generation_blocks_are_read_through() -> None:
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert text(new_tokenizer(template, Family()), [HI]) == "hi"


def test_a_tool_without_a_name_is_left_out_with_one_warning(
    smollm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Case B9: the other tools are not harmed."""
    for _ in range(3):
        assert "nameless" not in text(smollm, [HI], [TOOL_A, {"type": "function", "x": "nameless"}])
    assert [record.message for record in caplog.records if "nameless" in record.message] == [
        "tools[1] has no function name and is left out: {'type': 'function', 'x': 'nameless'}"
    ]
