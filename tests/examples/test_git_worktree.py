"""The example of a snapshot by reference: an episode cut between two turns goes on from the commit."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from asyncrl.plugins import resolve

EXAMPLE = Path(__file__).parents[2] / "examples" / "git_worktree.py"
Worktree = resolve(f"{EXAMPLE}:Worktree", None, "env.name")
TASK = {"id": "t", "prompt": "Write.", "ground_truth": "done"}


@pytest.fixture
def repository(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("needs git")
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "a.txt").write_text("begin")
    who = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    for words in (["init", "--quiet"], ["add", "--all"], [*who, "commit", "--quiet", "--message", "begin"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True, timeout=20)
    return folder


def calling(tool, **arguments):
    call = {"id": "c", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def test_a_worktree_goes_on_from_its_commit(repository):
    async def scenario():
        first, second = (Worktree(str(repository), "exact_match") for _ in range(2))
        await first.reset(TASK)
        await first.step(calling("write", path="a.txt", text="one"))
        kept = await first.snapshot()
        await first.step(calling("write", path="b/c.txt", text="behind the snapshot"))
        await first.close()

        await second.reset(TASK)
        assert (await second.step(calling("read", path="a.txt"))).messages[0]["content"] == "begin"
        await second.restore(kept)
        assert (await second.step(calling("read", path="a.txt"))).messages[0]["content"] == "one"
        assert (await second.step(calling("read", path="b/c.txt"))).messages[0]["content"] == "error: no file b/c.txt"
        turn = await second.step({"role": "assistant", "content": "done"})
        assert (turn.reward, turn.metrics["turns"]) == (1.0, 4.0), "one turn came with the snapshot"
        await second.close()
        assert kept == await third(kept)

    async def third(kept):
        """The reference names the same state for good, whatever was done since."""
        env = Worktree(str(repository), "exact_match")
        await env.reset(TASK)
        await env.restore(kept)
        assert env._file("a.txt").read_text() == "one"
        await env.close()
        return kept

    asyncio.run(scenario())
    listing = ["git", "-C", str(repository), "worktree", "list"]
    worktrees = subprocess.run(listing, capture_output=True, text=True, check=True, timeout=20)
    assert len(worktrees.stdout.splitlines()) == 1, "every worktree is removed"


@pytest.mark.parametrize("path", ["../a.txt", "/etc/passwd", ".git", "b/../../a"])
def test_the_policy_stays_in_its_worktree(repository, path):
    async def scenario():
        env = Worktree(str(repository), "exact_match")
        await env.reset(TASK)
        turn = await env.step(calling("write", path=path, text="x"))
        assert "is outside of the repository" in turn.messages[0]["content"]
        await env.close()

    asyncio.run(scenario())
