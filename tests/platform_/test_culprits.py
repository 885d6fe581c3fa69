"""Who is named where a group has ended: the rank that failed, not those that only met its end."""

from __future__ import annotations

import torch
import torch.distributed as dist

from elastrata.cluster.culprits import culprits, is_victim
from support.leaving_ranks import FAILING, error_of
from support.ranks import run_fresh_ranks


def test_the_rank_that_failed_is_named_not_those_that_waited_for_it() -> None:
    """Real errors of real ranks."""
    errors = dict(enumerate(run_fresh_ranks(3, error_of)))
    assert all(isinstance(error, Exception) for error in errors.values())
    assert list(culprits(errors)) == [FAILING]


def test_errors_of_nccl_are_victims_those_of_a_model_are_not() -> None:
    assert is_victim(dist.DistBackendError("NCCL communicator was aborted on rank 3"))
    assert is_victim(dist.DistNetworkError("the store is gone"))
    assert not is_victim(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_victim(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_victim(ValueError("gloo"))


def test_where_all_are_victims_all_are_told() -> None:
    errors: dict[int, Exception] = {n: dist.DistBackendError("NCCL error") for n in (2, 5)}
    assert culprits(errors) == errors
