"""The answer to a call of a store or of their registry: within seconds, or an OSError."""

from __future__ import annotations

from typing import Any

import ray


def answered(answer: Any, seconds: float) -> Any:
    """The value that `answer`, an object reference, stands for.

    Raises:
        FileNotFoundError: the actor says that there is no such file.
        OSError: the actor has failed, has died, or does not answer within `seconds`.
    """
    try:
        return ray.get(answer, timeout=seconds)
    except ray.exceptions.GetTimeoutError:
        raise OSError(f"no answer within {seconds:g} s") from None
    except ray.exceptions.RayTaskError as error:
        kind = FileNotFoundError if isinstance(error.cause, FileNotFoundError) else OSError
        raise kind(str(error.cause)) from None
    except ray.exceptions.RayError as error:
        raise OSError(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from None
