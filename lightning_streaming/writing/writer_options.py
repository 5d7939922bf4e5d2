"""What writers are asked for: every option once, with its type, default, meaning and check.

The writers, and the functions that write parts, have arguments of the same names, types and defaults; a test compares
them. Their docstrings are completed from these by :mod:`lightning_streaming.signatures`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.storage import StorageOptions
from lightning_streaming.units import store_whole
from lightning_streaming.writing.shard_encoders import ShardSettings, parse_settings

Input = TypeVar("Input")
_Options = TypeVar("_Options")
Sample = Mapping[str, Any]
Mode = Literal["create", "resume", "append"]

_ENGINES = ("processes", "ray")


def options_from(kind: type[_Options], values: Mapping[str, Any]) -> _Options:
    """Return options, checked, with their values taken from the arguments of a call.

    Args:
        kind: Class of the options.
        values: Arguments by name, and possibly more.
    """
    return kind(**{option.name: values[option.name] for option in fields(kind)})  # type: ignore[arg-type]  # a dataclass


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """What shards are made of, and how.

    Args:
        columns: Column name to encoding, for example ``{"id": "int", "image": "ndarray:uint8:32,32,3"}``. What samples
            hold beside these is left out. None tells them from the first sample, and all others must have the same.
        compression: Algorithm, for example ``"zstd"`` or ``"zstd:19"``; None for raw shards.
        hashes: Names of the hashes to record of each file, sorted.
        size_limit: Most raw bytes of a shard, as a number or like ``"64mb"``; a sample that is larger gets a shard of
            its own. None, 0 or ``"0"`` for one shard of any size below 4 GiB.
        storage_options: Arguments for the filesystem of the URL.
        strict: Whether to refuse a value that would come back as another one: 1.5 or ``"3"`` in a column of integers, a
            bool as a number, 1e300 in ``float32``, NaN in JSON. Without it they are taken as the reference takes them;
            what is written is the same, byte for byte.
    """

    columns: Mapping[str, str] | None = None
    compression: str | None = None
    hashes: Sequence[str] | None = None
    size_limit: int | float | str | None = 2**26
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    strict: bool = False

    def __post_init__(self) -> None:
        parse_settings(self.compression, self.hashes, self.size_limit)  # raises where they cannot work
        object.__setattr__(self, "storage_options", StorageOptions(self.storage_options))

    @property
    def settings(self) -> ShardSettings:
        """How shards are cut, compressed and hashed; parsed."""
        return parse_settings(self.compression, self.hashes, self.size_limit)

    def of_shards(self) -> dict[str, Any]:
        """These options alone, for another one who takes them."""
        return {one.name: getattr(self, one.name) for one in fields(ShardOptions)}


@dataclass(frozen=True, kw_only=True)
class WriterOptions(ShardOptions):
    """All that every writer takes.

    Args:
        out: A directory; or a URL that fsspec serves; or (directory, URL or second directory) for both.
        keep_local: Whether the directory of such a pair is filled too.
        progress_bar: Whether to show how many bytes are stored.
        max_workers: Shards that are compressed, hashed and stored at a time. One more may wait: so many and one are in
            memory, beside the one that is gathered. None for one a CPU, from 2 to 8.
        retry: Attempts in total for each upload.
        exist_ok: Whether a dataset that lies in the local directory is removed first, and one under the URL written
            over, uncompressed shards of the same names included. Only what its index names is removed; a directory that
            holds anything else is refused.
        mode: ``"create"`` begins anew. ``"resume"`` begins too, but records each shard that is stored, and goes on
            after the last of them if the writer before was stopped; a finished dataset is left as it is. ``"append"``
            adds shards behind those of a finished dataset, which stay as they are, and records them too; the last one
            that it adds may not be full. See :attr:`num_samples`.
    """

    out: str | Path | tuple[str, str]
    keep_local: bool = False
    progress_bar: bool = False
    max_workers: int | None = None
    retry: int = 5
    exist_ok: bool = False
    mode: Mode = "create"

    def __post_init__(self) -> None:
        super().__post_init__()
        store_whole(self, "retry", 1)
        store_whole(self, "max_workers", 1, or_none=True)
        if self.mode not in get_args(Mode):
            raise ConfigError(
                f"mode must be one of {', '.join(get_args(Mode))}, but got {short_repr(self.mode)}", option="mode"
            )
        if self.exist_ok and self.mode != "create":
            raise ConfigError(
                f"exist_ok=True replaces what is there, but mode={short_repr(self.mode)} continues it",
                hint="choose one of both",
                option="exist_ok",
            )


@dataclass(frozen=True, kw_only=True)
class SplitWriterOptions(WriterOptions):
    """All that a writer of rows takes.

    Args:
        newline: What every row ends in.
    """

    newline: str = "\n"


@dataclass(frozen=True, kw_only=True)
class XSVWriterOptions(SplitWriterOptions):
    """All that a writer of rows takes whose separator is not fixed.

    Args:
        separator: What is between two fields.
    """

    separator: str


@dataclass(frozen=True, kw_only=True)
class _PartsOptions(ShardOptions):
    """How a dataset in parts is written.

    Args:
        columns: Column name to encoding, as for :class:`~lightning_streaming.MDSWriter`. None tells them from each
            part's first sample; all parts must come to the same.
        mode: ``create``; or ``resume`` to go on with what the same call began, or begin if it began nothing.
    """

    mode: Literal["create", "resume"] = "create"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in ("create", "resume"):
            raise ConfigError(f"mode must be 'create' or 'resume', but got {short_repr(self.mode)}", option="mode")


@dataclass(frozen=True)
class PlanOptions(_PartsOptions, Generic[Input]):
    """What a dataset in parts is made of.

    Args:
        inputs: What each part is made of: file names, ranges, lists of records. The repr of each must be the same in
            every run; it is written down, and tells a resume whether it goes on with the same dataset.
        fn: Gives the samples of an input, the same ones each time.
        out: A directory that is missing or empty, or a URL with no dataset.
    """

    inputs: Sequence[Input]
    fn: Callable[[Input], Iterable[Sample]]
    out: str | Path


@dataclass(frozen=True)
class ParallelOptions(_PartsOptions, Generic[Input]):
    """What a dataset in parts is made of, and who writes them.

    Args:
        inputs: What each part is made of: file names, ranges, lists of records. All are held in memory, a generator's
            too. The repr of each must be the same in every run; it is written down, and tells a resume whether it goes
            on with the same dataset.
        fn: Gives the samples of an input, the same ones each time. With processes a function of a module.
        out: A directory that is missing or empty, or a URL with no dataset.
        num_workers: Parts that are written at a time; None for one a CPU of this machine, or of the Ray cluster.
        engine: ``processes`` of this machine; or ``ray``, tasks of a Ray cluster, all of whose nodes reach ``out``.
        start_method: How processes start: ``spawn``, ``forkserver`` or ``fork``.
        progress_bar: Whether to show finished parts and written samples, on stderr.
    """

    inputs: Iterable[Input]
    fn: Callable[[Input], Iterable[Sample]]
    out: str | Path
    _: KW_ONLY
    num_workers: int | None = None
    engine: Literal["processes", "ray"] = "processes"
    start_method: Literal["spawn", "forkserver", "fork"] = "spawn"
    progress_bar: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine not in _ENGINES:
            raise ConfigError(
                f"engine must be one of {', '.join(_ENGINES)}, but got {short_repr(self.engine)}", option="engine"
            )
        store_whole(self, "num_workers", 1, or_none=True)
