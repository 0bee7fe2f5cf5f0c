"""The tool-call formats by name: ours, and those that SGLang and vLLM give them.

Also which format a chat template asks its model for, told from the template's text.
"""

from __future__ import annotations

from agent_rl.errors import ConfigError
from agent_rl.tokens.bare_formats import Llama3Json, Mistral, Pythonic
from agent_rl.tokens.tool_formats import Glm, Hermes, QwenXml, ToolFormat

FORMATS: dict[str, ToolFormat] = {
    format.name: format
    for format in (Hermes(), QwenXml(), Glm(), Llama3Json(), Mistral(), Pythonic())
}
# Names that SGLang (`--tool-call-parser`) and vLLM use for the same wire formats.
ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder",
    "glm45": "glm",
    "glm47": "glm",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4": "pythonic",
    "llama4_pythonic": "pythonic",
}


def tool_format(name: str) -> ToolFormat:
    """The format of that name or alias.

    Raises:
        ConfigError: an unknown name; the message lists the known ones.
    """
    found = FORMATS.get(ALIASES.get(name, name))
    if found is None:
        known = ", ".join(sorted([*FORMATS, *ALIASES]))
        raise ConfigError(f"tool_call_parser is {name!r}; it must be auto, none or one of: {known}")
    return found


# What a template's text has if it asks the model for a format; the first that is found counts.
_HINTS = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm"),
    ("<minimax:tool_call>", "minimax-m2"),
    ("<|tool_calls_section_begin|>", "kimi-k2"),
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek-v3"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)


def detect(source: str, knows_tools: bool) -> str:
    """The format that a chat template's text asks the model for: ours, or that of a family."""
    if not knows_tools:
        return "hermes"
    return next((name for hint, name in _HINTS if hint in source), "hermes")
