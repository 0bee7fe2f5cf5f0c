"""Chat templates of public model families, in short, and a byte-level tokenizer for each.

``templates/*.jinja`` have the structure of the public templates: their marks, where reasoning and
tools go, what they refuse. The tokenizer is a byte-level BPE with a few merges, so that random
sampled ids are rarely canonical, and with the family's marks as added tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_FOLDER = Path(__file__).parent / "templates"
_MARKS = re.compile(
    r"<\|[^|<>{} ]+\|>|<\uff5c[^\uff5c]+\uff5c>|\]~!b\[|\]~b\]|\[e~\[|\[gMASK\]|<sop>"
    r"|\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|SYSTEM_PROMPT|ARGS)\]"
    r"|<(?:start|end)_(?:of_turn|function_\w+)>"
)
_TAGS = re.compile(r"</?(?:think|tool_call|tool_response|minimax:tool_call|arg_key|arg_value)>")
_CORPUS = [
    "the quick brown fox and the lazy dog said hello to the other user and the assistant"
] * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """``after_user`` and ``after_tools``: whether a bridge to such messages is exact."""

    eos: str = "<|im_end|>"
    bos: str | None = None
    pad: str | None = None
    marks: tuple[str, ...] = ()
    is_text: bool = False
    after_user: bool = True
    after_tools: bool = True


DEEPSEEK_BEGIN, DEEPSEEK_END = "<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"

FAMILIES: dict[str, Family] = {
    "alpaca": Family(eos="</s>", after_user=False, after_tools=False),
    "chatml": Family(),
    "command_a": Family(eos="<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
    "command_r": Family(eos="<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
    "deepseek_r1": Family(eos=DEEPSEEK_END, bos=DEEPSEEK_BEGIN),
    "deepseek_v3": Family(eos=DEEPSEEK_END, bos=DEEPSEEK_BEGIN),
    "function_gemma": Family(eos="<end_of_turn>", bos="<bos>", pad="<pad>", after_tools=False),
    "gemma_2": Family(eos="<end_of_turn>", bos="<bos>", pad="<pad>", after_tools=False),
    "gemma_3": Family(eos="<end_of_turn>", bos="<bos>", pad="<pad>"),
    "glm_4_5": Family(eos="<|endoftext|>", marks=("<|user|>", "<|observation|>")),
    "gpt_oss": Family(eos="<|return|>"),
    "granite": Family(eos="<|end_of_text|>"),
    "kimi_k2": Family(eos="<|im_end|>"),
    "llama_2": Family(eos="</s>", bos="<s>", after_tools=False),
    "llama_3": Family(eos="<|eot_id|>", bos="<|begin_of_text|>"),
    "llama_3_1": Family(eos="<|eot_id|>", bos="<|begin_of_text|>"),
    "llama_4": Family(eos="<|eot|>", bos="<|begin_of_text|>"),
    "minimax_m2": Family(eos="[e~["),
    "mistral_1": Family(eos="</s>", bos="<s>", after_tools=False),
    "mistral_3": Family(eos="</s>", bos="<s>"),
    "mistral_7": Family(eos="</s>", bos="<s>"),
    "nemotron_3": Family(),
    "phi_3": Family(eos="<|end|>", marks=("<|user|>", "<|assistant|>", "<|system|>")),
    "phi_4": Family(),
    "phi_4_mini": Family(eos="<|end|>", marks=("<|user|>", "<|assistant|>", "<|system|>")),
    "qwen2_5": Family(pad="<|endoftext|>"),
    "qwen3": Family(pad="<|endoftext|>"),
    "qwen3_coder": Family(pad="<|endoftext|>"),
    "qwen3_thinking": Family(pad="<|endoftext|>"),
    "tulu": Family(eos="</s>", is_text=True),
    "vicuna": Family(eos="</s>", bos="<s>"),
    "zephyr": Family(eos="</s>", is_text=True),
}


@cache
def _bytes_tokenizer() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    return str(backend.to_str())


@cache
def _pieces_tokenizer() -> str:
    """Like SentencePiece: a space is part of the piece after it, unknown bytes have their own."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    trained = json.loads(backend.to_str())
    vocab = trained["model"]["vocab"]
    vocab.update({f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)})
    return json.dumps(trained)


def new_tokenizer(chat_template: str, family: Family, *, has_pieces: bool = False) -> Any:
    """A tokenizer whose added tokens are the marks and tags of the template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(
            _pieces_tokenizer() if has_pieces else _bytes_tokenizer()
        ),
        eos_token=family.eos,
        bos_token=family.bos,
        pad_token=family.pad,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
    if not family.is_text:
        tokenizer.add_tokens([*family.marks, *_found(_MARKS, chat_template)], special_tokens=True)
    tokenizer.add_tokens(_found(_TAGS, chat_template))
    return tokenizer


@cache
def family_tokenizer(name: str, *, has_pieces: bool = False) -> Any:
    template = (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return new_tokenizer(template, FAMILIES[name], has_pieces=has_pieces)


def _found(pattern: re.Pattern[str], text: str) -> list[str]:
    return sorted(set(pattern.findall(text)))
