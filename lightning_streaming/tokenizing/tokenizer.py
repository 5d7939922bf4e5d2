"""Tokenizers: of files of the ``tokenizers`` package, and one whose tokens are the bytes of UTF-8."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, EncodingError, MissingDependencyError

BYTES = "bytes"
"""Name of the tokenizer whose tokens are the bytes of UTF-8."""
DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
"""Types of stored tokens; the default is the smallest unsigned one that holds them."""
TOKENIZER_FILE = "tokenizer.json"
"""Name of the tokenizer's file in the folder of a model."""
_LARGEST = np.iinfo(np.uint64).max

Tokens = NDArray[np.integer[Any]]
Spans = Sequence[tuple[int, int]]
"""Begin and end of parts of a text, in characters."""


class ByteTokenizer:
    """A tokenizer whose tokens are the bytes of a text in UTF-8."""

    num_ids = 256
    """One more than the largest token."""

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a document, of shape (tokens,), without special tokens, truncation or padding.

        Raises:
            EncodingError: The text cannot be tokenized.
        """
        try:
            return np.frombuffer(text.encode(), np.uint8)
        except UnicodeEncodeError as error:
            raise EncodingError(f"the text is not Unicode: {error}") from error

    def encode_some(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of several documents, each as :meth:`encode` does."""
        return [self.encode(text) for text in texts]

    def encode_spans_some(self, texts: Sequence[tuple[str, Spans]]) -> list[tuple[Tokens, NDArray[np.uint8]]]:
        """Return the tokens and masks of several texts, each as :meth:`encode_spans` does."""
        return [self.encode_spans(*text) for text in texts]

    def encode_spans(self, text: str, spans: Spans) -> tuple[Tokens, NDArray[np.uint8]]:
        """Return the tokens of a text, and a mask that is 1 for those of some parts of it; both of shape (tokens,).

        Args:
            text: The text.
            spans: Begin and end of each part, in characters.

        Raises:
            EncodingError: The text cannot be tokenized.
        """
        tokens = self.encode(text)
        mask = np.zeros(len(tokens), np.uint8)
        for begin, stop in spans:
            first = len(text[:begin].encode())
            mask[first : first + len(text[begin:stop].encode())] = 1
        return tokens, mask

    def find(self, token: str) -> int | None:  # noqa: ARG002
        """Return None: bytes have no names."""
        return None


class FileTokenizer:
    """A tokenizer that the ``tokenizers`` package saved as JSON."""

    def __init__(self, path: str, data: bytes) -> None:
        """Load it.

        Args:
            path: Its file, for errors.
            data: The contents of the file.

        Raises:
            ConfigError: They are no tokenizer.
            MissingDependencyError: The package is not installed.
        """
        try:
            import tokenizers
        except ImportError:
            raise MissingDependencyError(
                "a tokenizer's file needs the tokenizers package",
                hint="run: pip install 'lightning-streaming[tokenizers]'",
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the package raises plain ones
            raise ConfigError(
                f"{path} is no file of the tokenizers package: {error}", option="tokenizer", path=path
            ) from error
        # The file of a model may enable them.
        self._pid = os.getpid()
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.num_ids = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a document, as :class:`ByteTokenizer` does."""
        return np.array(self._encoded(text).ids, np.uint32)

    def encode_some(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of several documents, each as :meth:`encode` does.

        All cores tokenize, unless :func:`tokenize_in_one_thread` was called.

        Raises:
            EncodingError: One of them cannot be tokenized.
        """
        # Of later releases; it does not compute offsets.
        return self._split(self._encoded_some(texts, getattr(self._tokenizer, "encode_batch_fast", None)))

    def encode_spans_some(self, texts: Sequence[tuple[str, Spans]]) -> list[tuple[Tokens, NDArray[np.uint8]]]:
        """Return the tokens and masks of several texts, each as :meth:`encode_spans` does.

        Raises:
            EncodingError: One of them cannot be tokenized.
        """
        encodings = self._encoded_some([text for text, _ in texts])
        masks = (_mask(encoding, spans) for encoding, (_, spans) in zip(encodings, texts, strict=True))
        return list(zip(self._split(encodings), masks, strict=True))

    def encode_spans(self, text: str, spans: Spans) -> tuple[Tokens, NDArray[np.uint8]]:
        """Return the tokens of a text and a mask, as :class:`ByteTokenizer` does.

        A token that is partly in a part belongs to it.
        """
        return self.encode_spans_some([(text, spans)])[0]

    def _encoded_some(self, texts: Sequence[str], encode: Callable[..., list[Any]] | None = None) -> list[Any]:
        if os.getpid() != self._pid:
            tokenize_in_one_thread()  # the threads of the package did not survive the fork, and it would wait for them
        words = f"{texts[0]!r:.60}" if len(texts) == 1 else f"one of {len(texts)} texts"
        with _named_errors(words):
            return (encode or self._tokenizer.encode_batch)(texts, add_special_tokens=False)

    @staticmethod
    def _split(encodings: Sequence[Any]) -> list[Tokens]:
        """Return the tokens of each encoding: parts of one array, as creating one for each takes longer."""
        stops = np.cumsum([len(encoding) for encoding in encodings]).tolist()
        ids = chain.from_iterable(encoding.ids for encoding in encodings)
        tokens = np.fromiter(ids, np.uint32, stops[-1] if stops else 0)
        return [tokens[first:stop] for first, stop in pairwise([0, *stops])]

    def _encoded(self, text: str) -> Any:
        with _named_errors(f"{text!r:.60}"):
            return self._tokenizer.encode(text, add_special_tokens=False)

    def find(self, token: str) -> int | None:
        """Return the number of a token, for example of ``"<|endoftext|>"``; None if it is unknown."""
        number: int | None = self._tokenizer.token_to_id(token)
        return number


def _mask(encoding: Any, spans: Spans) -> NDArray[np.uint8]:
    """Return a mask that is 1 for tokens that are at least partly in some parts of the text."""
    mask = np.zeros(len(encoding), np.uint8)
    if spans and len(mask):
        offsets = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(mask))
        begins, stops = offsets.reshape(-1, 2).T
        for begin, stop in spans:
            mask |= (begins < stop) & (stops > begin)
    return mask


