"""Storage options, the environment variables they take, and how secrets in them and in URLs are kept out of texts."""

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
"""What is shown in place of a secret."""
_PUBLIC = ("account_host", "account_name", "endpoint", "endpoint_url", "region", "region_name", "profile", "project")
"""Options whose texts are no secrets, but for a URL's: where a store is, or which credentials to look up."""
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
# What is shorter, as a piece of a text or as a user, is rather a name, which occurs elsewhere too.
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
"""Environment variables from which stores' clients take what is secret, and the options that these stand for."""
_CONNECTION_STRING = "connection_string"
_IN_CONNECTION_STRING = re.compile(r"(?:AccountKey|SharedAccessSignature)=([^;]+)", re.IGNORECASE)


class StorageOptions(Mapping[str, Any]):
    """Storage options that print, log and represent themselves without secrets.

    Looked up, iterated over or pickled they are what was given: a filesystem, and a worker process, need that.

    Args:
        options: By name, as fsspec's filesystem takes them. None: none.
        option: Name of the option that they are from, as errors call it; options of this class keep theirs.

    Raises:
        ConfigError: They are no mapping from names to values. What they are is not shown: it may be secret.
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
    """Return the name of the option that storage options are from, as errors call it."""
    return options.option if isinstance(options, StorageOptions) else default


def expand(options: Mapping[str, Any]) -> dict[str, Any]:
    """Storage options with each ``${NAME}`` in a text, at any depth, replaced by that environment variable.

    To be done when a filesystem is opened, and the result kept nowhere else: the value may be a secret.

    Raises:
        ConfigError: A variable is not set, or a secret was left out when these options were printed.
    """
    option = option_of(options)
    expanded: dict[str, Any] = _map_texts(options, lambda text: _expanded(text, option))
    return expanded


def expand_known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Like :func:`expand`, but a variable that is not set stays as it is written."""
    expanded: dict[str, Any] = _map_texts(
        options, lambda text: _REFERENCE.sub(lambda found: os.environ.get(found[1], found[0]), text)
    )
    return expanded


def _expanded(text: str, option: str) -> str:
    if text == _HIDDEN:
        raise ConfigError(
            f"{option} holds {_HIDDEN}, which stands for a secret that was not printed",
            hint='write the name of an environment variable instead, like "${STORE_SECRET}", or leave the option out',
            option=option,
        )
    return _REFERENCE.sub(lambda reference: _value_of(reference[1], option), text)


