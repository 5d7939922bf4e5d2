"""Options of token budgets: batches of whole documents, padded to the longest, of limited size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_streaming.errors import ConfigError
from lightning_streaming.options.groups import store_plain
from lightning_streaming.options.packing import Packing
from lightning_streaming.replaced_names import suggests_names
from lightning_streaming.sequence.packing.settings import LARGEST_WINDOW, BudgetSettings
from lightning_streaming.signatures import explains_options_of


@suggests_names
@explains_options_of(Packing)
@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBudget(Packing):
    """Batches of whole documents of similar length, as many as a token budget allows.

    A batch is a dict: ``input_ids`` (the values of ``column``) and the columns of ``along``, of shape
    (documents, longest document), and ``lengths``, the tokens of each document. Other columns are dropped.

    A document may be anything that has a length, such as audio with a number of frames; frames then count as tokens.

    Args:
        column: The tokens of a document: a column of one-dimensional arrays, or of bytes with ``dtype``. None, with
            ``lengths`` and a ``collate_fn``: documents have no such column.
        tokens: Most tokens of a batch, with padding: the number of its documents times the longest of them.
        buckets: Ranges of lengths into which the documents of a window are sorted; a batch has documents of one range.
            More buckets pad less, and mix less.
        window: Documents of the epoch's order that are grouped together.
        longer: What to do with documents longer than ``tokens``: "truncate" or "drop" them, or "error".

    Raises:
        ConfigError: An argument cannot be.
    """

    option: ClassVar[str] = "token_budget"
    example: ClassVar[str] = "{column: tokens, tokens: 65536}"

    tokens: int
    buckets: int = 12
    window: int = LARGEST_WINDOW
    longer: Literal["truncate", "drop", "error"] = "error"

    def __post_init__(self) -> None:
        store_plain(self)
        if self.column is None and self.lengths is None:
            raise ConfigError(
                "token_budget needs column=, the tokens of a document, or lengths=, the length of a document",
                hint="like {column: tokens, tokens: 65536} or {lengths: num_frames, tokens: 65536}",
                option="token_budget.column",
            )
        if self.column is None and (self.along or self.longer == "truncate"):
            raise ConfigError(
                "token_budget.along and token_budget.longer='truncate' need token_budget.column, which is not given",
                hint="set token_budget.column, or remove them",
                option="token_budget.column",
            )
        Packing.__post_init__(self)
        if taken := {"input_ids", "lengths"} & {*self.along}:
            self._refuse("along", f"names {min(taken)!r}, which a batch has already; rename that column")

    def settings(self) -> BudgetSettings:
        """Return the settings of the plan."""
        return BudgetSettings(tokens=self.tokens, buckets=self.buckets, window=self.window, longer=self.longer)
