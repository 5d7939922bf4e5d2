"""Every error this package raises on purpose.

    StreamingError
    ├── ConfigError (ValueError)                   a setting or argument that cannot work
    │   ├── UnknownArgumentError (TypeError)           one that nothing here takes
    │   ├── MissingArgumentError (TypeError)           one that is required and was not passed
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

Each has a message and, where they are known, fields for programs: ``option``, ``stream``, ``path``, ``sample`` and
``hint``. All pickle, and an error of a DataLoader worker is raised again with its own class in the training process.

Messages hold names and values of datasets, files and servers, which may be hostile. So ``str(error)`` escapes every
character that is not printable, also line breaks, and leaves the middle of a very long message out. Only a message
given as ``message=`` has several lines.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from lightning_streaming.escaping import Lines, in_lines, in_one_line, shortened

_Error = TypeVar("_Error", bound="StreamingError")
_MOST_SHOWN = 4000
"""Characters of a message in one line."""
_FIELDS = ("hint", "option", "stream", "path", "sample")


class StreamingError(Exception):
    """Base of all errors that this package raises on purpose.

    Args:
        *args: The message: what is wrong, with the value.
        message: The message, where it has several lines.
        hint: How to fix it; ``str()`` shows it after the message.
        option: Name of the option at fault, dotted as in a configuration, like "selection.where"; of a command as
            it is typed, like "--part-size" or "OUT".
        stream: Name of the stream.
        path: File or URL, without secrets.
        sample: Number of the sample, in its shard or dataset as the message says.
    """

    hint: str | None = None
    option: str | None = None
    stream: str | None = None
    path: str | None = None
    sample: int | None = None

    def __init__(
        self,
        *args: Any,
        message: str | None = None,
        hint: str | None = None,
        option: str | None = None,
        stream: str | None = None,
        path: str | None = None,
        sample: int | None = None,
    ) -> None:
        # torch raises an error of a DataLoader worker again with message=, if the class has an attribute of this name.
        # Such a message is a traceback, in which the words of the error are escaped already.
        super().__init__(*(args if message is None else (Lines(message),)))
        fields = {"hint": hint, "option": option, "stream": stream, "path": path, "sample": sample}
        self.__dict__.update({name: value for name, value in fields.items() if value is not None})

    def __str__(self) -> str:
        return self.words if self.hint is None else f"{self.words}; {shortened(in_one_line(self.hint), _MOST_SHOWN)}"

    @property
    def message(self) -> str:
        """The message and the hint, as they are shown."""
        return str(self)

    @property
    def words(self) -> str:
        """The message without the hint, as it is shown."""
        text = super().__str__()
        if self.args and isinstance(self.args[0], Lines):
            return in_lines(text)
        return shortened(in_one_line(text), _MOST_SHOWN)

    @property
    def fields(self) -> dict[str, Any]:
        """The known ones of ``hint``, ``option``, ``stream``, ``path`` and ``sample``, by name."""
        return {name: value for name in _FIELDS if (value := getattr(self, name)) is not None}

    def with_context(self: _Error, prefix: str = "", **fields: Any) -> _Error:
        """Return the same error with what a caller knows of it.

        Args:
            prefix: What the message begins with, before a colon; left out where it begins so already.
            **fields: ``option``, ``stream``, ``path``, ``sample`` or ``hint``, for those that the error lacks.
        """
        error = copy.copy(self).with_traceback(self.__traceback__)
        text = str(self.args[0]) if self.args else ""
        has_lines = bool(self.args) and isinstance(self.args[0], Lines)
        prefix = in_one_line(prefix) if has_lines else prefix
        if prefix and not text.startswith(prefix):
            error.args = ((Lines if has_lines else str)(f"{prefix}: {text}"), *self.args[1:])
            if isinstance(error, ImportError):  # whose text is not that of its arguments
                error.msg = error.args[0]
        error.__dict__.update({name: value for name, value in fields.items() if getattr(error, name) is None})
        return error

    def with_message(self: _Error, message: str) -> _Error:
        """Return the same error with a message of several lines, which has the words of the hint already."""
        error = copy.copy(self).with_traceback(self.__traceback__)
        error.args = (Lines(message),)
        error.__dict__.pop("hint", None)
        return error


class ConfigError(StreamingError, ValueError):
    """A setting or argument that cannot work."""


class UnknownArgumentError(ConfigError, TypeError):
    """An argument that a class does not take."""


class MissingArgumentError(ConfigError, TypeError):
    """An argument that a class requires and a call does not pass."""


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
