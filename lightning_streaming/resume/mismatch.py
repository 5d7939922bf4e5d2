"""What differs between a saved position and today's data and options, and the message that reports it.

Difference        a changed setting or number of the data; `differences` compares two fingerprints
StreamList        a few bytes for each stream, next to a fingerprint that does not describe each of many streams
mismatch_message  the error for a saved position that belongs to other data or another order

A list of streams only reports which stream has changed; nothing depends on it:

    {"hashes": "sha1", "digests": "q83vEjRW...", "width": 4, "names": "eJyLVipWslJQKk5V..."}

"digests" are a few bytes for each stream, in their order, in Base64: of its shards and samples if the names are in the
list too, or in the fingerprint. "named_digests" replace them, and are of the name as well. "names" are a JSON list,
compressed. Without room for the names they are left out, and a change is reported by the stream's neighbours.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any, NamedTuple

from lightning_streaming.escaping import in_one_line, short_repr, shortened
from lightning_streaming.resume.saved_fields import Fields
from lightning_streaming.sequence.phases import ResolvedPhase

_MOST_ROWS = 24
"""Differences that are shown one by one."""
_WIDTHS = (4, 3, 2)
"""Bytes of a stream's digest, the most that there is room for."""
_MOST_NAMES = 1 << 20
"""Bytes of JSON up to which names are decompressed: many times what a state has room for."""
_VARIOUS = "various"
"""Placeholder for the hashes of streams that differ in them, where there are too many to list each."""


