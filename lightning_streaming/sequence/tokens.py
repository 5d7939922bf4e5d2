"""Mixtures that count tokens: where a stream's passes reach a number of tokens, and an order with even shares.

TokenLengths   the tokens of each sample, by id
TokenPasses    the tokens of a stream's samples along its passes
even_shares    the order of a mixture step in which each part has each stream's share of the tokens
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.permutation import Permutation, numbered_keys
from lightning_streaming.sequence.stream_slices import StreamPasses, pass_order, stable_argsort

_CHUNK = 1 << 20
"""Samples whose tokens are looked up together."""
_GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, modulo 1, are as far from each other as can be."""


class TokenLengths(Protocol):
    """The tokens of samples, which are known before the order is."""

    @property
    def digest(self) -> str:
        """Digest of all lengths."""

    def __call__(self, sample_ids: NDArray[np.int64]) -> NDArray[np.integer[Any]]:
        """Return the tokens of some samples."""


class _Pass(NamedTuple):
    """A pass over a stream, with the samples and tokens of all passes before it."""

    number: int
    first_sample: int
    first_token: int
    shards: NDArray[np.int64]
    """The shards in the order of the pass."""
    key: NDArray[np.uint64]
    samples: NDArray[np.int64]
    """Samples of the pass before each shard, and at its end."""
    tokens: NDArray[np.int64]
    """Tokens of the pass before each shard, and at its end."""


