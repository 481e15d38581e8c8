"""Ids that stand for texts: nobody reads them, and the scheduler checks them. Arrays are shared, one per length."""

from array import array
from functools import cache
from typing import Final

from inference.task import token_array

VOCABULARY_SIZE: Final = 3
STOP_ID: Final = 2
_PROMPT_ID: Final = 0
_ANSWER_ID: Final = 1


@cache
def prompt_ids(count: int) -> "array[int]":
    """Return a prompt. Not to be changed: all prompts of this length are the same array."""
    return token_array((_PROMPT_ID,)) * count


@cache
def answer_ids(count: int, stopped: bool) -> "array[int]":
    """Return `count` ids of an answer, the last of which ends it if it was `stopped`. Shared as prompts are."""
    ids = token_array((_ANSWER_ID,)) * count
    if stopped:
        ids[-1] = STOP_ID
    return ids
