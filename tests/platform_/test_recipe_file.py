"""Recipe files: bases, overrides, and one line for every mistake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from elastrata.core.optimizers.adamw import AdamWConfig
from elastrata.recipe.file import load_recipe, to_yaml
from elastrata.recipe.json_schema import recipe_schema
from elastrata.recipe.yaml_reader import available_recipes
from elastrata.recipe.yaml_values import parse_yaml
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.preparation import TokenizerConfig

GOOD = """\
workload: {name: bert, hidden_size: 32, num_layers: 1, num_heads: 2, max_positions: 64}
data: {path: data}
steps: 10
batch_size: 8
optimizer: {lr: 1e-3}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text(GOOD, encoding="utf-8")
    return tmp_path


def problems(name: str, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_recipe(name, overrides)
    return list(caught.value.problems)


@pytest.mark.parametrize("name", sorted(available_recipes()))
def test_every_recipe_that_ships_loads(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name.replace("/", "-")


def test_a_recipe_survives_being_written(folder: Path) -> None:
    recipe = load_recipe("good.yaml", ["optimizer.betas=[0.8, 0.9]", "workers.max=3"])
    (folder / "again.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    assert load_recipe("again.yaml") == recipe


def test_a_tokenizer_that_is_loaded_survives_being_written() -> None:
    config = TokenizerConfig(load="models/theirs")
    assert TokenizerConfig.model_validate(config.model_dump()) == config


def test_a_file_gives_its_run_its_name_and_never_its_base(folder: Path) -> None:
    (folder / "base.yaml").write_text(GOOD + "name: chosen\n", encoding="utf-8")
    (folder / "variant.yaml").write_text("extends: base.yaml\n", encoding="utf-8")
    assert load_recipe("good.yaml").name == "good"
    assert load_recipe("base.yaml").name == "chosen"
    assert load_recipe("variant.yaml").name == "variant"
    assert load_recipe("variant.yaml", ["name=mine"]).name == "mine"


def test_a_variant_says_only_what_is_different(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "middle.yaml").write_text(
        "extends: ../good.yaml\nsteps: 20\noptimizer: {betas: [0.5, 0.6]}\n", encoding="utf-8"
    )
    (folder / "top.yaml").write_text(
        "extends: sub/middle.yaml\noptimizer: {lr: 2e-3}\n", encoding="utf-8"
    )
    recipe = load_recipe("top.yaml")
    assert (recipe.steps, recipe.batch_size) == (20, 8)
    assert (recipe.optimizer.lr, recipe.optimizer.betas) == (2e-3, (0.5, 0.6))


def test_a_variant_of_a_recipe_by_name(folder: Path) -> None:
    (folder / "mine.yaml").write_text("extends: bert/tiny\nseed: 7\n", encoding="utf-8")
    assert load_recipe("mine.yaml").workload == load_recipe("bert/tiny").workload


def test_overrides_reach_sections_lists_and_null(folder: Path) -> None:
    recipe = load_recipe(
        "good.yaml",
        ["optimizer.betas=[0.1, 0.2]", "optimizer.betas.1=0.3", "workers.threads=null", "seed=-1"],
    )
    assert recipe.optimizer.betas == (0.1, 0.3)
    assert recipe.seed == -1
    assert load_recipe("good.yaml", ["optimizer.lr=3e-4"]).optimizer.lr == 3e-4


def test_all_mistakes_at_once_each_with_its_place(folder: Path) -> None:
    (folder / "bad.yaml").write_text(
        "workload: {name: bert, hidden_sise: 12, num_heads: x}\n"
        "data: {path: d, prepare: {sources: [{paths: [a], nam: x}],\n"
        "       tokenizer: {train: wordpece}, seq_len: 4, held_out: 2}}\n"
        "steps: 0\nlr: 3e-4\nbatch_size: true\noptimizer: {lr: -1, betas: [0.1]}\n"
        "schedule: {shape: lin}\nworkers: {gpus: some}\nprecission: bf16\n",
        encoding="utf-8",
    )
    found = problems("bad.yaml", "clip.max_norm=big")
    wanted = [
        "bad.yaml: workload.num_heads: 'x': expected a whole number above 0",
        "bad.yaml: workload.hidden_sise: 12: unknown key (did you mean 'hidden_size'?)",
        "bad.yaml: data.prepare.sources.0.nam: 'x': unknown key (did you mean 'name'?)",
        "bad.yaml: data.prepare.tokenizer.train: 'wordpece': expected 'wordpiece', 'bpe' or null "
        "(did you mean 'wordpiece'?)",
        "bad.yaml: data.prepare.seq_len: 4: expected a whole number at least 8",
        "bad.yaml: steps: 0: expected a whole number above 0 or null",
        "bad.yaml: lr: 0.0003: unknown key (did you mean 'optimizer.lr'?)",
        "bad.yaml: batch_size: true: expected a whole number above 0",
        "bad.yaml: optimizer.lr: -1: expected a number above 0",
        "bad.yaml: optimizer.betas.1: missing: expected a number at least 0 and below 1",
        "bad.yaml: schedule.shape: 'lin': expected 'linear', 'cosine', 'constant', 'polynomial' or "
        "'wsd' (did you mean 'linear'?)",
        "bad.yaml: workers.gpus: 'some': expected a whole number at least 0 or 'auto'",
        "bad.yaml: precission: 'bf16': unknown key (did you mean 'precision'?)",
        "command line: clip.max_norm: 'big': expected a number above 0",
    ]
    assert set(wanted) <= set(found)
    assert [line for line in found if line not in wanted] == [
        line for line in found if line.startswith("bad.yaml: data.prepare.held_out: 2: expected")
    ]
    assert not any("pydantic" in line or "Input should" in line for line in found)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("steps", "command line: steps: expected key=value, such as optimizer.lr=3e-4"),
        ("=3", "command line: =3: expected key=value, such as optimizer.lr=3e-4"),
        (
            "steps.x=1",
            "command line: steps.x: 1: steps is a value, not a section with keys",
        ),
        ("workload.name=brt", "workload.name: 'brt': no such workload (did you mean 'bert'?)"),
        ("workload={}", "command line: workload: needs a name, such as 'bert'"),
        ("workload=3", "command line: workload: 3: expected a section with name"),
        ("optimizer=3", "command line: optimizer: 3: expected a section with name, lr, betas, eps"),
        (
            "workers.gpus=0.5",
            "command line: workers.gpus: 0.5: expected a whole number at least 0 or 'auto'",
        ),
        ("steps=", "command line: steps: missing: expected steps, epochs or tokens"),
        ("steps=[1", "command line: steps: [1: not valid YAML"),
        ("name=a/b", "command line: name: 'a/b': expected letters, digits"),
        ("schedule.warmup_steps=10", "command line: schedule.warmup_steps: 10: expected fewer"),
        (
            "schedule={warmup_steps: 13, warmup_offset: 3}",
            "schedule.warmup_steps: 13: expected fewer than steps (10) plus warmup_offset (3)",
        ),
        (
            "schedule={warmup_steps: 3, warmup_offset: 3}",
            "command line: schedule: warmup_offset (3): expected fewer than warmup_steps (3)",
        ),
        ("schedule.power=2", "schedule: power (2.0) is for the shape polynomial, not linear"),
        ("schedule.decay.steps=2", "schedule: decay is for the shape wsd, not linear"),
        (
            "schedule={shape: wsd, warmup_steps: 3, decay: {steps: 8}}",
            "schedule.decay.steps: 8: expected at most steps (10) less the warm-up (3)",
        ),
        ("schedule={shape: polynomial, power: 0}", "schedule.power: 0: expected a number above 0"),
        ("schedule.decay_from=start", "expected 'warmup_end' or 'first_step'"),
        (
            "batch_size_warmup={start: 2, steps: 10}",
            "batch_size_warmup.steps: 10: expected fewer than steps (10)",
        ),
        (
            "batch_size_warmup={start: 8, steps: 5}",
            "batch_size_warmup.start: 8: expected at least workers.min (1) and fewer than "
            "batch_size (8)",
        ),
        ("batch_size_warmup.start=2", "batch_size_warmup.steps: missing: expected a whole number"),
        (
            "batch_size_warmup={start: 9, steps: 5}",
            "batch_size_warmup.start: 9: expected at least workers.min (1) and fewer than "
            "batch_size (8)",
        ),
        ("batch_size_warmup={start: 0, steps: 5}", "start: 0: expected a whole number above 0"),
        (
            "schedule.shape=cosin",
            "schedule.shape: 'cosin': expected 'linear', 'cosine', 'constant', 'polynomial' or "
            "'wsd' (did you mean 'cosine'?)",
        ),
        ("clip.max_norm=0", "command line: clip.max_norm: 0: expected a number above 0"),
        ("clip.max_norm=-1", "command line: clip.max_norm: -1: expected a number above 0"),
        ("clip.max_norm=.nan", "command line: clip.max_norm: .nan: expected a number above 0"),
        (
            "clip.method=bucketwize",
            "clip.method: 'bucketwize': expected 'global_norm', 'bucketwise' or 'none' (did you "
            "mean 'bucketwise'?)",
        ),
        ("micro_batch_tokens=0", "micro_batch_tokens: 0: expected a whole number above 0"),
        ("evaluation.every=0", "evaluation.every: 0: expected a whole number above 0 or null"),
        ("evaluation.every=null", "evaluation: needs either every (steps) or every_samples"),
        (
            "evaluation={every: 3, every_samples: 9}",
            "command line: evaluation: needs either every (steps) or every_samples, the other one "
            "null",
        ),
        ("evaluation.every_samples=0", "evaluation.every_samples: 0: expected a whole number"),
        ("target=3", "command line: target: 3: expected a section with metric, at_least and"),
        ("target.at_least=1", "target.metric: missing: expected text"),
        (
            "target={metric: eval/loss}",
            "command line: target: needs either at_least (such as 0.72) or at_most",
        ),
        (
            "target={metric: eval/loss, at_least: 1, at_most: 2}",
            "command line: target: needs either at_least (such as 0.72) or at_most",
        ),
        (
            "target={metric: eval/loss, at_most: .inf}",
            "target.at_most: .inf: expected a number or null",
        ),
        (
            "target={metric: mlm_acuracy, at_least: 0.72}",
            "command line: target.metric: 'mlm_acuracy': expected one of eval/loss, eval/mlm_loss, "
            "eval/mlm_accuracy (did you mean 'eval/mlm_accuracy'?)",
        ),
        (
            "target={metric: eval/nsp_accuracy, at_least: 0.72}",
            "target.metric: 'eval/nsp_accuracy': expected one of eval/loss, eval/mlm_loss",
        ),
        ("workers.min=9", "min (9) is larger than max (1)"),
        ("parallel.replicate=2", "parallel.replicate: 2: expected at most workers.max (1)"),
        ("parallel.replicate=0", "replicate: 0: expected a whole number above 0 or 'all'"),
        ("parallel.prefetch=0", "parallel.prefetch: 0: expected a whole number above 0 or null"),
        ("tracking.uri=3", "command line: tracking.uri: 3: expected text (not empty) or null"),
    ],
)
def test_a_bad_override_in_one_line(folder: Path, override: str, line: str) -> None:
    found = problems("good.yaml", override)
    assert len(found) == 1
    assert line in found[0]


@pytest.mark.parametrize(
    ("section", "line"),
    [
        (
            "{name: lam}",
            "optimizer.name: 'lam': expected 'adamw', 'lamb' or 'muon' (did you mean 'lamb'?)",
        ),
        ("{name: null}", "optimizer.name: null: expected 'adamw', 'lamb' or 'muon'"),
        ("{lr: .inf}", "optimizer.lr: .inf: expected a number above 0"),
        ("{weight_decay: -1}", "optimizer.weight_decay: -1: expected a number at least 0"),
        ("{betas: [0.9, 1]}", "optimizer.betas.1: 1: expected a number at least 0 and below 1"),
        ("{trust_max: 2}", "optimizer.trust_max: 2: unknown key; expected name, lr, betas, eps"),
        ("{name: muon, trust_max: 2}", "optimizer.trust_max: 2: unknown key; expected name, lr"),
        (
            "{name: lamb, trust_min: 2, trust_max: 1}",
            "command line: optimizer: trust_min (2.0) is larger than trust_max (1.0)",
        ),
        ("{name: lamb, trust_max: 0}", "optimizer.trust_max: 0: expected a number above 0"),
        ("{name: lamb, trust_max: -1}", "optimizer.trust_max: -1: expected a number above 0"),
        ("{name: lamb, trust_max: null}", "optimizer.trust_max: null: expected a number above 0"),
        ("{name: lamb, trust_max: big}", "optimizer.trust_max: 'big': expected a number above 0"),
        ("{name: lamb, trust_min: .inf}", "optimizer.trust_min: .inf: expected a number at least"),
        ("{name: lamb, trust_max: .nan}", "optimizer.trust_max: .nan: expected a number above 0"),
        ("{name: lamb, trust_min: -1}", "optimizer.trust_min: -1: expected a number at least 0"),
        ("{name: muon, momentum: 1}", "optimizer.momentum: 1: expected a number at least 0 and be"),
        ("{name: muon, newton_schulz: fp16}", "expected 'fp32' or 'bf16'"),
        ("{name: muon, nesterov: 2}", "optimizer.nesterov: 2: expected true or false"),
        ("{name: muon, lr: true}", "optimizer.lr: true: expected a number above 0"),
    ],
)
def test_a_bad_optimizer_in_one_line(folder: Path, section: str, line: str) -> None:
    whole = section if "lr:" in section else section.replace("{", "{lr: 1e-3, ", 1)
    found = problems("good.yaml", f"optimizer={whole}")
    assert len(found) == 1
    assert line in found[0]


def test_the_optimizer_without_a_name_is_adamw(folder: Path) -> None:
    assert isinstance(load_recipe("good.yaml").optimizer, AdamWConfig)
    lamb = load_recipe("good.yaml", ["optimizer.name=lamb", "optimizer.trust_max=.inf"]).optimizer
    assert (lamb.name, lamb.lr, lamb.trust_max) == ("lamb", 1e-3, float("inf"))


def test_sizes_that_each_are_fine_and_together_impossible(folder: Path) -> None:
    prepare = "{sources: [{paths: x}], tokenizer: {train: bpe}, seq_len: 512}"
    found = problems(
        "good.yaml",
        f"data.prepare={prepare}",
        "micro_batch_tokens=256",
        "workers={min: 9, max: 9}",
    )
    assert found == [
        "command line: micro_batch_tokens: 256: expected at least data.prepare.seq_len (512), "
        "the longest sample",
        "good.yaml: batch_size: 8: expected at least workers.min (9), a sample for every worker",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("steps: [1\nx: 2\n", "f.yaml:2: not valid YAML"),
        (
            "steps: 1\nseed: 2\nsteps: 3\n",
            "f.yaml:3: not valid YAML: the key 'steps' is given twice",
        ),
        ("- 1\n", "f.yaml: expected keys with values"),
        ("extends: f.yaml\n", "the recipe extends itself (f.yaml -> f.yaml)"),
        ("extends: nowhere.yaml\n", "f.yaml: extends: nowhere.yaml: no such recipe file"),
        ("extends: bert/tinny\n", "f.yaml: extends: bert/tinny: no such recipe (did you mean"),
        ("extends: [a]\n", "f.yaml: extends: ['a']: expected one recipe's file or name"),
    ],
)
def test_a_bad_file_in_one_line(folder: Path, text: str, line: str) -> None:
    (folder / "f.yaml").write_text(text, encoding="utf-8")
    found = problems("f.yaml")
    assert len(found) == 1
    assert line in found[0]


