"""Parts written by tasks of a Ray cluster."""

from __future__ import annotations

import importlib
import logging
import signal
import threading
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from lightning_streaming.errors import MissingDependencyError
from lightning_streaming.writing.parts import Event, PartFailed, PartJob, summary_of, write_part

_TIMES_A_DEAD_WORKER_IS_REPLACED = 3


class RayWorkers:
    """Tasks of the Ray cluster that this program is connected to, or of one of its own.

    A program that has not called ``ray.init`` is connected as ``ray.init()`` does it: to the cluster that the
    environment names, or to one on this machine that ends with the context.
    """

    def __init__(self, job: PartJob[Any], num_workers: int | None) -> None:
        """Nothing is started before the context is entered.

        Args:
            job: What to write.
            num_workers: Most tasks at a time; None for one a CPU of the cluster.

        Raises:
            MissingDependencyError: Ray is not installed.
        """
        self._ray = _import_ray()
        self._job = job
        self.capacity = num_workers or 1
        self._num_workers = num_workers
        self._running: dict[Any, int] = {}
        self._on_exit = ExitStack()

    def __enter__(self) -> RayWorkers:
        ray = self._ray
        if not ray.is_initialized():
            if threading.current_thread() is threading.main_thread():
                # Ray sets a handler of its own, and leaves it when it is shut down.
                self._on_exit.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            ray.init(log_to_driver=False, logging_level=logging.WARNING)
            self._on_exit.callback(ray.shutdown)
        self.capacity = self._num_workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._sent_job = ray.put(self._job)
        # Only a dead worker or node is tried again by Ray; an error of the function comes back as a value.
        self._task = ray.remote(max_retries=_TIMES_A_DEAD_WORKER_IS_REPLACED)(write_part)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._on_exit:
            for task in self._running:
                self._ray.cancel(task, force=True)

    def begin(self, number: int, part_input: Any) -> None:
        """Hand a part to the cluster."""
        task = self._task.options(name=f"part {number}").remote(self._sent_job, number, part_input)
        self._running[task] = number

    def wait(self) -> list[Event]:
        """Wait until a task ends."""
        ended, _ = self._ray.wait(list(self._running), num_returns=1)
        return [self._end_of(task) for task in ended]

    def _end_of(self, task: Any) -> Event:
        number = self._running.pop(task)
        try:
            event: Event = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            return PartFailed(
                number, f"Ray gave it up after {_TIMES_A_DEAD_WORKER_IS_REPLACED} more tries: {summary_of(error)}"
            )
        return event


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingDependencyError(
            f"engine='ray' needs a package that is not installed ({error}); run: pip install 'lightning-streaming[ray]'"
        ) from error
