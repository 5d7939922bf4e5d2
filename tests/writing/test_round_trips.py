"""Whatever is written in any order, with any limit, in any format, is read again."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming.writing.core import ShardWriter
from lightning_streaming.writing.writer import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter
from tests.formats.golden_datasets import read_index, read_samples

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bytes": st.binary(max_size=50),
    "str": st.text(),
    "int": st.integers(-(2**63), 2**63 - 1),
    "uint8": st.integers(0, 255),
    "float64": st.floats(allow_nan=False),
    "str_int": st.integers(),
    "json": st.dictionaries(st.text(), st.none() | st.booleans() | st.integers(), max_size=3),
}
FIELDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\t,|"), max_size=30)
SPLIT_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "str": FIELDS,
    "int": st.integers(),
    "float": st.floats(allow_nan=False),
}
SPLIT_WRITERS: list[tuple[type[ShardWriter], dict[str, Any]]] = [
    (JSONWriter, {}),
    (JSONWriter, {"newline": "\r\n"}),
    (CSVWriter, {}),
    (TSVWriter, {}),
    (XSVWriter, {"separator": "||", "newline": "\r\n"}),
]

Dataset = tuple[dict[str, str], list[dict[str, Any]]]


@st.composite
def datasets(
    draw: st.DrawFn, names: st.SearchStrategy[str], values: dict[str, st.SearchStrategy[Any]]
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Columns, and samples that fit them."""
    columns = draw(st.dictionaries(names, st.sampled_from(sorted(values)), min_size=1, max_size=4))
    sample = st.fixed_dictionaries({name: values[encoding_name] for name, encoding_name in columns.items()})
    return columns, draw(st.lists(sample, max_size=20))


def check_round_trip(writer: type[ShardWriter], dataset: Dataset, most_samples: int, **arguments: Any) -> None:
    """Write a dataset, read it, and look at the sizes of its shards; ``most_samples`` of a shard above the limit."""
    columns, samples = dataset
    with TemporaryDirectory() as directory:
        out, scratch = Path(directory) / "out", Path(directory) / "scratch"
        with writer(columns=columns, out=out, **arguments) as written:
            for sample in samples:
                written.write(sample)
        assert read_samples(out, scratch) == samples
        limit = arguments["size_limit"]
        for shard in read_index(out).shards:
            assert limit is None or shard.raw_data.bytes <= limit or shard.samples <= most_samples


LIMITS = st.none() | st.integers(1, 2000)
COMPRESSIONS = st.sampled_from([None, "zstd"])
HASHES = st.sampled_from([[], ["sha1", "xxh64"]])


@settings(max_examples=100)
@given(datasets(st.text(), VALUES), LIMITS, COMPRESSIONS, HASHES)
def test_an_mds_dataset_comes_back_as_it_was(
    dataset: Dataset, size_limit: int | None, compression: str | None, hashes: list[str]
) -> None:
    check_round_trip(MDSWriter, dataset, 1, size_limit=size_limit, compression=compression, hashes=hashes)


@settings(max_examples=100)
@given(st.sampled_from(SPLIT_WRITERS), datasets(FIELDS, SPLIT_VALUES), LIMITS, COMPRESSIONS, HASHES)
def test_a_dataset_of_rows_comes_back_as_it_was(
    writer: tuple[type[ShardWriter], dict[str, Any]],
    dataset: Dataset,
    size_limit: int | None,
    compression: str | None,
    hashes: list[str],
) -> None:
    # The header row is not counted, so a shard of any number of samples may be above the limit.
    settings: dict[str, Any] = {"size_limit": size_limit, "compression": compression, "hashes": hashes}
    check_round_trip(writer[0], dataset, len(dataset[1]), **settings, **writer[1])


@settings(max_examples=30)
@given(st.permutations(range(30)), st.integers(150, 500), st.integers(1, 4))
def test_samples_stay_in_the_order_they_are_written_in(order: list[int], size_limit: int, workers: int) -> None:
    samples = [{"id": number, "text": "x" * (number * 7 % 50)} for number in order]
    dataset = ({"id": "int", "text": "str"}, samples)
    check_round_trip(MDSWriter, dataset, 1, size_limit=size_limit, max_workers=workers)
