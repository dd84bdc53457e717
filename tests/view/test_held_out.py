"""Held-out answers over the evaluations: what the server gives of them; how damage is shown."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.tracking.rollouts import held_out
from asyncrl.view import held_out as shown_module
from asyncrl.view.command import write
from asyncrl.view.run import ViewedRun
from tests.view.held_out_run import held_out_run
from tests.view.made_run import TEXT
from tests.view.serving import served
from tests.view.test_server import get


def test_one_task_is_answered_over_the_evaluations_in_their_order(tmp_path: Path) -> None:
    made = held_out_run(tmp_path / "run", (0, 10, 20))
    with closing(ViewedRun(made.run, text=TEXT)) as run, served(run) as server:
        episodes = get(server, "/api/table?run=0")[2]["held_out"]
        assert episodes == [
            ["dev", task, index, f"held-out {task}", index == 1, 3] for task in (0, 1) for index in (0, 1)
        ]
        found = get(server, "/api/answers?run=0&set=dev&task=1&index=1")[2]
        assert [(a["due"], a["version"]) for a in found] == [(v, [0, v]) for v in (0, 10, 20)]
        texts = ["".join(a["shown"]["rows"][0]["pieces"]) for a in found]
        assert [f"The answer of {n}.3 is 7." in text for n, text in enumerate(texts)] == [True] * 3
        assert [a["row"]["reward"] for a in found] == [made.put[n, 3].reward for n in range(3)]
        assert get(server, "/api/answers?run=0&set=dev&task=9&index=0")[2] == []
        assert get(server, "/api/answers?run=0&set=dev&task=1")[0] == 400
        assert get(server, "/api/answers?run=0&set=dev&task=1&index=1", key="")[0] == 403


def test_a_damaged_answer_is_one_sentence_and_the_others_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = held_out_run(tmp_path / "run", (0, 10))
    path = held_out.evaluations(made.run.held_out)[0, 10]
    lines = path.read_text().splitlines()
    lines[0] = lines[0].replace('"record":"', '"record":"!')
    path.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(shown_module, "LOOK_S", 0.0)
    with closing(ViewedRun(made.run, text=TEXT)) as run:
        first, second = run.answers("dev", 0, 0)
        assert "rows" in first["shown"]
        assert second["error"].startswith("This answer cannot be read: ")
        path.unlink()
        assert [a["due"] for a in run.answers("dev", 0, 0)] == [0]
        assert run.about()["held_out"][0] == ["dev", 0, 0, "held-out 0", False, 1]


def test_of_many_evaluations_some_are_shown_from_first_to_last(tmp_path: Path) -> None:
    made = held_out_run(tmp_path / "run", tuple(range(0, 400, 10)))
    with closing(ViewedRun(made.run, text=TEXT)) as run:
        due = [a["due"] for a in run.answers("dev", 0, 0)]
    assert (len(due), due[0], due[-1], due == sorted(set(due))) == (16, 0, 390, True)


def test_an_exported_page_has_them(tmp_path: Path) -> None:
    made = held_out_run(tmp_path / "run", (0, 10))
    with closing(ViewedRun(made.run, text=TEXT)) as run:
        write([run], tmp_path / "page.html")
    assert '"0/dev/1/1":[{"branch":0,"due":0' in (tmp_path / "page.html").read_text()
