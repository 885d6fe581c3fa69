# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # AdamW and LAMB across batch sizes, both tuned
#
# *Breaking MLPerf Training: optimizing BERT* (arXiv 2402.02447) found that Adam, tuned again by a
# search, beats LAMB at a batch of 16,384. This notebook asks the same question
# on a small scale: for every batch size both optimizers get a sweep with the same points, tokens
# and scheduler.

# %%
from pathlib import Path

import pandas as pd

import elastrata
from elastrata.driver.quickstart import collect_corpus

FOLDER = "notebook-adamw-and-lamb"
BATCH_SIZES = (32, 128, 512)
TRAINED_SAMPLES = 32 * 600
TRIALS = 8

here = Path(FOLDER).resolve()
corpus = collect_corpus(here / "corpus")


# %%
def study(optimizer: str, batch_size: int) -> elastrata.SweepResult:
    steps = TRAINED_SAMPLES // batch_size
    return elastrata.sweep(
        elastrata.SweepConfig(
            name=f"{optimizer}-{batch_size}",
            recipe="bert/quickstart",
            changes={
                "data.path": str(here / "data"),
                "data.prepare.sources.0.paths": str(corpus.folder),
                "storage": str(here / "runs"),
                "optimizer.name": optimizer,
                "batch_size": batch_size,
                "steps": steps,
                "schedule.warmup_steps": steps // 10,
                "evaluation.every": max(1, steps // 6),
                "evaluation.samples": 256,
                "checkpoint.every": steps,
                "workers.max": 1,
            },
            space={
                "optimizer.lr": {"loguniform": [3e-4, 6e-2]},
                "optimizer.betas.1": {"uniform": [0.8, 0.999]},
                "optimizer.weight_decay": {"loguniform": [1e-3, 0.3]},
                "schedule.warmup_steps": {"int": [0, steps // 2]},
            },
            scheduler={"name": "asha", "reduction_factor": 2},
            trials=TRIALS,
        )
    )


results = {
    (optimizer, batch_size): study(optimizer, batch_size)
    for batch_size in BATCH_SIZES
    for optimizer in ("adamw", "lamb")
}

# %% [markdown]
# ## The best of each

# %%
table = pd.DataFrame(
    [
        {
            "batch_size": batch_size,
            "optimizer": optimizer,
            "eval/loss": result.best_value,
            **result.best_values,
            "tokens_of_the_search": sum(t.tokens for t in result.standings.trials.values()),
        }
        for (optimizer, batch_size), result in results.items()
    ]
)
table.sort_values(["batch_size", "optimizer"])

# %%
losses = table.pivot(index="batch_size", columns="optimizer", values="eval/loss")
axes = losses.plot(marker="o", logx=True, ylabel="eval/loss", title="Best held-out loss")
axes.set_xticks(BATCH_SIZES, [str(size) for size in BATCH_SIZES])
axes.figure
