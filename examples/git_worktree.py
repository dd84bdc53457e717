"""A repository as an environment: the policy reads and writes files, each episode in a worktree of its own.

Each turn is a commit, and its hash is the snapshot (`buffer.turns`): a reference, which never changes. An episode whose
actor is lost goes on from the commit, on any host that sees the repository.

    env:
      name: examples/git_worktree.py:Worktree
      options: {repository: /data/repository, score: exact_match}
    buffer: {turns: "on"}
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import asyncrl
from asyncrl.actors.envs.tool import ToolError

_AUTHOR = ("-c", "user.name=policy", "-c", "user.email=policy@localhost")


class Worktree(asyncrl.ToolEnvironment):
    """Tools `read` and `write` of text files; the final text is scored."""

    def __init__(self, repository: str, score: Any, *, base: str = "HEAD", git_s: float = 20.0) -> None:
        """
        Args:
            repository: folder of a git repository that all actors see, with the object store of every worktree.
            score: as in ToolEnvironment; `self.folder` of a subclass is the worktree.
            base: the commit that episodes begin with; a task's `base` goes before it.
            git_s: deadline of one call of git.
        """
        super().__init__((self.read, self.write), score)
        self._repository, self._base, self._git_s = repository, base, git_s
        self.folder: Path | None = None

    async def reset(self, task: Any) -> list[dict[str, Any]]:
        self.folder = Path(tempfile.mkdtemp(prefix="worktree-")) / "tree"
        base = str(task.get("base", self._base))
        await self._git(self._repository, "worktree", "add", "--detach", str(self.folder), base)
        messages: list[dict[str, Any]] = await super().reset(task)
        return messages

    async def read(self, path: str) -> str:
        """Read a file.

        Args:
            path: relative to the repository
        """
        file = self._file(path)
        if not file.is_file():
            raise ToolError(f"no file {path}")
        return file.read_text(errors="replace")

    async def write(self, path: str, text: str) -> str:
        """Write a file.

        Args:
            path: relative to the repository
            text: the whole new content
        """
        file = self._file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return f"{len(text)} characters"

    async def snapshot(self) -> str:
        """The hash of a commit of everything, and the number of turns."""
        await self._git(self.folder, "add", "--all")
        await self._git(self.folder, *_AUTHOR, "commit", "--quiet", "--allow-empty", "--message", f"turn {self._turns}")
        commit = (await self._git(self.folder, "rev-parse", "HEAD")).strip()
        # No branch holds the commit; the reference keeps it from being collected.
        await self._git(self.folder, "update-ref", f"refs/turns/{commit}", commit)
        return f"{commit} {self._turns}"

    async def restore(self, state: Any) -> None:
        commit, turns = str(state).split()
        await self._git(self.folder, "checkout", "--quiet", "--detach", "--force", commit)
        self._turns = int(turns)

    async def close(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder.parent, ignore_errors=True)
            await self._git(self._repository, "worktree", "prune")

    def _file(self, path: str) -> Path:
        assert self.folder is not None, "reset comes first"
        file = (self.folder / path).resolve()
        if not file.is_relative_to(self.folder.resolve()) or ".git" in file.relative_to(self.folder.resolve()).parts:
            raise ToolError(f"{path} is outside of the repository")
        return file

    async def _git(self, folder: Any, *words: str) -> str:
        """What git prints. Raises RuntimeError with its error."""
        command = ["git", "-C", str(folder), *words]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=self._git_s, check=False
        )
        if done.returncode:
            raise RuntimeError(f"git {words[0]}: {done.stderr.strip()[-500:]}")
        return str(done.stdout)
