"""Commands of `asyncrl` about its parts: lists of what can be chosen by name, and the sandbox as a service."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from asyncrl.cli.parsing import check_port
from asyncrl.plugins import resolve

Arg = tyro.conf.arg


def envs(words: list[str]) -> int:
    """Lists the environments and task sources that come with asyncrl."""
    from asyncrl.actors.envs import ENVIRONMENTS
    from asyncrl.data import SOURCES

    return _list(envs, words, {"env.name": ENVIRONMENTS, "data.source": SOURCES})


def rewards(words: list[str]) -> int:
    """Lists the scores and wrappers that come with asyncrl."""
    from asyncrl.rewards.table import GROUP_SCORES, REWARDS, WRAPPERS

    tables = {"env.options.score": REWARDS, "env.options.score.wrap": WRAPPERS, "env.group_score": GROUP_SCORES}
    return _list(rewards, words, tables)


def _list(command: Callable[[list[str]], int], words: list[str], tables: Mapping[str, Mapping[str, Any]]) -> int:
    """Prints the entries of the tables by name, each with the first line of its docstring."""

    @dataclass(frozen=True)
    class NoOptions:
        pass

    tyro.cli(NoOptions, args=words, prog=f"asyncrl {command.__name__}", description=command.__doc__)
    for title, table in tables.items():
        print(title)
        for name in sorted(table):
            print(f"  {name:<16} {(resolve(name, table, title).__doc__ or '').strip().partition(chr(10))[0]}")
    return 0


def sandbox(words: list[str]) -> int:
    """Serves the local sandbox for untrusted code over HTTP, with SandboxFusion's interface."""

    @dataclass(frozen=True)
    class Sandbox:
        host: Annotated[str, Arg(help="Address to listen on. There is no password: keep it private.")] = "127.0.0.1"
        port: Annotated[int, Arg(help="Port to listen on; 0: the first free one.")] = 8080
        concurrency: Annotated[int | None, Arg(help="Number of concurrent runs; default: one per core.")] = None
        memory_mb: Annotated[int, Arg(help="Memory limit of one run.")] = 512
        isolation: Annotated[Literal["full", "process"], Arg(help="`process` where the kernel refuses namespaces.")] = (
            "full"
        )

    options = tyro.cli(Sandbox, args=words, prog="asyncrl sandbox", description=sandbox.__doc__)
    check_port(options.port)
    from asyncrl.rewards.sandbox.local import LocalSandbox
    from asyncrl.rewards.sandbox.server import serve

    box = LocalSandbox(isolation=options.isolation, memory_mb=options.memory_mb)
    return serve(box, options.host, options.port, options.concurrency or os.cpu_count() or 1)
