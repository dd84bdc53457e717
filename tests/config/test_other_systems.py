"""The keys of other systems point at fields that there are."""

from __future__ import annotations

from asyncrl.config.loading import fields, mapping_above
from asyncrl.config.other_systems import KEYS, SECTIONS
from asyncrl.config.tree import Tree


def test_each_key_leads_to_a_field() -> None:
    known = {path for path, _ in fields(Tree)}
    assert [field for field in KEYS.values() if field not in known and mapping_above(field) is None] == []


def test_no_key_of_theirs_is_a_field_here() -> None:
    ours = {path.rpartition(".")[2] for path, _ in fields(Tree)} | set(Tree.model_fields)
    assert ours & (KEYS.keys() | set(SECTIONS)) == set()
