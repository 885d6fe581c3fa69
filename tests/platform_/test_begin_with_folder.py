"""`begin_with` a folder of transformers: its loss, in any layout; exported again, to the bit; and
whatever is wrong with it, in one line each."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from elastrata.parallel.mesh import lone_group
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.preflight import find_training_data
from elastrata.workload.hf_mapping import HasCounterpart, read_settings
from elastrata.workload.workload import workload_class
from elastrata_pipelines.errors import UserError
from support.begin_ranks import Begun, first_losses
from support.ranks import run_fresh_ranks, run_ranks
from support.synthetic import VOCABULARY, tiny_recipe, write_data_set
from support.their_models import WORKLOADS, save_theirs, their_loss

KINDS = list(WORKLOADS)
LAYOUTS: list[Any] = [
    (2, {}),
    pytest.param(3, {}, marks=pytest.mark.matrix),
    (2, {"tensor": 2}),
    (2, {"pipeline": 2}),
]
CLOSE = {"rel": 0.0, "abs": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("begin")


@pytest.fixture(scope="module")
def losses(folder: Path) -> dict[str, float]:
    """Makes the data and a folder for each kind of model; transformers' own loss of each."""
    write_data_set(folder / "data", samples=300, held_out=40)
    return {
        kind: their_loss(save_theirs(kind, folder / kind), _recipe(folder, kind)) for kind in KINDS
    }


def _recipe(folder: Path, kind: str, **changes: Any) -> dict[str, Any]:
    evaluation = {"every": 2, "samples": 32}
    values = tiny_recipe(folder / "data", folder / "runs", evaluation=evaluation)
    begin = {"workload": WORKLOADS[kind], "begin_with": str(folder / kind)}
    return {**values, **begin, **changes}


def _begun(folder: Path, kind: str, **changes: Any) -> Begun:
    with lone_group(torch.device("cpu")):
        recipe = Recipe.model_validate(_recipe(folder, kind, **changes))
        return Begun(0, 1, recipe, folder / "runs" / "child")


def _refused(folder: Path, kind: str, **changes: Any) -> tuple[str, ...]:
    with pytest.raises(UserError) as refused:
        _begun(folder, kind, **changes)
    return refused.value.problems


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_loss_is_transformers_own(
    folder: Path, losses: dict[str, float], kind: str
) -> None:
    with lone_group(torch.device("cpu")):
        begun = Begun(0, 1, Recipe.model_validate(_recipe(folder, kind)), folder / "runs" / "one")
        assert begun.loss() == pytest.approx(losses[kind], **CLOSE)


