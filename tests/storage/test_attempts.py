from __future__ import annotations

import pickle
import random
import traceback
from collections.abc import Callable

import pytest

from lightning_streaming.errors import (
    AccessDeniedError,
    ConfigError,
    DownloadError,
    IntegrityError,
    MissingDependencyError,
    ObjectNotFoundError,
    StorageError,
    StreamingError,
)
from lightning_streaming.storage.attempts import Attempts


def attempts(*, retry: int = 2, options: dict[str, object] | None = None) -> Attempts:
    return Attempts(
        purpose="download s3://bucket/x", options=options or {}, retry=retry, timeout=60, failure=DownloadError
    )


def failing(*errors: Exception) -> Callable[[], str]:
    """An action that raises these, one a call, and then succeeds."""
    left = list(errors)

    def action() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return action


def test_a_passing_failure_heals() -> None:
    assert attempts(retry=2).run(failing(ConnectionResetError())) == "done"


def test_retry_is_the_number_of_all_attempts() -> None:
    with pytest.raises(DownloadError, match="2 attempts"):
        attempts(retry=2).run(failing(OSError(), OSError()))


def test_the_last_failure_names_object_attempts_cause_and_way_out() -> None:
    with pytest.raises(DownloadError) as caught:
        attempts(retry=1).run(failing(ConnectionResetError("peer went away")))
    for words in ["s3://bucket/x", "1 attempt of up to 60 s", "ConnectionResetError: peer went away", "download_retry"]:
        assert words in str(caught.value)
    assert isinstance(caught.value.__cause__, ConnectionResetError)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(), ObjectNotFoundError),
        (PermissionError(), AccessDeniedError),
        (TypeError(), ConfigError),
        (ImportError(), MissingDependencyError),
    ],
)
def test_a_final_failure_is_not_tried_again(error: Exception, kind: type[StreamingError]) -> None:
    with pytest.raises(kind, match="could not download s3://bucket/x"):
        attempts(retry=5).run(failing(error))


def test_our_own_errors_keep_their_words() -> None:
    with pytest.raises(StorageError, match=r"^no room$"):
        attempts(retry=5).run(failing(StorageError("no room")))


def test_damage_counts_as_passing_until_the_last_attempt() -> None:
    assert attempts(retry=2).run(failing(IntegrityError("short"))) == "done"
    with pytest.raises(IntegrityError, match="short \\(attempt 2 of 2\\)"):
        attempts(retry=2).run(failing(IntegrityError("long"), IntegrityError("short")))


def test_no_secret_is_in_the_printed_error() -> None:
    secret = "hunt" + "er"  # in two halves, because a traceback prints the lines of this file
    store = attempts(retry=1, options={"secret": f"{secret}2"})
    with pytest.raises(DownloadError) as caught:
        store.run(failing(OSError(f"{secret}2 at https://user:{secret}3@host/?sig={secret}4")))
    assert secret not in "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(store)


def test_errors_pickle() -> None:
    with pytest.raises(DownloadError) as caught:
        attempts(retry=1).run(failing(OSError()))
    copied = pickle.loads(pickle.dumps(caught.value))
    assert type(copied) is DownloadError
    assert str(copied) == str(caught.value)


def test_waiting_draws_no_number_of_the_programs_generator() -> None:
    random.seed(1)
    attempts(retry=2).run(failing(OSError()))
    drawn = random.random()
    random.seed(1)
    assert drawn == random.random()
