"""Which tokens are masked, and by what."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MASK, FIRST_WORD, FIRST_CONTINUATION, NUM_IDS = 4, 5, 60, 97

shared_fixtures = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    max_examples=40,
)
lengths = st.lists(st.integers(1, 40), min_size=0, max_size=12)
rules = st.fixed_dictionaries(
    {
        "mask_probability": st.sampled_from([0.05, 0.15, 0.5]),
        "whole_word": st.booleans(),
        "max_predictions": st.sampled_from([None, 1, 3]),
    }
)


@shared_fixtures
@given(lengths=lengths, rule=rules, cut=st.integers(0, 12))
def test_a_slice_is_masked_like_the_whole(
    make_bert, make_rows, vocabulary, lengths, rule, cut
) -> None:
    bert, rows = make_bert(**rule, dropout=0.1), make_rows(lengths)
    first = int(rows.lengths[:cut].sum())
    part = rows[cut:]
    if not len(part):
        return
    whole, sliced = (bert.collate(r, vocabulary, seed=3) for r in (rows, part))
    inside = whole.predicted >= first
    assert (whole.predicted[inside] - first).tolist() == sliced.predicted.tolist()
    assert whole.targets[inside].tolist() == sliced.targets.tolist()
    assert whole.input_ids[first:].tolist() == sliced.input_ids.tolist()
    assert whole.positions[first:].tolist() == sliced.positions.tolist()
    assert whole.dropout_keys[first:].tolist() == sliced.dropout_keys.tolist()


@shared_fixtures
@given(lengths=lengths, rule=rules)
def test_every_sample_gets_its_predictions(make_bert, make_rows, vocabulary, lengths, rule) -> None:
    rows = make_rows(lengths)
    batch = make_bert(**rule).collate(rows, vocabulary, seed=3)
    tokens = rows.tokens.astype(np.int64)
    predicted = batch.predicted.numpy()
    assert (tokens[predicted] >= FIRST_WORD).all()
    assert tokens[predicted].tolist() == batch.targets.tolist()
    assert (np.diff(predicted) > 0).all()
    assert batch.weights == {"mlm": float(len(predicted))}
    if lengths:
        changed = batch.input_ids.numpy() != tokens
        assert set(np.flatnonzero(changed)) <= set(predicted)
    samples = np.repeat(np.arange(len(lengths)), lengths)
    per_sample = np.bincount(samples[predicted], minlength=len(lengths))
    maskable = np.bincount(samples[tokens >= FIRST_WORD], minlength=len(lengths))
    assert (per_sample[maskable > 0] >= 1).all()
    assert (per_sample <= (rule["max_predictions"] or 40)).all()
    if not rule["whole_word"] and rule["max_predictions"] is None:
        expected = np.where(
            maskable, np.maximum(1, np.rint(rule["mask_probability"] * maskable)), 0
        )
        assert per_sample.tolist() == expected.tolist()


@pytest.fixture
def many(make_rows):
    return make_rows([50] * 4000)


@pytest.mark.parametrize("whole_word", [False, True])
def test_shares_are_those_of_the_paper(make_bert, vocabulary, many, whole_word) -> None:
    batch = make_bert(whole_word=whole_word).collate(many, vocabulary, seed=0)
    maskable = (many.tokens >= FIRST_WORD).sum()
    assert len(batch.predicted) / maskable == pytest.approx(0.15, abs=0.005)
    now, before = batch.input_ids[batch.predicted], batch.targets
    kept = (now == before).double().mean().item()
    masked = (now == MASK).double().mean().item()
    # 28,000 predictions: a standard deviation of 0.0024.
    assert masked == pytest.approx(0.8, abs=0.01)
    # A random token is by chance the old one in 1 of 92 cases.
    assert kept == pytest.approx(0.1 + 0.1 / 92, abs=0.01)
    random = now[(now != MASK) & (now != before)]
    counts = np.bincount(random.numpy(), minlength=NUM_IDS)
    assert (counts[:FIRST_WORD] == 0).all()
    assert (counts[FIRST_WORD:] > 0).all()


def test_every_place_is_masked_equally_often(make_bert, vocabulary, many) -> None:
    batch = make_bert().collate(many, vocabulary, seed=0)
    counts = np.bincount(batch.predicted.numpy() % 50, minlength=50)[1:-1]
    assert counts.std() / counts.mean() < 3 / np.sqrt(counts.mean())


def test_seed_and_epoch_change_the_masks(make_bert, make_rows, vocabulary) -> None:
    bert, rows = make_bert(), make_rows([30] * 8)
    next_epoch = dataclasses.replace(rows, epochs=rows.epochs + 1)
    masks = [
        tuple(bert.collate(r, vocabulary, seed).predicted.tolist())
        for r, seed in ((rows, 0), (rows, 1), (next_epoch, 0))
    ]
    assert len(set(masks)) == 3


def test_whole_words_are_masked_whole(make_bert, make_rows, vocabulary) -> None:
    rows = make_rows([40] * 300)
    batch = make_bert(whole_word=True).collate(rows, vocabulary, seed=0)
    chosen = np.zeros(len(rows.tokens), dtype=bool)
    chosen[batch.predicted.numpy()] = True
    continues = rows.tokens >= FIRST_CONTINUATION
    follows_maskable = np.append(False, rows.tokens[:-1] >= FIRST_WORD)
    joined = np.flatnonzero(continues & follows_maskable)
    assert len(joined) > 1000
    assert (chosen[joined] == chosen[joined - 1]).all()


def test_words_end_where_documents_end(make_bert, make_rows, vocabulary) -> None:
    rows = make_rows([40] * 300)
    rows.tokens[:] = FIRST_CONTINUATION
    packed = dataclasses.replace(
        rows, boundaries=tuple(np.array([20], np.int32) for _ in range(300))
    )
    batch = make_bert(whole_word=True).collate(packed, vocabulary, seed=0)
    halves = np.bincount(batch.predicted.numpy() // 20, minlength=600)
    assert set(halves.tolist()) == {0, 20}
    assert (halves.reshape(300, 2).sum(axis=1) == 20).all()


def test_samples_without_maskable_tokens_are_left_alone(make_bert, make_rows, vocabulary) -> None:
    batch = make_bert().collate(make_rows([2, 2]), vocabulary, seed=0)
    assert batch.weights == {"mlm": 0.0}
    assert batch.input_ids.tolist() == [2, 3, 2, 3]
