import asyncio

import pytest

from asyncrl.actors.envs.single_turn import SingleTurnEnv
from asyncrl.actors.envs.tool import ToolError
from asyncrl.actors.envs.tool_env import ToolEnvironment

TASK = {"id": "0", "prompt": "hi", "data_source": "d", "reward_model": {"ground_truth": "42"}, "extra_info": {"k": 1}}


EXPECTED = 1
BEGUN: list[int] = []


async def slow(x: int) -> int:
    """Wait for the others."""
    BEGUN.append(x)
    async with asyncio.timeout(20):
        while len(BEGUN) < EXPECTED:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return x


def shout(text: str) -> str:
    """Shout."""
    return text.upper()


async def refuse() -> str:
    """Refuse."""
    raise ToolError("not today")


async def fail() -> str:
    """Fail."""
    raise RuntimeError("the store is down")


async def leave() -> str:
    """Leave."""
    raise SystemExit(3)


async def hang() -> str:
    """Hang."""
    await asyncio.sleep(60)
    return ""


def score(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str == ground_truth), "length": len(solution_str), "note": "text is dropped"}


def call(name, arguments, identity="c"):
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def play(*messages, **options):
    async def episode():
        env = ToolEnvironment((slow, shout, refuse, fail, leave, hang), score, **options)
        assert await env.reset(TASK) == [{"role": "user", "content": "hi"}]
        turns = [await env.step(message) for message in messages]
        await env.close()
        return turns

    return asyncio.run(episode())


def says(*calls, content=""):
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def test_calls_run_concurrently_and_come_back_in_order(monkeypatch):
    monkeypatch.setattr(f"{__name__}.EXPECTED", len(BEGUN) + 5)
    (turn,) = play(says(*(call("slow", {"x": x}, f"c{x}") for x in range(5)), call("shout", '{"text": "a"}', "s")))
    assert [message["content"] for message in turn.messages] == ["0", "1", "2", "3", "4", "A"]
    assert [message["tool_call_id"] for message in turn.messages] == ["c0", "c1", "c2", "c3", "c4", "s"]
    assert not turn.done


@pytest.mark.parametrize(
    ("bad", "answer"),
    [
        (call("nope", {}), "error: no tool 'nope'; there are: slow, shout, refuse, fail, leave, hang"),
        (call("slow", "{oops"), "error: the call is not valid JSON"),
        (call("slow", "[1]"), "error: the call is not valid JSON"),
        (call("slow", {"x": "a"}), "error: argument x"),
        (call("slow", {}), "error: argument x: Field required"),
        (call("refuse", {}), "error: not today"),
    ],
)
def test_what_the_policy_did_wrong_comes_back_as_a_message(bad, answer):
    (turn,) = play(says(bad))
    assert turn.messages[0]["role"] == "tool"
    assert turn.messages[0]["content"].startswith(answer)
    assert not turn.done


def test_what_a_tool_did_wrong_fails_the_episode():
    with pytest.raises(RuntimeError, match="the store is down"):
        play(says(call("fail", {}), call("hang", {})))
    for calls in ([call("leave", {})], [call("leave", {}), call("hang", {})]):
        with pytest.raises(RuntimeError, match=r"tool leave called sys\.exit\(3\)"):
            play(says(*calls))
    with pytest.raises(TimeoutError, match=r"tool hang did not answer within 0\.05 s"):
        play(says(call("hang", {})), tool_timeout_s=0.05)


def test_a_long_result_is_cut_and_says_so():
    (turn,) = play(says(call("shout", {"text": "a" * 30})), max_tool_chars=10)
    assert turn.messages[0]["content"] == "A" * 10 + "\n[cut: 20 more characters]"


def test_the_answer_without_calls_is_scored():
    _, turn = play(says(call("slow", {"x": 1})), {"role": "assistant", "content": "42"})
    assert turn.done
    assert (turn.reward, turn.rewards) == (1.0, {"score": 1.0})
    assert turn.metrics == {"turns": 2.0, "max_turns": 0.0, "length": 2.0}


def judged(solution_str):
    return {"score": len(solution_str.splitlines()) / 4, "read": 1.0}


def test_a_message_that_calls_tools_is_scored_for_its_own_turn():
    calling = says(call("slow", {"x": 1}), call("shout", {"text": "a"}), content="I call two.")
    first, last = play(calling, {"role": "assistant", "content": "42"}, turn_score=judged)
    assert (first.reward, first.rewards, first.metrics, first.done) == (0.75, {"turn": 0.75}, {"read": 1.0}, False)
    assert len(first.messages) == 2
    assert (last.reward, last.rewards) == (1.0, {"score": 1.0})


def test_what_scores_a_turn_is_checked_before_anything_runs():
    with pytest.raises(ValueError, match=r"env\.options\.turn_score"):
        ToolEnvironment.check({"score": "f1", "turn_score": "no_such_score"})


def test_max_turns_ends_an_episode_that_goes_on_calling():
    first, second = play(*[says(call("slow", {"x": 1}))] * 2, max_turns=2)
    assert not first.done
    assert second.done
    assert second.reward == 0.0
    assert second.metrics["max_turns"] == 1.0


def test_the_last_message_that_env_max_turns_allows_is_scored_whatever_the_options_allow():
    first, second = play(says(call("slow", {"x": 1})), says(call("slow", {"x": 1})) | {"last": True}, max_turns=9)
    assert not first.done
    assert second.done
    assert second.metrics["max_turns"] == 1.0


def test_tools_and_score_by_import_path(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        'def add(a: int) -> int:\n    "Add."\n    return a + 1\n'
        "async def score(data_source, solution_str, ground_truth, extra_info):\n    return extra_info['k']\n"
    )

    async def episode():
        env = ToolEnvironment([f"{file}:add"], f"{file}:score")
        await env.reset(TASK)
        turn = await env.step(says(call("add", {"a": 1})))
        return turn.messages[0]["content"], (await env.step({"role": "assistant", "content": None})).reward

    assert asyncio.run(episode()) == ("2", 1.0)


@pytest.mark.parametrize(("result", "message"), [("1", "returned str"), ({"reward": 1}, "without `score`")])
def test_a_score_that_is_no_number_fails_the_episode(result, message):
    async def episode():
        env = SingleTurnEnv(lambda **columns: result)
        await env.reset(TASK)
        await env.step({"role": "assistant", "content": "42"})

    with pytest.raises(TypeError, match=message):
        asyncio.run(episode())


def test_single_turn():
    async def episode():
        env = SingleTurnEnv(score)
        await env.reset(TASK)
        return await env.step({"role": "assistant", "content": "41"})

    turn = asyncio.run(episode())
    assert (turn.done, turn.reward, turn.metrics) == (True, 0.0, {"length": 2.0})
