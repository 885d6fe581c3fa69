"""The Hugging Face Hub, or a server that speaks as it does (`HF_ENDPOINT`): a repository that an
exported model is pushed to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastrata_pipelines.errors import UserError

_LOGIN = "expected one in HF_TOKEN, or from `hf auth login`"


class HubRepository:
    """A repository of models. It is looked for, and made where it is missing, at once: what the hub
    refuses is told before there is anything to push.

    Args:
        name: `OWNER/NAME`, or a name alone, whose owner is that of the token.
        public: whether everybody sees it; where it is there already it stays as it is.

    Raises:
        UserError: that is no name, there is no token, the hub refuses it or cannot be reached.
    """

    def __init__(self, name: str, *, public: bool = False) -> None:
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()
        self._shown = f"--push: {name}"
        # Read now, as any other setting: the library has read its own when it was imported.
        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
        with self._in_a_line():
            if get_token() is None:
                raise UserError(f"{self._shown}: no token for {self._api.endpoint}: {_LOGIN}")
            made = self._api.create_repo(name, private=not public, exist_ok=True)
        self._name = made.repo_id

    def push(self, folder: Path, message: str) -> str:
        """Makes the files of a folder the repository's newest commit; returns its URL.

        Files of an earlier push that the folder has no more are deleted: a model in one file would
        else go on beside the shards of another.

        Raises:
            UserError: the hub refuses them or cannot be reached.
        """
        with self._in_a_line():
            commit: Any = self._api.upload_folder(
                repo_id=self._name,
                folder_path=folder,
                commit_message=message,
                delete_patterns=["*.safetensors", "*.safetensors.index.json"],
            )
        return str(commit.commit_url)

    @contextmanager
    def _in_a_line(self) -> Iterator[None]:
        """What goes wrong is told in a line."""
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            yield
        except UserError:
            raise
        except HFValidationError as error:
            raise UserError(f"{self._shown}: {_first_line(error)}") from None
        except HfHubHTTPError as error:
            status = f"{error.response.status_code} {error.response.reason_phrase}"
            said = error.server_message or "no reason given"
            raise UserError(
                f"{self._shown}: refused by {self._api.endpoint}: {status}: {_shortened(said)}"
            ) from None
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"{self._shown}: {self._api.endpoint}: {_first_line(error)}") from error
        except Exception as error:  # the client's transport has errors of its own
            if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore2"):
                raise
            raise UserError(
                f"{self._shown}: {self._api.endpoint}: cannot be reached ({_first_line(error)})"
            ) from error


def _first_line(error: Exception) -> str:
    return _shortened(str(error).strip() or type(error).__name__)


def _shortened(text: str) -> str:
    return " ".join(text.split())[:300]
