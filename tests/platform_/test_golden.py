"""Short runs give the results that were recorded: what is moved or taken out changes none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.golden import results

RECORDED = Path(__file__).parents[1] / "data" / "golden.json"
RELATIVE = 2e-5
"""Of losses in fp32, which other processors sum in another order; the steps add that up."""


@pytest.mark.matrix
def test_short_runs_give_the_results_that_were_recorded() -> None:
    """The same samples exactly, and the same losses but for the order of sums."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    found = results()
    assert found.keys() == recorded.keys()
    for name, steps in found.items():
        assert [digest for digest, _ in steps] == [digest for digest, _ in recorded[name]], name
        losses = [loss for _, loss in recorded[name]]
        assert [loss for _, loss in steps] == pytest.approx(losses, rel=RELATIVE), name
