"""`prepare`: from text to a data set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from elastrata_pipelines.format import HELD_OUT, Manifest
from elastrata_pipelines.preparation.config import PrepareConfig
from elastrata_pipelines.preparation.corpus import Corpus, Progress
from elastrata_pipelines.preparation.data_set import DataSetWriter, lay_out
from elastrata_pipelines.preparation.filters import check_filters
from elastrata_pipelines.preparation.kept_tokenizer import keep_tokenizer, kept_tokenizer
from elastrata_pipelines.preparation.target import Target
from elastrata_pipelines.preparation.tokenizer import TokenizerFiles, load_tokenizer
from elastrata_pipelines.preparation.work import Tokenized
from elastrata_pipelines.storage import Storage


def prepare(
    config: PrepareConfig,
    out: str,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    session: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Manifest:
    """Makes a data set of `config.sources` in the folder or URL `out`, with Ray.

    Paths, tokenizer and `out` are looked at first; Ray must run, or is started by `session`, for
    what comes then.

    Equal configuration and files give equal bytes, whatever the parallelism. The data set is
    complete when this returns; until then there is no manifest in `out`. A data set that is there
    already and was made from the same configuration and files is returned as it is. Where it is
    interrupted, a tokenizer that it has trained stays in `out` for the next time.

    The driver holds some 60 bytes per sample, and where duplicates are looked for 17 per document,
    with near ones 530; every worker a portion of the text (2 to 64 MiB) or
    one shard.

    Raises:
        UserError: paths, text, tokenizer or `out` cannot work; one line per problem.
    """
    report = progress or (lambda stage, done, total, unit: None)
    corpus = Corpus.find(config, report)
    load = config.tokenizer.load
    tokenizer = load_tokenizer(load) if load is not None else None
    for setting in tokenizer.switched_off if tokenizer else ():
        report(f"the tokenizer's {setting} is switched off: ids are not drawn", 1, 1, "tokenizers")
    fingerprint, provenance = corpus.fingerprint(tokenizer), corpus.provenance(tokenizer)
    target = Target(Storage(Storage(out).uri()))  # absolute: workers run in other folders
    wanted = config.held_out is not None
    if found := target.prepared(fingerprint, provenance, held_out=wanted, overwrite=overwrite):
        report("already prepared", found.samples, found.samples, "samples")
        return found
    check_filters(config.filters)
    with target.building() as runs, session():
        corpus = corpus.without_repeats()
        tokenizer = tokenizer or _trained_tokenizer(corpus, target.storage, fingerprint)
        tokenized = corpus.tokenize(tokenizer, runs)
        if fraction := fraction_for_one(config, tokenized):
            corpus = replace(corpus, config=config.model_copy(update={"held_out": fraction}))
            tokenized = corpus.tokenize(tokenizer, runs)
        layouts = [lay_out(config, tokenized, part) for part in range(2 if config.held_out else 1)]
        writer = DataSetWriter(config, tokenizer, fingerprint, provenance, runs, report)
        target.clear()
        parts = [writer.write(target.storage.sub(HELD_OUT), part) for part in layouts[1:]]
        held_out = parts[0].fingerprint if parts else None
        return writer.write(target.storage, layouts[0], held_out=held_out)


def _trained_tokenizer(corpus: Corpus, storage: Storage, fingerprint: str) -> TokenizerFiles:
    """The tokenizer that an interrupted preparation left, else a new one, which is kept."""
    if kept := kept_tokenizer(storage, fingerprint):
        corpus.report("take the tokenizer trained before", 1, 1, "tokenizers")
        return kept
    tokenizer = corpus.train_tokenizer()
    keep_tokenizer(storage, fingerprint, tokenizer)
    return tokenizer


def fraction_for_one(config: PrepareConfig, tokenized: Sequence[Tokenized]) -> float | None:
    """The fraction that holds one document out, where the configured one holds out none.

    Of a few books one in a hundred is none of them; then the one whose draw is the smallest is held
    out. A tokenizer that was trained on the corpus has seen it.

    Returns:
        None where the configured fraction will do, or where there is one document alone.
    """
    training, held_out = (sum(portion.documents[part] for portion in tokenized) for part in (0, 1))
    if not config.held_out_fraction or held_out or training == 1:
        return None
    return math.nextafter(min(portion.least_draw for portion in tokenized), 1.0)
