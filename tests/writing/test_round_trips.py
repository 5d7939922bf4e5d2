from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming.writing.writer import MDSWriter
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


@st.composite
def datasets(draw: st.DrawFn) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Columns, and samples that fit them."""
    columns = draw(st.dictionaries(st.text(), st.sampled_from(sorted(VALUES)), min_size=1, max_size=4))
    sample = st.fixed_dictionaries({name: VALUES[encoding_name] for name, encoding_name in columns.items()})
    return columns, draw(st.lists(sample, max_size=20))


@settings(max_examples=100, deadline=None)
@given(
    datasets(),
    st.none() | st.integers(1, 2000),
    st.sampled_from([None, "zstd"]),
    st.sampled_from([[], ["sha1", "xxh64"]]),
)
def test_a_dataset_comes_back_as_it_was(
    dataset: tuple[dict[str, str], list[dict[str, Any]]],
    size_limit: int | None,
    compression: str | None,
    hashes: list[str],
) -> None:
    columns, samples = dataset
    with TemporaryDirectory() as directory:
        out, scratch = Path(directory) / "out", Path(directory) / "scratch"
        with MDSWriter(
            columns=columns, out=out, size_limit=size_limit, compression=compression, hashes=hashes
        ) as writer:
            for sample in samples:
                writer.write(sample)
        assert read_samples(out, scratch) == samples
        for shard in read_index(out).shards:
            assert size_limit is None or shard.raw_data.bytes <= size_limit or shard.samples <= 1
