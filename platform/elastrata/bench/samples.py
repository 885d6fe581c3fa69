"""The samples of a measured step: of the recipe's data set, or random ones of chosen lengths."""

from __future__ import annotations

from dataclasses import dataclass

from elastrata.bench.fit import check_fits
from elastrata.bench.lengths import DATA, choose_lengths
from elastrata.bench.random_steps import RandomSteps
from elastrata.bench.rank_steps import rank_steps
from elastrata.recipe.data_spec import data_spec
from elastrata.recipe.layout_rules import fixed_tokens
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.preflight import training_data
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.payload import RankStep


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Everything a lone rank is to train on, in memory before anything is measured."""

    lengths: str
    """`data`, `full`, or the name of a histogram's file. All but `data` have random tokens."""
    vocabulary: Vocabulary
    seq_len: int
    """No sample is longer."""
    steps: tuple[RankStep, ...]


def bench_samples(recipe: Recipe, wanted: str | None, *, steps: int) -> Samples:
    """The first steps of a lone rank, each of the recipe's full batch size.

    Args:
        recipe: a data set that is not prepared is needed for `data` only.
        wanted: `data`, `full` or a JSON file, see `choose_lengths`.
        steps: how many.

    Raises:
        UserError: the lengths, the data set and the recipe do not fit; one line for each reason.
    """
    tokens = fixed_tokens(recipe, "a measurement")
    spec = data_spec(recipe)
    lengths = choose_lengths(wanted, seq_len=spec.seq_len, prepared=spec.prepared)
    if lengths.histogram is None:
        return _of_data_set(recipe, steps)
    check_fits(recipe, spec, lengths.name, lengths.histogram)
    random = RandomSteps(
        histogram=lengths.histogram,
        num_ids=spec.vocabulary.size,
        pairs=spec.pairs,
        steps=steps,
        batch_size=recipe.batch_size,
        work=recipe.workload.work(spec.vocabulary),
        tokens_per_micro_batch=tokens,
        virtual_ranks=recipe.parallel.virtual_ranks or 1,
        seed=recipe.seed,
    )
    return Samples(
        lengths=lengths.name,
        vocabulary=spec.vocabulary,
        seq_len=len(lengths.histogram) - 1,
        steps=tuple(random),
    )


def _of_data_set(recipe: Recipe, steps: int) -> Samples:
    batches = training_data(recipe).train
    return Samples(
        lengths=DATA,
        vocabulary=batches.manifest.vocabulary,
        seq_len=batches.manifest.seq_len,
        steps=tuple(rank_steps(batches, batch_size=recipe.batch_size, steps=steps)),
    )
