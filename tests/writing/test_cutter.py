from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError, ShardCorruptError
from lightning_streaming.formats import mds
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.writing import cutter
from lightning_streaming.writing.cutter import Cutter
from lightning_streaming.writing.mds_recipe import make_mds_recipe
from lightning_streaming.writing.recipe import ShardRecipe, cut_samples
from lightning_streaming.writing.settings import parse_settings
from lightning_streaming.writing.shard_buffer import ShardBuffer
from lightning_streaming.writing.split_recipe import make_split_recipe

FORMATS = ["mds", "csv", "json"]


def recipe_of(shard_format: str, size_limit: int | None = None, hashes: tuple[str, ...] = ()) -> ShardRecipe:
    settings = parse_settings(None, hashes, size_limit)
    if shard_format == "mds":
        return make_mds_recipe({"text": "str"}, settings)
    return make_split_recipe(shard_format, {"text": "str"}, settings, newline="\n")


def taken(whole: Cutter, gathered: ShardBuffer) -> list[bytes]:
    """The samples of a shard, whose memory is used again."""
    with gathered.samples() as samples:
        found = [bytes(samples.data[start:stop]) for start, stop in pairwise([0, *samples.ends.tolist()])]
    whole.use_again(gathered)
    return found


def cut(whole: Cutter, samples: list[bytes]) -> list[list[bytes]]:
    """The samples of each shard."""
    shards = [taken(whole, whole.cut(whole.following([data]))) for data in samples if not whole.add([data])]
    return [*shards, taken(whole, whole.last())] if whole.has_samples else shards


def make(recipe: ShardRecipe, number: int, samples: list[bytes]) -> tuple[ShardInfo, list[bytes]]:
    """A shard, and its files."""
    gathered = ShardBuffer(0)
    for data in samples:
        gathered.append([data])
    with gathered.samples() as encoded:
        made = recipe.make(number, encoded)
        return made.info, [b"".join(file.pieces) for file in made.files]


@given(st.sampled_from(FORMATS), st.integers(1, 400), st.lists(st.binary(min_size=1, max_size=300), max_size=30))
def test_shards_are_cut_as_the_original_cuts_them(shard_format: str, size_limit: int, samples: list[bytes]) -> None:
    recipe = recipe_of(shard_format, size_limit)
    fixed, each = recipe.raw_bytes(0, 0), recipe.raw_bytes(1, 0) - recipe.raw_bytes(0, 0)
    expected: list[list[bytes]] = [[]]
    size = fixed
    for data in samples:
        if size + len(data) + each > size_limit:
            expected.append([])
            size = fixed
        expected[-1].append(data)
        size += len(data) + each
    assert cut(Cutter(recipe), samples) == (expected if samples else [])


@given(
    st.sampled_from(FORMATS), st.integers(1, 400), st.lists(st.binary(min_size=1, max_size=300), min_size=1), st.data()
)
def test_cutting_goes_on_anywhere(
    shard_format: str, size_limit: int, samples: list[bytes], data: st.DataObject
) -> None:
    recipe = recipe_of(shard_format, size_limit)
    whole = cut(Cutter(recipe), samples)
    number = data.draw(st.integers(0, len(whole) - 1))
    rest = [sample for shard in whole[number:] for sample in shard]
    there = data.draw(st.integers(0, len(whole[number])))
    if number > 0 or there > 0:  # a writer that starts with nothing may begin with an empty shard
        resumed = Cutter(recipe, number=number, samples=rest[:there])
        assert cut(resumed, rest[there:]) == whole[number:]


@pytest.mark.parametrize("shard_format", FORMATS)
def test_the_limit_of_32_bits_is_that_of_the_whole_file(shard_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(shard_format)
    data = b"".join(recipe.parts({"text": "x" * 50}))
    size = len(make(recipe, 0, [data] * 3)[1][-1])
    for module in (mds, cutter):
        monkeypatch.setattr(module, "MAX_RAW_BYTES", size)
    limited = Cutter(recipe)
    assert [limited.add([data]) for _ in range(3)] == [True] * 3
    with pytest.raises(ConfigError, match="set size_limit"):
        limited.add([data])
    assert taken(limited, limited.last()) == [data] * 3


def test_memory_is_used_again_unless_a_huge_sample_took_it() -> None:
    whole = Cutter(recipe_of("mds", 300))
    small = whole.cut(whole.following([bytes(10**6)]))
    huge = whole.cut(whole.following([b""]))
    assert huge.room >= 10**6
    whole.use_again(huge)
    whole.use_again(small)
    found = [whole.following([b""]) for _ in range(4)]
    assert any(buffer is small for buffer in found)
    assert all(buffer is not huge for buffer in found)


def test_a_sample_that_does_not_fit_changes_nothing() -> None:
    whole = Cutter(recipe_of("mds", 300))
    assert whole.add([b"one"])
    for _ in range(2):
        assert not whole.add([bytes(10**6)])
    following = whole.following([bytes(10**6)])
    assert (whole.number, whole.last().num_bytes, following.num_bytes) == (0, 3, 10**6)
    assert taken(whole, whole.cut(following)) == [b"one"]
    assert whole.number == 1


def test_an_empty_cutter_takes_little_memory() -> None:
    whole = Cutter(recipe_of("mds", 2**26))
    assert whole.add([b"one"])
    assert whole.last().room <= 2**16


@pytest.mark.parametrize("shard_format", FORMATS)
@given(texts=st.lists(st.text(st.characters(exclude_characters="\n,", exclude_categories=["Cs"])), max_size=20))
def test_a_shard_is_taken_apart_again(shard_format: str, texts: list[str]) -> None:
    recipe = recipe_of(shard_format, 1000, ("sha1",))
    samples = [b"".join(recipe.parts({"text": text})) for text in texts]
    info, contents = make(recipe, 3, samples)
    assert info.samples == len(samples)
    assert recipe.samples_in(contents) == samples


@pytest.mark.parametrize(
    ("table", "data"),
    [(b"", b""), (b"\1\0\0\0", b""), (b"\1\0\0\0\0\0\0\0\2\0\0\0", b"abc"), (b"\1\0\0\0\3\0\0\0\2\0\0\0", b"ab")],
)
def test_offsets_that_lead_nowhere_are_refused(table: bytes, data: bytes) -> None:
    with pytest.raises(ShardCorruptError):
        cut_samples(table, data)