def tokenize_in_one_thread() -> None:
    """Let the ``tokenizers`` package use one thread in this process: one of several that tokenize at once."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


@contextmanager
def _named_errors(text: str) -> Iterator[None]:
    try:
        yield
    except TypeError as error:  # raised for a text that has no UTF-8
        raise EncodingError(f"the text is not Unicode: {error}") from error
    except Exception as error:  # the package raises plain ones, for example for unknown words
        raise EncodingError(f"the tokenizer cannot encode {text}: {error}") from error


Tokenizer = ByteTokenizer | FileTokenizer
"""Converts documents to tokens."""


def file_of(name: str) -> Path:
    """Return the tokenizer's file: ``tokenizer.json`` of a folder, or the file itself."""
    path = Path(name)
    return path / TOKENIZER_FILE if path.is_dir() else path


def read_tokenizer(name: str) -> bytes | None:
    """Return the contents of the tokenizer's file; None for ``bytes``.

    Raises:
        ConfigError: The file is missing.
    """
    if name == BYTES:
        return None
    path = file_of(name)
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        words = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"the tokenizer must be {BYTES}, a JSON file or a folder with {TOKENIZER_FILE}, but {path}: {words}",
            option="tokenizer",
            path=str(path),
        ) from error


def load_tokenizer(name: str, data: bytes | None = None) -> Tokenizer:
    """Return a tokenizer.

    Args:
        name: ``bytes``, the path of a JSON file of the ``tokenizers`` package, or of a folder that has it.
        data: The contents of the file; None to read it.

    Raises:
        ConfigError: The file is missing or no tokenizer.
        MissingDependencyError: The package is not installed.
    """
    data = read_tokenizer(name) if data is None else data
    return ByteTokenizer() if data is None else FileTokenizer(str(file_of(name)), data)


def fingerprint(data: bytes | None) -> str:
    """Return a text that differs for any change of the tokenizer, from the contents of its file."""
    return BYTES if data is None else hashlib.sha256(data).hexdigest()


def find_token(tokenizer: Tokenizer, token: str | int, option: str) -> int:
    """Return a token from its number or its name.

    Args:
        tokenizer: The tokenizer.
        token: Number or name.
        option: The option that names it, for the message.

    Raises:
        ConfigError: The tokenizer has no token of this name.
    """
    if isinstance(token, int) or token.isdecimal():
        return int(token)
    number = tokenizer.find(token)
    if number is None:
        raise ConfigError(
            f"{option} must be a number or a token of the tokenizer, but it has no token {token!r}", option=option
        )
    return number


def with_ends(tokens: Tokens, bos: int | None, eos: int | None) -> Tokens:
    """Return the tokens of a document with its first and last one, which are added unless they are there."""
    first = [bos] if bos is not None and not (len(tokens) and tokens[0] == bos) else []
    last = [eos] if eos is not None and not (len(tokens) and tokens[-1] == eos) else []
    if not first and not last:
        return tokens
    wide = np.uint32 if max(first + last) <= np.iinfo(np.uint32).max else np.uint64  # bytes do not hold every token
    return np.concatenate([np.asarray(first, wide), tokens, np.asarray(last, wide)])


def choose_dtype(num_ids: int, dtype: str | None) -> str:
    """Return the dtype of stored tokens.

    Args:
        num_ids: One more than the largest token.
        dtype: The requested dtype; None for the smallest unsigned one.

    Raises:
        ConfigError: It does not hold the largest token, or none does.
    """
    if num_ids - 1 > _LARGEST:
        raise ConfigError(
            f"tokens must be at most {_LARGEST}, the maximum of uint64, but one is {num_ids - 1}", option="tokenizer"
        )
    if dtype is None:
        return next(name for name in DTYPES if num_ids - 1 <= np.iinfo(name).max)
    if num_ids - 1 > np.iinfo(dtype).max:
        raise ConfigError(
            f"--dtype must hold tokens up to {num_ids - 1}, but {dtype} ends at {np.iinfo(dtype).max}",
            hint=f"{choose_dtype(num_ids, None)} is enough",
            option="--dtype",
        )
    return dtype
