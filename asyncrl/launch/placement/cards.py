"""The memory of GPUs: by name, and of those in this machine as their driver reports it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from asyncrl.errors import ConfigError

QUERY_S = 10.0
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    memory: int
    """Bytes that programs can use."""


_MIB = {
    "a10-24gb": 22_731, "a100-40gb": 40_326, "a100-80gb": 81_050, "b200-180gb": 182_642, "h100-80gb": 81_079,
    "h200-141gb": 143_167, "l4-24gb": 22_478, "l40s-48gb": 45_467, "rtx4090-24gb": 24_080,
}  # fmt: skip
CARDS = {name: Card(name, mib << 20) for name, mib in _MIB.items()}
"""About what the driver leaves of each; `N-gb` for other cards takes 0.97 of N GiB."""


def cards(text: str) -> tuple[Card, int | None]:
    """A card and how many of them one machine has, if that is said: `h100-80gb`, `8xh100-80gb`. Raises ConfigError.

    >>> cards("8xh100-80gb")[1], cards("48gb")
    (8, (Card(name='48gb', memory=49993005957), None))
    """
    match = re.fullmatch(r"(\d{1,4})x(.+)", text)
    return (card(match[2]), int(match[1])) if match else (card(text), None)


def card(name: str) -> Card:
    """The card by this name, or of as many GB: `h100-80gb`, `48gb`. Raises ConfigError."""
    wanted = name.lower().replace("_", "-")
    if wanted in CARDS:
        return CARDS[wanted]
    if match := re.fullmatch(r"(\d{1,4})-?gb", wanted):
        return Card(wanted, int(int(match[1]) * 0.97 * GIB))
    raise ConfigError(
        f"--gpu is {name!r}: expected one of {', '.join(CARDS)}, or a size such as 48gb; before it 8x for "
        "a machine with 8."
    )


def card_here() -> Card | None:
    """The smallest GPU that this process sees, as NVIDIA's driver reports it; None where it reports none of them."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return smallest(answer, os.environ.get("CUDA_VISIBLE_DEVICES"))


def smallest(answer: str, visible: str | None = None) -> Card | None:
    """The smallest of the cards that `visible` names, by number or by the beginning of a UUID; of all if it is None.

    None where it names a part of a card (`MIG-...`), whose memory the driver's answer does not tell.

    >>> smallest("0, GPU-7f, NVIDIA H100 80GB HBM3, 81559\\n1, GPU-3a, NVIDIA L4, 23034\\n")
    Card(name='NVIDIA L4', memory=24152899584)
    """
    named = None if visible is None else [entry.strip() for entry in visible.split(",") if entry.strip()]
    if named and any(entry.startswith("MIG-") for entry in named):
        return None
    rows = [[part.strip() for part in line.split(",")] for line in answer.splitlines()]
    found = [
        Card(", ".join(name), int(mib) << 20)
        for index, uuid, *name, mib in (row for row in rows if len(row) > 3)
        if mib.isdigit() and (named is None or _names(named, index, uuid))
    ]
    return min(found, key=lambda c: c.memory, default=None)


def _names(entries: list[str], index: str, uuid: str) -> bool:
    return any(entry == index or (entry.startswith("GPU-") and uuid.startswith(entry)) for entry in entries)
