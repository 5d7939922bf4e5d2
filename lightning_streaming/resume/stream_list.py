"""A few bytes for each stream next to a fingerprint, to report which of many has changed; nothing depends on it.

    {"hashes": "sha1", "digests": "q83vEjRW...", "width": 4, "names": "eJyLVipWslJQKk5V..."}

"digests" are a few bytes for each stream, in their order, in Base64: of its shards and samples where the names are
there too, or in the fingerprint. "named_digests", in their place, are of its name as well. "names" are a JSON list,
compressed. Where there is no room for that they are left out, and a change is reported by the stream's neighbours.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_streaming.resume.differences import Difference
from lightning_streaming.saved_fields import Fields

_WIDTHS = (4, 3, 2)
"""Bytes of a stream's digest, as many as there is room for."""
_MOST_NAMES = 1 << 20
"""Bytes of JSON up to which names are unpacked: many times what a state has room for."""
_VARIOUS = "various"
"""Stands for the hashes of streams that have different ones, where there are too many to list each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamFacts:
    """The facts of a stream's data that its digest is computed over."""

    outline: str
    """Of its shards and samples; nothing of its name or of hashes."""
    hashes: tuple[str, ...]
    """Names of the hashes in its index."""
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamList:
    """The streams of a saved position."""

    digests: tuple[bytes, ...]
    """One for each stream, all of one length."""
    names: tuple[str, ...] | None
    """None if they are within the digests, or in the fingerprint."""
    of_names: bool
    """Whether names are within the digests."""
    hashes: str
    """Names of the hashes of all streams, with commas between."""

    @classmethod
    def read(cls, fields: Fields) -> StreamList:
        """Read the mapping that :meth:`as_state` returns.

        Raises:
            StateError: A value cannot be; the message names the field.
        """
        of_names = "named_digests" in fields
        key = "named_digests" if of_names else "digests"
        width = fields.whole_number("width", min(_WIDTHS), max(_WIDTHS))
        text = fields.text(key)
        try:
            joined = b64decode(text, validate=True)
        except ValueError:
            raise fields.wrong(key, "Base64") from None
        if not joined or len(joined) % width:
            raise fields.wrong(key, f"{width} bytes for each stream, in Base64")
        digests = tuple(joined[start : start + width] for start in range(0, len(joined), width))
        names = _unpacked(fields) if "names" in fields else None
        if names is not None and (of_names or len(names) != len(digests)):
            raise fields.contradicts(f"there are {len(names)} 'names' and {len(digests)} digests")
        return cls(digests=digests, names=names, of_names=of_names, hashes=fields.text("hashes"))

    def as_state(self) -> dict[str, Any]:
        """Return the dict that :meth:`read` turns back into this value."""
        return {
            "hashes": self.hashes,
            ("named_digests" if self.of_names else "digests"): b64encode(b"".join(self.digests)).decode(),
            "width": len(self.digests[0]),
            **({} if self.names is None else {"names": _packed(self.names)}),
        }

    def hashes_of(self, place: int, now: StreamFacts) -> tuple[tuple[str, ...] | None, bool]:
        """The hashes that a stream had, None if unknown or equal; and whether all else is the same."""
        if self.of_names or self.hashes == _VARIOUS or place >= len(self.digests):
            return None, False
        then = tuple(self.hashes.split(",")) if self.hashes else ()
        is_alike = self.digests[place] == _short(now.outline, len(self.digests[place]))
        return (None if then == now.hashes else then), is_alike


def list_streams(streams: Mapping[str, StreamFacts], room: int, *, with_names: bool) -> StreamList | None:
    """List as much as there is room for; None if that is nothing, or if no stream has been read.

    Args:
        streams: By name, in their order.
        room: Characters that it may have.
        with_names: Whether the names are nowhere else.
    """
    if not streams:  # no phase has begun
        return None
    kinds = {stream.hashes for stream in streams.values()}
    hashes = ",".join(kinds.pop()) if len(kinds) == 1 else _VARIOUS
    for names in (tuple(streams), None) if with_names else (None,):
        of_names = with_names and names is None
        for width in _WIDTHS:
            digests = tuple(_short(_text_of(name, stream, of_names), width) for name, stream in streams.items())
            listed = StreamList(digests=digests, names=names, of_names=of_names, hashes=hashes)
            if len(json.dumps(listed.as_state())) <= room:
                return listed
    return None


