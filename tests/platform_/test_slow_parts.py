"""Slow tests in parts: each test in one of them."""

from __future__ import annotations

import pytest

from support.parts import part_of_the_slow


class _Nothing(pytest.Item):
    def runtest(self) -> None:
        pass


def test_each_slow_test_is_in_one_part_and_all_others_in_every(
    request: pytest.FixtureRequest,
) -> None:
    items = [
        _Nothing.from_parent(request.session, name=f"test_{case}[{number}]")
        for case in ("of_some", "of_more")
        for number in range(5)
    ]
    slow, quick = items[:8], items[8:]
    for item in slow:
        item.add_marker("slow")
    parts = [part_of_the_slow(items, number, 2) for number in (41, 42)]
    assert sorted(item.nodeid for part in parts for item in part if item in slow) == sorted(
        item.nodeid for item in slow
    )
    for part in parts:
        assert [item for item in part if item in quick] == quick
        assert {item.name.partition("[")[0] for item in part} >= {"test_of_some", "test_of_more"}
    assert part_of_the_slow(items[::-1], 41, 2) == parts[0][::-1]
