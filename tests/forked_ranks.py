"""Real ranks, forked from the test: no interpreter starts and nothing is imported again, so a run takes a second."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.leftovers import forget_accelerate

_CONTEXT = multiprocessing.get_context("fork")


def on_ranks(do: Callable[..., Any], *args: Any, meeting: Path, count: int = 2, connected: bool = True) -> list[Any]:
    """Call ``do(*args)`` on each of ``count`` ranks, which have the environment that ``torchrun`` makes.

    Args:
        do: What each rank does; what it gives must pickle.
        *args: Its arguments.
        meeting: A directory for the file through which the ranks find each other.
        count: Ranks, all on one node.
        connected: Whether ``torch.distributed`` is initialised.

    Returns:
        What each rank gave, in order of rank.
    """
    meeting.mkdir(parents=True, exist_ok=True)
    file = meeting / f"meeting{len(list(meeting.iterdir()))}" if connected else None
    ranks = [_start(rank, count, file, do, args) for rank in range(count)]
    try:
        return [_answer_of(rank, listen) for rank, (_, listen) in enumerate(ranks)]
    finally:
        for process, listen in ranks:
            process.kill()  # it has answered, or waits for one that will not come
            process.join()
            listen.close()


def _start(
    rank: int, count: int, file: Path | None, do: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[ForkProcess, Connection]:
    listen, answer = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_be_rank, args=(rank, count, file, do, args, answer))
    process.start()
    answer.close()  # so that the end of the rank is heard
    return process, listen


def _answer_of(rank: int, listen: Connection) -> Any:
    assert listen.poll(100), f"rank {rank} does not answer"
    try:
        is_good, given = listen.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} ended without an answer") from None
    assert is_good, f"rank {rank} failed:\n{given}"
    return given


def _be_rank(
    rank: int, count: int, file: Path | None, do: Callable[..., Any], args: tuple[Any, ...], answer: Connection
) -> None:
    torch.set_num_threads(1)  # the parent's pool of threads is not here
    forget_accelerate()  # to which the parent is the only process
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="test",
    )  # fmt: skip
    try:
        if file is not None:
            dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=count)
        answer.send((True, do(*args)))
        if file is not None:
            dist.barrier()  # nobody leaves while another still speaks to it
    except BaseException:  # noqa: BLE001  # that of a failed assertion of pytest too: told to the test
        answer.send((False, traceback.format_exc()))
    finally:
        answer.close()
        os._exit(0)  # what the test's process does at its end is not for its ranks
