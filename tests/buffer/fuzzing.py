"""Seeded damage to messages: bytes flipped, cut, doubled; values of a header exchanged, lost, of another type."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgpack

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63 - 1, 2**64 - 1, -(2**63), 0.5, -1.0, 1e308, float("nan"),
    float("inf"), "", "x", "\udcff".encode("utf-8", "surrogatepass").decode("utf-8", "replace"), "a" * 5000, b"",
    b"\xff" * 9, [], [1], [[]], [1, 2], [1, 2, 3], [[1, 2, 3], 4], {}, {"a": 1}, {"a": {"b": []}},
)  # fmt: skip


def mutations(good: Sequence[Sequence[bytes]], count: int, seed: int) -> Iterator[list[bytes]]:
    """`count` damaged copies of messages (lists of frames, the first of which is often a header)."""
    rng = random.Random(seed)
    for _ in range(count):
        frames = [bytes(frame) for frame in rng.choice(good)]
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            at = 0 if rng.random() < 0.6 else rng.randrange(len(frames))
            if rng.random() < 0.5:
                frames[at] = header(frames[at], rng)
            else:
                frames[at] = noise(frames[at], rng)
        if rng.random() < 0.05:
            frames.insert(rng.randrange(len(frames) + 1), rng.randbytes(rng.randrange(20)))
        if len(frames) > 1 and rng.random() < 0.05:
            del frames[rng.randrange(len(frames))]
        yield frames


def header(frame: bytes, rng: random.Random) -> bytes:
    """A value somewhere in a msgpack map or list exchanged, lost, or one put in; other bytes: noise."""
    try:
        content = msgpack.unpackb(frame)
    except (ValueError, msgpack.exceptions.UnpackException):
        return noise(frame, rng)
    inside = content
    if isinstance(content, list) and content:
        entry(content, rng)
    while isinstance(inside, dict) and inside:
        name = rng.choice(sorted(inside, key=str))
        if isinstance(inside[name], dict) and inside[name] and rng.random() < 0.7:
            inside = inside[name]
            continue
        if isinstance(inside[name], list) and inside[name] and rng.random() < 0.7:
            entry(inside[name], rng)
            break
        match rng.randrange(4):
            case 0:
                del inside[name]
            case 1:
                inside[rng.choice(("x", "a" * 300, "n", "op"))] = rng.choice(VALUES)
            case _:
                inside[name] = rng.choice(VALUES)
        break
    packed: bytes = msgpack.packb(content)
    return packed


def entry(inside: list[Any], rng: random.Random) -> None:
    """A value anywhere in a list of values, lists, maps and bytes exchanged, lost, or damaged inside."""
    at = rng.randrange(len(inside))
    while isinstance(inside[at], list) and inside[at] and rng.random() < 0.8:
        inside = inside[at]
        at = rng.randrange(len(inside))
    within = inside[at]
    if isinstance(within, bytes) and rng.random() < 0.8:
        inside[at] = header(within, rng)  # a message in a message
    elif rng.random() < 0.25:
        del inside[at]
    else:
        inside[at] = rng.choice(VALUES)


def noise(frame: bytes, rng: random.Random) -> bytes:
    if not frame:
        return rng.randbytes(rng.randrange(9))
    bad, at = bytearray(frame), rng.randrange(len(frame))
    match rng.randrange(5):
        case 0:
            bad[at] ^= 1 << rng.randrange(8)
        case 1:
            del bad[at:]
        case 2:
            bad[at:at] = rng.randbytes(rng.randrange(1, 9))
        case 3:
            bad[at] = rng.choice((0, 0x7F, 0x80, 0xC1, 0xDD, 0xDF, 0xFF))
        case 4:
            bad += bad[at:]
    return bytes(bad)


def malformed(reply: Mapping[str, Any]) -> int:
    """How much of a request the buffer refused as malformed: all of it, or some of its puts."""
    outcomes = reply.get("reply")
    errors = [reply.get("error"), *(outcomes if isinstance(outcomes, list) else ())]
    return sum(isinstance(error, dict) and error["code"] == "malformed" for error in errors)