def _value_of(variable: str, option: str) -> str:
    if variable not in os.environ:
        raise ConfigError(
            f"{option} uses the environment variable {variable}, but it is not set",
            hint="set it where this process starts, or leave the option out",
            option=option,
        )
    return os.environ[variable]


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Morsel):  # a mapping of a cookie's attributes, without its value
        return change(value.coded_value)
    if isinstance(value, Mapping):
        return {key: _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        mapped = [_map_texts(item, change) for item in value]
        if mapped == list(value):  # also because aiohttp.BasicAuth, a named tuple, warns when one is made
            return value
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    return value


def is_secret_name(name: str) -> bool:
    """Whether a name sounds like that of a secret, so that a number under it is one."""
    return _SECRET_NAME.search(name) is not None


def shown_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Storage options as they may be shown, at any depth: ``***`` for each text that is not known to be harmless.

    Texts of nothing but environment variables, like ``"${STORE_SECRET}"``, stay: they name the secret only.
    """
    return {str(name): _shown(option, str(name)) for name, option in options.items()}


def without_hidden(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as :func:`shown_options` gives them, without what is hidden in them."""
    kept = {name: without_hidden(one) if isinstance(one, Mapping) else one for name, one in options.items()}
    return {
        name: one for name, one in kept.items() if one != _HIDDEN and not (isinstance(one, list) and _HIDDEN in one)
    }


def _shown(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return shown_options(value)
    if isinstance(value, list | tuple):
        return [_shown(one, name) for one in value]
    if isinstance(value, str) and name in _PUBLIC:
        return mask_url(value)
    if isinstance(value, str) and _REFERENCES.fullmatch(value):
        return value
    if value is None or isinstance(value, bool):
        return value
    return value if isinstance(value, int | float) and not is_secret_name(name) else _HIDDEN


def redact(text: str, options: Mapping[str, Any], hidden: Iterable[str] = ()) -> str:
    """Mask every URL in a text, every text that storage options hold, and more.

    All option values count as secret, whatever their name, except those that say where the store is. What they, or the
    clients of Azure and the hub, take from environment variables is masked as well, each piece of a value like a header
    or a list of cookies, and all of it also as it looks quoted or encoded.

    Args:
        text: What to show.
        options: Storage options.
        hidden: More texts to mask.
    """
    text = _URL_IN_TEXT.sub(lambda match: mask_url(match[0]), text)
    set_ones = {option: os.environ[name] for name, option in _SECRET_VARIABLES.items() if os.environ.get(name)}
    given = (options, expand_known(options), set_ones)
    secrets = {*(secret for one in given for secret in secrets_of_options(one)), *hidden}
    for secret in sorted({form for one in secrets for form in _forms(one)}, key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return text


def secrets_of(url: str) -> tuple[str, ...]:
    """What is secret in a URL: user, password, query and the long values in that, as written and decoded."""
    if not is_url(url):
        return ()
    userinfo, query = user_of(url), urlsplit(url.partition(user_of(url))[2] if user_of(url) else url).query
    user, _, password = userinfo.partition(":")
    found = [text for text in (userinfo, password, query) if len(text) >= _SHORTEST_SECRET]
    found += [user] if len(user) >= _SHORTEST_PIECE else []
    for name, value in parse_qsl(query):
        shortest = _SHORTEST_PIECE if is_secret_name(name) else _SHORTEST_QUERY_SECRET
        found += [value] if len(value) >= shortest else []
    return tuple({*found, *map(unquote, found)})


def secrets_of_options(value: object, name: str = "") -> set[str]:
    """What may be secret in storage options, or in one of them: texts, and their pieces.

    Args:
        value: The options, or one.
        name: Of the option, if it is one.
    """
    return {text for text in _texts(value, name) if text.lower() not in _NO_SECRETS}


def shown_cause(error: BaseException, options: Mapping[str, Any], hidden: tuple[str, ...] = ()) -> BaseException:
    """The error itself if nothing in its chain needs redacting or escaping, else a stand-in without the chain.

    A traceback prints the whole chain, and a DataLoader worker sends it as text: masking our own message is not enough.
    """
    texts = [text for link in chain_of(error) for text in (str(link), repr(link), *getattr(link, "__notes__", ()))]
    if all(redact(text, options, hidden) == text == in_lines(text) for text in texts):
        return error
    return StorageError(describe(error, options, hidden))


def describe(error: BaseException, options: Mapping[str, Any], hidden: tuple[str, ...] = ()) -> str:
    """Class and words of an error, redacted and in one line."""
    words = str(error)
    if any(cls.__name__ == "AzureError" for cls in type(error).__mro__):
        words = words.partition("\n")[0]  # then come the request's number, its time, and the answer again as XML
    return redact(f"{type(error).__name__}: {' '.join(words.split())}".rstrip(": "), options, hidden)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error and all that a traceback would print with it."""
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
        users = [value.get(one) for one in ("username", "user") if value.get(one)]
        yield from (f"{user}:{value['password']}" for user in users if value.get("password"))
        for key, item in value.items():
            yield from _texts(item, str(key))
    elif isinstance(value, list | tuple):
        if len(value) > 1 and all(isinstance(one, str) for one in value[:2]):
            yield f"{value[0]}:{value[1]}"  # a user and a password, as they are sent
        for item in value:
            yield from _texts(item, name)
    elif isinstance(value, bytes):
        yield from _texts(value.decode(errors="replace"), name)
    elif isinstance(value, str) and name == _CONNECTION_STRING:  # the rest says where the store is
        yield value
        for secret in _IN_CONNECTION_STRING.findall(value):
            yield from _pieces(secret)
    elif isinstance(value, str):
        yield from secrets_of(value)
        yield from () if name in _PUBLIC else _pieces(value)
    elif isinstance(value, int | float) and not isinstance(value, bool) and is_secret_name(name):
        yield from _pieces(str(value))


def _pieces(text: str) -> Iterator[str]:
    """A text, what it consists of, and what is encoded in it."""
    if len(text) >= _SHORTEST_SECRET:
        yield text
    for piece in _BETWEEN_PIECES.split(text):
        if len(piece) >= _SHORTEST_PIECE:
            yield piece
            if decoded := _decoded(piece):
                yield from (decoded, *(one for one in _BETWEEN_PIECES.split(decoded) if len(one) >= _SHORTEST_PIECE))


def _decoded(text: str) -> str:
    """What a text says if it is base64 of another one, as user and password are sent; else ""."""
    try:
        decoded = base64.b64decode(text + "=" * (-len(text) % 4), validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        return ""
    return decoded if decoded.isprintable() else ""


def _forms(secret: str) -> set[str]:
    """A secret as it may be written in an answer or in an error."""
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
        *(one.rstrip("=") for one in encoded),
    } - {""}
