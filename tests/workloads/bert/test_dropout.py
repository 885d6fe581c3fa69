"""Dropout that belongs to the token."""

from __future__ import annotations

import pytest
import torch

from elastrata_workloads.unpadded.dropout import HiddenDropout, token_feature_hash

KEYS = torch.randint(-(2**63), 2**63 - 1, (4000,), generator=torch.Generator().manual_seed(0))


def test_the_share_of_zeros_is_the_rate_and_the_mean_is_kept() -> None:
    dropped = HiddenDropout(0.25, site=1)(torch.ones(4000, 64), KEYS)
    # 256,000 draws: a standard deviation of 0.001.
    assert (dropped == 0).double().mean().item() == pytest.approx(0.25, abs=0.004)
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.006)
    assert (dropped == 0).double().mean(dim=0).std() < 0.01
    assert (dropped == 0).double().mean(dim=1).std() < 0.06


def test_masks_of_tokens_features_and_sites_are_unrelated() -> None:
    drawn = [token_feature_hash(KEYS, site, 64).double().flatten() for site in (0, 1)]
    shifted = token_feature_hash(KEYS + 1, 0, 64).double().flatten()
    features = token_feature_hash(KEYS, 0, 65).double()[:, 1:].flatten()
    for other in (drawn[1], shifted, features, drawn[0].roll(64)):
        correlation = torch.corrcoef(torch.stack([drawn[0], other]))[0, 1].item()
        assert abs(correlation) < 0.01


def test_nothing_drops_outside_of_training() -> None:
    hidden = torch.ones(4000, 8)
    assert HiddenDropout(0.5, site=1).eval()(hidden, KEYS) is hidden
    assert HiddenDropout(0.0, site=1)(hidden, KEYS) is hidden
    assert HiddenDropout(0.5, site=1)(hidden, None) is hidden


def test_loss_with_dropout_does_not_depend_on_the_split(make_bert, make_rows, vocabulary) -> None:
    bert, rows = make_bert(dropout=0.2), make_rows([20, 13, 13, 7])
    model = bert.build_model(vocabulary, 64)

    def sum_of(*parts) -> torch.Tensor:
        return sum(bert.loss(model, bert.collate(p, vocabulary, 0)).terms["mlm"] for p in parts)

    whole = sum_of(rows)
    torch.testing.assert_close(sum_of(rows[:1], rows[1:3], rows[3:]), whole, rtol=1e-5, atol=0)
    torch.testing.assert_close(sum_of(rows), whole, rtol=0, atol=0)
    assert sum_of(rows) != bert.loss(model.eval(), bert.collate(rows, vocabulary, 0)).terms["mlm"]
