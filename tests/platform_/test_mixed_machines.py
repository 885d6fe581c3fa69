"""Workers of several speeds: other hands, the same run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typing_extensions import override

from elastrata.cluster.node_speeds import (
    FixedFactors,
    NodeKinds,
    find_unknown_names,
    kinds_by_node,
    node_names,
)
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.run.status import slow_ranks, time_balance
from elastrata.trainer.trainer import check_same_deal, deal_checksums
from elastrata_pipelines.speeds import FixedSpeeds, RankKind, Speeds, SpeedSource, equal_kinds
from elastrata_pipelines.storage import Storage
from support.bare_loop import train_by_speeds, train_on_ranks
from support.command import run, run_json
from support.histories import said, started, stepped
from support.ranks import run_ranks
from support.synthetic import tiny_recipe, write_data_set

STEPS = 24


@dataclass(frozen=True)
class Changing(SpeedSource):
    """Equal ranks, then one that is slow, then one that has no rows."""

    @override
    def __call__(self, step: int) -> Speeds:
        return () if step < 6 else (256, 100, 256) if step < 14 else (256, 256, 1)


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("mixed")
    write_data_set(folder / "data", samples=400, held_out=50)
    return tiny_recipe(
        folder / "data", folder / "runs", steps=STEPS, optimizer={"lr": 1e-2, "fused": False}
    )


def test_losses_are_alike_whoever_has_the_rows(values) -> None:
    equal = run_ranks(3, train_on_ranks, values)[0]
    mixed = run_ranks(3, train_by_speeds, values, Changing())[0]
    assert [r.digest for r in mixed] == [r.digest for r in equal]
    assert [r.loss for r in mixed] == pytest.approx([r.loss for r in equal], rel=1e-5)
    by_step = {r.step: r.speeds for r in mixed if r.speeds}
    assert list(by_step.values()) == [(256, 100, 256), (256, 256, 1)]
    assert min(by_step) >= 7
    assert all(r.time_imbalance >= 1 and r.slowest_rank in range(3) for r in mixed)


def test_bits_stay_equal_with_virtual_ranks(values) -> None:
    exact = {**values, "parallel": {"virtual_ranks": 6}}
    alone = run_ranks(1, train_on_ranks, exact)[0]
    mixed = run_ranks(3, train_by_speeds, exact, Changing())[0]
    assert [(r.loss, r.gradient_norm) for r in mixed] == [(r.loss, r.gradient_norm) for r in alone]


def test_hands_of_different_deals_are_seen() -> None:
    mine, theirs = deal_checksums((256, 128)), deal_checksums((256, 127))
    check_same_deal({name: 2 * value for name, value in mine.items()}, (256, 128))
    check_same_deal({name: 3 * value for name, value in deal_checksums(()).items()}, ())
    with pytest.raises(RuntimeError, match="different deals"):
        check_same_deal({name: mine[name] + theirs[name] for name in mine}, (256, 128))


def _node(name: str, device: str | None = None, **labels: str) -> dict[str, Any]:
    return {
        "NodeID": f"id-{name}",
        "NodeManagerHostname": f"host-{name}",
        "NodeManagerAddress": f"10.0.0.{name}",
        "Labels": {f"ray.io/{key}": value for key, value in labels.items()},
        "Resources": {"CPU": 8.0, **({f"accelerator_type:{device}": 1.0} if device else {})},
        "Alive": True,
    }


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    described = [_node("1", "A100"), _node("2", "T4", **{"node-group": "cheap"}), _node("3")]
    monkeypatch.setattr("elastrata.cluster.node_speeds.list_nodes", lambda: described)


def test_factors_are_those_of_the_node_or_else_of_its_device(cluster) -> None:
    ids = ["id-1", "id-2", "id-3"]

    def speeds(factors: dict[str, float], copies: int = 1) -> Speeds:
        source = FixedFactors(factors=factors, copies=copies, repeats=1)
        return source(ids if copies == 1 else [ids[0], *ids])(0)

    assert speeds({"T4": 0.25}) == (256, 64, 256)
    assert speeds({"T4": 0.25, "host-2": 0.5, "CPU": 2}) == (128, 64, 256)
    assert speeds({"cheap": 0.5}) == speeds({"10.0.0.2": 0.5}) == (256, 128, 256)
    assert speeds({"T4": 0.5}, copies=2) == (256, 128)


def test_a_name_that_the_cluster_does_not_have_is_told_with_the_nearest(cluster) -> None:
    assert find_unknown_names("speeds", {"A100": 1.0, "host-3": 2.0}) == []
    (line,) = find_unknown_names("speeds", {"A10": 0.5})
    assert line == (
        "workers.speeds.A10: 0.5: no such node or device in the cluster, whose devices are "
        "A100, CPU, T4 (did you mean 'A100'?)"
    )
    assert node_names(_node("3"))[-1] == "CPU"


def test_kinds_are_those_of_the_devices_and_of_who_has_room_for_fewer_tokens(
    cluster,
) -> None:
    ids, a100 = ["id-1", "id-2", "id-3"], RankKind("A100")

    def kinds(fewer: dict[str, int], **parallel: int) -> tuple[RankKind, ...]:
        return NodeKinds(fewer=fewer, **{"copies": 1, "repeats": 1, **parallel})(ids)

    assert kinds({"T4": 512}) == (a100, RankKind("T4", 512), RankKind("CPU"))
    named = (RankKind("A100"), RankKind("T4 of cheap", 256), RankKind("CPU of host-3", 128))
    assert kinds({"T4": 512, "cheap": 256, "host-3": 128}) == named
    assert kinds({"T4": 512}, copies=3) == (RankKind("A100 + T4 + CPU", 512),)
    (line,) = find_unknown_names("micro_batch_tokens", {"T40": 4096})
    assert line.startswith("workers.micro_batch_tokens.T40: 4096: no such node or device")
    assert "(did you mean 'T4'?)" in line


def test_where_all_have_one_number_of_tokens_nobody_asks_for_kinds(values) -> None:
    def source(**changes: Any) -> Any:
        return kinds_by_node(Recipe.model_validate({**values, **changes}))

    assert source() is equal_kinds
    assert isinstance(source(micro_batch_tokens="auto"), NodeKinds)
    workers = {**values["workers"], "micro_batch_tokens": {"T4": 64}}
    assert source(workers=workers).fewer == {"T4": 64}


def _told(command: str, values: dict[str, Any], tmp_path: Path, capsys: Any) -> list[str]:
    """The lines about a recipe that is refused, with exit code 2."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    assert _code(command, path) == 2
    told: list[str] = capsys.readouterr().err.splitlines()
    return [line for line in told if str(path) in line] or told


