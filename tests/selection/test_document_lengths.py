"""Lengths by sample id, of streams and selections, are those of the samples; and what may be asked of them."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming import StreamingDataset
from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.errors import ConfigError, StorageError
from lightning_streaming.options.column_functions import LENGTHS
from lightning_streaming.options.lengths import LengthsRequest
from lightning_streaming.selection import catalog as catalogs
from lightning_streaming.selection import document_lengths as module
from lightning_streaming.selection.bitmap import Selection, bits_of
from lightning_streaming.selection.catalog import Catalog, CatalogLengths
from lightning_streaming.selection.document_lengths import StreamLengths, document_lengths
from tests.helpers import raises, write_shards
from tests.tiers import examples

COLUMNS = {"id": "int", "tokens": "ndarray:uint16"}
SIZES = {"a": [5, 0, 9, 3], "b": [1], "c": [7, 7]}


def stored(name: str) -> list[int]:
    """The lengths of a stream's samples."""
    rng = np.random.default_rng(ord(name))
    return [int(length) for length in rng.integers(1, 500, sum(SIZES[name]))]


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ShardCache]:
    root = tmp_path_factory.mktemp("data")
    made = {}
    for name, sizes in SIZES.items():
        lengths = stored(name)

        def sample(number: int, lengths: list[int] = lengths) -> dict[str, Any]:
            return {"id": number, "tokens": np.zeros(lengths[number], np.uint16)}

        path = write_shards(root / name, sizes, COLUMNS, sample)
        made[name] = ShardCache(CacheConfig(name=name, remote=str(path), local=str(root / f"{name}-local")))
    return made


def lengths_of(caches: dict[str, ShardCache]) -> dict[str, StreamLengths]:
    asked = LengthsRequest(column="tokens")
    return {name: document_lengths(asked, cache.read_index(), cache) for name, cache in caches.items()}


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_lengths_by_id_are_those_of_the_samples(caches: dict[str, ShardCache], data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(SIZES)), unique=True, min_size=1))
    selections, expected, per_stream = {}, [], []
    for name in names:
        lengths = stored(name)
        wanted = np.ones(len(lengths), np.bool_)
        if data.draw(st.booleans()):
            kept = data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))
            wanted = np.isin(np.arange(len(lengths)), sorted(kept))
            selections[name] = Selection(bits_of(wanted), len(lengths))
        own = [length for length, is_wanted in zip(lengths, wanted, strict=True) if is_wanted]
        per_stream.append(sum(own))
        expected += own
    chosen = {name: caches[name] for name in names}
    catalog = Catalog({name: cache.read_index() for name, cache in chosen.items()}, selections)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogs, "_IDS_AT_ONCE", data.draw(st.integers(1, 9)))
        for summing in (catalogs, module):
            patch.setattr(summing, "SUMMED_AT_ONCE", data.draw(st.integers(1, 9)))
        by_id = CatalogLengths(catalog, lengths_of(chosen))
        ids = np.array(data.draw(st.lists(st.integers(0, catalog.num_samples - 1), max_size=40)), np.int64)
        found = by_id(ids)
        assert found.tolist() == [expected[number] for number in ids.tolist()]
        assert found.dtype == np.uint32
        assert by_id.num_tokens == tuple(per_stream)
        by_id.gather()
        assert by_id(ids).tolist() == found.tolist()


def test_a_dataset_has_samples_of_these_lengths(caches: dict[str, ShardCache], tmp_path: Path) -> None:
    remote = str(caches["a"].directory.path.parent / "a")
    dataset = StreamingDataset(
        remote=remote, local=str(tmp_path / "local"), selection={"where": "id % 3 <> 1"}, batch_size=1
    )
    selection = Selection(bits_of(np.arange(17) % 3 != 1), 17)
    index = caches["a"].read_index()
    by_id = CatalogLengths(Catalog({"a": index}, {"a": selection}), lengths_of({"a": caches["a"]}))
    assert by_id(np.arange(len(dataset))).tolist() == [len(dataset[number]["tokens"]) for number in range(len(dataset))]


def test_digests_name_the_values_whatever_they_came_from(caches: dict[str, ShardCache], tmp_path: Path) -> None:
    kept = lengths_of(caches)
    for name, one in kept.items():
        again = StreamLengths(np.array(stored(name), np.uint32))
        assert (again.digest, again.num_tokens) == (one.digest, one.num_tokens)
        assert len(one.digest) == 16
        assert one.is_whole()
    changed = np.array(stored("a"), np.uint32)
    changed[3] += 1
    assert StreamLengths(changed).digest != kept["a"].digest
    head = kept["a"].head(5)
    assert (head.values.tolist(), head.digest) == (stored("a")[:5], StreamLengths(kept["a"].values[:5].copy()).digest)
    assert CatalogLengths(Catalog({"a": caches["a"].read_index()}), kept).digests == (kept["a"].digest,)


