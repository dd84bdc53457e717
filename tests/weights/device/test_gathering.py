"""Who gets a version together with whom: properties of the decision, without sockets."""

from __future__ import annotations

import doctest

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.weights.device import gathering
from asyncrl.weights.device.gathering import Asked, Gathering

WAIT_S = 1.0
STEPS = st.lists(st.tuples(st.sampled_from(["publish", "ask", "wait", "forget"]), st.integers(0, 3)), max_size=60)


def names(parties: list[tuple[Asked, ...]]) -> list[list[str]]:
    return [[asked.reader for asked in party] for party in parties]


def test_the_example() -> None:
    assert doctest.testmod(gathering).failed == 0


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_everybody_is_answered_in_time_and_together_at_most_once(steps: list[tuple[str, int]]) -> None:
    gathered, now, publication = Gathering(WAIT_S), 0.0, 0
    waits: dict[str, tuple[int, float]] = {}
    together: dict[tuple[str, int], int] = {}
    for what, who in steps:
        name = f"actor-{who}"
        if what == "publish":
            publication += 1
        elif what == "ask":
            gathered.ask(Asked(name), publication, now)
            waits[name] = publication, now
        elif what == "forget":
            gathered.forget(name)
            waits.pop(name, None)
        else:
            now += 0.4
        for party in gathered.due(now):
            asked_for = {waits[asked.reader][0] for asked in party}
            assert len(asked_for) == 1, "one version"
            assert len({asked.reader for asked in party}) == len(party)
            for asked in party:
                version, since = waits.pop(asked.reader)
                assert now - since <= WAIT_S + 0.4, "the step of this clock on top"
                if len(party) > 1:
                    together[asked.reader, version] = together.get((asked.reader, version), 0) + 1
        assert all(now - since < WAIT_S for _, since in waits.values()), "nobody is left"
    assert all(times == 1 for times in together.values()), "what failed once is not tried so again"


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(2, 8), st.randoms(use_true_random=False))
def test_those_who_are_in_time_are_one_party_from_the_second_version_on(
    count: int, versions: int, order: object
) -> None:
    gathered, readers = Gathering(WAIT_S), [f"actor-{i}" for i in range(count)]
    for version in range(versions):
        order.shuffle(readers)  # type: ignore[attr-defined]
        now, parties = 10.0 * version, []
        for reader in readers:
            assert parties == [] or version == 0
            gathered.ask(Asked(reader), version, now)
            parties += names(gathered.due(now))
        assert parties == ([[reader] for reader in readers] if version == 0 else [readers])


def rounds(late: str, versions: int, answers: bool) -> tuple[float, int]:
    """Seconds that `a` and `b` wait in all, and versions that they got together, while `late` asks after 5 s, or has
    asked once and never again."""
    gathered, waited, together = Gathering(WAIT_S), 0.0, 0
    for version in range(versions):
        now = 10.0 * version
        for reader in ("a", "b"):
            gathered.ask(Asked(reader), version, now)
        parties = gathered.due(now)
        if not any(asked.reader == "a" for party in parties for asked in party):
            waited += WAIT_S
            parties += gathered.due(now + WAIT_S)
        together += ["a", "b"] in names(parties)
        if answers or version == 0:
            gathered.ask(Asked(late), version, now + 5.0)
            assert names(gathered.due(now + 5.0)) == [[late]], "by itself, at once"
    return waited, together


def test_one_that_is_gone_is_waited_for_once() -> None:
    assert rounds("gone", versions=200, answers=False) == (WAIT_S, 200)


def test_one_that_is_always_late_is_waited_for_less_and_less() -> None:
    waited, together = rounds("slow", versions=200, answers=True)
    assert together == 200
    assert 2 * WAIT_S <= waited <= 9 * WAIT_S


def test_a_late_one_that_is_in_time_again_is_in_the_next_party_but_one() -> None:
    gathered = Gathering(WAIT_S)
    for version, asks in enumerate([("a", "b"), ("a",), ("a",), ("a", "b"), ("a", "b")]):
        for reader in asks:
            gathered.ask(Asked(reader), version, 10.0 * version)
        parties = gathered.due(10.0 * version + WAIT_S)
    assert names(parties) == [["a", "b"]]


def test_one_that_no_broadcast_reaches_tries_it_less_and_less() -> None:
    """As where engines cannot connect to one another, but each to the learner."""
    gathered, tried = Gathering(WAIT_S), 0
    for version in range(200):
        now = 10.0 * version
        for reader in ("a", "b"):
            gathered.ask(Asked(reader), version, now)
        if ["a", "b"] in names(gathered.due(now)):
            tried += version > 0
            for reader in ("a", "b"):
                gathered.ask(Asked(reader), version, now + 5.0)
            assert names(gathered.due(now + 5.0)) == [["a"], ["b"]]
    assert 2 <= tried <= 9
