"""Every error this package raises on purpose.

    StreamingError
    ├── ConfigError (ValueError)                   a setting or argument that cannot work
    │   ├── UnknownArgumentError (TypeError)           one that nothing here takes
    │   └── UnsupportedError (NotImplementedError)     a sound setting that this version does not serve yet
    ├── MissingDependencyError (ImportError)       an optional package is not installed
    ├── SampleIndexError (IndexError)              a sample index outside the dataset
    ├── FormatError (ValueError)                   bytes that are not what the format says
    │   ├── IndexFormatError                           index.json
    │   ├── EncodingError                              one value of one column
    │   └── ShardCorruptError                          a shard file
    ├── StorageError (OSError)                     a store did not give or take what was asked
    │   ├── ObjectNotFoundError (FileNotFoundError)
    │   ├── AccessDeniedError (PermissionError)
    │   ├── DownloadError                              every attempt failed
    │   ├── DiskFullError                              no room for what was fetched
    │   └── IntegrityError                             what arrived is not what the index promises
    ├── SampleError (RuntimeError)                 a transform, dataset or collate function that failed on samples
    │   └── BadSamplesError                            more samples that cannot be read than may be replaced
    ├── PartError (RuntimeError)                   a part of a dataset could not be written
    ├── LockTimeoutError (TimeoutError)            another process held a lock for too long
    └── StateError (ValueError)                    a saved position that cannot be used
        └── StateMismatchError                         ... because data or order settings changed

Each takes one argument, the message: so it pickles, and so a DataLoader worker's error can be raised again, with its
own class, in the training process.

Messages hold names and values of datasets, files and servers, which nobody has checked. So ``str(error)`` escapes
every character that is not printable, also line breaks. Only what is given as ``message=`` has several lines.
"""

from __future__ import annotations

from typing import Any

from lightning_streaming.escaping import Lines, in_lines, in_one_line


class StreamingError(Exception):
    """Base of all errors raised on purpose by this package."""

    def __init__(self, *args: Any, message: str | None = None) -> None:
        # torch raises an error of a DataLoader worker again with message=, if the class has an attribute of this name.
        # Such a message is a traceback, in which the words of the error are escaped already.
        super().__init__(*(args if message is None else (Lines(message),)))

    def __str__(self) -> str:
        text = super().__str__()
        return in_lines(text) if self.args and isinstance(self.args[0], Lines) else in_one_line(text)

    @property
    def message(self) -> str:
        """The message, as it is shown."""
        return str(self)


class ConfigError(StreamingError, ValueError):
    """A setting or argument that cannot work."""


class UnknownArgumentError(ConfigError, TypeError):
    """An argument that a class does not take."""


class UnsupportedError(ConfigError, NotImplementedError):
    """A sound setting that this version does not serve yet."""


class MissingDependencyError(StreamingError, ImportError):
    """An optional package is needed and not installed."""


class SampleIndexError(StreamingError, IndexError):
    """A sample index outside the dataset."""


class FormatError(StreamingError, ValueError):
    """Bytes that are not what the format says."""


class IndexFormatError(FormatError):
    """An ``index.json`` that cannot be used."""


class EncodingError(FormatError):
    """A value that does not fit the encoding of its column."""


class ShardCorruptError(FormatError):
    """A shard file that contradicts its index or itself."""


class StorageError(StreamingError, OSError):
    """A store did not give or take what was asked."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """A bucket, object or file that does not exist."""


class AccessDeniedError(StorageError, PermissionError):
    """A store that refuses these credentials."""


class DownloadError(StorageError):
    """A download whose every attempt failed."""


class DiskFullError(StorageError):
    """A disk of this machine that has no room left for what was fetched."""


class IntegrityError(StorageError):
    """An object whose size or hash is not the one its index promises."""


class SampleError(StreamingError, RuntimeError):
    """Code of the user's own, or torch's default collate, that failed on some samples; names them."""


class BadSamplesError(SampleError):
    """More samples that cannot be read than may be replaced, or one that none of its shard can replace."""


class PartError(StreamingError, RuntimeError):
    """Some part of a dataset could not be written; the others are there, for ``mode="resume"``."""


class LockTimeoutError(StreamingError, TimeoutError):
    """Another process held a lock for longer than we may wait."""


class StateError(StreamingError, ValueError):
    """A saved position that cannot be used."""


class StateMismatchError(StateError):
    """A saved position that belongs to other data or another order."""
