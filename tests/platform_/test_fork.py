"""A fork: it goes on where its parent was, by its own recipe, and tells all that cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from elastrata.cli.main import run as run_here
from elastrata.driver.fork import ForkPlan, plan_fork
from elastrata.run import history
from elastrata.run.audit import Audit, audit
from elastrata.run.folder import read_identity
from elastrata.run.fork import begin_fork
from elastrata.step.schedule import ScheduleConfig, learning_rate
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.storage import Storage
from support.lone_run import lone_run, train_alone
from support.synthetic import write_data_set

STEPS, AT, SAMPLES = 20, 10, 300
WSD = {"shape": "wsd", "warmup_steps": 2, "decay": {"ratio": 0.4}}
LARGER = Vocabulary(size=400, pad_id=0, mask_id=4, special_ids=(0, 4), continuation_ids=())
EVERY: dict[str, Any] = {
    "checkpoint": {"every": 5, "keep_last": 9},
    "evaluation": {"every": 5, "samples": 32},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fork")


@pytest.fixture(scope="module")
def stem(folder: Path) -> Path:
    """A run of 20 steps of 21 samples, more than an epoch of its 300, whose rate falls in the last
    eight."""
    return lone_run(folder, "stem", steps=STEPS, schedule=WSD, **EVERY)


@pytest.fixture(scope="module")
def other_data(folder: Path) -> Path:
    write_data_set(folder / "other", samples=SAMPLES, seed=7, held_out=40)
    return folder / "other"


def forked(parent: Path, name: str, *overrides: str, at: int | None = AT) -> Path:
    """A fork, trained to its end; its folder."""
    plan = planned(parent, name, *overrides, at=at)
    begin_fork(plan.fork)
    return train_alone(plan.fork.recipe, Path(plan.fork.run.uri()))


def planned(parent: Path, name: str, *overrides: str, at: int | None = AT) -> ForkPlan:
    return plan_fork(str(parent) if at is None else f"{parent}@{at}", name, overrides)


def steps(run: Path) -> list[Any]:
    return list(history.effective_steps(history.read_entries(Storage(str(run)).sub("history"))))


def tellings(run: Path, *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(step[key] for key in keys) for step in steps(run)]


def proven(run: Path) -> Audit:
    found = audit(Storage(str(run)))
    assert found.partition_ok, found.problems
    return found


def test_with_the_same_recipe_it_is_what_the_parent_became(stem: Path) -> None:
    same = ("step", "samples", "tokens", "digest", "lr", "loss")
    child = forked(stem, "again")
    assert tellings(child, *same) == tellings(stem, *same)[AT:]
    found = proven(child)
    assert found.inherited.state == "checked"
    assert found.epochs == pytest.approx((STEPS * 21 / SAMPLES,))
    assert found.to_dict()["inherited"] == "checked"


def test_a_stem_decays_from_where_it_is_forked(stem: Path) -> None:
    plan = planned(stem, "short", "steps=13")
    assert [(one.what, one.before, one.after) for one in plan.changes] == [
        ("schedule.decay.ratio", "0.4", "none"),
        ("schedule.decay.steps", "none", "3"),
        ("steps", "20", "13"),
    ]
    child = forked(stem, "short-run", "steps=13")
    assert [step["digest"] for step in steps(child)] == [s["digest"] for s in steps(stem)[10:13]]
    schedule = ScheduleConfig.model_validate({**WSD, "decay": {"steps": 3}})
    rates = [learning_rate(schedule, peak=1e-3, step=step, steps=13) for step in (10, 11, 12)]
    assert [step["lr"] for step in steps(child)] == pytest.approx(rates)
    assert rates[0] == 1e-3


def test_other_data_begins_with_its_first_sample(stem: Path, other_data: Path) -> None:
    fresh = lone_run(other_data.parent, "fresh", steps=10, data={"path": str(other_data),
                                                                "window_stripes": 4})  # fmt: skip
    child = forked(stem, "elsewhere", f"data.path={other_data}")
    assert [s["digest"] for s in steps(child)] == [s["digest"] for s in steps(fresh)]
    assert steps(child)[0]["samples"] == (AT + 1) * 21
    assert proven(child).epochs == pytest.approx((10 * 21 / SAMPLES,))


def test_another_batch_size_and_a_fork_of_a_fork_leave_no_gap(stem: Path) -> None:
    first = forked(stem, "smaller", "batch_size=15", at=5)
    assert steps(first)[0]["samples"] == 5 * 21 + 15
    proven(first)
    second = forked(first, "smaller-again", "batch_size=30", "steps=22", at=15)
    assert steps(second)[0]["samples"] == 5 * 21 + 10 * 15 + 30
    taken = 5 * 21 + 10 * 15 + 7 * 30
    assert proven(second).epochs == pytest.approx((taken / SAMPLES,))


def test_it_names_its_parent_and_goes_on_under_its_own_name(stem: Path) -> None:
    plan = planned(stem, "named")
    begin_fork(plan.fork)
    run = Path(plan.fork.run.uri())
    identity = read_identity(Storage(str(run)))
    assert identity is not None
    assert identity.origin == plan.fork.origin
    assert identity.origin.to_tags() == {
        "parent": str(stem), "parent.step": "10", "parent.sha256": identity.origin.sha256,
    }  # fmt: skip
    train_alone(plan.fork.recipe.model_copy(update={"steps": 15}), run)
    train_alone(plan.fork.recipe, run)
    assert [s["digest"] for s in steps(run)] == [s["digest"] for s in steps(stem)[AT:]]
    proven(run)


def test_an_audit_takes_a_parent_that_has_gone_at_its_word(stem: Path, tmp_path: Path) -> None:
    parent = Path(shutil.copytree(stem, tmp_path / "runs" / "parent"))
    child = forked(parent, "child")
    assert child == tmp_path / "runs" / "child"
    shutil.rmtree(parent)
    found = proven(child)
    assert found.inherited.state == "missing"
    assert found.inherited.text == f"{parent}: the parent is missing"
    assert found.epochs == pytest.approx((STEPS * 21 / SAMPLES,))


def test_an_audit_finds_a_parent_that_was_touched(stem: Path, tmp_path: Path) -> None:
    parent = Path(shutil.copytree(stem, tmp_path / "runs" / "parent"))
    child = forked(parent, "child")
    for part in (parent / "history").glob("*.jsonl"):
        text = part.read_text(encoding="utf-8")
        part.write_text(text.replace('"samples": 210,', '"samples": 211,'), encoding="utf-8")
    found = audit(Storage(str(child)))
    assert any("211 samples after step 10" in line for line in found.problems)


@pytest.mark.parametrize(
    ("wanted", "overrides", "line"),
    [
        ("stem@12", [], "stem@12: no checkpoint of step 12; the nearest is 10, of the steps 5, 10"),
        ("stem@last", [], "stem@last: expected RUN@STEP, with one of the steps 5, 10, 15, 20"),
        ("stam", [], "stam: no run here"),
        ("stem@10", ["workload.hidden_size=64"], "workload.hidden_size: 64: expected 32, as in "),
        ("stem@10", ["workload.name=gpt"], "workload."),
        ("stem@10", ["steps=10"], "steps: 10: expected more steps than 10, which the parent has"),
        ("stem@10", ["sparsity={method: static, level: 0.5}"], "sparsity: expected as in "),
        ("stem@10", ["stepss=30"], "command line: stepss: 30: unknown key (did you mean 'steps'?)"),
        ("stem@10", ["name=other"], "name=other: unexpected: --name never names the fork"),
        ("stem@10", ["data.path=nowhere"], "nowhere"),
    ],
)  # fmt: skip
def test_what_cannot_be_forked_is_told_and_nothing_is_begun(
    wanted: str,
    overrides: list[str],
    line: str,
    stem: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(stem.parent.parent)
    before = sorted(path.name for path in stem.parent.iterdir())
    assert run_here(["fork", wanted, "--name", "never", *overrides]) == 2
    told = capsys.readouterr().err.splitlines()
    assert any(line in one for one in told), told
    assert sorted(path.name for path in stem.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"tokenizer_fingerprint": "another"}, "prepared with another tokenizer than"),
        ({"vocabulary": LARGER}, "changes the shape of the model: "),
    ],
)
def test_data_for_another_model_is_told(
    changed: dict[str, Any], line: str, stem: Path, tmp_path: Path
) -> None:
    manifest = write_data_set(tmp_path / "data", samples=SAMPLES)
    manifest.model_copy(update=changed).write(Storage(str(tmp_path / "data")))
    with pytest.raises(UserError, match=line):
        planned(stem, "never", f"data.path={tmp_path / 'data'}")


@pytest.fixture(scope="module")
def phased(folder: Path) -> Path:
    """A run of phases of 5, 10 and 5 steps."""
    phases = [{"steps": 5}, {"steps": 10, "optimizer": {"lr": 5e-4}}, {"steps": 5}]
    return lone_run(folder, "phased", steps=None, phases=phases, **EVERY)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("steps=8", "command line: steps: 8: unused, because every phase has its own: expected "),
        ("epochs=1", "command line: epochs: 1: unused, because every phase"),
        ("tokens=9000", "command line: tokens: 9000: unused, because every phase"),
        ("phases.0.steps=3", "phases.0.steps: 3: expected 5 steps: the parent, "),
        ("phases.0.steps=7", "phases.0.steps: 7: expected 5 steps: the parent, "),
        ("phases.1.steps=4", "phases.1.steps: 4: expected more than 5 steps: the parent, "),
        ("phases.0.batch_size=7", "phases.0.batch_size: 7: expected 21, as in "),
        ("phases.0.optimizer.lr=7e-4", "phases.0.optimizer.lr: 0.0007: expected 0.001, as in "),
        ("phases.0.schedule.final=0.5", "phases.0.schedule.final: 0.5: expected 0.0, as in "),
        ("data.prepare.seq_len=8", "data.prepare.seq_len=8: unexpected: a fork uses "),
    ],
)
def test_what_no_step_of_a_fork_would_follow_is_refused(
    phased: Path, override: str, line: str
) -> None:
    with pytest.raises(UserError) as refused:
        planned(phased, "vain", override)
    assert refused.value.problems[0].startswith(line)