def test_another_process_maps_the_file_itself(caches: dict[str, ShardCache]) -> None:
    kept = lengths_of(caches)["c"]
    sent = pickle.dumps(kept)
    assert len(sent) < 400
    again = pickle.loads(sent)
    assert (again.values.tolist(), again.digest, again.cached_at) == (stored("c"), kept.digest, kept.cached_at)
    assert not again.values.flags.writeable
    assert pickle.loads(pickle.dumps(kept.head(3))).values.tolist() == stored("c")[:3]
    assert kept.cached_at is not None
    kept.cached_at.unlink()
    with pytest.raises(StorageError, match="were removed, or are damaged; start the run again"):
        pickle.loads(sent)


def test_each_stream_must_have_its_lengths(caches: dict[str, ShardCache]) -> None:
    catalog = Catalog({name: caches[name].read_index() for name in ("a", "b")})
    lengths = lengths_of(caches)
    with pytest.raises(ConfigError, match="stream 'b' stores 1 samples, but has no lengths"):
        CatalogLengths(catalog, {"a": lengths["a"]})
    with pytest.raises(ConfigError, match="stream 'a' stores 17 samples, but has 3 lengths"):
        CatalogLengths(catalog, {**lengths, "a": lengths["a"].head(3)})


# --- what may be asked ---


def _short(text: str) -> int:
    return len(text) // 4


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"column": "tokens"}, "column='tokens'"),
        ({"column": "tokens", "dtype": "uint16"}, "column='tokens', dtype='uint16'"),
        ({"lengths": "num_tokens"}, "lengths='num_tokens'"),
        ({"lengths": _short}, "lengths=_short"),
    ],
)
def test_a_request_has_words_and_a_name(asked: dict[str, Any], words: str) -> None:
    request = LengthsRequest(**asked)
    assert request.in_words() == words
    assert request.key("data") == LengthsRequest(**asked).key("data")
    others = [LengthsRequest(column="token"), LengthsRequest(lengths="tokens"), LengthsRequest(lengths=lambda text: 3)]
    keys = {request.key("data"), request.key("other"), *(other.key("data") for other in others)}
    assert len(keys) == 5
    assert all(len(key) == 32 for key in keys)


