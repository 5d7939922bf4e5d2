"""A recipe that takes only values which come back as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_streaming.errors import EncodingError
from lightning_streaming.formats.exact import Check, find_check
from lightning_streaming.writing.columns import columns_of
from lightning_streaming.writing.recipe import MadeShard, ShardRecipe
from lightning_streaming.writing.settings import ShardSettings
from lightning_streaming.writing.shard_buffer import EncodedSamples

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class StrictRecipe:
    """Another recipe behind a look at the values; its shards are the same, byte for byte."""

    recipe: ShardRecipe
    """What makes the shards."""
    checks: tuple[tuple[str, Check], ...]
    """Columns with what their values must pass."""

    @property
    def format(self) -> str:
        return self.recipe.format

    @property
    def settings(self) -> ShardSettings:
        return self.recipe.settings

    @property
    def schema(self) -> Mapping[str, Any]:
        return self.recipe.schema

    @property
    def uncounted_bytes(self) -> int:
        return self.recipe.uncounted_bytes

    def parts(self, sample: Mapping[str, Any]) -> Sequence[Buffer]:
        for name, check in self.checks:
            if name in sample:  # the recipe says what is missing
                try:
                    check(sample[name])
                except EncodingError as error:
                    raise EncodingError(f"column {name!r}: {error}") from None
        return self.recipe.parts(sample)

    def raw_bytes(self, num_samples: int, data_bytes: int) -> int:
        return self.recipe.raw_bytes(num_samples, data_bytes)

    def make(self, number: int, samples: EncodedSamples) -> MadeShard:
        return self.recipe.make(number, samples)

    def samples_in(self, contents: Sequence[bytes]) -> list[bytes]:
        return self.recipe.samples_in(contents)


def make_strict(recipe: ShardRecipe) -> StrictRecipe:
    """Put a look at the values before a recipe."""
    found = ((name, find_check(encoding)) for name, encoding in columns_of(recipe.schema).items())
    return StrictRecipe(recipe=recipe, checks=tuple((name, check) for name, check in found if check is not None))
