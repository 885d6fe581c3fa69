"""Training of tokenizers, such that the same text gives byte-identical files."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from elastrata_pipelines.preparation.config import TokenizerConfig
from elastrata_pipelines.preparation.encoders import split_text
from elastrata_pipelines.preparation.tokenizer import (
    TokenizerFiles,
    to_files,
    wrap_for_transformers,
)

_WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_BPE_SPECIAL = ("<|endoftext|>", "<pad>", "<mask>")
_MAX_ALPHABET = 1000
_MAX_WORD = 256
_MAX_TEXT = 2**13
_LONG_RUN = re.compile(rf" ?\S{{{_MAX_WORD},}}|\s{{{_MAX_WORD},}}")


def train_tokenizer(
    texts: Sequence[str], config: TokenizerConfig, *, seq_len: int
) -> TokenizerFiles:
    """Train the tokenizer that `config.train` names on `texts`."""
    if config.train == "wordpiece":
        return _wordpiece(texts, config.vocab_size, config.lowercase, seq_len)
    return _bpe(texts, config.vocab_size, seq_len)


def split_long_words(texts: Sequence[str], pre_tokenizer: Any) -> list[str]:
    """Divide texts such that no pre-token is longer than about 256 characters.

    Texts without such runs are kept, and long texts are divided into parts of whole words.
    """
    # Trainers take time quadratic in the length of a pre-token: 300,000 equal letters take minutes.
    # They also process hundreds of texts at once, with a hundred times their memory.
    short = (part for text in texts for part, _ in split_text(text, lambda *_: True, _MAX_TEXT))
    return [part for text in short for part in _divide_long_runs(text, pre_tokenizer)]


def _divide_long_runs(text: str, pre_tokenizer: Any) -> Iterator[str]:
    begin = 0
    for run in _LONG_RUN.finditer(text):
        for _, (first, end) in pre_tokenizer.pre_tokenize_str(run[0]):
            for place in range(run.start() + first, run.start() + end, _MAX_WORD)[1:]:
                yield text[begin:place]
                begin = place
    yield text[begin:]


def _bpe(texts: Sequence[str], vocab_size: int, seq_len: int) -> TokenizerFiles:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_BPE_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(split_long_words(texts, tokenizer.pre_tokenizer), trainer)
    end, pad, mask = _BPE_SPECIAL
    fast = wrap_for_transformers(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end,
        pad_token=pad, mask_token=mask, model_max_length=seq_len,
    )  # fmt: skip
    return to_files(fast)


def _wordpiece(
    texts: Sequence[str], vocab_size: int, lowercase: bool, seq_len: int
) -> TokenizerFiles:
    from tokenizers import Tokenizer, decoders, processors

    tokenizer = _bert(lowercase)
    texts = split_long_words(texts, tokenizer.pre_tokenizer)
    vocab = _wordpiece_vocab(tokenizer, texts, vocab_size)
    description = json.loads(tokenizer.to_str())
    description["model"]["vocab"] = vocab
    # The trainer has made every character of its alphabet a special token.
    description["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocab[token]) for token in ("[CLS]", "[SEP]")],
    )
    pad, unk, cls, sep, mask = _WORDPIECE_SPECIAL
    fast = wrap_for_transformers(
        tokenizer_object=tokenizer, pad_token=pad, unk_token=unk, cls_token=cls, sep_token=sep,
        mask_token=mask, model_max_length=seq_len,
    )  # fmt: skip
    return to_files(fast, tokenizer_class="BertTokenizer", do_lower_case=lowercase)


def _bert(lowercase: bool) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _wordpiece_vocab(tokenizer: Any, texts: Sequence[str], vocab_size: int) -> dict[str, int]:
    """Train a WordPiece vocabulary, and return the ids by token."""
    from tokenizers import trainers

    # The trainer numbers characters in the order of a hash map, which differs from run to run, and
    # resolves ties by these numbers. Naming all characters in advance fixes the numbers.
    first, later = _alphabet(tokenizer, texts, (vocab_size - len(_WORDPIECE_SPECIAL)) // 2)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*_WORDPIECE_SPECIAL, *first, *(f"##{letter}" for letter in later)],
        initial_alphabet=sorted({*first, *later}),
        limit_alphabet=len({*first, *later}),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
    return dict(sorted(vocab.items(), key=lambda item: item[1]))


def _alphabet(tokenizer: Any, texts: Sequence[str], most: int) -> tuple[list[str], list[str]]:
    """Return the most frequent characters that begin words, and those inside words, both sorted."""
    words: Counter[str] = Counter()
    for text in texts:
        normalized = tokenizer.normalizer.normalize_str(text)
        words.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normalized))
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for letter in word:
            counts[letter] += count
    ranked = sorted(counts, key=lambda letter: (-counts[letter], letter))
    frequent_letters = set(ranked[: min(_MAX_ALPHABET, most)])
    return (
        sorted({word[0] for word in words} & frequent_letters),
        sorted({letter for word in words for letter in word[1:]} & frequent_letters),
    )
