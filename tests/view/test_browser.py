"""The page in a real browser. Needs one (Debian: `apt-get install chromium`), or ASYNCRL_BROWSER=COMMAND."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.trajectory import Ticket
from asyncrl.view import source
from asyncrl.view.command import write
from asyncrl.view.run import ViewedRun
from tests.audit.real_run import fake_actor
from tests.buffer.processes import BufferProcess
from tests.view.browser import Browser, found
from tests.view.held_out_run import held_out_run
from tests.view.live import LIVE, WORDS, train
from tests.view.made_run import TEXT, MadeRun, answer
from tests.view.serving import served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(found() is None, reason="no browser here: apt-get install chromium, or set ASYNCRL_BROWSER"),
]

HOSTILE = (
    "<script>window.owned = 1</script><img src=x onerror='window.owned = 2'></textarea></script><svg onload=alert(1)>"
    "\x1b[31mred\x1b[0m \u202egnitirw\u202c \u2066isolated\u2069 a\u0000b zero\u200bwidth \u05d0\u05d1\u05d2 "
    "</title>\u2028<!-- --> javascript:alert(1) "
)


def hostile(ticket: Ticket) -> str:
    if ticket.id.group == 1:
        return HOSTILE + ("x" * 1_000_000 if ticket.id.index == 1 else "") + "<|im_end|>"
    return answer(ticket)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    run = MadeRun(tmp_path_factory.mktemp("view") / "calc", words=hostile)
    for number in range(6):
        run.step(fail=3 if number == 2 else 0)
    run.close()
    return run


@pytest.fixture(scope="module")
def address(made: MadeRun) -> Iterator[str]:
    run = ViewedRun(made.run, text=TEXT)
    with served(run) as server:
        yield server.url
    run.close()


@pytest.fixture
def page(browser: Browser, address: str) -> Browser:
    """The page of `made`, which a test before may have left for another one."""
    if browser.js("location.href") != address:
        browser.open(address)
    return browser


def choose(page: Browser, group: int, index: int) -> None:
    """Opens a trajectory, by a click on its row."""
    page.js(f"$('right').replaceChildren(); only({{group: {group}}})")
    page.js(f"document.querySelector('.r[data-id=\"0/{group}.{index}\"]').click()")
    page.until(f"!!document.querySelector('.side[data-id=\"0/{group}.{index}\"] .seg, .side .bad')")


def shown(page: Browser) -> list[str]:
    """The trajectories of the table, in its order, all of them."""
    return [str(name) for name in page.js("shown.map(r => r.id)")]


def test_the_table_has_every_trajectory_and_filters_it(page: Browser, made: MadeRun) -> None:
    page.js("only({})")
    assert len(shown(page)) == len(made.put)
    page.js("$('f-env').value = 'search'; $('f-env').dispatchEvent(new Event('input'))")
    assert set(shown(page)) == {f"{g}.{i}" for (g, i), t in made.put.items() if t.env == "search"}
    page.js("only({step: 3})")
    assert len(shown(page)) == 8
    assert "step 3 trained batch 2 (2 groups) on version 2" in page.js("$('count').textContent")
    page.js("only({})")
    page.js("[...document.querySelectorAll('#head button')].find(b => b.textContent.startsWith('tokens')).click()")
    lengths = {f"{g}.{i}": t.num_tokens for (g, i), t in made.put.items()}
    assert [lengths[name] for name in shown(page)] == sorted(lengths.values())


def test_the_search_finds_words_of_the_text(page: Browser) -> None:
    page.js("only({}); $('search').value = 'ANSWER OF 4.2'; search()")
    page.until("hits && hits.size === 1 && shown.length === 1")
    assert shown(page) == ["4.2"]
    page.js("only({})")


@pytest.mark.parametrize(
    ("name", "best"),
    [("longest", "1.1"), ("slowest tool", "3"), ("groups that diverge", "1."), ("highest advantage", "."),
     ("lowest advantage", "."), ("errors", ".")],
)  # fmt: skip
def test_one_click_each(page: Browser, made: MadeRun, name: str, best: str) -> None:
    page.js("only({})")
    page.until("all.every(r => r.parts !== null)")  # the index has read every trajectory
    page.js(f"[...document.querySelectorAll('#quick button')].find(b => b.textContent === {name!r}).click()")
    names = shown(page)
    assert names
    if name == "longest":
        assert names[0] == best
    if name == "slowest tool":
        assert names[0].endswith(".3"), "the fourth of a group has the slowest tool"
    if name == "groups that diverge":
        assert {made.put[tuple(map(int, n.split(".")))].id.group % 3 for n in names} <= {1, 2}
    if "advantage" in name:
        values = page.js("shown.map(r => r.advantage)")
        assert values == sorted(values, reverse=name.startswith("highest"))
        assert len(values) == 24, "one group of each step has samples"
    if name == "errors":
        assert page.js("shown.every(r => r.failures > 0)")
        assert len(names) == 3


def test_every_number_of_a_token_on_hover_and_its_colour(page: Browser, made: MadeRun) -> None:
    choose(page, 4, 1)
    t, row = made.put[4, 1], made.put[4, 1].rows[0]
    place = int(row.mask.nonzero()[0][-5])
    for name in page.js("Object.keys(COLOURS)"):
        page.js(f"colour = {name!r}; render(0)")
        assert page.js("document.querySelectorAll('.side .policy [data-t]').length") > 20
        coloured = page.js(f"document.querySelector('[data-t=\"{place}\"]').style.background")
        assert bool(coloured) == (name != "nothing" and not (name == "learner minus behaviour" and place % 7 == 3))
    page.js(f"document.querySelector('[data-t=\"{place}\"]').dispatchEvent(new Event('mouseover', {{bubbles: true}}))")
    said = page.js("$('info').textContent")
    assert f"version {row.versions[place]}" in said
    assert f"behaviour {round(float(row.logprobs[place]), 5):g}"[:14] in said
    assert "not recorded" not in said
    assert f"token {row.token_ids[place]}" in said
    choose(page, t.id.group + 1, 1)  # without samples
    page.js(f"document.querySelector('[data-t=\"{place}\"]').dispatchEvent(new Event('mouseover', {{bubbles: true}}))")
    assert page.js("$('info').textContent").count("not recorded") == 5
    assert "learner logprob, weight, advantage and loss mask: not recorded" in page.js("$('right').textContent")


@pytest.mark.parametrize("exported", [False, True], ids=["served", "exported"])
def test_one_held_out_task_over_the_evaluations_side_by_side(browser: Browser, tmp_path: Path, exported: bool) -> None:
    made = held_out_run(tmp_path / "run", (0, 10, 20), words=hostile)
    run = ViewedRun(made.run, text=TEXT)
    with served(run) as server:
        if exported:
            write([run], tmp_path / "page.html")
        browser.open((tmp_path / "page.html").as_uri() if exported else server.url)
        options = browser.js("[...$('held').options].map(o => o.textContent)")
        assert options[1:3] == [
            "dev 1, sampled 1: held-out 0 (3 evaluations)",
            "dev 1, greedy: held-out 0 (3 evaluations)",
        ]
        browser.js("$('held').selectedIndex = 2; $('held').dispatchEvent(new Event('change'))")
        browser.until("document.querySelectorAll('.side').length === 3")
        assert "too long to be kept" in browser.js("$('right').textContent"), "one of a megabyte"
        browser.js("$('held').selectedIndex = 1; $('held').dispatchEvent(new Event('change'))")
        browser.until("!$('right').textContent.includes('too long')")
        titles = browser.js("[...document.querySelectorAll('.side h2')].map(e => e.textContent)")
        assert titles == [f"dev at version {version}" for version in (0, 10, 20)]
        sides = browser.js("[...document.querySelectorAll('.side')].map(e => e.textContent)")
        assert ["The answer of 0.0 is 4." in sides[0], "<script>" in sides[1], "of 2.0" in sides[2]] == [True] * 3
        assert "tokens that all 3 have in common" in browser.js("$('right').textContent")
        assert browser.js("window.owned === undefined")
        assert not browser.errors
    run.close()


def test_a_trajectory_has_its_name_and_a_word_has_its_number(page: Browser, made: MadeRun) -> None:
    choose(page, 4, 0)
    row = made.put[4, 0].rows[0]
    (version,) = set(row.versions[row.mask].tolist())
    said = "document.querySelector('.side dl').textContent"
    assert page.js("document.querySelector('.side h2').textContent") == "trajectory 0.4.0"
    assert f"sampled in 2 turns, by version {version}used" in page.js(said)
    page.js("panes[0].r = {...panes[0].r, turns: 1, newest: panes[0].r.oldest + 2}; render(0)")
    assert f"sampled in 1 turn, by versions {version} to {version + 2}used" in page.js(said)


def test_filters_that_leave_nothing_say_so_and_are_left_by_a_click(page: Browser, made: MadeRun) -> None:
    page.js("only({step: 99})")
    assert page.js("$('none').textContent").startswith("No trajectory matches the filters.")
    page.js("document.querySelector('#none button').click()")
    assert len(shown(page)) == len(made.put)
    assert page.js("$('none').hidden")


def test_what_a_cell_cuts_is_shown_under_the_pointer(page: Browser) -> None:
    page.js("only({group: 4})")
    cell, task = page.js("[...document.querySelectorAll('.r > span')].map(e => [e.title, e.textContent])[3]")
    assert cell == task != ""
    assert page.js("[...document.querySelectorAll('#head button')].at(-3).title") == "used in batch, or why not"


def test_siblings_stand_side_by_side_with_what_they_share_folded(page: Browser) -> None:
    choose(page, 4, 0)
    page.js("[...document.querySelectorAll('.side button')].find(b => b.textContent.includes('siblings')).click()")
    page.until("document.querySelectorAll('.side').length === 4")
    summary = page.js("document.querySelector('#right > details > summary').textContent")
    shared = int(summary.split()[0])
    assert summary.endswith("tokens that all 4 have in common")
    texts = page.js("panes.map(p => p.t.rows[0].pieces.join(''))")
    assert len({text[:shared] for text in texts}) == 1
    assert len({text[: shared + 1] for text in texts}) > 1
    assert page.js(f"[...document.querySelectorAll('.side [data-t]')].every(e => Number(e.dataset.t) >= {shared})")


def test_tool_calls_are_folded_and_unfold(page: Browser) -> None:
    choose(page, 4, 0)
    assert page.js("document.querySelector('details.call summary').textContent").startswith("call calculate · ")
    assert page.js("document.querySelectorAll('details.call [data-t]').length") == 0
    page.js("document.querySelector('details.call').open = true")
    page.until("document.querySelectorAll('details.call [data-t]').length > 0")
    assert '"expression": "2+2"' in page.js("document.querySelector('details.call .toks').textContent")


def test_from_a_trajectory_to_its_step(page: Browser) -> None:
    choose(page, 4, 0)
    page.js("[...document.querySelectorAll('dd button')].find(b => b.textContent.startsWith('step 3')).click()")
    assert page.js("$('f-step').value") == "3"
    assert len(shown(page)) == 8


@pytest.mark.parametrize("index", [0, 1])
def test_hostile_text_is_shown_and_does_nothing(page: Browser, index: int) -> None:
    choose(page, 1, index)
    page.until("document.querySelectorAll('.side .policy [data-t]').length > 100")
    text = page.js("[...document.querySelectorAll('.side .policy .toks')].map(e => e.textContent).join('')")
    assert "<script>window.owned = 1</script><img src=x onerror='window.owned = 2'>" in text
    assert "␛[31mred␛[0m" in text
    assert "U+202Egnitirw" in text
    assert "a␀b" in text
    assert "zeroU+200Bwidth" in text
    assert "U+2028" in text
    assert page.js("typeof window.owned") == "undefined"
    assert page.js("document.querySelectorAll('#right img, #right svg, #right script').length") == 0
    assert page.js("document.querySelectorAll('.side [data-t]').length") < 10_000, "a long text comes in pieces"
    assert page.errors == []
    assert all(url.startswith("http://127.0.0.1:") for url in page.asked), "nothing else is asked for anything"


def test_the_policy_stops_a_script_that_would_be_written_into_the_page(page: Browser) -> None:
    """What would happen if textContent were innerHTML somewhere: nothing."""
    before = len(page.errors)
    page.js("document.body.insertAdjacentHTML('beforeend', '<img id=evil src=x onerror=\"window.owned = 3\">')")
    page.js("{const s = document.createElement('script'); s.textContent = 'window.owned = 4'; document.body.append(s)}")
    page.js("new Promise(done => setTimeout(done, 300))")
    assert page.js("typeof window.owned") == "undefined"
    assert len(page.errors) > before
    page.js("document.getElementById('evil').remove()")
    page.messages.clear()


def test_numbers_in_the_page_are_those_of_the_trajectories(page: Browser, made: MadeRun) -> None:
    for (group, index), t in sorted(made.put.items()):
        if group == 1:
            continue
        r = json.loads(page.js(f"JSON.stringify(all.find(r => r.id === '{group}.{index}'))"))
        assert (r["reward"], r["turns"], r["tokens"], r["policy_tokens"], r["stop"], r["task"], r["env"]) == (
            t.reward, t.turns, t.num_tokens, t.num_policy_tokens, t.stop_reason, t.task_id, t.env,
        )  # fmt: skip


def test_an_exported_page_needs_no_server(browser: Browser, made: MadeRun, tmp_path: Path) -> None:
    run = ViewedRun(made.run, text=TEXT)
    kept, of = write([run], tmp_path / "page.html")
    run.close()
    assert kept == of == len(made.put)
    browser.open((tmp_path / "page.html").as_uri())
    assert len(shown(browser)) == of
    for group, index in ((4, 2), (1, 0)):
        choose(browser, group, index)
        words: Any = browser.js("panes[0].t.rows[0].pieces.join('')")
        assert words == "".join(map(chr, made.put[group, index].rows[0].token_ids.tolist()))
    assert browser.js("typeof window.owned") == "undefined"
    assert browser.errors == []
    assert [url for url in browser.asked if not url.startswith("file:")] == []


def test_two_runs_side_by_side(browser: Browser, made: MadeRun, tmp_path: Path) -> None:
    other = MadeRun(tmp_path / "other")
    for _ in range(3):
        other.step()
    runs = [ViewedRun(made.run, text=TEXT), ViewedRun(other.close(), text=TEXT)]
    with served(*runs) as server:
        browser.open(server.url)
        assert len(shown(browser)) == len(made.put) + len(other.put)
        browser.js("pick(all.find(r => r.run === 0 && r.group === 2))")
        browser.until("!!document.querySelector('.side .seg')")
        browser.js(
            "[...document.querySelectorAll('.side button')].find(b => b.textContent.includes('same task')).click()"
        )
        browser.until("document.querySelectorAll('.side').length === 2")
        assert browser.js("panes.map(p => p.r.run)") == [0, 1]
        assert browser.js("new Set(panes.map(p => p.r.task)).size") == 1
    for run in runs:
        run.close()


def test_a_live_run_grows_in_the_page_and_goes_on_without_it(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = BufferProcess(tmp_path / "run", **LIVE)
    monkeypatch.setattr(source, "living", lambda run: {1: "buffer"} if process.process else {})
    process.start()
    try:
        client, incarnation = process.learner()
        with fake_actor(process.run, "actor-0"):
            train(client, incarnation, 0)
            run = ViewedRun(process.run, text=WORDS)
            with served(run) as server:
                browser.open(server.url)
                assert " live, 1 steps" in browser.js("$('runs').textContent")
                rows = len(shown(browser))
                for b in (1, 2):
                    train(client, incarnation, b)
                browser.until(f"shown.length > {rows} && $('runs').textContent.includes('live, 3 steps')")
                browser.js("pick(shown[0]); 1")
                browser.until("!!document.querySelector('.side .seg')")
                assert browser.errors == []
            run.close()
            train(client, incarnation, 3)
    finally:
        process.close()
