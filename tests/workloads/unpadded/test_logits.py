"""Logits that are divided over ranks give what whole ones give."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from elastrata_workloads.unpadded.logits import cross_entropy, of_ids
from support.logits_ranks import divided_cross_entropy
from support.ranks import run_fresh_ranks

NUM_IDS, ROWS = 7, 12
"""Of three ranks with 4 columns each the second has one that is no id, the third no id at all."""


def _case(predictions: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(predictions, ROWS, generator=generator) * 5
    return logits, torch.randint(NUM_IDS, (predictions,), generator=generator)


def _wanted(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    total, right = cross_entropy(of_ids(logits, NUM_IDS, torch.float32), targets)
    (2 * total).backward()
    assert logits.grad is not None
    return total.detach(), right, logits.grad


def test_sum_right_answers_and_gradient_are_the_same() -> None:
    ties, targets = _case(20, seed=1)
    ties = ties.round().clamp(-1, 1)  # several ids have the largest logit: the first one counts
    large = _case(20, seed=2)[0] * 1e4
    cases = [_case(50), (ties, targets), (large, targets), _case(0)]
    assert 0 < float(_wanted(ties, targets)[1]) < len(targets)
    for found in run_fresh_ranks(3, divided_cross_entropy, cases, NUM_IDS):
        for (logits, targets), case in zip(cases, found, strict=True):
            total, right, gradient = _wanted(logits, targets)
            torch.testing.assert_close(case.total, total)
            assert case.right == right
            torch.testing.assert_close(case.gradient, gradient)
            assert case.columns == ROWS // 3


def test_what_is_not_finite_is_seen_by_all_ranks() -> None:
    cases = []
    for bad in (math.nan, math.inf):
        logits, targets = _case(5)
        logits[2, 1] = bad
        cases.append((logits, targets))
    for found in run_fresh_ranks(3, divided_cross_entropy, cases, NUM_IDS):
        assert not any(math.isfinite(case.total) for case in found)


def test_rows_that_are_no_ids_are_left_out() -> None:
    logits = _case(3)[0]
    assert torch.equal(of_ids(logits, NUM_IDS, torch.float32), logits[:, :NUM_IDS])
    assert of_ids(logits, ROWS, torch.float32) is logits
    assert of_ids(logits, NUM_IDS, torch.bfloat16).dtype == torch.bfloat16


def test_right_answers_of_whole_logits() -> None:
    total, right = cross_entropy(torch.tensor([[0.0, 3.0], [0.0, 3.0]]), torch.tensor([1, 0]))
    assert right == 1
    assert float(total) == pytest.approx(3 + 2 * math.log1p(math.exp(-3)))
