"""CPU attention over samples of uneven lengths: the forms that were tried, side by side.

    python benchmarks/bert_attention.py

Every form computes the same forward and backward pass over the same tokens, interleaved with the
others. `step` is a whole model on the first case, ours beside transformers' padded one.
Writes benchmarks/results/bert_attention.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from harness import cpu_milliseconds, parser_of, write_result
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.rows import Rows
from elastrata_workloads.bert import Bert
from elastrata_workloads.bert.objective import BertBatch
from elastrata_workloads.unpadded.attention import attention
from elastrata_workloads.unpadded.batch import Segments

Form = Callable[[Tensor, Tensor, Tensor, Sequence[int]], Tensor]

HEADS, HEAD_SIZE, LAYERS, ROUNDS = 4, 64, 4, 11
STEP_CASE = "32 samples up to 128, mostly short"


def runs(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    """Ours: a call per run of equal lengths."""
    return attention(query, key, value, Segments(torch.empty(0), tuple(lengths), max(lengths)))


def per_sample(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    """A call per sample."""
    parts = []
    for qkv in zip(*(x.split(list(lengths)) for x in (query, key, value)), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        parts.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
    return torch.cat(parts)


def grouped(waste: float) -> Form:
    """A call per group of neighbours, padded to the longest, with at most `waste` padding."""

    def form(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
        groups = _groups(lengths, waste)
        sizes = [sum(group) for group in groups]
        parts = []
        for group, *qkv in zip(groups, *(x.split(sizes) for x in (query, key, value)), strict=True):
            keep = torch.arange(max(group)) < torch.tensor(group)[:, None]
            places = keep.flatten().nonzero()[:, 0]
            q, k, v = (_padded(x, places, keep.shape) for x in qkv)
            mask = None if keep.all() else keep[:, None, None, :]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            parts.append(out.transpose(1, 2).flatten(0, 1)[places])
        return torch.cat(parts)

    return form


def block_diagonal(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    """One call over all tokens, with a mask between samples."""
    owner = torch.repeat_interleave(torch.tensor(lengths))
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    mask = owner[:, None] == owner
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)


FORMS: dict[str, Form] = {
    "runs of equal length": runs,
    "one call per sample": per_sample,
    "groups, 3% padding": grouped(0.03),
    "groups, 10% padding": grouped(0.10),
    "groups, 25% padding": grouped(0.25),
    "all padded to the longest": grouped(float("inf")),
    "block-diagonal mask": block_diagonal,
}


def _groups(lengths: Sequence[int], waste: float) -> list[list[int]]:
    """Neighbours, longest first, that share a call."""
    groups = [[lengths[0]]]
    for length in lengths[1:]:
        group = groups[-1]
        padded = group[0] * (len(group) + 1)
        if padded > (1 + waste) * (sum(group) + length):
            groups.append([length])
        else:
            group.append(length)
    return groups


def _padded(x: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    flat = x.new_zeros(shape.numel(), *x.shape[1:]).index_copy(0, places, x)
    return flat.unflatten(0, tuple(shape)).transpose(1, 2)


def milliseconds(runs_by_name: dict[str, Callable[[], object]]) -> dict[str, float]:
    found = cpu_milliseconds(runs_by_name, ROUNDS)
    return {name: round(value, 2) for name, value in found.items()}


def attention_case(lengths: Sequence[int]) -> dict[str, float]:
    qkv = [torch.randn(sum(lengths), HEADS, HEAD_SIZE, requires_grad=True) for _ in range(3)]
    expected = per_sample(*qkv, lengths)

    def once(form: Form) -> Callable[[], object]:
        torch.testing.assert_close(form(*qkv, lengths), expected, rtol=1e-4, atol=1e-5)
        return lambda: form(*qkv, lengths).sum().backward()

    return milliseconds({name: once(form) for name, form in FORMS.items()})


def step_case(lengths: Sequence[int]) -> dict[str, float]:
    vocabulary = Vocabulary(
        size=8192, pad_id=0, mask_id=4, special_ids=(0, 1, 2, 3, 4), continuation_ids=()
    )
    rng = np.random.default_rng(0)
    rows = Rows(
        sample_ids=np.arange(len(lengths), dtype=np.uint64),
        epochs=np.zeros(len(lengths), np.int64),
        lengths=np.array(lengths),
        tokens=rng.integers(5, 8192, sum(lengths)).astype(np.uint16),
    )
    bert = Bert(hidden_size=HEADS * HEAD_SIZE, num_layers=LAYERS, num_heads=HEADS)
    model = bert.build_model(vocabulary, 512)
    batch = bert.collate(rows, vocabulary, seed=0)
    theirs = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=8192,
            hidden_size=bert.hidden_size,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=4 * bert.hidden_size,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ).train()
    inputs = _padded_inputs(batch)
    return milliseconds(
        {
            "ours": lambda: bert.loss(model, batch).terms["mlm"].backward(),
            "transformers, padded": lambda: theirs(**inputs).loss.backward(),
        }
    )


def _padded_inputs(batch: BertBatch) -> dict[str, Tensor]:
    lengths = list(batch.segment_lengths)
    labels = torch.full_like(batch.input_ids, -100).index_copy(0, batch.predicted, batch.targets)
    ones = torch.ones_like(batch.input_ids)
    return {
        "input_ids": pad_sequence(batch.input_ids.split(lengths), batch_first=True),
        "attention_mask": pad_sequence(ones.split(lengths), batch_first=True),
        "labels": pad_sequence(labels.split(lengths), batch_first=True, padding_value=-100),
    }


def main() -> None:
    parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    drawn = {
        STEP_CASE: np.clip(rng.exponential(40, 32), 3, 128),
        "80 samples of 5 to 40": rng.integers(5, 41, 80),
        "20 samples of 64 to 128": rng.integers(64, 129, 20),
        "8 samples of 10 to 512": rng.integers(10, 513, 8),
        "16 samples of 128": np.full(16, 128),
    }
    cases = {name: sorted(map(int, lengths), reverse=True) for name, lengths in drawn.items()}
    figures = {
        "machine": "2 cores, busy with other work",
        "unit": "milliseconds of CPU time of forward and backward, one thread, median",
        "model": {"heads": HEADS, "head_size": HEAD_SIZE, "layers (step)": LAYERS},
        "cases": [
            {
                "case": name,
                "tokens": sum(lengths),
                "tokens_padded": len(lengths) * max(lengths),
                "attention": attention_case(lengths),
            }
            for name, lengths in cases.items()
        ],
        "step": step_case(cases[STEP_CASE]),
    }
    write_result("bert_attention", figures, ("torch", "transformers"))


if __name__ == "__main__":
    main()
