"""Tables as tasks, read by the real `datasets`."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.data.prompt_fit import fit, fit_prompts
from asyncrl.data.sources.hugging_face import DatasetSource
from asyncrl.errors import ConfigError

VERL_ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {i} + {i}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
        "extra_info": {"split": "train", "index": i},
    }
    for i in range(20)
]


@pytest.fixture(autouse=True)
def own_caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_verls_rows_load_unchanged(tmp_path: Path) -> None:
    source = DatasetSource(parquet(tmp_path / "train.parquet", VERL_ROWS), held_out_size=5, seed=3)
    assert (source.train_size, source.held_out_size) == (15, 5)
    epoch = [source.task(i) for i in range(15)]
    held = [source.held_out(i) for i in range(5)]
    by_index = sorted([*epoch, *held], key=lambda task: task["extra_info"]["index"])
    assert [{name: task[name] for name in VERL_ROWS[0]} for task in by_index] == VERL_ROWS
    assert [task["id"] for task in by_index[:2]] == ["train.parquet:0", "train.parquet:1"]
    again = DatasetSource(str(tmp_path / "train.parquet"), held_out_size=5, seed=3)
    assert [again.task(i)["id"] for i in range(40)] == [source.task(i)["id"] for i in range(40)]
    assert [again.held_out(i) for i in range(5)] == held
    assert [source.task(i)["id"] for i in range(15, 30)] != [task["id"] for task in epoch], "a new order each round"
    other = DatasetSource(str(tmp_path / "train.parquet"), held_out_size=5, seed=4)
    assert {other.held_out(i)["id"] for i in range(5)} != {task["id"] for task in held}


def test_columns_are_mapped_and_prompts_are_built(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": f"x #### {i}", "when": datetime.date(2026, 1, 1)} for i in range(4)]
    source = DatasetSource(
        parquet(tmp_path / "a.parquet", rows),
        columns={"reward_model.ground_truth": "answer"},
        prompt_template="{question} Think.",
        system_prompt="Be brief.",
        constants={"data_source": "mine"},
    )
    task = next(source.task(i) for i in range(4) if source.task(i)["question"] == "q2")
    assert task["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q2 Think."}]
    assert (task["reward_model"], task["data_source"]) == ({"ground_truth": "x #### 2"}, "mine")
    assert task["when"] == "2026-01-01"
    assert msgpack.unpackb(msgpack.packb(task)) == task


def test_only_rows_with_given_values(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "ability": "code" if i % 2 else "math", "level": i // 4} for i in range(8)]
    path = lines(tmp_path / "mixed.jsonl", rows)
    source = DatasetSource(path, where={"ability": "code", "level": 1})
    assert sorted(source.task(i)["id"] for i in range(2)) == ["mixed.jsonl:5", "mixed.jsonl:7"]
    with pytest.raises(ConfigError, match=r"holds no row with \{'ability': 'art'\}"):
        DatasetSource(path, where={"ability": "art"})
    with pytest.raises(ConfigError, match="where names 'kind'"):
        DatasetSource(path, where={"kind": 1})


def test_json_lines_arrow_and_saved_folders_hold_the_same_rows(tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": f"p{i}", "ground_truth": i} for i in range(6)]
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"test": table}).save_to_disk(tmp_path / "splits")
    lines(tmp_path / "part-0.jsonl", rows[:3])
    lines(tmp_path / "part-1.jsonl", rows[3:])
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    for path, split in (
        (str(tmp_path / "part-*.jsonl"), "train"),
        (str(arrow), "train"),
        (str(tmp_path / "saved"), "train"),
        (str(tmp_path / "splits"), "test"),
    ):
        source = DatasetSource(path, split=split)
        assert sorted(source.task(i)["prompt"] for i in range(6)) == [f"p{i}" for i in range(6)], path


def test_held_out_rows_may_have_a_file_of_their_own_and_are_never_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = lines(tmp_path / "tasks.jsonl", [{"prompt": f"p{i}"} for i in range(6)])
    (tmp_path / "eval").mkdir()
    held = lines(tmp_path / "eval" / "tasks.jsonl", [{"prompt": "p1"}, {"prompt": "new"}, {"prompt": "newer"}])
    source = DatasetSource(train, held_out_path=held, held_out_size=2)
    assert [source.held_out(i)["prompt"] for i in range(2)] == ["p1", "new"]
    assert sorted(source.task(i)["prompt"] for i in range(5)) == ["p0", "p2", "p3", "p4", "p5"]
    assert "1 training rows have the prompt of a held-out one" in caplog.text
    assert source.held_out(0)["id"] != next(source.task(i)["id"] for i in range(5))


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"question": "q"}], {}, r"bad\.jsonl:0 has None as its prompt.*columns are question.*columns: \{prompt"),
        ([{"prompt": "a"}, {"prompt": ""}], {}, r"bad\.jsonl:1 has '' as its prompt"),
        ([{"prompt": [{"content": "a"}]}], {}, "expected a message with `role`"),
        ([{"prompt": "a"}], {"columns": {"ground_truth": "answer"}}, "columns names 'answer'.*its columns are prompt"),
        ([{"prompt": "a"}], {"prompt_template": "{question}"}, "prompt_template asks for 'question'"),
        ([{"prompt": "a"}], {"drop_columns": ["image"]}, "drop_columns names 'image'"),
        ([{"prompt": "a"}], {"held_out_size": 1}, "held_out_size is 1; expected at least 0 and less than the 1 rows"),
        ([{"prompt": "a"}, {"prompt": "a"}], {"held_out_size": 1}, "no row is left for training"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DatasetSource(lines(tmp_path / "bad.jsonl", rows), **options)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.options\.path is .*none\.parquet.*looked up beside the config file"):
        DatasetSource(str(tmp_path / "none.parquet"))
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ConfigError, match=r"torn\.parquet.* cannot be read"):
        DatasetSource(str(tmp_path / "torn.parquet"))
    import datasets

    column = datasets.Dataset.from_dict({"prompt": ["a"], "image": [None]})
    column.cast_column("image", datasets.Image(decode=False)).save_to_disk(tmp_path / "pictures")
    with pytest.raises(ConfigError, match=r"column 'image' holds .*drop_columns"):
        DatasetSource(str(tmp_path / "pictures"))
    assert DatasetSource(str(tmp_path / "pictures"), drop_columns=["image"]).task(0)["prompt"] == "a"


class FakeTokenizer:
    """One token per character; the template adds two around each message and one for the answer's start."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        return "".join(f"<{message['content']}>" for message in conversation) + "@"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(map(ord, text))

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))


