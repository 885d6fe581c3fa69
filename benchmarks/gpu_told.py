"""What `gpu.py` tells every case, and the recipes that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastrata.core.device import current_device
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe

NATURAL = "natural"
_TINY = ("workload.hidden_size=64", "workload.num_layers=2", "workers.threads=1")
TINY = {
    "gpt": (
        *_TINY,
        *("workload.num_heads=2", "workload.max_positions=128", "data.prepare.seq_len=128"),
        *("data.prepare.tokenizer.vocab_size=1000", "workload.embedding_multiple=1"),
        *("workload.attention=dense", "batch_size=2", "micro_batch_tokens=128"),
    ),
    "bert": (
        *_TINY,
        *("workload.num_heads=2", "data.prepare.tokenizer.vocab_size=1000"),
        *("workload.embedding_multiple=1", "batch_size=4", "micro_batch_tokens=1024"),
    ),
}
"""Overrides that make a model tiny."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What `gpu.py` tells every case.

    Raises:
        RuntimeError: the device is not there.
    """

    device: str
    is_tiny: bool
    histogram: str
    folder: str

    def __post_init__(self) -> None:
        found = current_device().type
        if found != ("cpu" if self.device == "cpu" else "cuda"):
            raise RuntimeError(f"wanted {self.device}, found {found}")

    @property
    def is_measured(self) -> bool:
        """Whether figures count."""
        return not self.is_tiny and self.device != "fake"

    def recipe(self, model: str, overrides: Sequence[str] = ()) -> Recipe:
        """A recipe, of a tiny model where that is wanted; nothing is compiled on a CPU, where it
        takes minutes and is not what is tried."""
        last = () if self.device == "cuda" else ("compile=false",)
        tiny = TINY[model.partition("/")[0]] if self.is_tiny else ()
        usual = "precision=fp32" if self.device == "cpu" else "precision=bf16"
        kept = [one for one in overrides if not (self.is_tiny and _is_of_size(one))]
        return load_recipe(model, [usual, *tiny, *kept, *last])

    def lengths(self, wanted: str) -> str:
        """As `bench_samples` takes them."""
        return self.histogram if wanted == NATURAL else wanted


def _is_of_size(override: str) -> bool:
    return override.partition("=")[0] in ("batch_size", "micro_batch_tokens", "workload.num_layers")
