"""The `asyncrl` command: finds the command and runs it. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from asyncrl.cli import system
from asyncrl.cli.beginning import doctor, init, try_
from asyncrl.cli.launch import chaos, evaluate, launch
from asyncrl.cli.parts import envs, rewards, sandbox
from asyncrl.cli.planning import plan
from asyncrl.cli.runs import actors, audit, dashboard, replay, report, status, trace, view, why
from asyncrl.errors import AsyncRLError, ConfigError, RunError, described

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "launch": launch,
    "init": init,
    "doctor": doctor,
    "try": try_,
    "eval": evaluate,
    "dashboard": dashboard,
    "view": view,
    "status": status,
    "why": why,
    "chaos": chaos,
    "audit": audit,
    "replay": replay,
    "report": report,
    "trace": trace,
    "plan": plan,
    "actors": actors,
    "envs": envs,
    "rewards": rewards,
    "sandbox": sandbox,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Exits with 0 (done), 1 (the run failed) or 2 (the configuration or the command line is wrong)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        sys.exit(0 if words else 2)
    if words[0] == "--version":
        from asyncrl import __version__

        print(__version__)
        sys.exit(0)
    try:
        _find_modules_here()
        if words[0] not in COMMANDS:
            raise _unknown(words[0])
        system.check()
        code = COMMANDS[words[0]]([word for word in words[1:] if word != "--debug"])
        sys.stdout.flush()
        sys.exit(code)
    except BrokenPipeError:  # the reader, e.g. `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except (AsyncRLError, OSError, KeyboardInterrupt, ImportError, AttributeError) as error:
        code, sentence = _told(error)
        if not sentence:
            raise
        if "--debug" in words:
            traceback.print_exc()
        print(f"asyncrl: {sentence}", file=sys.stderr)
        sys.exit(code)


def _told(error: AsyncRLError | OSError | KeyboardInterrupt | ImportError | AttributeError) -> tuple[int, str]:
    """The exit code and the sentence for an error; without one it is a defect of asyncrl, whose traceback is needed."""
    if isinstance(error, (AsyncRLError, OSError, KeyboardInterrupt)):
        return described(error)
    return 1, system.hidden_module(error)


_MEANT = {"help": "--help", "version": "--version", "train": "launch", "run": "launch", "start": "launch"}
"""What other words for a command, or near ones, mean here."""


def _unknown(word: str) -> ConfigError:
    close = (
        [word] if word in _MEANT else difflib.get_close_matches(word.lstrip("-"), [*COMMANDS, "help", "version"], n=1)
    )
    if not close and word.startswith("--"):
        return ConfigError(f"{word} stands before the command: the command comes first, as in asyncrl launch {word}.")
    hint = f" (did you mean {_MEANT.get(close[0], close[0])}?)" if close else ""
    return ConfigError(f"{word!r} is not a command{hint}: expected one of {', '.join(COMMANDS)}.")


def _find_modules_here() -> None:
    """The user's modules are found from the working folder, as with `python -m`. Raises RunError."""
    try:
        sys.path.insert(0, os.getcwd())
    except FileNotFoundError:
        raise RunError("the working folder is gone: it was removed or moved; change to another one (cd).") from None


def _usage() -> str:
    lines = [f"  {name:<10} {(run.__doc__ or '').strip().splitlines()[0]}" for name, run in COMMANDS.items()]
    return "\n".join(
        ["usage: asyncrl COMMAND [--help]", "", "Asynchronous reinforcement learning for language-model agents.", "",
         *lines]
    )  # fmt: skip
