"""Tiny models as transformers saves them, and transformers' own loss of held-out data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elastrata.parallel.mesh import data_rank
from elastrata.recipe.recipe import Recipe
from elastrata.step.evaluate import EVALUATION_SEED, OWN
from elastrata.trainer.evaluation import HeldOutData
from elastrata.trainer.preflight import find_training_data
from support.synthetic import SEQ_LEN, VOCABULARY

GPT2 = {"name": "gpt", "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_positions": SEQ_LEN}
LLAMA = {
    **GPT2,
    "num_kv_heads": 2,
    "intermediate_size": 64,
    "positions": "rotary",
    "activation": "swiglu",
    "norm": "rms",
    "bias": False,
    "tied_embeddings": False,
}
BERT = {
    "name": "bert",
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_positions": SEQ_LEN,
}
MODERNBERT = {
    **BERT,
    "name": "modernbert",
    "num_layers": 4,
    "window": 8,
    "global_rotary_base": 500.0,
    "local_rotary_base": 50.0,
}
WORKLOADS = {"gpt2": GPT2, "llama": LLAMA, "bert": BERT, "modernbert": MODERNBERT}


def save_theirs(kind: str, folder: Path, *, num_ids: int = VOCABULARY, **saving: Any) -> Any:
    """Makes a model of transformers with weights far from zero, saves it, and returns it."""
    model = _make(kind, num_ids)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder, **saving)
    return model.eval()


def _make(kind: str, num_ids: int) -> Any:
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        ModernBertConfig,
        ModernBertForMaskedLM,
    )

    torch.manual_seed(3)
    if kind == "modernbert":
        return ModernBertForMaskedLM(
            ModernBertConfig(
                vocab_size=num_ids,
                hidden_size=32,
                num_hidden_layers=4,
                num_attention_heads=4,
                intermediate_size=48,
                max_position_embeddings=SEQ_LEN,
                local_attention=8,
                global_rope_theta=500.0,
                local_rope_theta=50.0,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                cls_token_id=1,
                sep_token_id=2,
                attn_implementation="sdpa",
            )
        )
    if kind == "bert":
        return BertForMaskedLM(
            BertConfig(
                vocab_size=num_ids,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=128,
                max_position_embeddings=SEQ_LEN,
                pad_token_id=0,
            )
        )
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=num_ids,
                n_positions=SEQ_LEN,
                n_embd=32,
                n_layer=2,
                n_head=4,
                bos_token_id=1,
                eos_token_id=1,
            )
        )
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=num_ids,
            max_position_embeddings=SEQ_LEN,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=1,
        )
    )


@torch.no_grad()
def their_loss(model: Any, values: dict[str, Any]) -> float:
    """Of transformers' model on a recipe's held-out data: the mean over all predictions."""
    total, weight = 0.0, 0
    for ids, labels in _samples(Recipe.model_validate(values)):
        output = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None])
        logits = output.logits[0]
        is_predicted = labels != -100
        picked = torch.nn.functional.cross_entropy(
            logits[is_predicted].double(), labels[is_predicted], reduction="sum"
        )
        total, weight = total + float(picked), weight + int(is_predicted.sum())
    return total / weight


def _samples(recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids of each held-out sample, and its labels: -100 where nothing is predicted."""
    data = find_training_data(recipe)
    place = data_rank(0, 1, 1)
    held_out = HeldOutData(data.phases, data.evaluated, recipe.evaluation, place, 0).of(0)
    for rows in held_out[OWN].micro_batches:
        batch: Any = recipe.workload.collate(rows, data.vocabulary, EVALUATION_SEED)
        labels = torch.full_like(batch.input_ids, -100)
        labels[batch.predicted] = batch.targets
        first = 0
        for length in batch.segment_lengths:
            yield batch.input_ids[first : first + length], labels[first : first + length]
            first += length
