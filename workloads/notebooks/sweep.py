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
# # A sweep: which values does a small BERT like best?
#
# Learning rate, betas, weight decay, warm-up, optimizer and clipping, on real text: the sources of
# Python's own library, which every machine has. For another text, change `data.prepare.sources`.
#
# Open this file as a notebook with jupytext, or convert it: `jupytext --to ipynb sweep.py`.

# %%
from pathlib import Path

import elastrata
from elastrata.driver.quickstart import collect_corpus

FOLDER = "notebook-sweep"
STEPS = 300
TRIALS = 16
TOP_STEPS = 1000

here = Path(FOLDER).resolve()
corpus = collect_corpus(here / "corpus")

# %% [markdown]
# ## The space
#
# The space may contain any dotted key of the recipe. LAMB's bound on its trust ratio exists for
# LAMB alone. ASHA compares trials at rungs of tokens and stops those that fall behind.

# %%
sweep = elastrata.SweepConfig(
    name="first-sweep",
    recipe="bert/quickstart",
    changes={
        "data.path": str(here / "data"),
        "data.prepare.sources.0.paths": str(corpus.folder),
        "storage": str(here / "runs"),
        "steps": STEPS,
        "schedule.warmup_steps": STEPS // 10,
        "evaluation.every": max(1, STEPS // 12),
        "evaluation.samples": 256,
        "checkpoint.every": max(1, STEPS // 3),
        "workers.max": 1,
    },
    space={
        "optimizer.name": {"choice": ["adamw", "lamb"]},
        "optimizer.lr": {"loguniform": [3e-4, 3e-2]},
        "optimizer.betas.0": {"uniform": [0.8, 0.95]},
        "optimizer.betas.1": {"uniform": [0.9, 0.999]},
        "optimizer.weight_decay": {"loguniform": [1e-4, 0.3]},
        "optimizer.trust_max": {"uniform": [1, 10], "when": {"optimizer.name": "lamb"}},
        "schedule.warmup_steps": {"int": [0, STEPS // 4]},
        "clip.max_norm": {"choice": [0.5, 1.0, 2.0]},
    },
    scheduler={"name": "asha"},
    trials=TRIALS,
)
result = elastrata.sweep(sweep)
result

# %% [markdown]
# ## Results

# %%
result.trials.sort_values("eval/loss").head(8)

# %%
result.plot("curves")

# %%
result.plot("keys")

# %%
result.plot("parallel")

# %%
result.plot("importance")

# %% [markdown]
# ## Back from MLflow
#
# The sweep is one MLflow run, with a nested run for every trial.

# %%
from mlflow import MlflowClient

client = MlflowClient(f"sqlite:///{here / 'runs' / 'mlflow.db'}")
whole = client.get_run(result.mlflow_run_id)
parts = client.search_runs(
    [whole.info.experiment_id],
    f"tags.`mlflow.parentRunId` = '{whole.info.run_id}'",
)
{
    part.info.run_name: (part.data.tags.get("state"), part.data.metrics.get("eval/loss"))
    for part in sorted(parts, key=lambda part: part.info.run_name)
}

# %%
{key: value for key, value in whole.data.tags.items() if key.startswith("best")}

# %% [markdown]
# ## The winner, trained for longer
#
# Its values are changes to the recipe like any other.

# %%
import json

values = {
    **sweep.changes,
    **result.best_values,
    "steps": TOP_STEPS,
    "schedule.warmup_steps": TOP_STEPS // 10,
    "evaluation.every": TOP_STEPS // 4,
    "name": "winner",
}
recipe = elastrata.load_recipe(
    sweep.recipe, [f"{key}={json.dumps(value)}" for key, value in values.items()]
)
trained = elastrata.train(recipe)
trained.steps, trained.final_loss
