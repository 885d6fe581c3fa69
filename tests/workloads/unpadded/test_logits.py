"""The cross entropy of logits, whole or divided over ranks, is what its definition says, and takes
little memory."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elastrata_workloads.unpadded import loss as logits_module
from elastrata_workloads.unpadded.loss import cross_entropy, mask_logits_without_ids
from support.live_bytes import LiveBytes
from support.logits_ranks import Found, divided_cross_entropy
from support.ranks import run_fresh_ranks

NUM_IDS, ROWS = 7, 12
"""Of three ranks with 4 columns each the second has one that is no id, the third no id at all."""


def _case(predictions: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(predictions, ROWS, generator=generator) * 5
    return logits, torch.randint(NUM_IDS, (predictions,), generator=generator)


def _wanted(logits: Tensor, targets: Tensor, *, squares: bool) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    ids = logits[:, :NUM_IDS]
    loss = 2 * F.cross_entropy(ids, targets, reduction="sum")
    if squares:
        loss = loss + ids.logsumexp(-1).square().sum() / 3
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), (ids.argmax(-1) == targets).sum().float(), logits.grad


@pytest.mark.parametrize("squares", [False, True])
def test_sum_right_answers_and_gradient_are_the_same(squares: bool) -> None:
    ties, targets = _case(20, seed=1)
    ties = ties.round().clamp(-1, 1)  # several ids have the largest logit: the first one counts
    large = _case(20, seed=2)[0] * 1e4
    cases = [_case(50), (ties, targets), (large, targets), _case(0)]
    assert 0 < float(_wanted(ties, targets, squares=squares)[1]) < len(targets)
    whole = [_whole(*case, squares=squares) for case in cases]
    divided = run_fresh_ranks(3, divided_cross_entropy, cases, NUM_IDS, squares)
    for found in [*divided, whole]:
        for (logits, targets), case in zip(cases, found, strict=True):
            loss, right, gradient = _wanted(logits, targets, squares=squares)
            torch.testing.assert_close(case.total, loss)
            assert case.right == right
            torch.testing.assert_close(case.gradient, gradient)
            assert case.columns in (ROWS // 3, ROWS)


def _whole(logits: Tensor, targets: Tensor, *, squares: bool) -> Found:
    """Of logits that no leaf has, as a model's are: some at a time, and overwritten."""
    leaf = logits.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logits_module, "_AT_ONCE_ON_CPU", 3 * ROWS)
        given = mask_logits_without_ids(leaf * 1, NUM_IDS)
        sums = cross_entropy(given, targets, with_squares=squares)
        loss = 2 * sums.total + (0.0 if sums.squares is None else sums.squares / 3)
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="overwritten"):
        loss.backward()
    assert leaf.grad is not None
    torch.testing.assert_close(given.detach(), leaf.grad)
    return Found(loss.detach(), sums.num_right, leaf.grad, given.shape[1])


def test_nothing_is_held_beside_the_logits_but_a_portion(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, with rows that are no ids: neither logits in fp32 nor a second copy."""
    predictions, rows, at_once = 1000, 512, 2**14
    monkeypatch.setattr(logits_module, "_AT_ONCE_ON_CPU", at_once)
    hidden = torch.randn(predictions, 8, dtype=torch.bfloat16)
    table = torch.randn(rows, 8, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(rows - 10, (predictions,))
    with LiveBytes() as live:
        total = cross_entropy(
            mask_logits_without_ids(F.linear(hidden, table), rows - 10), targets
        ).total
        total.backward()
    logits = predictions * rows * 2
    assert logits < live.peak < logits + 1.5 * 4 * at_once + 64 * predictions
    exact = table.detach().float().requires_grad_()
    wanted = F.cross_entropy((hidden.float() @ exact.T)[:, :-10], targets, reduction="sum")
    wanted.backward()
    torch.testing.assert_close(total, wanted, rtol=1e-3, atol=0)
    assert table.grad is not None
    assert exact.grad is not None
    assert float((table.grad.float() - exact.grad).norm() / exact.grad.norm()) < 1e-2


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
    ids = mask_logits_without_ids(logits, NUM_IDS)
    assert torch.equal(ids[:, :NUM_IDS], logits[:, :NUM_IDS])
    assert (ids[:, NUM_IDS:] == -math.inf).all()
    assert mask_logits_without_ids(logits, ROWS) is logits
    assert mask_logits_without_ids(logits.bfloat16(), NUM_IDS).dtype == torch.bfloat16


def test_right_answers_of_whole_logits() -> None:
    found = cross_entropy(torch.tensor([[0.0, 3.0], [0.0, 3.0]]), torch.tensor([1, 0]))
    assert found.num_right == 1
    assert float(found.total) == pytest.approx(3 + 2 * math.log1p(math.exp(-3)))
