"""The command lines of the documents: how each is run by a test, or why it is not.

`tests/platform_/test_command_lines.py` holds documents and tables to one another, and runs what is
to be run. A key is a line as a document has it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a test puts in the place of placeholders, paths and sizes."""

    words: Mapping[str, str] = field(default_factory=dict)
    """By word what stands in its place; nothing where that is empty."""
    extra: tuple[str, ...] = ()
    """Words at the end."""

    def arguments(self, line: str) -> list[str]:
        """The words of a line after the program's name."""
        found = [self.words.get(word, word) for word in shlex.split(line)[1:]]
        return [word for word in [*found, *self.extra] if word]


_SHORT = ("evaluation.samples=16", "workers={max: 1, threads: 1, spares: false}")
_QUICK = (
    *("steps=4", "batch_size=8", "schedule.warmup_steps=1", "evaluation.samples=16"),
    *("data.prepare.tokenizer.max_bytes=200000", "--out", "quick"),
)
_OF_RECIPE = {"RECIPE": "mine.yaml"}

TO_A_BERT = {
    "elastrata prepare --text my/texts --out data/mine": Run(),
    "elastrata train bert/tiny data.path=data/mine --name first": Run(
        extra=("tokens=20_000", "batch_size=32", "schedule={warmup_steps: 1}", *_SHORT)
    ),
    "elastrata export first --out models/first": Run(),
}
"""In this order, in a folder with texts."""

READING = {
    "elastrata export first --out models/first-bf16 --dtype bf16 --shard-size 500MB": Run(),
    "elastrata audit RUN --json": Run(words={"RUN": "first"}),
    "elastrata COMMAND --help": Run(words={"COMMAND": "train"}),
    "elastrata audit RUN": Run(words={"RUN": "first"}),
    "elastrata audit RUN --step K --samples": Run(words={"RUN": "first", "K": "1"}),
    "elastrata audit RUN OTHER": Run(words={"RUN": "first", "OTHER": "runs/first"}),
    "elastrata audit RUN RUN": Run(words={"RUN": "first"}),
    "elastrata doctor --cluster FILE": Run(words={"FILE": "gcp"}),
    "elastrata doctor --cluster aws bert/base workers.max=96": Run(),
    "elastrata doctor --cluster cluster_configs/aws.yaml bert/base workers.max=32": Run(),
    "elastrata inspect DATA --verify": Run(words={"DATA": "data/mine"}),
    "elastrata inspect DATA --workers 8,64,1024": Run(
        words={"DATA": "data/mine", "8,64,1024": "2,4"}
    ),
    "elastrata inspect DIR --workers N --batch B": Run(
        words={"DIR": "data/mine", "N": "2", "B": "32"}
    ),
    "elastrata inspect RECIPE": Run(words=_OF_RECIPE, extra=("batch_size=32",)),
    "elastrata inspect RECIPE --phase 1": Run(words={"RECIPE": "phases.yaml"}),
    "elastrata inspect bert/base batch_size=4096 --workers 256": Run(
        words={"batch_size=4096": "batch_size=64", "256": "4"},
        extra=("data.path=data/mine", "workload.hidden_size=96"),
    ),
    "elastrata inspect data/mine": Run(),
    "elastrata inspect data/mine --show 3": Run(),
    "elastrata plan RECIPE --cluster 64xA100-80GB": Run(words={"RECIPE": "gpt/tiny"}),
    "elastrata plan RECIPE --cluster 128xA100-80GB|FILE": Run(
        words={"RECIPE": "gpt/125m", "128xA100-80GB|FILE": "128xA100-80GB"}
    ),
    "elastrata plan gpt/13b --cluster 64xA100-80GB": Run(),
    "elastrata plan gpt/13b --cluster cluster.yaml --explain --write mine.yaml "
    "--plot layouts.png": Run(words={"mine.yaml": "planned.yaml"}),
    "elastrata rehearse RECIPE --cluster 1024xH100-80GB|FILE": Run(
        words={"RECIPE": "bert/base", "1024xH100-80GB|FILE": "16xH100-80GB"},
        extra=("workload.num_layers=2", "--no-graphs"),
    ),
    "elastrata runs [STORAGE]": Run(words={"[STORAGE]": "runs"}),
    "elastrata schema --keys": Run(),
    "elastrata schema --out recipe.schema.json": Run(),
    "elastrata simulate RECIPE --cluster FILE|64xA100-80GB": Run(
        words={"RECIPE": "gpt/125m", "FILE|64xA100-80GB": "cluster.yaml"}
    ),
    "elastrata simulate gpt/13b --cluster cluster.yaml --lost-per-hour 0.02 --intervals": Run(),
    "elastrata status RUN": Run(words={"RUN": "first"}),
}
"""After those, in any order."""

