"""The next epoch's order, made in the background while this one is read."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass

from lightning_streaming.loading.order_store import is_shared, order_ahead_of_use
from lightning_streaming.order.draw import Order, order_digest
from lightning_streaming.order.settings import OrderSettings
from lightning_streaming.order.shape import DatasetShape

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Draw:
    """One order in the making: written to by its thread alone, until that has ended."""

    digest: str
    process: int
    thread: threading.Thread | None = None
    order: Order | None = None
    has_failed: bool = False

    @property
    def is_running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    @property
    def is_settled(self) -> bool:
        """Whether another try would end the same; not so where another process was busy."""
        return self.order is not None or self.has_failed


class OrderAhead:
    """Makes an epoch's order ahead of time, so that nobody waits for it when the epoch begins.

    It is a matter of speed alone: whoever reads the epoch asks for its order all the same, and makes it if it is not
    there. To be used from one thread. A copy sent to another process, or one in a forked child, starts with nothing.
    """

    def __init__(self) -> None:
        self._draw: _Draw | None = None

    def __reduce__(self) -> tuple[type[OrderAhead], tuple[()]]:
        return OrderAhead, ()

    def prepare(self, settings: OrderSettings, shape: DatasetShape, epoch: int) -> None:
        """Begin to make an order, unless one is being made; and keep it, so that nobody removes it before its use.

        Returns at once. Of what was made before, the file may be removed once nobody else uses it. Orders that have no
        file are left to their readers, and so is one that another process is making. A failure is logged, and left to
        the reader to meet.

        Args:
            settings: Settled; see :meth:`OrderSettings.settled`.
            shape: The data.
            epoch: Counts from 0.
        """
        if not is_shared(settings, shape):
            return
        draw = self._draw_here()
        if draw is not None and draw.is_running:
            return
        digest = order_digest(settings, shape, epoch)
        if draw is not None and draw.digest == digest and draw.is_settled:
            return
        self._draw = draw = _Draw(digest=digest, process=os.getpid())
        draw.thread = threading.Thread(
            target=_make, args=(draw, settings, shape, epoch), name="order-ahead", daemon=True
        )
        draw.thread.start()

    def close(self) -> None:
        """Keep nothing any more. A draw that runs ends by itself, or with the process; nobody waits for it."""
        self._draw = None

    def _draw_here(self) -> _Draw | None:
        """What was begun in this process: a forked child has a copy of the record, and no thread that goes on."""
        return self._draw if self._draw is not None and self._draw.process == os.getpid() else None


def _make(draw: _Draw, settings: OrderSettings, shape: DatasetShape, epoch: int) -> None:
    try:
        draw.order = order_ahead_of_use(settings, shape, epoch)
    except Exception as error:  # noqa: BLE001  whoever reads the epoch meets it again
        draw.has_failed = True
        cause = f"{type(error).__name__}: {error}"
        _log.warning(
            "the order of epoch %d was not made ahead of time, which is tried again at its start: %s", epoch, cause
        )