@pytest.mark.parametrize(("world_size", "parallel"), LAYOUTS)
def test_and_so_it_is_in_any_layout(
    folder: Path, losses: dict[str, float], world_size: int, parallel: dict[str, Any]
) -> None:
    count = {"min": world_size, "max": world_size, "cpus": 0.4, "threads": 1, "spares": False}
    cases = [
        (_recipe(folder, kind, workers=count, parallel=parallel), str(folder / "runs" / "many"))
        for kind in KINDS
    ]
    run = run_fresh_ranks if parallel else run_ranks
    for found in run(world_size, first_losses, cases):
        assert found == pytest.approx([losses[kind] for kind in KINDS], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_exported_at_once_is_equal_to_the_bit(
    folder: Path, losses: dict[str, float], kind: str, tmp_path: Path
) -> None:
    begun = _begun(folder, kind)
    recipe = Recipe.model_validate(_recipe(folder, kind))
    vocabulary = find_training_data(recipe).vocabulary
    recipe.workload.export(begun.weights(), vocabulary, 48, None, tmp_path / "again")
    theirs = load_file(folder / kind / "model.safetensors")
    ours = load_file(tmp_path / "again" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("saving", [{"max_shard_size": "20KB"}, {"dtype": torch.bfloat16}])
def test_shards_and_half_numbers_are_read(
    folder: Path, losses: dict[str, float], tmp_path: Path, saving: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "gpt2", dtype=saving.get("dtype"))
    model.save_pretrained(tmp_path / "m", max_shard_size=saving.get("max_shard_size", "5GB"))
    assert (tmp_path / "m" / "model.safetensors.index.json").exists() == ("dtype" not in saving)
    begun = _begun(folder, "gpt2", begin_with=str(tmp_path / "m"))
    table = model.state_dict()["transformer.wte.weight"].float()
    assert torch.equal(begun.weights()["embeddings.tokens.weight"], table)


def test_a_model_without_its_head_and_old_names_are_known(
    folder: Path, losses: dict[str, float], tmp_path: Path
) -> None:
    for kind, prefix in (("gpt2", "transformer."), ("bert", "")):
        shutil.copytree(folder / kind, tmp_path / kind)
        file = tmp_path / kind / "model.safetensors"
        renamed = {
            name.removeprefix(prefix)
            .replace("LayerNorm.weight", "LayerNorm.gamma")
            .replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in load_file(file).items()
        }
        if kind == "gpt2":
            renamed["h.0.attn.bias"] = torch.ones(1, 1, 48, 48, dtype=torch.bool)
        save_file(renamed, file)
        plain, begun = _begun(folder, kind), _begun(folder, kind, begin_with=str(tmp_path / kind))
        found = begun.weights()
        assert all(torch.equal(found[name], value) for name, value in plain.weights().items())


def test_a_vocabulary_that_grew_is_extended_where_that_is_asked_for(
    folder: Path, losses: dict[str, float], tmp_path: Path
) -> None:
    save_theirs("gpt2", tmp_path / "small", num_ids=VOCABULARY - 7)
    begin = {"weights": str(tmp_path / "small")}
    (line,) = _refused(folder, "gpt2", begin_with=begin)
    assert line.startswith("begin_with.extend_vocabulary: false: the tokenizer of ")
    begun = _begun(folder, "gpt2", begin_with={**begin, "extend_vocabulary": True})
    drawn = _begun(folder, "gpt2", begin_with=None).weights()["embeddings.tokens.weight"]
    known = load_file(tmp_path / "small" / "model.safetensors")["transformer.wte.weight"]
    found = begun.weights()["embeddings.tokens.weight"]
    assert torch.equal(found, torch.cat((known, drawn[len(known) :])))
    assert any(
        "embeddings of 7 new token ids are initialised at random" in line for line in begun.lines
    )


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_an_id_of_the_tokenizer_are_kept(
    folder: Path, losses: dict[str, float], tmp_path: Path, kind: str
) -> None:
    import transformers

    model = save_theirs(kind, tmp_path / "padded", num_ids=VOCABULARY + 7)
    begun = _begun(folder, kind, begin_with=str(tmp_path / "padded"))
    place = f"begin_with.weights: {tmp_path / 'padded'}"
    assert begun.lines[-1] == f"{place}: keeping 7 embeddings without a token id"
    # The softmax is over all rows, as in transformers.
    theirs_loss = their_loss(model, _recipe(folder, kind))
    assert begun.loss() == pytest.approx(theirs_loss, **CLOSE)
    workload = begun.recipe.workload
    vocabulary = find_training_data(begun.recipe).vocabulary
    workload.export(begun.weights(), vocabulary, 48, None, tmp_path / "again")
    theirs = load_file(tmp_path / "padded" / "model.safetensors")
    ours = load_file(tmp_path / "again" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    loader = getattr(transformers, workload.exported_as.loader)
    loaded = loader.from_pretrained(tmp_path / "again")
    assert loaded.config.vocab_size == VOCABULARY + 7 == workload.num_ids(vocabulary)


def test_a_vocab_size_below_the_tokenizers_ids_is_refused(
    folder: Path, losses: dict[str, float]
) -> None:
    (line,) = _refused(folder, "gpt2", workload={**WORKLOADS["gpt2"], "vocab_size": 90})
    assert line.endswith(
        f"workload.vocab_size: 90: expected at least {VOCABULARY}, the ids of this data set's "
        "tokenizer"
    )


def _altered(folder: Path, to: Path, kind: str, **changes: torch.Tensor | None) -> str:
    """A copy of a folder with some tensors replaced, or without them."""
    shutil.copytree(folder / kind, to)
    tensors: dict[str, Any] = load_file(to / "model.safetensors") | changes
    save_file({n: t for n, t in tensors.items() if t is not None}, to / "model.safetensors")
    return str(to)


def test_missing_and_other_tensors_are_named(
    folder: Path, losses: dict[str, float], tmp_path: Path
) -> None:
    names = ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    gone = {f"transformer.h.{layer}.{name}.bias": None for layer in range(2) for name in names}
    extra = {"transformer.adapter.weight": torch.zeros(3)}
    model = _altered(folder, tmp_path / "m", "gpt2", **gone, **extra)
    missing, other = _refused(folder, "gpt2", begin_with=model)
    where = f"begin_with.weights: {model}"
    assert missing.startswith(f"{where}: lacks transformer.h.0.attn.c_proj.bias, ")
    assert "transformer.h.1.attn.c_proj.bias and 2 more" in missing
    assert other == f"{where}: has transformer.adapter.weight, which the model lacks"


def test_another_architecture_is_refused_key_by_key(folder: Path, losses: dict[str, float]) -> None:
    (line,) = _refused(folder, "gpt2", begin_with=str(folder / "bert"))
    assert line.endswith("config.json: a bert: expected a model of workload gpt")
    changed = {**WORKLOADS["gpt2"], "num_layers": 3, "norm_eps": 1e-6}
    lines = _refused(folder, "gpt2", workload=changed)
    where = f"as {folder / 'gpt2'} has"
    assert f"workload.num_layers: 3: expected 2, {where}" in lines
    assert f"workload.norm_eps: 1e-06: expected 1e-05, {where}" in lines


def test_a_folder_without_weights_and_a_pickle_are_refused(
    folder: Path, losses: dict[str, float], tmp_path: Path
) -> None:
    model = tmp_path / "m"
    shutil.copytree(folder / "gpt2", model)
    (model / "model.safetensors").unlink()
    (line,) = _refused(folder, "gpt2", begin_with=str(model))
    assert line.startswith(f"begin_with.weights: {model}: has no weights")
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    (line,) = _refused(folder, "gpt2", begin_with=str(model))
    assert line.startswith(f"begin_with.weights: {model}: pytorch_model.bin is a pickle")
    (line,) = _refused(folder, "gpt2", begin_with=str(tmp_path / "nothing"))
    assert line.startswith(f"begin_with.weights: {tmp_path / 'nothing'}: no such folder")


def test_a_header_that_lies_is_refused(
    folder: Path, losses: dict[str, float], tmp_path: Path
) -> None:
    model = tmp_path / "m"
    shutil.copytree(folder / "gpt2", model)
    header = json.dumps({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(4)
    (model / "model.safetensors").write_bytes(content)
    (line,) = _refused(folder, "gpt2", begin_with=str(model))
    assert "model.safetensors: truncated or altered (" in line


@pytest.mark.parametrize("value", ["x", [1], None, 1.5])
@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_wrong_types_in_a_configuration_are_told(kind: str, value: object) -> None:
    """Whichever key has the value, the settings can be read or the file is named."""
    good = AutoConfig.for_model(kind).to_dict()
    refused = set()
    for key in good.keys() - {"model_type"}:
        config = SimpleNamespace(**{**good, key: value})
        for workload in (workload_class("gpt"), workload_class("bert")):
            assert issubclass(workload, HasCounterpart)
            try:
                read_settings(workload, config, "there/config.json")
            except UserError as error:
                refused.update(error.problems)
    assert refused
    assert all(line.startswith("there/config.json: ") for line in refused)
