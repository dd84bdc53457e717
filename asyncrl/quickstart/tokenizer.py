"""A tokenizer whose pieces are those of the quickstart's conversations, so that a whole episode is about 80 tokens.

Any printable ASCII text can be written with it; a tool call decodes to the JSON that any Hermes parser reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.data.sources.lookup import SIGNS, WORDS

PAD, START, END, CALL, CALL_END, UNKNOWN = (
    "<|pad|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<|unknown|>"
)  # fmt: skip
PIECES = (
    "system\n", "user\n", "assistant\n", "tool\n", "Tools: ", "What is ", "error: ", "no key ",
    '{"name": "', '", "arguments": {"key": "', '", "arguments": {"expression": "', '"}}', "lookup", "calculate",
    *(f" {sign} " for sign in SIGNS),
    *WORDS, *(f"{number:02d}" for number in range(100)),
)  # fmt: skip
CHARACTERS = ("\n", *(chr(code) for code in range(32, 127)))

# ChatML, as Qwen uses it. Tools are named but not described: the warm-up teaches what they take.
CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools: ' }}\
{%- for tool in tools %}{{ tool.function.name }}{{ ' ' if not loop.last }}{%- endfor %}\
{{ '<|im_end|>\\n' }}{%- endif %}\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}\
{%- for call in message.tool_calls or [] %}\
{{ '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}\
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}\
{{- '}</tool_call>' }}{%- endfor %}{{ '<|im_end|>\\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""


def build_tokenizer(pieces: Sequence[str] = PIECES, positions: int = 256) -> PreTrainedTokenizerFast:
    """The tokenizer: text is cut into the longest of `pieces` it begins with, a single character where no piece fits.

    `pieces` are longer than one character; `positions` is the number of tokens that its model reads.
    """
    vocabulary = [PAD, START, END, CALL, CALL_END, UNKNOWN, *pieces, *CHARACTERS]
    backend = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(vocabulary)}, unk_token=UNKNOWN))
    longest_first = sorted(pieces, key=len, reverse=True)
    cut = Regex("|".join([*map(re.escape, longest_first), r"[\s\S]"]))
    backend.pre_tokenizer = pre_tokenizers.Split(cut, behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[START, CALL, CALL_END],
        clean_up_tokenization_spaces=False,
        model_max_length=positions,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
