from __future__ import annotations

import asyncio
import pickle
import random
import time
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
from lightning_streaming.storage.attempts import Attempts, Deadline
from lightning_streaming.storage.refusals import RefusedError
from lightning_streaming.storage.retry import LONGEST_WAIT


def attempts(*, retry: int = 2, options: dict[str, object] | None = None, deadline: Deadline | None = None) -> Attempts:
    return Attempts(
        purpose="download s3://bucket/x",
        options=options or {},
        retry=retry,
        timeout=60,
        failure=DownloadError,
        deadline=deadline,
        hidden=("hidden-text",),
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


def test_the_same_holds_on_an_event_loop() -> None:
    def run(retry: int, *errors: Exception) -> str:
        action = failing(*errors)

        async def act() -> str:
            return action()

        return asyncio.run(attempts(retry=retry).run_async(act))

    assert run(2, ConnectionResetError()) == "done"
    with pytest.raises(DownloadError, match="2 attempts"):
        run(2, OSError(), OSError())
    with pytest.raises(ObjectNotFoundError):
        run(5, FileNotFoundError())


def test_the_store_is_given_the_time_it_asked_for() -> None:
    pause = attempts(retry=2).pause_after(RefusedError(429, {"Retry-After": "20"}, ""), 1)
    assert 20 < pause <= 20 + LONGEST_WAIT


def test_there_is_no_attempt_that_the_deadline_leaves_no_time_for() -> None:
    deadline = Deadline(3600)
    assert deadline.left() == 3600
    deadline.begin()
    assert attempts(retry=9, deadline=deadline).pause_after(OSError(), 1) > 0
    deadline.end = time.monotonic()
    with pytest.raises(DownloadError, match="1 attempt of up to 60 s, within 3600 s in all, failed"):
        attempts(retry=9, deadline=deadline).run(failing(OSError()))
    deadline.begin()
    assert deadline.left() < 0


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        ("The specified bucket does not exist", "the bucket does not exist; check its name"),
        ("No such object: b/x", "the bucket has no such object; check the path"),
        ("Not Found", "not found; check the bucket, the path"),
    ],
)
def test_what_is_missing_is_named(words: str, way_out: str) -> None:
    with pytest.raises(ObjectNotFoundError, match=f"{way_out}.*{words}"):
        attempts().run(failing(RefusedError(404, {}, words)))


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
        store.run(failing(OSError(f"{secret}2 at https://user:{secret}3@host/?sig={secret}4 hidden-" + "text")))
    assert "hidden-" + "text" not in "".join(traceback.format_exception(caught.value)) + repr(store)
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