def test_a_mistake_in_a_base_is_told_of_the_base(folder: Path) -> None:
    (folder / "base.yaml").write_text(GOOD + "steeps: 3\n", encoding="utf-8")
    (folder / "top.yaml").write_text("extends: base.yaml\nseed: x\n", encoding="utf-8")
    assert problems("top.yaml") == [
        "top.yaml: seed: 'x': expected a whole number",
        "base.yaml: steeps: 3: unknown key (did you mean 'steps'?)",
    ]


def test_a_missing_or_unreadable_recipe(folder: Path) -> None:
    (folder / "latin.yaml").write_bytes(b"name: \xe9\n")
    assert problems("nowhere.yaml") == ["nowhere.yaml: no such recipe file"]
    assert problems("latin.yaml") == ["latin.yaml: not UTF-8 text"]
    assert problems("bert/tinny")[0].startswith("bert/tinny: no such recipe (did you mean 'bert/")
    (folder / "empty.yaml").write_text("", encoding="utf-8")
    assert "empty.yaml: steps: missing: expected steps, epochs or tokens" in problems("empty.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1.5", 1.5),
        (".5", 0.5),
        ("10", 10),
        ("1_000", 1000),
        ("0x10", 16),
        ("yes", "yes"),
        ("true", True),
        ("1:30", "1:30"),
        ("2026-11-21", "2026-11-21"),
        ("010", "010"),
        ("~", None),
        ("", None),
        ("3e", "3e"),
    ],
)
def test_yaml_scalars_mean_what_they_look_like(text: str, value: object) -> None:
    found = parse_yaml(text, "x")
    assert found == value
    assert type(found) is type(value)


