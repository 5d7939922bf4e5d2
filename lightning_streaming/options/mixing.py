"""Options of a mixture as a whole: the unit of its weights, their relation to the sizes of streams, and its limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.options.groups import OptionGroup, fields_of, store_plain
from lightning_streaming.options.lengths import LengthsRequest
from lightning_streaming.options.schedule import check_max_repeats
from lightning_streaming.sequence.settings import require_known
from lightning_streaming.signatures import public, suggests_names
from lightning_streaming.units import check_whole, parse_count, plain_number

WeightUnit = Literal["samples", "tokens"]
BeyondLimit = Literal["error", "redistribute"]


@public()
@suggests_names
@dataclass(frozen=True, kw_only=True, slots=True)
class MixingConfig(OptionGroup):
    """Unit and limits of the weights of a mixture, in ``proportion`` and ``schedule``.

    With any of these options, streams continue from epoch to epoch where they stopped. See docs/mixtures.md.

    Args:
        weights_in: Unit of the weights, and of ``epoch_size``, the ends of phases and ``max_repeats``: "samples", or
            "tokens", as counted by ``packing``, ``token_budget``, or ``lengths`` and ``column`` here.
        size_exponent: Weights are multiplied by the size of their stream to this power: 0 leaves them as they are, 1
            makes them factors of the natural size, and a number between flattens the sizes, like a temperature of its
            inverse.
        max_repeats: Most times that each stream may be read in the whole run, by name, like ``{"code": 4}``.
        beyond: How a mixture is handled that reads a stream more often: "error", before the run; or "redistribute": the
            other streams of the mix take over what is beyond, by their weights. Streams are read first come, first
            served: one that reaches its limit is missing from later phases and epochs.
        longest_step: Most samples, or tokens, of a mixture step, like "10m": samples are shuffled within a step, and
            weights that a run sets take effect where one ends. None: as many as the shuffle mixes.
        column: Without packing, the column of a sample's tokens: arrays of one dimension, or bytes with ``dtype``.
        dtype: Type of the tokens in a column of bytes, like "uint16".
        lengths: Without packing, a column with the number of tokens, or a function whose parameters are named like
            columns.
        lengths_version: With a function in ``lengths``, a name of what it depends on, such as a tokenizer.

    Raises:
        ConfigError: A field has a value that cannot work.
    """

    option: ClassVar[str] = "mixing"
    example: ClassVar[str] = "{weights_in: tokens}"

    weights_in: WeightUnit = "samples"
    size_exponent: float = 0.0
    max_repeats: Mapping[str, float] = field(default_factory=dict)
    beyond: BeyondLimit = "error"
    longest_step: int | float | str | None = None
    column: str | None = None
    dtype: str | None = None
    lengths: str | Callable[..., Any] | None = None
    lengths_version: str | None = None

    def __post_init__(self) -> None:
        store_plain(self)
        require_known("mixing.weights_in", self.weights_in, get_args(WeightUnit))
        require_known("mixing.beyond", self.beyond, get_args(BeyondLimit))
        exponent = plain_number(self.size_exponent)
        if exponent is None or not 0 <= exponent <= 1:
            raise ConfigError(
                f"mixing.size_exponent must be a number from 0 to 1, but is {short_repr(self.size_exponent)}",
                option="mixing.size_exponent",
            )
        object.__setattr__(self, "size_exponent", float(exponent))
        check_max_repeats("mixing.max_repeats", self.max_repeats)
        if self.longest_step is not None:
            object.__setattr__(self, "longest_step", parse_count(self.longest_step, "mixing.longest_step"))
            check_whole("mixing.longest_step", self.longest_step, 1)
        sources = [
            name for name in ("column", "dtype", "lengths", "lengths_version") if getattr(self, name) is not None
        ]
        if sources and self.weights_in != "tokens":
            raise ConfigError(
                f"mixing.{sources[0]} needs weights that count tokens",
                hint="set mixing.weights_in: tokens, or remove it",
                option=f"mixing.{sources[0]}",
            )
        if sources:
            with fields_of("mixing"):
                self.request()

    @property
    def in_tokens(self) -> bool:
        """True if weights count tokens."""
        return self.weights_in == "tokens"

    def request(self) -> LengthsRequest | None:
        """Return the request for lengths, if the group has one."""
        if self.column is None and self.lengths is None and self.dtype is None and self.lengths_version is None:
            return None
        return LengthsRequest(
            column=self.column, dtype=self.dtype, lengths=self.lengths, version=self.lengths_version, group="mixing"
        )