def stream_changes(then: StreamList, now: Mapping[str, StreamFacts]) -> list[Difference]:
    """Return which streams have left, were added, have changed, or were renamed or moved; empty if unknown."""
    if then.names is not None:
        return _changes_by_name(then.names, then, now)
    return _changes_by_place(then, now) if then.of_names else []


def _changes_by_name(names: Sequence[str], then: StreamList, now: Mapping[str, StreamFacts]) -> list[Difference]:
    width = len(then.digests[0])
    digests = dict(zip(names, then.digests, strict=True))
    data = {name: _short(stream.outline, width) for name, stream in now.items()}
    left, added = [name for name in names if name not in now], [name for name in now if name not in digests]
    changes = []
    for name in left:
        # The same data under another name; of several with the same data, the one that comes first.
        renamed = next((other for other in added if data[other] == digests[name]), None)
        if renamed is not None:
            added.remove(renamed)
        changes.append(Difference(f"streams.{name}", "there", "'absent'" if renamed is None else f"named {renamed!r}"))
    changes += [Difference(f"streams.{name}", "'absent'", f"{now[name].samples} samples") for name in added]
    stayed = [name for name in names if name in now]
    for name in stayed:
        if digests[name] != data[name]:
            changes.append(Difference(f"streams.{name}.digest", digests[name].hex(), data[name].hex()))
    if not left and not added and list(now) != stayed:
        places = dict(zip(now, range(len(now)), strict=True))
        moved = [(name, place) for place, name in enumerate(names) if places[name] != place]
        changes += [Difference(f"streams.{name}.index", str(place), str(places[name])) for name, place in moved]
    return [*changes, *_changes_of_hashes(then, now)]


def _changes_of_hashes(then: StreamList, now: Mapping[str, StreamFacts]) -> list[Difference]:
    kinds = {",".join(stream.hashes) for stream in now.values()}
    if kinds == {then.hashes} or then.hashes == _VARIOUS:
        return []
    were, are = (" or ".join(kind.replace(",", ", ") or "none" for kind in sorted(of)) for of in ({then.hashes}, kinds))
    return [Difference("streams.*.hashes", were, are)]


def _changes_by_place(then: StreamList, now: Mapping[str, StreamFacts]) -> list[Difference]:
    width = len(then.digests[0])
    digests = {name: _short(_text_of(name, stream, True), width) for name, stream in now.items()}
    names = {digest: name for name, digest in digests.items()}
    known = Counter(then.digests)
    changes, before = [], ""
    for place, digest in enumerate(then.digests):
        if digest in names:
            before = f", after {names[digest]!r}"
        else:
            changes.append(Difference(f"streams[{place}]", f"a stream{before}", "changed, renamed or 'absent'"))
    added = [name for name, digest in digests.items() if digest not in known]
    changes += [Difference(f"streams.{name}", "'absent', or other", f"{now[name].samples} samples") for name in added]
    return [*changes, *_changes_of_hashes(then, now)]


def _text_of(name: str, stream: StreamFacts, of_names: bool) -> str:
    return f"{json.dumps(name)} {stream.outline}" if of_names else stream.outline


def _short(text: str, width: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=width).digest()


def _packed(names: Sequence[str]) -> str:
    return b64encode(zlib.compress(json.dumps(names).encode(), 9)).decode()


def _unpacked(fields: Fields) -> tuple[str, ...]:
    packed = fields.text("names")
    try:
        names: Any = json.loads(zlib.decompressobj().decompress(b64decode(packed, validate=True), _MOST_NAMES))
    except (ValueError, zlib.error, RecursionError):
        raise fields.wrong("names", "a compressed list of texts") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise fields.wrong("names", "a compressed list of texts")
    return tuple(names)
