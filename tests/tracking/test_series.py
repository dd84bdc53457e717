import doctest
import itertools

import pytest

from asyncrl.tracking import series
from asyncrl.tracking.series import AXES, BUCKETS, PLACEHOLDERS, SECTIONS, SERIES, check, find, histogram, rate_name


def test_every_entry_has_a_section_a_unit_and_a_meaning():
    for s in SERIES.values():
        assert s.section in SECTIONS, s.name
        assert s.unit, s.name
        assert len(s.meaning) > 5, s.name
    assert {s.section for s in SERIES.values()} == set(SECTIONS)
    assert not set(AXES) & set(SERIES)


def test_a_total_has_its_rate_in_the_table():
    totals = [s for s in SERIES.values() if s.total]
    assert len(totals) > 5
    for s in totals:
        assert rate_name(s.name) in SERIES
        assert SERIES[rate_name(s.name)].unit == s.unit + "/s"


def test_a_member_of_a_family_is_found_and_a_stranger_is_not():
    assert find("waits/actor/ticket") is SERIES["waits/actor/{cause}"]
    assert find("reward/success/lookup") is SERIES["reward/success/{env}"]
    assert find("reward/success") is SERIES["reward/success"]
    assert find("buffer/dropped/stale") is not None
    assert find("buffer/dropped/aborted") is None
    assert find("buffer/dropped/{drop}") is None, "the family itself is no series"
    assert find("reward/success/a/b") is None
    with pytest.raises(ValueError, match="correction/esss"):
        check(["reward/mean", "correction/esss"])


def test_every_placeholder_in_a_name_is_known():
    import re

    for s in SERIES.values():
        assert set(re.findall(r"\{(\w+)\}", s.name)) <= set(PLACEHOLDERS)


def test_a_histogram_names_every_bucket_and_loses_no_count():
    values = histogram("staleness/in_queue", {0: 5, 2: 1, 5: 2, 7: 1, 30: 4})
    check(values)
    assert len(values) == len(BUCKETS)
    assert sum(values.values()) == 13
    assert values["staleness/in_queue/4_7"] == 3
    assert values["staleness/in_queue/1"] == 0


def test_docstrings():
    assert doctest.testmod(series).failed == 0


def test_the_buckets_are_named_after_their_edges():
    edges = series.BUCKET_EDGES
    named = [f"{a}" if b == a + 1 else f"{a}_{b - 1}" for a, b in itertools.pairwise(edges)]
    assert [*named, f"{edges[-1]}_up"] == list(BUCKETS)