class Difference(NamedTuple):
    """A setting, or a number of the data, that has changed."""

    setting: str
    """Its key in the fingerprint, like "order.shuffle"."""
    saved: str
    """The saved value, in few words."""
    now: str
    """The current value."""


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return each difference between two fingerprints, as states hold them.

    >>> differences({"order": {"shuffle": True}}, {"order": {"shuffle": False}})
    [Difference(setting='order.shuffle', saved='True', now='False')]
    """
    return list(_differences(saved, now, ""))


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> Iterator[Difference]:
    for key in [*saved, *(key for key in now if key not in saved)]:
        name = f"{prefix}.{key}" if prefix else str(key)
        before, after = _by_number(saved.get(key, "absent")), _by_number(now.get(key, "absent"))
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, name)
            continue
        try:
            is_equal = bool(before == after)
        except (ValueError, RuntimeError):  # an array of several values, which no run saves
            is_equal = False
        if not is_equal:
            yield Difference(name, _brief(before), _brief(after))


def _by_number(value: object) -> object:
    """Return a list of mappings as a mapping, so that they are compared field by field."""
    is_list = isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value)
    return dict(enumerate(value)) if is_list and isinstance(value, list) else value


def _brief(value: object) -> str:
    if isinstance(value, Mapping) and "class" in value:
        return str(value["class"])
    if isinstance(value, Mapping) and value and all(isinstance(key, int) for key in value):
        return ", ".join(map(_brief, value.values()))
    if isinstance(value, Mapping):
        return f"{value['samples']} samples" if "samples" in value else "there"
    return short_repr(value)


def format_differences(items: Sequence[Difference]) -> str:
    """Return differences as plain text: one as a phrase, several as a table whose columns are two spaces apart.

    Names and values of a saved state are escaped, so that they add no lines.

    >>> format_differences([Difference("order.shuffle", "True", "False")])
    'order.shuffle: saved True, now False'
    >>> changes = [Difference("order.shuffle", "True", "False"), Difference("streams.0.shards", "6", "3")]
    >>> print(format_differences(changes))
    setting           saved  now
    order.shuffle     True   False
    streams.0.shards  6      3
    """
    items = _escaped(items)
    if len(items) == 1:
        return f"{items[0].setting}: saved {items[0].saved}, now {items[0].now}"
    rows = [("setting", "saved", "now"), *items[:_MOST_ROWS]]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    more = len(items) - _MOST_ROWS
    return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)


def _escaped(items: Sequence[Difference]) -> list[Difference]:
    return [Difference(*(shortened(in_one_line(text)) for text in item)) for item in items]


def mismatch_message(items: Sequence[Difference], *, are_together: bool = False, phase_hints: str = "") -> str:
    """Return the message for a saved position that is refused for these differences, with the fix.

    Args:
        items: The differences.
        are_together: The saved fingerprint has one digest for all streams.
        phase_hints: The result of :func:`phase_hints`.
    """
    items, phase_hints = _escaped(items), in_one_line(phase_hints)
    table = f"the saved position belongs to other data or another order:\n{indent(format_differences(items), '  ')}"
    hashes = [item for item in items if item.setting.endswith(".hashes")]
    fix = f'resume with on_mismatch="warn" to continue from the same position with these changes.{phase_hints}'
    counts = [(item.saved, item.now) for item in items if item.setting.endswith(".samples")]
    if any(saved.isdigit() and now.isdigit() and int(saved) < int(now) for saved, now in counts):
        fix += (
            " Data may be appended after the shards that existed, as mode='append' of the writers does; the shards "
            "before must stay unchanged."
        )
    of_streams = [item.setting for item in items if item.setting.startswith(("streams.", "all_streams"))]
    if any(setting.endswith(".lengths") for setting in of_streams):
        fix += (
            " Packs follow from the lengths of documents. Their source (lengths= or the transform's tokenizer) returns "
            "other lengths than before: put it back, or start a new epoch with the other lengths: "
            '`lightning-streaming state set CKPT --epoch N --sample 0`, then resume with on_mismatch="warn".'
        )
    if not hashes and are_together:
        fix += (
            " With so many streams a state does not describe the shards of each: data must not be appended to any, nor "
            "to datasets joined with them."
        )
    if not hashes:
        return f"{table}\nPut these back, or {fix}"
    changes = "; ".join(dict.fromkeys(f"{item.saved} → {item.now}" for item in hashes))
    if len(hashes) == len(items):
        return (
            f"{table}\nOnly hashes in the indexes differ ({changes}); names, samples and sizes of the shards are the "
            f"same. If the shards were not rewritten, {fix}"
        )
    rewritten = f"Data that is rewritten with other hashes ({changes}) has other shards."
    return f"{table}\n{rewritten} Put it back, or {fix}"


def phase_hints(
    items: Sequence[Difference], cursor: tuple[int, int], phases: Sequence[ResolvedPhase], checkpoint: str
) -> str:
    """Return sentences with the fix for changed phases, each after a space; empty if no phase differs.

    Args:
        items: The differences.
        cursor: The saved epoch and sample.
        phases: The requested phases.
        checkpoint: The name in messages of the file that the position was read from.
    """
    items = [item for item in items if item.setting.startswith("schedule.")]
    if not items:
        return ""
    by_name = {phase.name: phase for phase in phases}
    (epoch, sample), hints = cursor, list[str]()
    for item in items:
        name, _, field = item.setting.removeprefix("schedule.").rpartition(".")
        phase = by_name.get(name)
        if phase is None:
            continue
        if field == "end" and phase.written is not None:
            hints.append(
                f"schedule.{name}.end is written as {phase.written} of epoch_size, which is {phases[-1].planned_stop} "
                f"now; to keep the saved end, write {item.saved}."
            )
        is_new = field == "ended_at" and item.saved == "'absent'"
        if is_new and phase.cut is not None and not epoch and phase.cut < sample:
            hints.append(
                f"schedule.{name}.ended_at={phase.cut} is before sample {sample}, the position of the checkpoint; end "
                "it there or later."
            )
    hints.append(
        f"Phases after those that have begun may change: `lightning-streaming state branch {checkpoint}` prints how to "
        "end the last of them at the position of the checkpoint."
    )
    return "".join(f" {hint}" for hint in hints)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamFacts:
    """The facts of a stream's data that its digest is computed over."""

    outline: str
    """Its shards and samples, without its name and hashes."""
    hashes: tuple[str, ...]
    """Names of the hashes in its index."""
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamList:
    """The streams of a saved position."""

    digests: tuple[bytes, ...]
    """One for each stream, all of the same length."""
    names: tuple[str, ...] | None
    """None if the digests include them, or the fingerprint holds them."""
    of_names: bool
    """True if the digests include the names."""
    hashes: str
    """Names of the hashes of all streams, separated by commas."""

    @classmethod
    def read(cls, fields: Fields) -> StreamList:
        """Read the mapping that :meth:`as_state` returns.

        Raises:
            StateError: A value is invalid; the message names the field.
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
        names = None
        if "names" in fields:
            packed = fields.text("names")
            try:
                names = json.loads(zlib.decompressobj().decompress(b64decode(packed, validate=True), _MOST_NAMES))
            except (ValueError, zlib.error, RecursionError):
                raise fields.wrong("names", "a compressed list of texts") from None
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise fields.wrong("names", "a compressed list of texts")
            if of_names or len(names) != len(digests):
                raise fields.contradicts(f"there are {len(names)} 'names' and {len(digests)} digests")
            names = tuple(names)
        return cls(digests=digests, names=names, of_names=of_names, hashes=fields.text("hashes"))

    def as_state(self) -> dict[str, Any]:
        """Return the dict that :meth:`read` turns back into this value."""
        state = {
            "hashes": self.hashes,
            ("named_digests" if self.of_names else "digests"): b64encode(b"".join(self.digests)).decode(),
            "width": len(self.digests[0]),
        }
        if self.names is not None:
            state["names"] = b64encode(zlib.compress(json.dumps(self.names).encode(), 9)).decode()
        return state

    def hashes_of(self, index: int, now: StreamFacts) -> tuple[tuple[str, ...] | None, bool]:
        """Return the hashes that a stream had, None if unknown or unchanged; and whether all else is the same."""
        if self.of_names or self.hashes == _VARIOUS or index >= len(self.digests):
            return None, False
        then = tuple(self.hashes.split(",")) if self.hashes else ()
        is_alike = self.digests[index] == _short(now.outline, len(self.digests[index]))
        return (None if then == now.hashes else then), is_alike


def list_streams(streams: Mapping[str, StreamFacts], room: int, *, with_names: bool) -> StreamList | None:
    """Return the longest list that there is room for; None if there is room for none, or no stream has been read.

    Args:
        streams: The streams by name, in their order.
        room: Most characters of the list.
        with_names: True if nothing else holds the names.
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
    """Return the streams that were removed, added, changed, renamed or moved; empty if that is unknown."""
    if then.names is None and not then.of_names:
        return []
    changes = _changes_by_index(then, now) if then.names is None else _changes_by_name(then.names, then, now)
    kinds = {",".join(stream.hashes) for stream in now.values()}
    if kinds != {then.hashes} and then.hashes != _VARIOUS:
        saved, current = (
            " or ".join(kind.replace(",", ", ") or "none" for kind in sorted(of)) for of in ({then.hashes}, kinds)
        )
        changes.append(Difference("streams.*.hashes", saved, current))
    return changes


