"""The losses that an evaluation tells beside its own, by the names of their metrics: those of a
mixture's sources, `eval/loss/NAME`, and those on further sets, `eval/NAME/loss`."""

from __future__ import annotations

from collections.abc import Mapping


def losses_by_source(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of the sources, by name.

    Args:
        metrics: of an evaluation, by metric name; others are passed over.
    """
    parts = [(name.split("/"), loss) for name, loss in metrics.items()]
    return {name[2]: loss for name, loss in parts if len(name) == 3 and name[1] == "loss"}


def losses_by_set(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those on further sets, by name; `metrics` as above."""
    parts = [(name.split("/"), loss) for name, loss in metrics.items()]
    return {name[1]: loss for name, loss in parts if len(name) == 3 and name[2] == "loss"}