class TokenPasses:
    """The tokens of a stream's samples along its passes, at random access.

    The order of a pass is known shard by shard, and within a shard at any place. So the tokens up to a sample are those
    of the shards before it, which are added up once, and those of a part of one shard.

    Args:
        stream: Name of the stream.
        first_id: Its first sample id.
        passes: The division of its samples into passes.
        lengths: Returns the tokens of samples.
        seed: Seed of all passes.
        is_shuffled: Passes are shuffled, rather than in the order of the stored samples.

    Raises:
        ConfigError: Its first pass has no tokens.
    """

    def __init__(
        self, stream: str, first_id: int, passes: StreamPasses, lengths: TokenLengths, seed: int, *, is_shuffled: bool
    ) -> None:
        self.passes = passes
        self._stream, self._first_id, self._lengths = stream, first_id, lengths
        self._seed, self._is_shuffled = seed, is_shuffled
        sizes = passes.sizes_of(1 << 62)  # the last passes read all shards
        self._firsts = np.cumsum(sizes) - sizes
        self.longest = 0
        """Most tokens of a sample."""
        self._of_shard = self._sums(sizes)
        self._pass: _Pass | None = None
        self._shard: tuple[tuple[int, int], NDArray[np.int64]] | None = None
        if not self.tokens_of_pass(0):
            raise ConfigError(
                f"stream {stream!r} has no tokens, so its weight cannot count them",
                hint="leave the stream out, or check the lengths of its samples",
                option="mixing.weights_in",
                stream=stream,
            )

    def tokens_of_pass(self, number: int) -> int:
        """Return the tokens of a whole pass."""
        return int(self._of_shard[: len(self.passes.sizes_of(number))].sum())

    @property
    def mean(self) -> float:
        """Tokens per sample of the first pass."""
        return self.tokens_of_pass(0) / self.passes.position(0)[1]

    def before(self, samples: int) -> int:
        """Return the tokens of the first samples of all passes."""
        known = self._pass
        if known is None or not 0 <= samples - known.first_sample < known.samples[-1]:
            known = self._of_pass(int(self.passes.numbers(np.asarray([samples]))[0]))
        within = samples - known.first_sample
        place = int(known.samples.searchsorted(within, side="right")) - 1
        tokens = known.first_token + int(known.tokens[place])
        rest = within - int(known.samples[place])
        return tokens + int(self._of_part(known, int(known.shards[place]))[rest]) if rest else tokens

    def position(self, tokens: int) -> int:
        """Return the number of samples whose tokens are nearest to a number; of two, the smaller one."""
        known = self._pass
        if known is None or not 0 <= tokens - known.first_token < known.tokens[-1]:
            known = self._of_pass(self._pass_at(tokens))
        rest = tokens - known.first_token
        # The last shard of which something is needed; shards without tokens are passed over.
        place = max(int(known.tokens.searchsorted(rest, side="left")) - 1, 0)
        of_part = self._of_part(known, int(known.shards[place]))
        left = rest - int(known.tokens[place])
        after = min(int(of_part.searchsorted(left, side="left")), len(of_part) - 1)
        if after and left - int(of_part[after - 1]) <= int(of_part[after]) - left:
            after -= 1
        return known.first_sample + int(known.samples[place]) + after

    def repeats(self, samples: int) -> float:
        """Return the number of passes that so many samples are, by their tokens."""
        number = int(self.passes.numbers(np.asarray([samples]))[0])
        return number + (self.before(samples) - self._tokens_of_passes(number)) / self.tokens_of_pass(number)

    def sample_at(self, repeats: float) -> int:
        """Return the number of samples with which a number of passes is reached, by their tokens."""
        number = int(repeats)
        return self.position(self._tokens_of_passes(number) + round((repeats - number) * self.tokens_of_pass(number)))

    def _tokens_of_passes(self, number: int) -> int:
        """Return the tokens of all passes before one."""
        parts = self.passes.equal(0, self.passes.position(number)[0])
        return sum(
            (part.stop - part.start) // int(part.sizes.sum()) * int(self._of_shard[: len(part.sizes)].sum())
            for part in parts
        )

    def _pass_at(self, tokens: int) -> int:
        """Return the pass that reaches a number of tokens."""
        for part in self.passes.equal(0, self.passes.last_start):
            total = int(self._of_shard[: len(part.sizes)].sum())
            count = (part.stop - part.start) // int(part.sizes.sum())
            if tokens < count * total:
                return part.first_pass + tokens // total
            tokens -= count * total
        first = int(self.passes.numbers(np.asarray([self.passes.last_start]))[0])
        return first + tokens // self.tokens_of_pass(first)

    def _of_pass(self, number: int) -> _Pass:
        """Return a pass."""
        known = self._pass
        if known is None or known.number != number:
            sizes = self.passes.sizes_of(number)
            shards, key = pass_order(len(sizes), self._stream, self._seed, number, is_shuffled=self._is_shuffled)
            samples, tokens = (np.concatenate([[0], np.cumsum(of[shards])]) for of in (sizes, self._of_shard))
            first = self.passes.position(number)[0]
            known = self._pass = _Pass(number, first, self._tokens_of_passes(number), shards, key, samples, tokens)
        return known

    def _of_part(self, of: _Pass, shard: int) -> NDArray[np.int64]:
        """Return the tokens of the first samples of a shard, in the order of a pass, from none to all of them."""
        known = self._shard
        if known is None or known[0] != (of.number, shard):
            size = int(self.passes.sizes_of(of.number)[shard])
            indexes: NDArray[Any] = np.arange(size)
            if self._is_shuffled:
                key = numbered_keys(of.key, np.asarray([shard]))[0]
                indexes = Permutation(size, key).permuted(indexes)
            tokens = self._lengths(self._first_id + int(self._firsts[shard]) + indexes)
            known = self._shard = (of.number, shard), np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
        return known[1]

    def _sums(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of each shard."""
        stops = np.cumsum(sizes)
        at_stops, total, num_samples = np.zeros(len(sizes), np.int64), 0, int(stops[-1])
        for start in range(0, num_samples, _CHUNK):
            stop = min(start + _CHUNK, num_samples)
            tokens = self._lengths(self._first_id + np.arange(start, stop))
            self.longest = max(self.longest, int(tokens.max()))
            sums = np.cumsum(tokens, dtype=np.int64)
            first, last = np.searchsorted(stops, (start, stop), side="right").tolist()
            at_stops[first:last] = total + sums[stops[first:last] - start - 1]
            total += int(sums[-1])
        # Those of empty shards at the beginning of a chunk are still 0.
        return np.diff(np.maximum.accumulate(at_stops), prepend=0)


def even_shares(
    streams: NDArray[np.int64], passes: NDArray[np.int64], tokens: NDArray[np.int64], num_nodes: int
) -> NDArray[np.intp]:
    """Return an order of items in which each stream's tokens are spread evenly, where canonical nodes are read in turn.

    The items of a stream keep their order, those of a pass before those of the next. An item belongs where its middle
    divides the tokens of its stream, so each canonical node has each stream's share of the tokens, to within about a
    sample, and so has each part of a node. The long items of a stream would be read at the same time in all nodes; so
    in each node another point of an item takes the place of its middle.

    Each pass is divided among all nodes, so these begin the next one at about the same time. Passes begin in different
    nodes, so that short ones, which do not have an item for each node, are spread over all of them.

    Args:
        streams: The stream of each item.
        passes: The pass of each item, of its stream.
        tokens: The tokens of each item.
        num_nodes: Canonical nodes; each has equally many of the items, one node after another.
    """
    passes = passes - int(passes.min(initial=0))
    of_pass = streams * (int(passes.max(initial=0)) + 1) + passes
    by_pass = stable_argsort(of_pass)
    streams, of_pass, sizes = streams[by_pass], of_pass[by_pass], tokens[by_pass]
    if num_nodes == 1:
        return by_pass[_merged(streams, sizes, 1, 2)]
    begins, begins_stream = (np.diff(of, prepend=-1) > 0 for of in (of_pass, streams))
    number = np.cumsum(begins) - 1
    number -= np.maximum.accumulate(np.where(begins_stream, number, 0))
    places = (_places(of_pass, sizes, 1, 2) + number * _GOLDEN) % 1
    order, per_node = np.argsort(places, kind="stable"), len(streams) // num_nodes
    for node in range(num_nodes):
        here = slice(node * per_node, (node + 1) * per_node)
        of_node = np.sort(order[here])  # by stream and pass again
        order[here] = of_node[_merged(streams[of_node], sizes[of_node], 2 * node + 1, 2 * num_nodes)]
    return by_pass[order]


def _merged(groups: NDArray[np.int64], sizes: NDArray[np.int64], part: int, of: int) -> NDArray[np.intp]:
    """Return an order of items, given by group: by the share of the group's tokens up to ``part / of`` of each."""
    return np.argsort(_places(groups, sizes, part, of), kind="stable")


def _places(groups: NDArray[np.int64], sizes: NDArray[np.int64], part: int, of: int) -> NDArray[np.float64]:
    """Return the share of a group's tokens up to ``part / of`` of each item; items are given by group."""
    starts = np.cumsum(sizes) - sizes
    firsts = np.flatnonzero(np.diff(groups, prepend=-1))
    counts = np.diff(firsts, append=len(groups))
    starts -= np.repeat(starts[firsts], counts)
    totals = np.repeat(np.maximum(np.add.reduceat(sizes, firsts), 1), counts)
    places: NDArray[np.float64] = (of * starts + part * sizes) / (of * totals)
    return places
