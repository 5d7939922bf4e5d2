"""Storage options, environment variables in them, and the masking of secrets in options, URLs and errors."""

from __future__ import annotations

import base64
import binascii
import html
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.cookies import Morsel
from typing import Any
from urllib.parse import parse_qsl, quote, quote_plus, unquote, unquote_plus, urlsplit

from lightning_streaming.errors import ConfigError, StorageError
from lightning_streaming.escaping import in_lines
from lightning_streaming.storage.urls import is_url, mask_url, user_of

_HIDDEN = "***"
"""The text shown for a secret."""
_PUBLIC = ("account_host", "account_name", "endpoint", "endpoint_url", "region", "region_name", "profile", "project")
"""Options whose texts are no secrets, except those of a URL: the location of a store, or the name of credentials."""
_SECRET_NAME = re.compile(
    r"(?:^|[_-])(?:key|secret|token|pass|passwd|password|pin|auth|authorization|sig|signature|cookie|credentials?)"
    r"(?:$|[_-])",
    re.IGNORECASE,
)
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_REFERENCES = re.compile(r"(?:(?:bearer|basic|token) +)?(?:\$\{[A-Za-z_]\w*\})+", re.IGNORECASE)
_URL_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_BETWEEN_PIECES = re.compile(r"[\s;,=:&\"'|]+")
_NO_SECRETS = {"true", "false", "null", "none", "anon"}
_SHORTEST_SECRET = 4
# A shorter piece of a text, or user, is probably a name, which occurs elsewhere too.
_SHORTEST_PIECE = 6
_SHORTEST_QUERY_SECRET = 12
_SECRET_VARIABLES = {
    "AZURE_STORAGE_ACCOUNT_KEY": "account_key",
    "AZURE_STORAGE_CLIENT_SECRET": "client_secret",
    "AZURE_STORAGE_CONNECTION_STRING": "connection_string",
    "AZURE_STORAGE_SAS_TOKEN": "sas_token",
    "AZURE_CLIENT_SECRET": "client_secret",
    "HF_TOKEN": "token",
}
"""Environment variables from which stores' clients take secrets, and the options with the same meaning."""
_CONNECTION_STRING = "connection_string"
_IN_CONNECTION_STRING = re.compile(r"(?:AccountKey|SharedAccessSignature)=([^;]+)", re.IGNORECASE)


class StorageOptions(Mapping[str, Any]):
    """Storage options whose ``repr``, and so whatever is printed or logged, holds no secrets.

    Items, iteration and pickling return the original values: a filesystem, and a worker process, need them.

    Args:
        options: By name, as fsspec's filesystem takes them. None: none.
        option: Name of the option that they are from, for errors; options of this class keep theirs.

    Raises:
        ConfigError: They are no mapping from names to values. The value is not shown: it may be secret.
    """

    __slots__ = ("_options", "option")

    def __init__(self, options: Mapping[str, Any] | None = None, option: str = "storage_options") -> None:
        must = f"{option} must map names to values, like {{'anon': True}}"
        if not isinstance(options, Mapping | None):
            raise ConfigError(f"{must}, but are of type {type(options).__name__}", option=option)
        for name in options or ():
            if not isinstance(name, str):
                raise ConfigError(f"{must}, but have a name of type {type(name).__name__}", option=option)
        self._options = dict(options or {})
        self.option = option_of(options, option)

    def __getitem__(self, name: str) -> Any:
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        return repr(shown_options(self))


def option_of(options: Mapping[str, Any] | None, default: str = "storage_options") -> str:
    """Return the name of the option that storage options are from, for errors."""
    return options.option if isinstance(options, StorageOptions) else default