def test_a_long_prompt_is_cut_at_the_left_or_in_the_middle_of_the_last_user_message() -> None:
    tokenizer = FakeTokenizer()
    assert fit("0123456789", tokenizer, 13, "truncate_left").cut is None
    assert fit("0123456789", tokenizer, 8, None).tokens == 13
    assert fit("0123456789", tokenizer, 8, "truncate_left").cut == "56789"
    assert fit("0123456789", tokenizer, 8, "truncate_middle").cut == "01289"
    chat = [{"role": "system", "content": "abc"}, {"role": "user", "content": "0123456789"}]
    assert fit(chat, tokenizer, 10, "truncate_left").cut == [chat[0], {"role": "user", "content": "89"}]
    with pytest.raises(ConfigError, match="outside its last user message"):
        fit(chat, tokenizer, 8, "truncate_left")


@pytest.mark.system
def test_counts_that_cannot_be_kept_are_counted_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "full").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))
    assert len(fit_prompts(["What is fox + owl?"], "quickstart", 60, "error", workers=1)) == 1
    assert "set XDG_CACHE_HOME" in caplog.text


@pytest.mark.system
def test_over_long_prompts_counted_in_a_process_that_is_not_this_one(tmp_path: Path) -> None:
    rows = [{"prompt": "What is fox + owl?" * n} for n in (1, 1, 20, 2)]
    path = lines(tmp_path / "long.jsonl", [{**row, "id": i} for i, row in enumerate(rows)])
    code = (
        "import sys, json\n"
        "from asyncrl.data.sources.hugging_face import DatasetSource\n"
        "from asyncrl.errors import ConfigError\n"
        "if __name__ == '__main__':\n"
        "    try: DatasetSource(sys.argv[1], max_prompt_tokens=60)\n"
        "    except ConfigError as error: print(error)\n"
        "    source = DatasetSource(sys.argv[1], max_prompt_tokens=60, over_long='drop', workers=1)\n"
        "    print(json.dumps(sorted(source.task(i)['id'] for i in range(source.train_size))))\n"
        "    print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    file = tmp_path / "count.py"
    file.write_text(code)
    done = subprocess.run([sys.executable, str(file), path], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    refused, dropped, loaded = done.stdout.splitlines()
    assert "1 of 4 prompts have more than 60 tokens" in refused
    assert "long.jsonl:2 has" in refused
    assert json.loads(dropped) == ["0", "1", "3"]
    assert loaded == "False False", "whoever opens a source loads no torch"
