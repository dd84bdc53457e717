"""Files of the working folder that hide modules: every process of a run looks for modules there first, so a `random.py`
of the user's would be imported in place of Python's. Imports only what Python has loaded before it looks there."""

from __future__ import annotations

import os
import sys

UNUSED = frozenset(
    (
        "aifc", "antigravity", "asynchat", "asyncore", "audioop", "cgi", "cgitb", "chunk", "cmd", "code", "codeop",
        "crypt", "doctest", "ensurepip", "idlelib", "imaplib", "imghdr", "imp", "lib2to3", "mailbox", "mailcap",
        "msilib", "msvcrt", "nis", "nntplib", "nt", "ossaudiodev", "pipes", "poplib", "pyclbr", "sched",
        "shelve", "smtpd", "smtplib", "sndhdr", "spwd", "sunau", "symtable", "syslog", "tabnanny", "telnetlib",
        "this", "tkinter", "trace", "turtle", "turtledemo", "uu", "venv", "wave", "winreg", "winsound", "xdrlib",
        "zipapp",
    )
)  # fmt: skip
"""Modules of Python that no process of a run imports."""
PACKAGES = frozenset(
    (
        "huggingface_hub", "jinja2", "msgpack", "msgspec", "numpy", "packaging", "psutil", "pydantic", "regex", "rich",
        "safetensors", "tokenizers", "torch", "tqdm", "transformers", "typing_extensions", "tyro", "xxhash", "yaml",
        "zmq",
    )
)  # fmt: skip
"""Packages that every run imports."""


def hiding(names: list[str]) -> list[str]:
    """Those of `names`, files and packages of a folder, that hide a module. Pure.

    >>> hiding(["random.py", "score.py", "torch", "code.py", "notes.txt"])
    ['random.py', 'torch']
    """
    needed = (sys.stdlib_module_names - UNUSED) | PACKAGES
    return sorted(name for name in names if (name.removesuffix(".py") if name.endswith(".py") else name) in needed)


def tell() -> None:
    """Exits with code 1 and one sentence where the working folder holds such a file."""
    try:
        names = [
            entry.name
            for entry in os.scandir(os.getcwd())
            if entry.name.endswith(".py") or os.path.isfile(os.path.join(entry.path, "__init__.py"))
        ]
    except OSError:  # a folder that is gone or cannot be listed: the command says so
        return
    if found := hiding(names):
        what = "the module of this name" if len(found) == 1 else "the modules of these names"
        print(
            f"asyncrl: {', '.join(found)} in this folder {'hides' if len(found) == 1 else 'hide'} {what} that asyncrl "
            f"needs: rename the {'file' if len(found) == 1 else 'files'}, or start asyncrl in another folder.",
            file=sys.stderr,
        )
        sys.exit(1)
