"""Frames: what a tokenizer puts around texts, whatever its alphabet."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.preparation.packing import Frame
from elastrata_pipelines.preparation.pairs import PairFrame
from elastrata_pipelines.preparation.tokenizer import TokenizerFiles
from support.random_tokenizers import Description, described

CLS, SEP = 1, 2
SPECIAL = [("[CLS]", CLS), ("[SEP]", SEP)]


def files(processor: Any, description: Description | None = None, **config: str) -> TokenizerFiles:
    """A tokenizer with a post-processor of tokenizers', or none."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(description or described("dna")))
    if processor is not None:
        tokenizer.post_processor = processor
    return TokenizerFiles(tokenizer.to_str(), json.dumps(config))


def template(single: str, pair: str = "$A $B:1") -> Any:
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single=single, pair=pair, special_tokens=SPECIAL)


def processors() -> dict[str, tuple[Any, Frame, PairFrame | None]]:
    from tokenizers import processors as kinds

    bert = template("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    both = PairFrame((CLS,), (SEP,), (SEP,))
    return {
        "template": (bert, Frame((CLS,), (SEP,)), both),
        "BERT's": (
            kinds.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS)), Frame((CLS,), (SEP,)), both
        ),
        "RoBERTa's": (
            kinds.RobertaProcessing(("[SEP]", SEP), ("[CLS]", CLS)),
            Frame((CLS,), (SEP,)),
            PairFrame((CLS,), (SEP, SEP), (SEP,), has_segments=False),
        ),
        "a sequence": (
            kinds.Sequence([kinds.ByteLevel(trim_offsets=False), bert]),
            Frame((CLS,), (SEP,)),
            both,
        ),
        "a prefix": (template("[CLS] $A"), Frame((CLS,), (), (SEP,)), None),
        "a suffix": (template("$A [SEP] [SEP]"), Frame((), (SEP, SEP)), None),
        "types of one kind": (
            template("[CLS] $0 [SEP]", "[CLS] $A [SEP] $B [SEP]"),
            Frame((CLS,), (SEP,)),
            PairFrame((CLS,), (SEP,), (SEP,), has_segments=False),
        ),
        "no suffix of pairs": (
            template("$A", "$A [SEP] $B:1"), Frame(end=(SEP,)), PairFrame((), (SEP,), ())
        ),
        "bytes": (kinds.ByteLevel(), Frame(end=(SEP,)), None),
        "none": (None, Frame(end=(SEP,)), None),
    }  # fmt: skip


def lower_cased() -> Description:
    description = described("dna")
    vocab = description["model"]["vocab"]
    description["model"]["vocab"] = {
        word.lower() if len(word) == 1 else word: number for word, number in vocab.items()
    }
    description["normalizer"] = {"type": "Lowercase"}
    return description


def without_unknown() -> Description:
    description = described("dna")
    description["model"]["unk_token"] = "<none>"
    return description


@pytest.mark.parametrize("make", [lambda: described("dna"), lower_cased, without_unknown])
@pytest.mark.parametrize("name", processors())
def test_a_frame_is_that_of_the_post_processor(name: str, make: Any) -> None:
    """No text of these tokenizers holds the letter a, or the frame would be tried with it."""
    processor, frame, pair_frame = processors()[name]
    tokenizer = files(processor, make(), eos_token="[SEP]")
    assert tokenizer.frame() == frame
    framed = tokenizer._parsed.encode("GATTACA").ids
    assert framed == [*frame.prefix, *tokenizer.encode("GATTACA"), *frame.suffix]
    if pair_frame is None:
        with pytest.raises(UserError, match="no token between two texts"):
            tokenizer.pair_frame()
        return
    assert tokenizer.pair_frame() == pair_frame
    both = tokenizer._parsed.encode("GATTACA", "CCG").ids
    first, second = tokenizer.encode("GATTACA"), tokenizer.encode("CCG")
    assert both == [
        *pair_frame.prefix, *first, *pair_frame.middle, *second, *pair_frame.suffix
    ]  # fmt: skip


@pytest.mark.parametrize("single", ["[CLS]", "$A [SEP] $A"])
def test_a_template_that_does_not_keep_a_text_once_is_refused(single: str) -> None:
    with pytest.raises(UserError, match=r"^tokenizer: its template gives .*expected the text once"):
        files(template(single)).frame()


def test_a_template_for_pairs_keeps_their_order() -> None:
    with pytest.raises(UserError, match=r"^tokenizer: its template gives .*then the second once"):
        files(template("$A", "[CLS] $B [SEP] $A")).pair_frame()


def test_a_template_with_an_id_of_no_token_is_refused() -> None:
    from tokenizers.processors import TemplateProcessing

    special = [("[CLS]", 101), ("[SEP]", SEP)]
    processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    with pytest.raises(UserError, match="its template adds id 101, which no token of its has"):
        files(processor).frame()


def test_the_unknown_token_of_a_lone_file_is_counted() -> None:
    assert files(None).unknown_id == 0
    assert files(None, unk_token="[UNK]").unknown_id == 0
    assert files(None, without_unknown()).unknown_id is None
    assert TokenizerFiles(json.dumps(described("bytes")), "{}").unknown_id is None
