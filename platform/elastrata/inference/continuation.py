"""The continuation of a text, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from elastrata.inference.language_model import LanguageModel
from elastrata_pipelines.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0
    """Logits are divided by it: below 1 likely tokens become likelier. 0: always the likeliest."""
    top_k: int | None = None
    """Chooses among so many of the likeliest; None: among all."""
    seed: int = 0
    """Equal seeds give equal texts."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A model's text after a prompt."""

    text: str
    tokens: int
    """New ones."""
    ended: bool
    """Whether the model ended the text before it had as many tokens as wanted."""


@torch.inference_mode()
def continuation(
    model: LanguageModel, prompt: str, *, tokens: int, sampling: Sampling
) -> Continuation:
    """Continues a text by up to `tokens` tokens. Keys and values of earlier ones are kept.

    Raises:
        UserError: the prompt has no token, or there is no room for so many after it.
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
    fed, cache = ids, None
    while len(new) < tokens:
        inputs = torch.tensor([fed], device=model.device)
        output = model.network(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        fed = [chosen(output.logits[0, -1], sampling, generator)]
        if tuple(fed) == end:
            break
        new += fed
    # Decoded together: what a token reads as may depend on the one before it.
    text = model.tokenizer.decode(ids + new)[len(model.tokenizer.decode(ids)) :]
    return Continuation(text=text, tokens=len(new), ended=len(new) < tokens)


def chosen(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token.

    Args:
        logits: shape [V].
        sampling: how it is chosen.
        generator: on the CPU, so that a seed means the same on every device.
    """
    logits = logits.float().cpu()
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        least = logits.topk(min(sampling.top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return int(torch.multinomial(logits.softmax(dim=-1), 1, generator=generator))
