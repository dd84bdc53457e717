"""Demonstrations are read once, checked, and drawn in an order that the seed fixes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.data.demonstrations import chat, open_demonstrations
from asyncrl.errors import ConfigError, RunError
from tests.data.demonstrations.chats import TOOLS, called, said, turns, written

USER, ANSWER = said("user", "?"), said("assistant", "3")


def opened(*paths: str, seed: int = 0) -> Any:
    return open_demonstrations(Config.load(None, {"data.demonstrations": list(paths), "data.seed": seed}))


def test_every_row_comes_once_in_an_epoch_in_an_order_of_the_seed(tmp_path: Path) -> None:
    one, two = written(tmp_path / "a.jsonl", map(turns, range(5))), written(tmp_path / "b.jsonl", map(turns, range(3)))
    data, again, other = opened(one, two), opened(one, two), opened(one, two, seed=1)
    assert data.size == 8
    rows = [data.row(draw) for draw in range(24)]
    assert all(sorted(rows[e : e + 8]) == list(range(8)) for e in (0, 8, 16))
    assert rows[:8] != rows[8:16]
    assert [again.row(draw) for draw in range(24)] == rows != [other.row(draw) for draw in range(24)]
    assert data.digest == again.digest == other.digest != opened(two, one).digest
    assert data.chats.where(6) == f"{two} line 2"
    assert chat.decoded(data.chats.chat(6)).messages == turns(1)["messages"]
    assert chat.digest(data.chats.chat(6)).hex() == data.digest_of(6)


def test_without_demonstrations_there_are_none() -> None:
    assert open_demonstrations(Config.load(None, {})) is None


def test_a_relative_file_is_looked_up_beside_the_config(tmp_path: Path) -> None:
    path = written(tmp_path / "chats.jsonl", [turns(1)])
    (tmp_path / "sft.yaml").write_text("data: {demonstrations: chats.jsonl}\n")
    assert Config.load(tmp_path / "sft.yaml").data.demonstrations == (path,)


def test_a_table_holds_the_same_chats_as_json_lines(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    # Arrow has one type for the arguments of all calls, so tables hold them as text; other keys come back as None.
    rows = []
    for n in range(4):
        row = json.loads(json.dumps(turns(n)))
        for message in row["messages"]:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        rows.append(row | {"tools": json.dumps(row.get("tools", []))})
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "chats.parquet")
    table.save_to_disk(str(tmp_path / "saved"))
    lines = opened(written(tmp_path / "chats.jsonl", map(turns, range(4))))
    for path in ("chats.parquet", "saved"):
        data = opened(str(tmp_path / path))
        assert [chat.decoded(data.chats.chat(n)) for n in range(4)] == [
            chat.decoded(lines.chats.chat(n)) for n in range(4)
        ]
    assert data.chats.where(2).endswith("saved row 2")


def test_what_follows_the_last_answer_is_left_out_and_text_arguments_become_objects() -> None:
    call = called(key="fox")
    call["tool_calls"][0]["function"]["arguments"] = '{"key": "fox"}'
    row = {"messages": [USER, call, said("tool", "41"), ANSWER, said("user", "thanks")], "tools": TOOLS, "id": 7}
    read = chat.decoded(chat.encoded(row, "x"))
    assert read.messages == [USER, called(key="fox"), said("tool", "41"), ANSWER]
    assert read.tools == TOOLS


NO_CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "lookup"}]}
DEEP = '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("nope", "is not JSON: Expecting value.*expected one object per line"),
        (DEEP, "is not JSON"),
        ('{"messages": [{"role": "assistant", "content": NaN}]}', "NaN is no JSON number"),
        ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "cannot be sent as JSON.*surrogates"),
        ([1], "holds a list: expected an object with `messages`"),
        ({"prompt": "?"}, "holds an object with prompt: expected an object with `messages`"),
        ({"messages": []}, "no assistant message.*roles: none"),
        ({"messages": [USER]}, "no assistant message.*roles: user.*add the answer, or leave the row out"),
        ({"messages": [{"content": "?"}, ANSWER]}, "message 0 is an object without a role"),
        ({"messages": [said("user", None), ANSWER]}, r"message 0 \(user\) has nothing as its content"),
        ({"messages": [{"role": "user", "content": ["x"]}, ANSWER]}, "has a list as its content: expected text"),
        ({"messages": [USER, NO_CALL]}, "message 1 has a tool call without a function's name"),
        ({"messages": [USER, ANSWER], "tools": "{"}, "tools that are not JSON"),
        ({"messages": [USER, ANSWER], "tools": {"a": 1}}, "an object as its tools: expected a list"),
        ({"messages": [USER] * 4096 + [ANSWER]}, "4097 messages, at most 4096 are read: split the chat"),
        ({"messages": [USER, said("assistant", "x" * chat.MAX_BYTES)]}, "bytes, at most .* are read: split the chat"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_named_with_its_line(line: Any, problem: str, tmp_path: Path) -> None:
    path = written(tmp_path / "chats.jsonl", [turns(0), "", line])
    with pytest.raises(ConfigError, match=f"{path} line 3.*{problem}"):
        opened(path)


def test_a_line_without_end_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 30)  # a gigabyte without a newline that takes no room
    with pytest.raises(ConfigError, match=r"line 1 has more than .* bytes: split the chat"):
        opened(str(path))


def test_files_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    full, empty = written(tmp_path / "a.jsonl", [turns(0)]), written(tmp_path / "b.jsonl", ["", " "])
    with pytest.raises(ConfigError, match=r"b\.jsonl, which is empty: expected one JSON object per line"):
        opened(full, empty)
    with pytest.raises(ConfigError, match=r"gone\.jsonl', which cannot be read \(No such file"):
        opened("gone.jsonl")
    with pytest.raises(ConfigError, match="JSON lines beside another kind"):
        opened(full, "b.parquet")


def test_a_table_without_messages_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"prompt": "?"}]).to_parquet(tmp_path / "chats.parquet")
    with pytest.raises(ConfigError, match="has the columns prompt: expected `messages`"):
        opened(str(tmp_path / "chats.parquet"))


def test_a_file_that_changes_under_the_run_is_noticed_and_one_that_is_replaced_is_read_as_it_was(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "chats.jsonl", map(turns, range(4)))
    data = opened(path)
    before = data.chats.chat(1)
    (tmp_path / "new").write_text(f"{json.dumps(turns(9))}\n" * 4)
    os.replace(tmp_path / "new", path)
    assert data.chats.chat(1) == before
    data = opened(path)
    for text in (json.dumps(turns(7)), "{" * len(json.dumps(turns(9)))):
        with open(path, "r+") as file:
            file.write(text)
        with pytest.raises(RunError, match="line 1 is no longer what it was when the run opened it: put the file back"):
            data.chats.chat(0)