@pytest.mark.parametrize("bad", ["0", "-1", ".nan", ".inf", "fast"])
def test_a_speed_that_cannot_be_is_refused(
    bad: str, values, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = {**values["workers"], "speeds": {"T4": yaml.safe_load(bad)}}
    (line,) = _told("train", {**values, "workers": workers}, tmp_path, capsys)
    assert f"workers.speeds: {{T4: {bad}}}: expected 'equal', 'measured' or keys with" in line
    assert line.endswith("each a number at least 0.001")


@pytest.mark.parametrize(
    ("fewer", "changes", "expected"),
    [
        ({"T4": 0}, {}, "workers.micro_batch_tokens.T4: 0: expected"),
        ({"T4": 128}, {}, "T4: 128: expected fewer than micro_batch_tokens (128), the value"),
        ({"T4": 1}, {}, "workers.micro_batch_tokens.T4: 1: "),
        (
            {"T4": 64},
            {"parallel": {"virtual_ranks": 4}},
            "workers.micro_batch_tokens: {'T4': 64}: not allowed if parallel.virtual_ranks",
        ),
    ],
)
def test_fewer_tokens_that_cannot_be_are_refused(
    fewer: dict[str, int],
    changes: dict[str, Any],
    expected: str,
    values,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    workers = {**values["workers"], "micro_batch_tokens": fewer}
    told = _told("train", {**values, **changes, "workers": workers}, tmp_path, capsys)
    assert any(expected in line for line in told), told


def _code(*words: Any) -> int:
    from elastrata.cli.main import run as main

    return main([str(word) for word in words])


def test_slow_ranks_and_times_by_the_history() -> None:
    slowed = {"step": 9, "host": "b", "device": "CPU", "since": 3}
    entries = [
        started(1, 0),
        said("slowed", 1, time=1, rank=0, factor=0.5, is_over=False, **slowed),
        started(2, 0),
        said("slowed", 2, time=2, rank=1, factor=0.5, is_over=False, **slowed),
        said("slowed", 2, time=2, rank=2, factor=0.6, is_over=False, **slowed),
        said("slowed", 2, time=3, rank=1, factor=0.97, is_over=True, **slowed),
    ]
    (slow,) = slow_ranks(entries)
    assert str(slow) == "rank 2 (b, CPU) trains at 0.60 of the speed of its kind since step 3"
    steps = [
        stepped(2, step, world_size=3, time_imbalance=1 + step / 10, slowest_rank=step % 2)
        for step in (1, 2, 3)
    ]
    balance = time_balance(steps)
    assert balance
    assert (balance.imbalance, balance.slowest_rank) == (1.2, 1)
    assert time_balance([stepped(1, 1)]) is None


@pytest.mark.matrix  # two launches
def test_a_run_by_measured_speeds_is_the_run_that_it_is(values, tmp_path: Path) -> None:
    path, runs = tmp_path / "recipe.yaml", tmp_path / "runs"
    path.write_text(yaml.safe_dump({**values, "steps": 60, "storage": str(runs)}), encoding="utf-8")
    two = ["workers.min=2", "workers.max=2"]
    run_json("train", path, *two, "workers.speeds=measured", "--name", "measured")
    run_json("train", path, *two, "workers.speeds={CPU: 0.5}", "--name", "factors")
    equal, measured = (
        history.effective_steps(history.read_entries(Storage(str(runs / name / "history"))))
        for name in ("factors", "measured")
    )
    assert [s["digest"] for s in measured] == [s["digest"] for s in equal]
    assert [s["loss"] for s in measured] == pytest.approx([s["loss"] for s in equal], rel=1e-5)
    assert all(s["time_imbalance"] >= 1 for s in measured)
    done = run("train", path, "workers.speeds={A1O0: 0.5}", "--name", "wrong")
    assert done.returncode == 2
    assert "workers.speeds.A1O0: 0.5: no such node or device" in done.stderr


def test_fixed_speeds_are_those_of_every_step() -> None:
    assert FixedSpeeds((256, 1))(0) == FixedSpeeds((256, 1))(10**6) == (256, 1)
