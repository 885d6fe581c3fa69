"""Culprits and victims: which rank's error ended a group, and which ones only met its end."""

from __future__ import annotations

from collections.abc import Mapping

_KINDS = ("DistError",)
"""PyTorch's own error of collectives, or a base of it."""
_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "processgroup")
"""In errors of collectives that have no kind of their own."""


def is_victim(error: BaseException) -> bool:
    """Whether it is an error of a collective: another rank has left, or does not answer."""
    if any(kind.__name__ in _KINDS for kind in type(error).__mro__):
        return True
    text = str(error).lower()
    return type(error) is RuntimeError and any(word in text for word in _WORDS)


def culprits(errors: Mapping[int, Exception]) -> dict[int, Exception]:
    """The errors, by rank, that are no victims'; all of them where there is none such."""
    own = {rank: error for rank, error in errors.items() if not is_victim(error)}
    return own or dict(errors)
