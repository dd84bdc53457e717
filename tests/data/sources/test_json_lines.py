import json

import pytest

from asyncrl.data.sources.json_lines import JsonLinesSource
from asyncrl.errors import ConfigError


def write(path, tasks):
    path.write_text("\n".join(json.dumps(task) for task in tasks) + "\n")
    return str(path)


@pytest.fixture
def ten(tmp_path):
    return write(tmp_path / "tasks.jsonl", [{"prompt": f"q{i}", "ground_truth": i} for i in range(10)])


def test_goes_round_in_a_new_order_without_what_is_held_out(ten):
    source = JsonLinesSource(ten, seed=1, held_out_size=2)
    epochs = [[source.task(8 * epoch + i)["prompt"] for i in range(8)] for epoch in range(3)]
    assert all(sorted(epoch) == [f"q{i}" for i in range(8)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [source.held_out(i)["prompt"] for i in range(2)] == ["q8", "q9"]
    assert JsonLinesSource(ten, seed=1, held_out_size=2).task(17)["prompt"] == epochs[2][1]
    assert source.task(0)["id"].startswith("tasks.jsonl:")
    assert (source.train_size, source.held_out_size) == (8, 2)
    with pytest.raises(IndexError):
        source.held_out(2)


def test_a_second_file_may_hold_the_held_out_tasks(ten, tmp_path):
    other = write(tmp_path / "eval.jsonl", [{"id": "e", "prompt": "other"}])
    source = JsonLinesSource(ten, held_out_path=other)
    assert source.held_out(0)["id"] == "e"
    assert source.train_size == 10


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ('{"prompt": "a"}', {"held_out_size": 1}, "held_out_size is 1; expected at least 0 and less than the 1 tasks"),
        ('{"prompt": "a"}\n{oops', {}, "line 2 is not JSON"),
        ('{"prompt": 3}', {}, "line 1: expected an object with `prompt`"),
        ("[1]", {}, "line 1: expected an object"),
        ("", {}, "holds no task"),
        ('{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}', {}, "the id '1' appears more than once"),
        (
            '{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "a"}',
            {"held_out_size": 1},
            "has the prompt of a training task",
        ),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, lines, options, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(lines)
    with pytest.raises(ConfigError, match=message):
        JsonLinesSource(str(path), **options)


def test_a_line_ends_where_json_says_not_where_unicode_does(tmp_path):
    file = tmp_path / "tasks.jsonl"
    prompts = ["one\u2028two", "three\x85four", "five"]
    file.write_text("\r\n".join(json.dumps({"prompt": p}, ensure_ascii=False) for p in prompts), newline="")
    assert {JsonLinesSource(str(file)).task(i)["prompt"] for i in range(3)} == set(prompts)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match="no/such"):
        JsonLinesSource("no/such.jsonl")
