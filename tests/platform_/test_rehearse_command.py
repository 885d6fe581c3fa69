"""`elastrata rehearse`, as it is typed."""

from __future__ import annotations

import json

import pytest

from elastrata.cli.main import run
from support import rehearsed
from support.documented import documented_keys
from support.fake_cuda import NEEDS_COMPILER, apart


@NEEDS_COMPILER
def test_a_rehearsal_tells_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["workload.num_layers=2", "batch_size=8", "parallel.pipeline=2"]
    assert run(["rehearse", "gpt/125m", *settings, "--cluster", "8xH100", "--json"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert list(result) == documented_keys("rehearse")
    assert [rank["rank"] for rank in result["ranks"]] == [0, 4]
    assert result["graphs"]["graphs"] > 0
    assert result["graphs"]["next_group"] == 0  # what is compiled survives a fault
    assert "the plan has" in shown.err
    assert "allgather" in shown.err


MISTAKES = [
    (["parallel.tensor=5"], "8xH100", "parallel.tensor: 5"),
    ([], "8xCPU", "--cluster: 8xCPU: expected GPUs, which a rehearsal simulates"),
]


def test_mistakes_get_a_line() -> None:
    for overrides, cluster, line in MISTAKES:
        told = apart(rehearsed.mistakes, "gpt/125m", overrides, cluster)
        assert line in "\n".join(told)