def test_dtypes_of_one_width_are_one_request_and_others_are_not() -> None:
    keys = [LengthsRequest(column="raw", dtype=dtype).key("data") for dtype in ("uint16", "int16", "uint32")]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, "the length of a sample needs a column or a function"),
        ({"column": "a", "lengths": "b"}, "the length of a sample needs a column or a function"),
        ({"column": ""}, "column must be the name of a column"),
        ({"column": 3}, "column must be the name of a column"),
        ({"lengths": ""}, "lengths must be the name of a column, or a function"),
        ({"lengths": 3}, "lengths must be the name of a column, or a function"),
        ({"lengths": "a", "dtype": "uint16"}, "dtype='uint16' needs a column of tokens in column="),
        ({"column": "a", "dtype": "uint15"}, "dtype must be one of numbers"),
        ({"lengths": len}, "lengths must be a plain Python function"),
        ({"lengths": lambda: 3}, "the parameters of lengths="),
        ({"lengths": lambda **all_: 3}, "as in lambda text: len(text) // 4"),
    ],
)
def test_what_cannot_be_asked_is_refused(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LengthsRequest(**asked)
    assert told in str(refused.value)


def test_a_function_that_may_change_unseen_is_refused() -> None:
    seen = [3]
    with pytest.raises(ConfigError, match=r"encloses a list, .*or write the lengths as a column of whole numbers"):
        LengthsRequest(lengths=lambda text: seen[0])


class Tokenizer:
    """One that splits a text at spaces; it stands for one of a library, whose state nothing says."""

    def __init__(self, per_word: int = 1) -> None:
        self.per_word = per_word

    def __call__(self, text: str) -> int:
        return self.per_word * len(text.split())

    def count(self, text: str) -> int:
        return self(text)


TOKENIZER = Tokenizer()


def _times(text: str, factor: int) -> int:
    return factor * len(text)


@pytest.mark.parametrize(
    "lengths",
    [TOKENIZER, TOKENIZER.count, partial(_times, factor=2), partial(TOKENIZER.count), lambda text: TOKENIZER(text)],
    ids=["object", "method", "partial", "partial of a method", "enclosed"],
)
def test_whatever_is_called_has_a_name_by_its_version(lengths: Any) -> None:
    with raises(ConfigError, "lengths_version="):
        LengthsRequest(lengths=lengths)
    keys = [LengthsRequest(lengths=lengths, version=version).key("data") for version in ("gpt2", "gpt2", "gpt3")]
    assert keys[0] == keys[1] != keys[2]
    assert LENGTHS.columns(lengths) == ("text",)
    columns = {"text": ["a b c", "a"]}
    assert list(LENGTHS.called(lengths, columns, np.arange(2), int)) == [lengths(text=text) for text in columns["text"]]


def test_what_is_known_of_a_function_with_a_version_counts_too() -> None:
    told: list[Any] = [
        partial(_times, factor=2),
        partial(_times, factor=3),
        lambda text: TOKENIZER(text),
        lambda text: TOKENIZER(text) + 1,
        TOKENIZER,
    ]
    assert len({LengthsRequest(lengths=one, version="1").key("data") for one in told}) == len(told)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"lengths": "num_tokens", "version": "1"}, "lengths_version='1' needs a function"),
        ({"column": "tokens", "version": "1"}, "lengths_version='1' needs a function"),
        ({"lengths": TOKENIZER, "version": ""}, "lengths_version must be a text"),
        ({"lengths": TOKENIZER, "version": 3}, "lengths_version must be a text"),
        ({"lengths": lambda **all_: 3, "version": "1"}, "as in lambda text: len(text) // 4"),
        ({"lengths": print, "version": "1"}, "as in lambda text: len(text) // 4"),
    ],
)
def test_versions_that_say_nothing_are_refused(asked: dict[str, Any], told: str) -> None:
    with raises(ConfigError, told):
        LengthsRequest(**asked)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a module of the user's beside the script, with the source that is passed."""

    def write(source: str) -> Any:
        (tmp_path / "own_tokens.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "own_tokens", raising=False)
        importlib.invalidate_caches()
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        try:
            return importlib.import_module("own_tokens")
        finally:
            sys.dont_write_bytecode = before

    yield write
    sys.modules.pop("own_tokens", None)


def _key_of(module: Any, function: Any) -> str:
    function.__globals__["own_tokens"] = module
    try:
        return LengthsRequest(lengths=function).key("data")
    finally:
        del function.__globals__["own_tokens"]


def test_what_a_module_holds_counts(own_module: Any) -> None:
    def by_module(text):  # type: ignore[no-untyped-def]
        return own_tokens.count(text)  # type: ignore[name-defined]  # noqa: F821

    sources = [
        "FACTOR = 1\ndef count(text): return FACTOR * len(text)",
        "FACTOR = 2\ndef count(text): return FACTOR * len(text)",
        "FACTOR = 2\ndef count(text): return FACTOR * len(text) + 1",
    ]
    keys = [_key_of(own_module(source), by_module) for source in [*sources, sources[0]]]
    assert len({*keys}) == 3
    assert keys[0] == keys[-1]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("class T:\n  def encode(self, text): return text\ncount = T()", "T"),
        ("class T:\n  pass\nT = T()\ndef count(text): return T", "T"),
        ("count = {'a': 1}.get", "builtin_function_or_method"),
        ("count = {1, 2}.__contains__", "builtin_function_or_method"),
        ("class count:\n  def __new__(cls, text): return 3", "type"),
    ],
    ids=["object", "function that names one", "method of a dict", "method of a set", "class"],
)
def test_an_object_of_a_module_is_refused_without_a_version(own_module: Any, source: str, kind: str) -> None:
    def by_module(text):  # type: ignore[no-untyped-def]
        return own_tokens.count(text)  # type: ignore[name-defined]  # noqa: F821

    module = own_module(source)
    with raises(ConfigError, f"encloses a {kind}, which may change without notice", "lengths_version="):
        _key_of(module, by_module)


def test_an_import_within_a_function_is_refused_without_a_version(own_module: Any) -> None:
    def by_import(text):  # type: ignore[no-untyped-def]
        import own_tokens  # type: ignore[import-not-found]

        return own_tokens.count(text)

    own_module("def count(text): return 3")
    with raises(ConfigError, "imports own_tokens", "lengths_version="):
        LengthsRequest(lengths=by_import)
    assert LengthsRequest(lengths=by_import, version="1")


def test_modules_that_are_installed_may_be_named() -> None:
    assert LengthsRequest(lengths=lambda text: np.array(text.split()).size + len(json.dumps(text)))