def test_the_schema_takes_what_the_loader_takes(folder: Path) -> None:
    schema = recipe_schema()
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    validator.validate(yaml.safe_load(to_yaml(load_recipe("good.yaml"))))
    validator.validate({"extends": "bert/tiny", "optimizer": {"eps": 1e-8}})
    lamb, muon = {"name": "lamb", "trust_max": 1}, {"name": "muon", "lr": 1, "momentum": 0.9}
    validator.validate({"extends": "bert/tiny", "optimizer": lamb})
    validator.validate({**yaml.safe_load(to_yaml(load_recipe("good.yaml"))), "optimizer": muon})
    for wrong in (
        {"steps": 3},
        {"extends": "bert/tiny", "optimizer": {**lamb, "momentum": 0.9}},
        {"extends": "bert/tiny", "stepps": 3},
        {"extends": "bert/tiny", "workload": {"hidden_sise": 3}},
        {**yaml.safe_load(to_yaml(load_recipe("good.yaml"))), "steps": "many"},
    ):
        assert not validator.is_valid(wrong)


def _loads(folder: Path, values: dict[str, Any]) -> bool:
    (folder / "tried.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    with suppress(UserError):
        return bool(load_recipe("tried.yaml"))
    return False


def _whole_numbers(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from _whole_numbers(value, (*path, key))
        elif type(value) is int:
            yield (*path, key)


def test_the_schema_and_the_loader_agree_on_whole_numbers_written_with_a_point(
    folder: Path,
) -> None:
    validator = jsonschema.Draft202012Validator(recipe_schema())
    text = to_yaml(load_recipe("good.yaml"))
    paths = list(_whole_numbers(yaml.safe_load(text)))
    assert ("steps",) in paths
    for path in paths:
        values = yaml.safe_load(text)
        *above, key = path
        section = reduce(getitem, above, values)
        section[key] = float(section[key])
        assert _loads(folder, values), path
        assert validator.is_valid(values), path
        section[key] += 0.25
        assert _loads(folder, values) == validator.is_valid(values), path
