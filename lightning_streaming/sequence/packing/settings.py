"""Options of packing, and their checks.

A *pack* is what a language model reads as one row of tokens, or, under a budget of tokens, a group of whole documents
that are padded to the longest. Which documents share a pack is a function of the epoch's order, the documents' lengths
and these settings, and so the same on any number of machines; ``plan`` computes it, ``packs`` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.settings import require_known
from lightning_streaming.units import store_whole

PackMethod = Literal["concat", "best_fit"]
LongerThanPack = Literal["split", "truncate", "drop", "error"]
LongerThanBudget = Literal["truncate", "drop", "error"]

LARGEST_WINDOW = 1 << 16
"""Documents of a window, whose places fit 16 bits."""
LARGEST_CAPACITY = 1 << 22
LARGEST_BUDGET = 2**31 - 1
MOST_BUCKETS = 1024


@dataclass(frozen=True, kw_only=True)
class PackSettings:
    """Packs of one capacity, for rows of one length.

    Args:
        capacity: Most tokens of a pack.
        method: "concat": documents one after another in the epoch's order, cut every ``capacity`` tokens; only the
            last pack may be short. "best_fit": whole documents, each window packed separately: longest first, each into
            the pack with the least room that is enough, or a new one. Packs of a window are then put in random order.
        window: With "best_fit", the number of consecutive documents of the epoch's order that are packed together.
        max_documents: With "best_fit", most documents of a pack; None for any number.
        multiple: Each document takes a multiple of this many tokens of a pack, the rest of which is padding; divides
            ``capacity``.
        longer: How a document longer than ``capacity`` is packed: "split" gives a separate pack to each full piece, and
            packs the rest like a document; "truncate" keeps its first ``capacity`` tokens; "drop" leaves it out;
            "error" raises an error. "concat" cuts all documents alike, so it supports "split" only.

    Raises:
        ConfigError: A setting is invalid.
    """

    capacity: int
    method: PackMethod = "best_fit"
    window: int = 4096
    longer: LongerThanPack = "split"
    max_documents: int | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        store_whole(self, "capacity", 1, LARGEST_CAPACITY)
        require_known("method", self.method, get_args(PackMethod))
        store_whole(self, "window", 1, LARGEST_WINDOW)
        require_known("longer", self.longer, get_args(LongerThanPack))
        store_whole(self, "max_documents", 1, LARGEST_WINDOW, or_none=True)
        store_whole(self, "multiple", 1, self.capacity)
        if self.capacity % self.multiple:
            raise ConfigError(
                f"capacity={self.capacity} must be a multiple of multiple={self.multiple}",
                hint=f"use {-(-self.capacity // self.multiple) * self.multiple}",
                option="multiple",
            )
        if self.method == "concat" and self.max_documents is not None:
            raise ConfigError(
                f"max_documents={self.max_documents} needs method='best_fit', as 'concat' puts any number into a pack",
                hint="leave it out, or pass method='best_fit'",
                option="max_documents",
            )
        if self.method == "concat" and self.longer != "split":
            raise ConfigError(
                f"longer={self.longer!r} does not go with method='concat', which cuts every document where a pack ends",
                hint="leave longer at 'split', or pass method='best_fit'",
                option="longer",
            )

    @property
    def facts(self) -> tuple[str | int, ...]:
        """The settings that make a difference to the packs; those of later releases only where they are set."""
        return tuple(self.named.values()) + tuple(name for name in self.named if name in _LATER)

    @property
    def named(self) -> dict[str, str | int]:
        """The same by the names of their options."""
        more = {} if self.max_documents is None else {"max_documents": self.max_documents}
        if self.multiple > 1:
            more["multiple"] = self.multiple
        named: dict[str, str | int] = {"method": self.method, "capacity": self.capacity}
        return {**named, **({} if self.method == "concat" else {"window": self.window, "longer": self.longer}), **more}

    @property
    def in_units(self) -> PackSettings:
        """The settings of a plan that counts in units of ``multiple`` tokens."""
        return self if self.multiple == 1 else replace(self, capacity=self.capacity // self.multiple, multiple=1)


@dataclass(frozen=True, kw_only=True)
class BudgetSettings:
    """Groups of whole documents of similar length, padded to the longest: as many as a budget of tokens allows.

    Documents of a window are sorted into buckets by their lengths, with borders chosen for the window so that each
    bucket needs about as much padding. Within a bucket they are taken in the epoch's order, and a group ends before its
    number of documents times its longest one would exceed ``tokens``. Groups of a window are then put in random order.

    Args:
        tokens: Most tokens of a group, padding included.
        buckets: Number of ranges of lengths. More buckets need less padding, and mix less.
        window: The number of consecutive documents of the epoch's order that are grouped together.
        longer: How a document longer than ``tokens`` is handled: "truncate" keeps its first ``tokens`` tokens, "drop"
            leaves it out, "error" raises an error.

    Raises:
        ConfigError: A setting is invalid.
    """

    tokens: int
    buckets: int = 12
    window: int = LARGEST_WINDOW
    longer: LongerThanBudget = "error"

    def __post_init__(self) -> None:
        store_whole(self, "tokens", 1, LARGEST_BUDGET)
        store_whole(self, "buckets", 1, MOST_BUCKETS)
        store_whole(self, "window", 1, LARGEST_WINDOW)
        require_known("longer", self.longer, get_args(LongerThanBudget))

    multiple: ClassVar[int] = 1

    @property
    def capacity(self) -> int:
        """The most tokens of a pack."""
        return self.tokens

    @property
    def in_units(self) -> BudgetSettings:
        """The settings of a plan."""
        return self

    @property
    def facts(self) -> tuple[str | int, ...]:
        """The settings that make a difference to the packs."""
        return ("budget", self.tokens, self.buckets, self.window, self.longer)

    @property
    def named(self) -> dict[str, str | int]:
        """The same by the names of their options."""
        return named_facts(self.facts)


AnyPackSettings = PackSettings | BudgetSettings

_OF_BUDGET = ("tokens", "buckets", "window", "longer")
_OF_PACK = ("capacity", "window", "longer")
_LATER = ("max_documents", "multiple")


def named_facts(facts: Sequence[str | int]) -> dict[str, str | int]:
    """Return ``facts`` of settings by the names of their options.

    >>> named_facts(["best_fit", 512, 4096, "split"])
    {'method': 'best_fit', 'capacity': 512, 'window': 4096, 'longer': 'split'}
    """
    method, *rest = facts
    return {"method": method, **dict(zip(_OF_BUDGET if method == "budget" else _OF_PACK, rest, strict=False))}
