"""A language model with its tokenizer: generation of text, and the perplexity of a text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from elastrata.run.export import ExportedModel, export_model
from elastrata.run.folder import RUN_FILE, read_identity, read_recipe
from elastrata.run.weights import TRAINED
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.preparation.encoders import make_encoder
from elastrata_pipelines.preparation.packing import Frame, Texts, split_documents
from elastrata_pipelines.preparation.tokenizer import TokenizerFiles, load_tokenizer
from elastrata_pipelines.storage import Storage

TASK = "text-generation"
"""The pipeline of transformers that exported language models are for."""
_EXPECTED = "expected a model that predicts the next token, as gpt does"


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A model that predicts the next token."""

    network: Any
    """A causal language model of transformers, in fp32."""
    tokenizer: TokenizerFiles
    frame: Frame
    """Tokens around a text, as in training."""
    max_positions: int
    """Largest number of tokens of an input."""
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A language model's folder, for transformers."""

    path: Path
    run: ExportedModel | None
    """The run's export; None if `place` was an exported folder already."""


@contextmanager
def model_folder(
    place: str, *, checkpoint: str = "newest", weights: str = TRAINED
) -> Iterator[ModelFolder]:
    """Yield the folder of a language model: an exported one, or a temporary export of a run.

    Args:
        place: folder or URL of a run, or an exported folder.
        checkpoint: checkpoint of a run: `newest`, `best` (smallest evaluation loss), or a step.
        weights: weights of the checkpoint: `trained`, `average` or `mean:K`, see `read_weights`.

    Raises:
        UserError: the model or checkpoint does not exist, or it does not predict next tokens.
    """
    if (identity := read_identity(Storage(place))) is not None:
        workload = read_recipe(Storage(place), identity).workload
        if workload.exported_as.task != TASK:
            raise UserError(f"{place}: workload {workload.name}: {_EXPECTED}")
        with TemporaryDirectory() as scratch:
            out = Path(scratch) / "model"
            model = export_model(place, out, checkpoint=checkpoint, weights=weights)
            _check(model.path, place)
            yield ModelFolder(path=model.path, run=model)
        return
    if not (Path(place) / "config.json").is_file():
        raise UserError(
            f"{place}: neither a run ({RUN_FILE} is missing) nor an exported model (config.json is "
            "missing)"
        )
    if checkpoint != "newest":
        raise UserError(
            f"--checkpoint: {checkpoint}: {place} is an exported model with a single checkpoint"
        )
    if weights != TRAINED:
        raise UserError(
            f"--weights: {weights}: {place} is an exported model, which has only its own weights"
        )
    _check(Path(place), place)
    yield ModelFolder(path=Path(place), run=None)


def load_language_model(place: str, *, checkpoint: str = "newest") -> LanguageModel:
    """Load a model onto the GPU if there is one; see `model_folder`."""
    with model_folder(place, checkpoint=checkpoint) as found:
        return _load(found.path)


def _check(folder: Path, place: str) -> None:
    """Check that a folder holds a model that predicts next tokens, and a tokenizer."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.utils import logging

    quiet: Any = logging  # transformers does not annotate these two functions
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    try:
        config: Any = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:  # transformers raises these for unknown models
        raise UserError(
            f"{place}: config.json: not a model that transformers supports: {_EXPECTED}"
        ) from error
    kind = (config.architectures or [config.model_type])[0]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise UserError(f"{place}: a {kind}: {_EXPECTED}")
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{place}: has no tokenizer (tokenizer.json is missing)")


def _load(folder: Path) -> LanguageModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = load_tokenizer(str(folder))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config: Any = AutoConfig.from_pretrained(folder)
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    return LanguageModel(
        network=network.to(device).eval(),
        tokenizer=tokenizer,
        frame=tokenizer.frame(),
        max_positions=config.max_position_embeddings,
        device=device,
    )


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Perplexity over all tokens of a text except the first of each sample."""

    perplexity: float
    """e to the power of `loss`."""
    loss: float
    """Mean cross-entropy per token, in nats."""
    tokens: int
    """Number of predicted tokens."""


@torch.inference_mode()
def compute_perplexity(model: LanguageModel, text: str) -> Perplexity:
    """Return the perplexity of a text.

    The text is cut as `prepare` cuts a document: into consecutive samples of the model's length.
    Each token is predicted from its own sample alone.

    Raises:
        UserError: the text is too short to predict any token.
    """
    tokens, lengths, _ = make_encoder(model.tokenizer.tokenizer_json).encode([text])
    whole = Texts(ids=np.zeros(1, np.uint64), lengths=lengths, tokens=tokens)
    samples = split_documents(whole, model.frame, seq_len=model.max_positions, min_tokens=1)
    total, count = 0.0, 0
    for sample in np.split(samples.tokens, np.cumsum(samples.lengths)[:-1]):
        # A single token has no predecessor to predict it from.
        if len(sample) < 2:
            continue
        ids = torch.from_numpy(sample.astype(np.int64)).to(model.device)
        logits = model.network(input_ids=ids[None]).logits[0, :-1].float()
        # Summed, because samples differ in length.
        total += F.cross_entropy(logits, ids[1:], reduction="sum").item()
        count += len(ids) - 1
    if not count:
        raise UserError("--file: expected a text of at least two tokens")
    return Perplexity(perplexity=math.exp(total / count), loss=total / count, tokens=count)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for sampling the next token."""

    temperature: float = 1.0
    """Divisor of the logits; below 1 likely tokens become likelier. 0: always the likeliest token.
    """
    top_k: int | None = None
    """Sample from this number of likeliest tokens; None: from all."""
    seed: int = 0
    """Equal seeds give equal texts."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A model's text after a prompt."""

    text: str
    tokens: int
    """Number of new tokens."""
    ended: bool
    """Whether the model ended the text before it reached the requested length."""


@torch.inference_mode()
def continue_text(
    model: LanguageModel, prompt: str, *, tokens: int, sampling: Sampling
) -> Continuation:
    """Continue a text by up to `tokens` tokens, with a cache of keys and values.

    Raises:
        UserError: the prompt has no token, or it and `tokens` exceed the model's length.
    """
    ids = [*model.frame.prefix, *model.tokenizer.encode(prompt)]
    if not ids:
        raise UserError("--prompt: empty: expected a text to continue")
    if len(ids) + tokens > model.max_positions:
        raise UserError(
            f"--tokens: {tokens}: {len(ids)} of the prompt and these make more than the "
            f"{model.max_positions} that the model sees"
        )
    generator = torch.Generator().manual_seed(sampling.seed)
    end = model.frame.end[:1] or model.frame.suffix[:1]
    new: list[int] = []
    # The whole prompt first, then only the newest token: the cache holds the others.
    fed, cache = ids, None
    while len(new) < tokens:
        inputs = torch.tensor([fed], device=model.device)
        output = model.network(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        fed = [sample_token(output.logits[0, -1], sampling, generator)]
        if tuple(fed) == end:
            break
        new += fed
    # Decoded together, because the text of a token may depend on the previous one.
    text = model.tokenizer.decode(ids + new)[len(model.tokenizer.decode(ids)) :]
    return Continuation(text=text, tokens=len(new), ended=len(new) < tokens)


def sample_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return the id of the next token.

    Args:
        logits: shape [V].
        sampling: settings.
        generator: on the CPU, so that a seed means the same on every device.
    """
    logits = logits.float().cpu()
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        # Tokens that tie with the last of the top k stay candidates, too.
        least = logits.topk(min(sampling.top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return int(torch.multinomial(logits.softmax(dim=-1), 1, generator=generator))
