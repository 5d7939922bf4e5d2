"""The batches that a dataset is asked to leave out: placed once, and from then on the same samples everywhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping

from lightning_streaming.order.batch_ranges import BatchRange, Counted, Dealing, parse_ranges, stretches_of
from lightning_streaming.order.gaps import Place, Stretch

_log = logging.getLogger(__name__)


class SkippedBatches:
    """Ranges of global batches, and where their samples are.

    A range is placed with the global batch of the run that was first asked to skip it. A saved position carries that
    place, so that a run with other ranks or batch sizes leaves out the same samples.

    Args:
        asked: What the user wrote, like ["12000-12100", "15000"].

    Raises:
        ConfigError: It is not written so, or ranges overlap.
    """

    def __init__(self, asked: Iterable[int | str] = ()) -> None:
        self._ranges = parse_ranges(asked, "skip")
        self._known: dict[BatchRange, Stretch] = {}
        self._counted: Counted | None = None
        self._latest: tuple[Hashable, dict[BatchRange, Stretch]] | None = None
        self._told = False

    def __len__(self) -> int:
        return len(self._ranges)

    def load(self, saved: Mapping[str, Stretch]) -> None:
        """Take what a saved position says of the ranges that are asked for; others are read again from here on."""
        self._known = {one: saved[str(one)] for one in self._ranges if str(one) in saved}
        self._counted, self._latest, self._told = None, None, False

    def count_from(self, counted: Counted) -> None:
        """Count batches from here on, as a trainer does. What was placed for a trainer that has begun stays there."""
        if self._counted is not None and self._latest is not None and counted.steps:
            self._known = self._latest[1]
        self._counted, self._latest = counted, None

    def placed(self) -> Mapping[BatchRange, Stretch]:
        """The ranges whose places are known without asking how epochs are dealt."""
        return self._known

    def stretches(self, key: Hashable, dealing: Callable[[Place], Dealing]) -> Mapping[BatchRange, Stretch]:
        """Where the samples of every range are.

        Args:
            key: Of all that ``dealing`` depends on: while it stays the same, so do the places.
            dealing: How the epoch of a place and those after it are dealt. Asked only if a range is new.
        """
        new = [one for one in self._ranges if one not in self._known]
        if not new:
            return self._known
        if self._latest is None or self._latest[0] != key:
            counted = self._counted or Counted()
            found = stretches_of(new, self._known, counted, dealing(counted.place))
            self._latest = key, {one: self._known.get(one) or found[one] for one in self._ranges}
        return self._latest[1]

    def tell(self, place: Place, stretches: Mapping[BatchRange, Stretch], told: str = "") -> None:
        """Say once which ranges were asked for too late: a run that goes on at ``place`` has read them.

        Args:
            place: Where the run goes on.
            stretches: Where the ranges are.
            told: What the message begins with.
        """
        late = [str(one) for one, (_, stop) in stretches.items() if one not in self._known and stop <= place]
        if late and not self._told:
            words = "%sskip: batches %s have been read already, so nothing is left out for them"
            _log.warning(words, told, ", ".join(late))
        self._told = True
