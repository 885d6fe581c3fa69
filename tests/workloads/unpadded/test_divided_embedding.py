"""A table of the vocabulary that is divided over ranks is looked up, and learns, as a whole one."""

from __future__ import annotations

from support.embedding_ranks import differences
from support.ranks import run_ranks

EQUAL = {"hidden": True, "gradient": True, "rows": 6}


def test_every_rank_has_its_rows_of_the_whole_gradient() -> None:
    """To the bit, in the types that tables are applied in; a rank's gradient has its rows alone."""
    for ranks in run_ranks(2, differences):
        assert ranks == {"torch.float32": EQUAL, "torch.bfloat16": EQUAL}