def _changes_by_name(names: Sequence[str], then: StreamList, now: Mapping[str, StreamFacts]) -> list[Difference]:
    width = len(then.digests[0])
    digests = dict(zip(names, then.digests, strict=True))
    data = {name: _short(stream.outline, width) for name, stream in now.items()}
    removed, added = [name for name in names if name not in now], [name for name in now if name not in digests]
    changes = []
    for name in removed:
        # The same data under another name; the first of several with the same data.
        renamed = next((other for other in added if data[other] == digests[name]), None)
        if renamed is not None:
            added.remove(renamed)
        changes.append(Difference(f"streams.{name}", "there", "'absent'" if renamed is None else f"named {renamed!r}"))
    changes += [Difference(f"streams.{name}", "'absent'", f"{now[name].samples} samples") for name in added]
    stayed = [name for name in names if name in now]
    for name in stayed:
        if digests[name] != data[name]:
            changes.append(Difference(f"streams.{name}.digest", digests[name].hex(), data[name].hex()))
    if not removed and not added and list(now) != stayed:
        indexes = dict(zip(now, range(len(now)), strict=True))
        for index, name in enumerate(names):
            if indexes[name] != index:
                changes.append(Difference(f"streams.{name}.index", str(index), str(indexes[name])))
    return changes


def _changes_by_index(then: StreamList, now: Mapping[str, StreamFacts]) -> list[Difference]:
    width = len(then.digests[0])
    digests = {name: _short(_text_of(name, stream, True), width) for name, stream in now.items()}
    names = {digest: name for name, digest in digests.items()}
    known = Counter(then.digests)
    changes, before = [], ""
    for index, digest in enumerate(then.digests):
        if digest in names:
            before = f", after {names[digest]!r}"
        else:
            changes.append(Difference(f"streams[{index}]", f"a stream{before}", "changed, renamed or 'absent'"))
    added = [name for name, digest in digests.items() if digest not in known]
    changes += [Difference(f"streams.{name}", "'absent', or other", f"{now[name].samples} samples") for name in added]
    return changes


def _text_of(name: str, stream: StreamFacts, of_names: bool) -> str:
    return f"{json.dumps(name)} {stream.outline}" if of_names else stream.outline


def _short(text: str, width: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=width).digest()
