"""Recipe files: bases, overrides, and one line for every mistake."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml

from elastrata.recipe.file import load_recipe, to_yaml
from elastrata.recipe.schema import recipe_schema
from elastrata.recipe.yaml_reader import available_recipes
from elastrata.recipe.yaml_values import parse_yaml
from elastrata_pipelines.errors import UserError

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
        (
            "steps.x=1",
            "command line: steps.x: 1: steps is a value, not a section with keys",
        ),
        ("workload.name=brt", "workload.name: 'brt': no such workload (did you mean 'bert'?)"),
        ("workload={}", "command line: workload: needs a name, such as 'bert'"),
        ("workload=3", "command line: workload: 3: expected a section with name"),
        (
            "workers.gpus=0.5",
            "command line: workers.gpus: 0.5: expected a whole number at least 0 or 'auto'",
        ),
        ("steps=", "command line: steps: missing: expected steps, epochs or tokens"),
        ("steps=[1", "command line: steps: [1: not valid YAML"),
        ("name=a/b", "command line: name: 'a/b': expected letters, digits"),
        (
            "schedule={warmup_steps: 13, warmup_offset: 3}",
            "schedule.warmup_steps: 13: expected fewer than steps (10) plus warmup_offset (3)",
        ),
        ("schedule.power=2", "schedule: power (2.0) is for the shape polynomial, not linear"),
        (
            "schedule={shape: wsd, warmup_steps: 3, decay: {steps: 8}}",
            "schedule.decay.steps: 8: expected at most steps (10) less the warm-up (3)",
        ),
        ("schedule={shape: polynomial, power: 0}", "schedule.power: 0: expected a number above 0"),
        (
            "batch_size_warmup={start: 8, steps: 5}",
            "batch_size_warmup.start: 8: expected at least workers.min (1) and fewer than "
            "batch_size (8)",
        ),
        (
            "schedule.shape=cosin",
            "schedule.shape: 'cosin': expected 'linear', 'cosine', 'constant', 'polynomial' or "
            "'wsd' (did you mean 'cosine'?)",
        ),
        ("clip.max_norm=0", "command line: clip.max_norm: 0: expected a number above 0"),
        (
            "evaluation={every: 3, every_samples: 9}",
            "command line: evaluation: needs either every (steps) or every_samples, and null for "
            "the other",
        ),
        (
            "target={metric: eval/loss, at_least: 1, at_most: 2}",
            "command line: target: needs either at_least (such as 0.72) or at_most",
        ),
        (
            "target={metric: mlm_acuracy, at_least: 0.72}",
            "command line: target.metric: 'mlm_acuracy': expected one of eval/loss, eval/mlm_loss, "
            "eval/mlm_accuracy (did you mean 'eval/mlm_accuracy'?)",
        ),
        ("workers.min=9", "min (9) is larger than max (1)"),
        ("parallel.replicate=2", "parallel.replicate: 2: expected at most workers.max (1)"),
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
        ("{lr: .inf}", "optimizer.lr: .inf: expected a number above 0"),
        ("{betas: [0.9, 1]}", "optimizer.betas.1: 1: expected a number at least 0 and below 1"),
        ("{trust_max: 2}", "optimizer.trust_max: 2: unknown key; expected name, lr, betas, eps"),
        (
            "{name: lamb, trust_min: 2, trust_max: 1}",
            "command line: optimizer: trust_min (2.0) is larger than trust_max (1.0)",
        ),
        ("{name: lamb, trust_max: null}", "optimizer.trust_max: null: expected a number above 0"),
        ("{name: muon, momentum: 1}", "optimizer.momentum: 1: expected a number at least 0 and be"),
        ("{name: muon, lr: true}", "optimizer.lr: true: expected a number above 0"),
    ],
)
def test_a_bad_optimizer_in_one_line(folder: Path, section: str, line: str) -> None:
    whole = section if "lr:" in section else section.replace("{", "{lr: 1e-3, ", 1)
    found = problems("good.yaml", f"optimizer={whole}")
    assert len(found) == 1
    assert line in found[0]


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
