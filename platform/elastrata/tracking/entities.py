"""MLflow's own values, made of ours."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

_DIGEST_CHARACTERS = 36  # MLflow's own limit

_NOT_UNIQUE = "IntegrityError"
"""In what SQLAlchemy says of a row that another client has added meanwhile."""


@dataclass(frozen=True, kw_only=True)
class DataInput:
    """A data set that a run reads."""

    url: str
    """Absolute path or URL."""
    fingerprint: str
    samples: int
    tokens: int
    purpose: Literal["training", "evaluation"]


def data_inputs(inputs: Iterable[DataInput]) -> list[Any]:
    """The argument of `log_inputs`: each with its fingerprint as digest, cut, and whole in its
    profile."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    return [
        DatasetInput(
            dataset=Dataset(
                name="/".join(data.url.rstrip("/").split("/")[-2:]),
                digest=data.fingerprint[:_DIGEST_CHARACTERS],
                source_type=urlsplit(data.url).scheme or "local",
                source=json.dumps({"uri": data.url}),
                profile=json.dumps(
                    {
                        "fingerprint": data.fingerprint,
                        "num_rows": data.samples,
                        "num_tokens": data.tokens,
                    }
                ),
            ),
            tags=[InputTag("mlflow.data.context", data.purpose)],
        )
        for data in inputs
    ]


def log_inputs(client: Any, run_id: str, inputs: Iterable[DataInput]) -> None:
    """Records what a run reads; what is recorded already stays as it is.

    MLflow's store looks whether it has a data set, and then adds it: of two runs that begin with
    the same one in the same moment, one is refused, and finds it there the next time.
    """
    if found := data_inputs(dict.fromkeys(inputs)):
        try:
            client.log_inputs(run_id, found)
        except Exception as error:  # the store's own, by any of its ways
            if _NOT_UNIQUE not in str(error):
                raise
            client.log_inputs(run_id, found)


def model_output(model_id: str, step: int) -> Any:
    """The argument of `log_outputs`."""
    from mlflow.entities import LoggedModelOutput

    return LoggedModelOutput(model_id=model_id, step=step)
