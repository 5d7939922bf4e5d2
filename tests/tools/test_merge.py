from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.golden import golden_path
from tests.servers import S3Store
from tests.tools.running import options, put, read_index, run, run_process, write_texts


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A directory of two datasets, at different depths."""
    write_texts(tmp_path / "b", 7)
    write_texts(tmp_path / "a" / "deep", 12, compression="zstd")
    return tmp_path


def names(directory: Path) -> list[str]:
    return [(shard.zip_data or shard.raw_data).basename for shard in read_index(directory).shards]


def test_all_that_is_below_is_merged_in_sorted_order(parts: Path) -> None:
    done = run("merge", parts)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{parts}: {len(names(parts))} shards with 19 samples\n"
    assert names(parts)[0] == "a/deep/shard.00000.mds.zstd"
    assert names(parts)[-1].startswith("b/shard.")
    assert run("verify", parts).code == 0


def test_named_parts_keep_the_order_they_are_named_in(parts: Path) -> None:
    done = run_process("merge", ".", "b", "a/deep", "--json", cwd=parts)
    assert done.code == 0
    assert done.json == {"dataset": ".", "shards": len(names(parts)), "samples": 19}
    assert names(parts)[0] == "b/shard.00000.mds"


def test_it_may_be_done_again(parts: Path) -> None:
    run("merge", parts)
    write_texts(parts / "c", 1)
    assert run("merge", parts, "--json").json["samples"] == 20


def test_formats_are_not_mixed(parts: Path) -> None:
    (parts / "rows").mkdir()
    np.save(parts / "rows" / "a.npy", np.arange(3))
    run("index", parts, "--format", "npy")
    before = (parts / "index.json").read_bytes()
    done = run("merge", parts)
    assert done.code == 2
    assert "is of npy files, so it is not replaced by one of MDS; add --format npy" in done.err
    done = run("merge", parts, "--format", "npy")
    assert done.code == 2
    assert "has an index of MDS files, which cannot be merged with npy" in done.err
    assert (parts / "index.json").read_bytes() == before


def test_on_a_store(parts: Path, s3: S3Store) -> None:
    bucket = s3.make_bucket()
    put(parts, bucket, s3.options)
    assert run("merge", bucket, *options(s3.options)).code == 0
    assert run("inspect", bucket, "--json", *options(s3.options)).json["samples"] == 19


def test_golden_parts_make_the_golden_whole(tmp_path: Path) -> None:
    """The merged golden dataset was made of its own two parts."""
    golden = golden_path("mds", "merged")
    parts = list(dict.fromkeys(name.rpartition("/")[0] for name in names(golden)))
    put(golden, str(tmp_path), {})
    (tmp_path / "index.json").unlink()
    assert run("merge", tmp_path, *[tmp_path / part for part in parts]).code == 0
    assert (tmp_path / "index.json").read_bytes() == (golden / "index.json").read_bytes()


def test_what_cannot_be_merged_is_refused(parts: Path, tmp_path: Path) -> None:
    assert run("merge", parts, "/elsewhere").code == 2
    assert run("merge", tmp_path / "empty").code == 2
    (parts / "b" / "index.json").write_text("{")
    assert run("merge", parts).code == 1
