"""What a saved state records of a dataset that is joined with a stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_streaming.saved_fields import Fields


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedJoin:
    """A dataset that is joined with a stream."""

    samples: int
    digest: str
    """Of its shards: their names, sizes and hashes."""
    key: str | None = None
    """The column of ids; None where samples are joined by position."""
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, fields: Fields) -> SavedJoin:
        """Read the mapping that :meth:`as_state` returns."""
        return cls(
            samples=fields.whole_number("samples"),
            digest=fields.text("digest"),
            key=fields.text("key") if "key" in fields else None,
            more=fields.others("samples", "digest", "key"),
        )

    def as_state(self) -> dict[str, Any]:
        """Return it as a state holds it."""
        return {
            "samples": self.samples,
            "digest": self.digest,
            **({} if self.key is None else {"key": self.key}),
            **self.more,
        }

    def digested(self) -> dict[str, Any]:
        """Return it under the keys of the first version, which digests are computed over."""
        return {
            "samples": self.samples,
            "digest": self.digest,
            **({} if self.key is None else {"on": self.key}),
            **self.more,
        }
