"""The deal's balance, measured: how equal the work of any number of workers is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from elastrata.bench.lengths import check_fits, choose_lengths
from elastrata.recipe.data_spec import data_spec
from elastrata.recipe.layout_rules import fixed_tokens
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.preflight import training_data
from elastrata_pipelines.balance import (
    Balance,
    drawn_batches,
    measure_balance,
    mixed_batches,
    ordered_batches,
)
from elastrata_pipelines.deal import Ints
from elastrata_pipelines.mixed_order import MixedOrder
from elastrata_pipelines.storage import Storage

_STEPS = 20

BatchesOfLengths = Callable[[int], Iterator[Ints]]
"""From a batch size to the lengths of the rows of each batch."""


def measure_balances(
    recipe: Recipe, wanted: str | None, workers: Sequence[int], *, samples_per_worker: int
) -> dict[int, Balance]:
    """By number of workers, the balance of batches that grow with it.

    Args:
        recipe: gives the cost of a sample, the micro-batches, and the data set where there is one.
        wanted: `data`, `full` or a JSON file, see `choose_lengths`.
        workers: the numbers.
        samples_per_worker: in a batch.

    Raises:
        UserError: the lengths, the data set and the recipe do not fit; one line for each reason.
    """
    tokens = fixed_tokens(recipe, "a measurement")
    batches = batches_of_lengths(recipe, wanted)
    work = recipe.workload.work(data_spec(recipe).vocabulary)
    return {
        number: measure_balance(
            batches(samples_per_worker * number),
            workers=number,
            tokens_per_micro_batch=tokens,
            work=work,
        )
        for number in workers
    }


def batches_of_lengths(recipe: Recipe, wanted: str | None) -> BatchesOfLengths:
    """Batches in the recipe's order, or drawn from a histogram; see `choose_lengths`."""
    spec = data_spec(recipe)
    chosen = choose_lengths(wanted, seq_len=spec.seq_len, prepared=spec.prepared)
    histogram = chosen.histogram
    if histogram is not None:
        check_fits(recipe, spec, chosen.name, histogram)
        return lambda size: drawn_batches(histogram, batch_size=size, steps=_STEPS)
    data = training_data(recipe).train
    lengths = [manifest.read_lengths(Storage(url)) for url, manifest in data.data_sets]
    order = data.order
    if isinstance(order, MixedOrder):
        return lambda size: mixed_batches(lengths, order, batch_size=size, steps=_STEPS)
    return lambda size: ordered_batches(lengths[0], order, batch_size=size, steps=_STEPS)