TRAINING = {
    "elastrata prepare --text my/texts --tokenizer bpe --packing best_fit --seq-len 256 "
    "--out data/mine-gpt": Run(),
    "elastrata train gpt/quick data.path=data/mine-gpt --name first-gpt": Run(
        extra=("tokens=20_000", "schedule={warmup_steps: 1}", *_SHORT)
    ),
    "elastrata prepare --text my/texts --tokenizer bpe --seq-len 512 --out data/mine-modern": Run(),
    "elastrata train modernbert/tiny data.path=data/mine-modern --name first-modern": Run(
        extra=("tokens=20_000", "schedule.warmup_steps=1", *_SHORT)
    ),
    "elastrata export first-modern --out models/first-modern": Run(),
    'elastrata generate first-gpt --prompt "Once upon a time"': Run(extra=("--tokens", "8")),
    "elastrata generate RUN|EXPORT --prompt TEXT": Run(
        words={"RUN|EXPORT": "runs/first-gpt", "TEXT": "Once"}, extra=("--tokens", "4")
    ),
    "elastrata prepare mine.yaml": Run(extra=("data.path=data/again",)),
    "elastrata train mine.yaml optimizer.lr=3e-4": Run(
        extra=(
            *("steps=3", "schedule.warmup_steps=1", "batch_size=8", "workload.num_layers=1"),
            *_SHORT,
        )
    ),
    "elastrata train --resume RUN [KEY=VALUE]...": Run(words={"RUN": "mine", "[KEY=VALUE]...": ""}),
    "elastrata export --register NAME": Run(
        words={"NAME": "little"}, extra=("first", "--out", "models/registered")
    ),
    "elastrata fork RUN[@STEP] --name NEW [KEY=VALUE]...": Run(
        words={"RUN[@STEP]": "first", "NEW": "forked", "[KEY=VALUE]...": "schedule.shape=constant"},
        extra=("tokens=30_000",),
    ),
    "elastrata prepare RECIPE": Run(
        words={"RECIPE": "phases.yaml"}, extra=("data.path=data/phases",)
    ),
    "elastrata prepare --text FILES --text-field content": Run(
        words={"FILES": "web.jsonl"}, extra=("--out", "data/web")
    ),
    "elastrata prepare --text my/texts --tokenizer bpe --out data/mine": Run(
        words={"data/mine": "data/lstm"}
    ),
    "elastrata bench step RECIPE [KEY=VALUE]...": Run(
        words={"RECIPE": "bert/tiny", "[KEY=VALUE]...": "data.path=data/mine"},
        extra=("batch_size=8", "--steps", "1", "--warm-up", "0"),
    ),
    "elastrata sweep lr.yaml": Run(extra=("trials=3",)),
    "elastrata sweep SWEEP.yaml": Run(words={"SWEEP.yaml": "lr.yaml"}, extra=("trials=3",)),
    "elastrata sweep lr.yaml trials=64 batch_size=128": Run(
        words={"trials=64": "trials=1", "batch_size=128": "batch_size=16"}, extra=("name=other",)
    ),
    "elastrata sweep --best lr --train": Run(extra=("steps=10",)),
    "elastrata sweep --best lr --train steps=50000 --name long": Run(
        words={"steps=50000": "steps=12"}
    ),
    "elastrata export runs/lr/trials/0007 --out models/best": Run(),
    "elastrata quickstart --model gpt": Run(extra=_QUICK),
}
"""After those, in this order: each takes Ray, or what such a one made."""

