"""Ids that stand for texts: nobody reads them, and the scheduler checks them."""

from array import array
from functools import cache
from typing import Final

from inference.task import token_array

VOCABULARY_SIZE: Final = 3
STOP_ID: Final = 2
_PROMPT_ID: Final = 0
_ANSWER_ID: Final = 1


def prompt_ids(count: int, number: int) -> "array[int]":
    """Return the prompt of a task. No two begin alike, or the router would take engines for ones that know them."""
    ids = token_array((_PROMPT_ID,)) * count
    ids[0] = number
    return ids


@cache
def answer_ids(count: int, stopped: bool) -> "array[int]":
    """Return `count` ids of an answer, the last of which ends it if it was `stopped`. Shared: not to be changed."""
    ids = token_array((_ANSWER_ID,)) * count
    if stopped:
        ids[-1] = STOP_ID
    return ids
