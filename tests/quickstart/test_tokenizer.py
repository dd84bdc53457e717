import json
import re

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from asyncrl.quickstart.tokenizer import PIECES, build_tokenizer
from asyncrl.rendering.tool_calls import Hermes

TOKENIZER = build_tokenizer()


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


ascii_text = st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126))


@given(ascii_text | st.lists(st.sampled_from(PIECES)).map("".join))
def test_ascii_text_comes_back(text):
    assert TOKENIZER.decode(encode(text)) == text


def test_the_vocabulary_is_small_and_without_repeats():
    assert len(TOKENIZER) < 300
    assert len(set(PIECES)) == len(PIECES)


def test_a_tool_call_is_few_tokens_and_proper_json():
    ids = encode(Hermes().write("lookup", {"key": "fox"}))
    assert len(ids) == 7
    assert len(encode(Hermes().write("calculate", {"expression": "41 - 17"}))) == 9
    body = re.fullmatch(r"<tool_call>(.*)</tool_call>", TOKENIZER.decode(ids))[1]
    assert json.loads(body) == {"name": "lookup", "arguments": {"key": "fox"}}


def test_what_it_cannot_write_is_one_unknown_token():
    assert encode("é") == [TOKENIZER.unk_token_id]


def test_saved_and_loaded_it_is_the_same(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "What is fox + owl?<|im_end|>\n"
    assert loaded.encode(text) == encode(text)
    assert loaded.chat_template == TOKENIZER.chat_template
    assert (loaded.eos_token_id, loaded.pad_token_id) == (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)
