"""The group numbers of evaluation tickets. Pure."""

from __future__ import annotations

FIRST_NUMBER = 1 << 40
"""Evaluation tickets have group numbers from here on, which no training group ever reaches."""
TASKS_PER_SET = 1 << 20


def number_of(serial: int, task: int) -> int:
    return FIRST_NUMBER + serial * TASKS_PER_SET + task


def place_of(group: int) -> tuple[int, int]:
    """Serial of the set and number of the task, from the group number of a ticket.

    >>> place_of(number_of(3, 7))
    (3, 7)
    """
    return divmod(group - FIRST_NUMBER, TASKS_PER_SET)
