"""Every field of the config is in one list of what `--resume` makes of its change, and acts as the list says."""

from __future__ import annotations

from itertools import combinations

import pytest

from asyncrl.config import Config
from asyncrl.config.loading import fields
from asyncrl.config.resuming import FIELDS, ONLY_IF, differences, settings


def test_every_field_is_classified_once() -> None:
    known = {field for field, _ in fields(Config)}
    named = set().union(*FIELDS.values())
    assert known - named == set(), "add it to a list in asyncrl/config/resuming.py"
    assert named - known == set(), "no such field"
    assert [a & b for a, b in combinations(FIELDS.values(), 2)] == [frozenset()] * 3
    assert set(ONLY_IF) <= FIELDS["branch"]


def test_settings_are_the_fields_that_begin_a_branch() -> None:
    learner = {"schedule": "linear", "teacher": {"path": "quickstart"}, "demonstrations": {"per_step": 4}}
    learner |= {"backend": "fsdp2", "shard": "node"}
    data = {"demonstrations": ["chats.jsonl"]}
    config = Config.model_validate({"data": data, "buffer": {"over_age": "mask"}, "learner": learner})
    assert settings(config).keys() == FIELDS["branch"]


def ranks_on_nodes(shard: str, each: int) -> dict[str, object]:
    return {
        "learner": {"backend": "fsdp2", "ranks": 8, "shard": shard},
        "launch": {"backend": "ray", "host": "auto", "ranks_per_node": each},
        "weights": {"channel": "zmq"},
    }


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ({"learner": {"steps": 10, "schedule": "linear"}}, {"learner": {"steps": 20, "schedule": "linear"}}, "steps"),
        ({"learner": {"steps": 10}}, {"learner": {"steps": 20}}, ""),
        ({"learner": {"lr": 1e-3}}, {"learner": {"lr": 1e-4}}, "learner.lr was 0.001 and is 0.0001"),
        ({"learner": {"threads": 1}}, {"learner": {"threads": 2}}, "learner.threads"),
        ({"buffer": {"max_staleness": 2}}, {"buffer": {"max_staleness": 3}}, ""),
        ({"buffer": {"over_age": "drop"}}, {"buffer": {"over_age": "wait"}}, ""),
        ({"buffer": {"over_age": "drop"}}, {"buffer": {"over_age": "mask"}}, "buffer.over_age"),
        (
            {"buffer": {"over_age": "mask", "max_staleness": 2}},
            {"buffer": {"over_age": "mask", "max_staleness": 3}},
            "buffer.max_staleness",
        ),
        ({"actors": {"seed": 1}}, {"actors": {"seed": 2}}, ""),
        (ranks_on_nodes(shard="node", each=2), ranks_on_nodes(shard="node", each=4), "launch.ranks_per_node was 2"),
        (ranks_on_nodes(shard="all", each=2), ranks_on_nodes(shard="all", each=4), ""),
        (
            {"learner": {"teacher": {"path": "quickstart"}}},
            {"learner": {"teacher": {"path": "quickstart", "coef": 2.0}}},
            "learner.teacher.coef was 1.0 and is 2.0",
        ),
    ],
)
def test_what_changes_a_redone_step_is_named(before: dict[str, object], now: dict[str, object], named: str) -> None:
    found = "; ".join(differences(*(settings(Config.model_validate(values)) for values in (before, now))))
    assert named in found
    assert bool(named) == bool(found)


@pytest.mark.parametrize(
    ("changed", "value"), [("renderer", "package.module:Name"), ("tool_calls", "json"), ("stop_token_ids", [5])]
)
def test_what_renders_demonstrations_is_a_setting_where_there_are_some(changed: str, value: object) -> None:
    """A redone batch has the same chats, which these fields make into ids."""
    plain = {"learner": {"demonstrations": {"per_step": 4}}, "data": {"demonstrations": ["chats.jsonl"]}}
    for sections, said in ((plain, [changed]), ({}, [])):
        before, now = ({"actors": {}} | sections, {"actors": {changed: value}} | sections)
        found = differences(*(settings(Config.model_validate(values)) for values in (before, now)))
        assert [text.split()[0] for text in found] == [f"actors.{name}" for name in said]