_INSTALLS = "installs from an index"
_HUB = "needs a hub: tests/platform_/test_push.py has one"
_CLUSTER = "needs a Ray cluster elsewhere: tests/e2e/test_jobs.py has one"
_BACK = "tests/platform_/test_going_back.py goes back to a checkpoint"
_FORKED = "takes hours; tests/platform_/test_fork.py does it with a tiny model"
_AVERAGED = "needs a run with averages: tests/platform_/test_average.py has one"
_MEASURES = "measures for minutes to hours; its figures are in benchmarks/results"
NOT_RUN = {
    "make quickstart": f"{_INSTALLS}, then `elastrata quickstart`: test_quickstart.py",
    "make test": "runs this test",
    "make docs": "continuous integration builds the site",
    "make house": "prints sizes: no result that a page states",
    "make check": "runs this test",
    "make e2e": "minutes of real runs: continuous integration runs it",
    "make bench NAME=balance BENCH_OPTIONS=...": _MEASURES,
    "make gpu": "needs a GPU: test_gpu_table.py runs it on a CPU",
    "make gpu-wheels": _INSTALLS,
    "python benchmarks/gpu.py --list": "names the cases that test_gpu_table.py runs",
    "make test-all": "runs this test",
    'make test-all FILES="tests/faults/test_chaos.py"': "takes minutes",
    "make chaos": "takes minutes: tests/faults/test_chaos.py does some of it",
    "pip install -c constraints.txt -e .": _INSTALLS,
    "uv pip install -c constraints.txt -e .": _INSTALLS,
    "pip install mlflow psycopg2-binary boto3": _INSTALLS,
    "pip install --no-deps": _INSTALLS,
    "pip install accelerate": _INSTALLS,
    "pip install lm_eval accelerate": _INSTALLS,
    "elastrata export first --out models/first --push OWNER/first": _HUB,
    **dict.fromkeys(
        (
            "elastrata evaluate RUN|EXPORT --tasks hellaswag,arc_easy",
            "elastrata evaluate first-gpt --tasks hellaswag",
        ),
        "downloads questions: tests/platform_/test_evaluate.py has some",
    ),
    "pip install optuna": _INSTALLS,
    "pip install rensa": _INSTALLS,
    "pip install -e workloads/example": f"{_INSTALLS}: tests/workloads/test_third_party.py",
    "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=~/.ray/auth_token": _CLUSTER,
    "elastrata submit bert/base --cluster http://127.0.0.1:8265 --name first "
    "storage=s3://bucket/runs data.path=s3://bucket/data tracking.uri=http://mlflow:5000": _CLUSTER,
    "elastrata submit RECIPE --cluster ADDRESS": _CLUSTER,
    "elastrata status s3://bucket/runs/first": "needs a bucket: tests/clusters has some",
    "elastrata stop first --cluster http://127.0.0.1:8265": _CLUSTER,
    "ray job submit --address http://127.0.0.1:8265 --working-dir . --runtime-env-json "
    '\'{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}}\' -- elastrata train recipe.yaml': (
        _CLUSTER
    ),
    "ray get-auth-token --generate": "makes a secret in the home folder",
    "elastrata train RECIPE --address auto": _CLUSTER,
    "elastrata doctor --address ADDRESS": _CLUSTER,
    "export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false": "goes with the next",
    "mlflow server --host 0.0.0.0 --port 5000 "
    "--backend-store-uri postgresql+psycopg2://mlflow@db.example.com/mlflow "
    "--artifacts-destination s3://bucket/artifacts": (
        "needs a database and a bucket: tests/support/tracking_server.py starts such a server"
    ),
    "elastrata rehearse gpt/7b --cluster 64xH100-80GB": "as the other `elastrata rehearse`",
    "elastrata fork stem@30000 --name short steps=33000": _FORKED,
    "elastrata fork stem@30000 --name middle steps=40000": _FORKED,
    "elastrata train gpt/quick data.path=data/mine-gpt steps=60000 schedule.shape=wsd "
    "checkpoint.keep_every=10000 --name stem": _FORKED,
    "elastrata train --resume short": "as `elastrata train --resume RUN`",
    "elastrata export first --weights average --out models/averaged": _AVERAGED,
    "elastrata export first --weights mean:5 --out models/mean": _AVERAGED,
    "elastrata train RECIPE": "as `elastrata train mine.yaml`",
    "elastrata prepare continue.yaml": "test_continue_a_model.py has a model to go on with",
    "elastrata train continue.yaml": "as the line before it",
    "elastrata train ... --from STEP": _BACK,
    "elastrata train RECIPE --from COMMIT": _BACK,
    "elastrata train bert/mini optimizer.lr=3e-4 workers.max=8 optimizer.betas.1=0.95 "
    "tracking.uri=null": "an hour on eight workers; test_docs.py looks at its overrides",
    "elastrata train lstm/tiny data.path=data/mine --name first-lstm": (
        "needs the example installed: tests/workloads/test_third_party.py"
    ),
    "elastrata prepare bert/mlperf 'data.prepare.tokenizer={load: FOLDER}'": (
        "needs MLPerf's text; test_alternatives.py loads a tokenizer so"
    ),
    **dict.fromkeys(
        (
            "python benchmarks/encoders.py WIKITEXT --scratch FOLDER",
            "python benchmarks/hot_tier.py",
            "python benchmarks/large_data.py --beside CHECKOUT",
            "python benchmarks/mixture_text.py WIKITEXT --scratch DIR",
            "python benchmarks/mixed_machines.py LENGTHS",
            "python benchmarks/modernbert.py WIKITEXT",
            "python benchmarks/slow_network.py DATA_SET",
            "python benchmarks/trainers.py",
            "python benchmarks/trainers_loss.py WIKITEXT",
            "python benchmarks/waits.py WIKITEXT",
        ),
        _MEASURES,
    ),
}
"""Why not."""