def expand(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return storage options with each ``${NAME}`` in a text, at any depth, replaced by that environment variable.

    For opening a filesystem only; the result is stored nowhere else: a value may be a secret.

    Raises:
        ConfigError: A variable is not set, or a secret was masked when these options were printed.
    """
    option = option_of(options)

    def value_of(reference: re.Match[str]) -> str:
        if reference[1] not in os.environ:
            raise ConfigError(
                f"{option} uses the environment variable {reference[1]}, but it is not set",
                hint="set it where this process starts, or leave the option out",
                option=option,
            )
        return os.environ[reference[1]]

    def expand_text(text: str) -> str:
        if text == _HIDDEN:
            raise ConfigError(
                f"{option} holds {_HIDDEN}, which stands for a secret that was not printed",
                hint='write the name of an environment variable instead, like "${STORE_SECRET}", or leave the option '
                "out",
                option=option,
            )
        return _REFERENCE.sub(value_of, text)

    expanded: dict[str, Any] = _map_texts(options, expand_text)
    return expanded


def expand_known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return storage options like :func:`expand`, but with references to variables that are not set unchanged."""
    expanded: dict[str, Any] = _map_texts(
        options, lambda text: _REFERENCE.sub(lambda match: os.environ.get(match[1], match[0]), text)
    )
    return expanded


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Morsel):  # a mapping of a cookie's attributes, without its value
        return change(value.coded_value)
    if isinstance(value, Mapping):
        return {key: _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        mapped = [_map_texts(item, change) for item in value]
        if mapped == list(value):  # also because aiohttp.BasicAuth, a named tuple, warns when it is created
            return value
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    return value


def is_secret_name(name: str) -> bool:
    """Return whether a name is like that of a secret, so that its value is masked even if it is a number."""
    return _SECRET_NAME.search(name) is not None


def shown_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return storage options to show, at any depth: ``***`` for each text that is not known to be public.

    Texts of nothing but environment variables, like ``"${STORE_SECRET}"``, stay: they name the secret only.
    """
    return {str(name): _shown(option, str(name)) for name, option in options.items()}


def without_hidden(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that :func:`shown_options` returned, without those that are masked."""
    kept = {name: without_hidden(value) if isinstance(value, Mapping) else value for name, value in options.items()}
    return {
        name: value
        for name, value in kept.items()
        if value != _HIDDEN and not (isinstance(value, list) and _HIDDEN in value)
    }


def _shown(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return shown_options(value)
    if isinstance(value, list | tuple):
        return [_shown(item, name) for item in value]
    if isinstance(value, str) and name in _PUBLIC:
        return mask_url(value)
    if isinstance(value, str) and _REFERENCES.fullmatch(value):
        return value
    if value is None or isinstance(value, bool):
        return value
    return value if isinstance(value, int | float) and not is_secret_name(name) else _HIDDEN


def redact(text: str, options: Mapping[str, Any], hidden: Iterable[str] = ()) -> str:
    """Mask every URL in a text, every text in storage options, and more.

    All option values count as secret, except the location of the store. Values that they, or the clients of Azure and
    the hub, take from environment variables are masked as well, each piece of a value like a header or a list of
    cookies, and all of them also in quoted and encoded form.

    Args:
        text: The text to show.
        options: Storage options.
        hidden: More texts to mask.
    """
    text = _URL_IN_TEXT.sub(lambda match: mask_url(match[0]), text)
    variables = {option: os.environ[name] for name, option in _SECRET_VARIABLES.items() if os.environ.get(name)}
    sources = (options, expand_known(options), variables)
    secrets = {*(secret for source in sources for secret in secrets_of_options(source)), *hidden}
    for form in sorted({form for secret in secrets for form in _forms(secret)}, key=len, reverse=True):
        text = text.replace(form, _HIDDEN)
    return text


def secrets_of(url: str) -> tuple[str, ...]:
    """Return the secrets in a URL: user, password, query and the long values in that, as written and decoded."""
    if not is_url(url):
        return ()
    userinfo = user_of(url)
    query = urlsplit(url.partition(userinfo)[2] if userinfo else url).query
    user, _, password = userinfo.partition(":")
    secrets = [text for text in (userinfo, password, query) if len(text) >= _SHORTEST_SECRET]
    secrets += [user] if len(user) >= _SHORTEST_PIECE else []
    for name, value in parse_qsl(query):
        shortest = _SHORTEST_PIECE if is_secret_name(name) else _SHORTEST_QUERY_SECRET
        secrets += [value] if len(value) >= shortest else []
    return tuple({*secrets, *map(unquote, secrets)})


def secrets_of_options(value: object, name: str = "") -> set[str]:
    """Return the possible secrets in storage options, or in one of them: texts, and their pieces.

    Args:
        value: The options, or one of them.
        name: Name of the option, if it is one.
    """
    return {text for text in _texts(value, name) if text.lower() not in _NO_SECRETS}


def shown_cause(error: BaseException, options: Mapping[str, Any], hidden: tuple[str, ...] = ()) -> BaseException:
    """Return the error if nothing in its chain needs masking or escaping, else a replacement without the chain.

    A traceback prints the whole chain, and a DataLoader worker sends it as text: masking our message is not enough.
    """
    texts = [text for link in chain_of(error) for text in (str(link), repr(link), *getattr(link, "__notes__", ()))]
    if all(redact(text, options, hidden) == text == in_lines(text) for text in texts):
        return error
    return StorageError(describe(error, options, hidden))


def describe(error: BaseException, options: Mapping[str, Any], hidden: tuple[str, ...] = ()) -> str:
    """Return class and message of an error, masked and in one line."""
    message = str(error)
    if any(cls.__name__ == "AzureError" for cls in type(error).__mro__):
        message = message.partition("\n")[0]  # the number and time of the request, and the response as XML follow
    return redact(f"{type(error).__name__}: {' '.join(message.split())}".rstrip(": "), options, hidden)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and all that a traceback would print with it."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__ or link.__context__


def _texts(value: object, name: str) -> Iterator[str]:
    if isinstance(value, Morsel):
        yield from _texts(value.coded_value, name)
    elif isinstance(value, Mapping):
        users = [value.get(key) for key in ("username", "user") if value.get(key)]
        yield from (f"{user}:{value['password']}" for user in users if value.get("password"))
        for key, item in value.items():
            yield from _texts(item, str(key))
    elif isinstance(value, list | tuple):
        if len(value) > 1 and all(isinstance(item, str) for item in value[:2]):
            yield f"{value[0]}:{value[1]}"  # a user and a password, as they are sent
        for item in value:
            yield from _texts(item, name)
    elif isinstance(value, bytes):
        yield from _texts(value.decode(errors="replace"), name)
    elif isinstance(value, str) and name == _CONNECTION_STRING:  # the rest is the location of the store
        yield value
        for secret in _IN_CONNECTION_STRING.findall(value):
            yield from _pieces(secret)
    elif isinstance(value, str):
        yield from secrets_of(value)
        yield from () if name in _PUBLIC else _pieces(value)
    elif isinstance(value, int | float) and not isinstance(value, bool) and is_secret_name(name):
        yield from _pieces(str(value))


def _pieces(text: str) -> Iterator[str]:
    """Yield a text, its pieces, and the texts that are encoded in those."""
    if len(text) >= _SHORTEST_SECRET:
        yield text
    for piece in _BETWEEN_PIECES.split(text):
        if len(piece) >= _SHORTEST_PIECE:
            yield piece
            if decoded := _decoded(piece):
                parts = _BETWEEN_PIECES.split(decoded)
                yield from (decoded, *(part for part in parts if len(part) >= _SHORTEST_PIECE))


def _decoded(text: str) -> str:
    """Return the text that base64 decodes to, as user and password are sent; "" if it is not base64 of a text."""
    try:
        decoded = base64.b64decode(text + "=" * (-len(text) % 4), validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        return ""
    return decoded if decoded.isprintable() else ""


def _forms(secret: str) -> set[str]:
    """Return the forms in which a response or an error may contain a secret."""
    data = secret.encode(errors="replace")
    encoded = {base64.b64encode(data).decode(), base64.urlsafe_b64encode(data).decode()}
    return {
        secret,
        quote(secret),
        quote(secret, safe=""),
        quote_plus(secret),
        unquote(secret),
        unquote_plus(secret),
        html.escape(secret),
        json.dumps(secret)[1:-1],
        repr(secret)[1:-1],
        *(form.rstrip("=") for form in encoded),
    } - {""}
