"""What a trained model makes of text: continuations, perplexity, and who is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastrata.cli.main import run as run_here
from elastrata.inference.language_model import (
    LanguageModel,
    Sampling,
    compute_perplexity,
    continue_text,
    load_language_model,
    sample_token,
)
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.preparation.config import TokenizerConfig
from elastrata_pipelines.preparation.training import train_tokenizer
from elastrata_pipelines.rows import Rows
from elastrata_workloads.bert import Bert
from elastrata_workloads.gpt import Gpt
from support.documented import documented_keys

SENTENCE = "Some say the world will end in fire, some say in ice. "
SEQ_LEN = 48
GREEDY = Sampling(temperature=0)


def _rows(tokens: np.ndarray) -> Rows:
    """One sample."""
    return Rows(
        sample_ids=np.ones(1, np.uint64),
        epochs=np.zeros(1, np.int64),
        lengths=np.array([len(tokens)]),
        tokens=tokens,
    )


def _write_tokenizer(folder: Path) -> Vocabulary:
    files = train_tokenizer(
        [SENTENCE * 9], TokenizerConfig(train="bpe", vocab_size=300), seq_len=SEQ_LEN
    )
    folder.mkdir()
    for name, content in files.contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    return files.vocabulary()


@pytest.fixture(scope="module", params=["learned", "rotary"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """An exported model that knows one sentence, over and over."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("model")
    vocabulary = _write_tokenizer(place / "tokenizer")
    style = {} if request.param == "learned" else {
        "positions": "rotary", "activation": "swiglu", "norm": "rms", "bias": False,
        "num_kv_heads": 2,
    }  # fmt: skip
    gpt = Gpt(hidden_size=32, num_layers=2, num_heads=4, max_positions=SEQ_LEN, **style)
    model = gpt.build_model(vocabulary, SEQ_LEN)
    gpt.export(model.state_dict(), vocabulary, SEQ_LEN, place / "tokenizer", place / "new")
    encoded = load_language_model(str(place / "new")).tokenizer.encode(SENTENCE * 9)
    batch = gpt.collate(_rows(np.array(encoded[:SEQ_LEN], np.uint16)), vocabulary, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        (gpt.loss(model, batch).terms["lm"] / batch.weights["lm"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    gpt.export(model.state_dict(), vocabulary, SEQ_LEN, place / "tokenizer", place / "trained")
    yield place / "trained"
    torch.set_num_threads(threads)


@pytest.fixture
def model(folder: Path) -> LanguageModel:
    return load_language_model(str(folder))


def test_greedy_tokens_are_those_of_a_full_forward_pass_each(model: LanguageModel) -> None:
    ids = model.tokenizer.encode("world")
    start = len(ids)
    for _ in range(15):
        with torch.inference_mode():
            logits = model.network(input_ids=torch.tensor([ids])).logits[0, -1]
        ids.append(int(logits.argmax()))
    said = continue_text(model, "world", tokens=15, sampling=GREEDY)
    assert said.text == model.tokenizer.decode(ids)[len(model.tokenizer.decode(ids[:start])) :]


def test_a_seed_gives_the_same_text_and_another_one_another(model: LanguageModel) -> None:
    def text(**sampling: Any) -> str:
        drawn = Sampling(**{"temperature": 3.0, **sampling})
        return continue_text(model, "Some", tokens=30, sampling=drawn).text

    assert text(seed=1) == text(seed=1)
    assert len({text(seed=seed) for seed in range(4)}) > 1
    assert text(top_k=1) == text(temperature=0) == text(temperature=0, seed=9)


def test_tokens_are_drawn_by_their_probabilities_among_the_likeliest() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    generator = torch.Generator().manual_seed(0)

    def shares(**sampling: Any) -> torch.Tensor:
        drawn = [sample_token(logits, Sampling(**sampling), generator) for _ in range(4000)]
        return torch.bincount(torch.tensor(drawn), minlength=4) / 4000

    # 4,000 draws: a standard deviation of 0.008 at most.
    close = {"rtol": 0, "atol": 0.035}
    torch.testing.assert_close(shares(), logits.softmax(0), **close)
    torch.testing.assert_close(shares(temperature=2.0), (logits / 2).softmax(0), **close)
    two = shares(top_k=2)
    torch.testing.assert_close(two[:2], logits[:2].softmax(0), **close)
    assert not two[2:].any()


def test_perplexity_is_that_of_the_workloads_loss(model: LanguageModel, folder: Path) -> None:
    """On a text of two and a half samples, the end of the text included."""
    from elastrata_workloads.gpt import from_transformers

    gpt, state = from_transformers(folder)
    vocabulary = model.tokenizer.vocabulary()
    plain = gpt.build_model(vocabulary, SEQ_LEN)
    plain.load_state_dict(state)
    tokens = model.tokenizer.encode(SENTENCE * 9)[: SEQ_LEN * 5 // 2 - 1]
    text = model.tokenizer.decode(tokens)
    assert model.tokenizer.encode(text) == tokens
    whole = np.array([*tokens, *model.frame.end], np.uint16)
    losses, count = 0.0, 0.0
    for part in np.split(whole, [SEQ_LEN, 2 * SEQ_LEN]):
        batch = gpt.collate(_rows(part), vocabulary, 0)
        losses += gpt.loss(plain, batch).terms["lm"].item()
        count += batch.weights["lm"]
    found = compute_perplexity(model, text)
    assert found.tokens == count == len(whole) - 3
    assert found.loss == pytest.approx(losses / count, rel=1e-5)
    assert found.perplexity == math.exp(found.loss)


def test_a_prompt_must_leave_room(model: LanguageModel) -> None:
    with pytest.raises(UserError, match=f"make more than the {SEQ_LEN} that the model sees"):
        continue_text(model, "Some", tokens=SEQ_LEN, sampling=GREEDY)
    with pytest.raises(UserError, match="--prompt: empty"):
        continue_text(model, "", tokens=1, sampling=GREEDY)
    with pytest.raises(UserError, match="a text of at least two tokens"):
        compute_perplexity(model, "")


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "held_out.txt").write_text(SENTENCE * 3, encoding="utf-8")
    arguments = ["--prompt", "Some say [the]", "--tokens", "8", "--temperature", "0"]
    both = ["generate", str(folder), *arguments, "--file", str(tmp_path / "held_out.txt")]
    assert run_here(both) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Some say [the]")
    assert "perplexity" in shown
    assert run_here([*both, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == documented_keys("generate")
    assert shown.startswith("Some say [the]" + result["continuation"]["text"])
    assert result["perplexity"]["tokens"] > 20


def test_what_cannot_be_asked_is_told_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for arguments, line in (
        ([str(folder)], "expected --prompt TEXT to continue, or --file PATH"),
        ([str(folder), "--file", str(tmp_path / "no.txt")], "cannot be read (No such file"),
        ([str(folder), "--file", str(tmp_path / "latin.txt")], "cannot be read (not UTF-8)"),
        ([str(folder), "--prompt", "a", "--checkpoint", "7"], "is an exported model"),
        ([str(tmp_path), "--prompt", "a"], "neither a run (run.json is missing) nor an exported"),
        ([str(folder), "--prompt", "a", "--tokens", "0"], "--tokens"),
    ):
        assert run_here(["generate", *arguments]) == 2
        shown = capsys.readouterr()
        assert line in shown.err
        assert (shown.err.count("\n"), shown.out) == (1, "")


def test_a_bert_continues_nothing(tmp_path: Path) -> None:
    bert = Bert(hidden_size=32, num_layers=1, num_heads=2)
    vocabulary = Vocabulary(size=97, pad_id=0, mask_id=4, special_ids=(0, 4), continuation_ids=())
    state = bert.build_model(vocabulary, 64).state_dict()
    bert.export(state, vocabulary, 64, None, tmp_path)
    with pytest.raises(UserError, match="a BertForMaskedLM: expected a model that predicts"):
        load_language_model(str(tmp_path))
