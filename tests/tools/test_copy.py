from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_streaming.storage import Location
from lightning_streaming.tools.copy import CLAIM_BASENAME
from tests.golden import golden_path
from tests.servers import HttpStore, S3Store
from tests.tools.running import contents, flip_byte, options, put, read_index, run, run_process, write_texts

GOLDEN = sorted(path.name for path in golden_path("mds").iterdir() if path.is_dir())


def named(directory: Path) -> dict[str, bytes]:
    """The index of a dataset and all files that it names."""
    found = contents(directory)
    shards = read_index(directory).shards
    return {name: found[name] for name in ["index.json", *((z or r).basename for s in shards for r, z in s.files)]}


def on_store(url: str, s3: S3Store) -> dict[str, bytes]:
    """All objects under a URL."""
    bucket = Location(url, s3.options, attempts=1, timeout=10)
    return {name: (bucket / name).read() for name in bucket.walk()}


@pytest.mark.rotate(9)
@pytest.mark.parametrize("dataset", GOLDEN)
def test_golden_datasets_are_copied_byte_for_byte(dataset: str, tmp_path: Path) -> None:
    source = golden_path("mds", dataset)
    done = run("copy", source, tmp_path / "a" / "copy", "--json")
    assert (done.code, done.err) == (0, "")
    assert contents(tmp_path / "a" / "copy") == named(source)
    assert done.json["copied"] == done.json["files"] == len(named(source)) - 1
    assert done.json["complete"] is True


def test_to_a_store_between_stores_and_back(tmp_path: Path, s3: S3Store) -> None:
    write_texts(tmp_path / "data", compression="zstd")
    one, other = s3.make_bucket(), s3.make_bucket()
    assert run("copy", tmp_path / "data", f"{one}/train", *options(s3.options)).code == 0
    assert on_store(f"{one}/train", s3) == named(tmp_path / "data")
    assert run("copy", f"{one}/train", other, *options(s3.options)).code == 0
    assert on_store(other, s3) == named(tmp_path / "data")
    assert run("copy", other, tmp_path / "back", *options(s3.options)).code == 0
    assert contents(tmp_path / "back") == named(tmp_path / "data")


def test_each_store_has_its_own_options(tmp_path: Path, http_store: HttpStore, s3: S3Store) -> None:
    write_texts(http_store.root)
    bucket = s3.make_bucket()
    done = run("copy", http_store.url, bucket, *options(s3.options, "--out-storage-options"))
    assert done.code == 0
    assert on_store(bucket, s3) == contents(http_store.root)


def test_what_is_there_and_right_is_skipped(tmp_path: Path) -> None:
    index = write_texts(tmp_path / "data")
    assert run("copy", tmp_path / "data", tmp_path / "out").code == 0
    again = run("copy", tmp_path / "data", tmp_path / "out", "--json")
    assert again.code == 0
    assert (again.json["copied"], again.json["already_there"]) == (0, len(index.shards))
    flip_byte(tmp_path / "out" / "shard.00001.mds")
    (tmp_path / "out" / "shard.00002.mds").unlink()
    mended = run("copy", tmp_path / "data", tmp_path / "out", "--json")
    assert (mended.json["copied"], mended.json["copied_bytes"]) == (
        2,
        sum(shard.raw_data.bytes for shard in index.shards[1:3]),
    )
    assert contents(tmp_path / "out") == contents(tmp_path / "data")


@pytest.mark.nightly
def test_a_copy_that_was_killed_goes_on(tmp_path: Path, http_store: HttpStore, s3: S3Store) -> None:
    """The source stops answering in the middle; the copy is killed there, and given again."""
    index = write_texts(http_store.root, 60, hashes=None)
    http_store.fail("shard.00003", "stall", times=1)
    bucket = s3.make_bucket()
    arguments = ["copy", http_store.url, bucket, "--workers", "1", *options(s3.options, "--out-storage-options")]
    command = [sys.executable, "-m", "lightning_streaming", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while "shard.00003.mds" not in http_store.requests():
            assert process.poll() is None
        process.kill()
    assert sorted(on_store(bucket, s3)) == [CLAIM_BASENAME, "shard.00000.mds", "shard.00001.mds", "shard.00002.mds"]
    before = len(http_store.requests())
    done = run(*arguments, "--json")
    assert done.code == 0
    assert done.json["already_there"] == 3
    assert "shard.00000.mds" not in http_store.requests()[before:]
    assert on_store(bucket, s3) == contents(http_store.root)
    assert len(index.shards) > 4


def test_without_hashes_a_finished_copy_is_not_taken_on_trust(tmp_path: Path) -> None:
    """Two datasets of the same sizes have the same index; their samples may differ."""
    write_texts(tmp_path / "one", hashes=None)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    for path in (tmp_path / "other").glob("shard.*"):
        flip_byte(path)
    assert run("copy", tmp_path / "one", tmp_path / "out").code == 0
    assert run("copy", tmp_path / "other", tmp_path / "out").code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


def test_an_interrupted_copy_of_another_dataset_is_not_gone_on_with(tmp_path: Path) -> None:
    write_texts(tmp_path / "one", hashes=None)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    (tmp_path / "one" / "shard.00001.mds").unlink()
    assert run("copy", tmp_path / "one", tmp_path / "out").code == 1
    assert (tmp_path / "out" / CLAIM_BASENAME).exists()
    refused = run("copy", tmp_path / "other", tmp_path / "out")
    assert refused.code == 2
    assert "--exist-ok" in refused.err
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize("on_s3", [False, True])
def test_another_dataset_is_not_written_over_unasked(on_s3: bool, tmp_path: Path, s3: S3Store) -> None:
    write_texts(tmp_path / "old", 60)
    write_texts(tmp_path / "new", 25, columns={"text": "str"})
    out, secrets = (s3.make_bucket(), options(s3.options)) if on_s3 else (str(tmp_path / "out"), [])
    assert run("copy", tmp_path / "old", out, *secrets).code == 0
    refused = run("copy", tmp_path / "new", out, *secrets)
    assert refused.code == 2
    assert "holds another dataset" in refused.err
    found = on_store(out, s3) if on_s3 else contents(tmp_path / "out")
    assert found == contents(tmp_path / "old")
    assert run("copy", tmp_path / "new", out, "--exist-ok", *secrets).code == 0
    found = on_store(out, s3) if on_s3 else contents(tmp_path / "out")
    new = contents(tmp_path / "new")
    assert {name: found[name] for name in new} == new
    assert found.keys() == contents(tmp_path / "old").keys(), "nothing is deleted"


@pytest.mark.rotate(2)
@pytest.mark.parametrize("on_s3", [False, True])
@pytest.mark.parametrize("hashes", [None, ["sha1"]])
def test_files_of_others_are_not_taken_for_ours_after_an_interruption(
    hashes: list[str] | None, on_s3: bool, tmp_path: Path, s3: S3Store
) -> None:
    """Those not yet written over have the right size, and nothing else of ours."""
    write_texts(tmp_path / "new", hashes=hashes)
    out, secrets = (s3.make_bucket(), options(s3.options)) if on_s3 else (str(tmp_path / "out"), [])
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    for path in (tmp_path / "old").glob("shard.*"):
        flip_byte(path)
    (tmp_path / "old" / "index.json").unlink()
    put(tmp_path / "old", out, s3.options if on_s3 else {})
    kept = (tmp_path / "new" / "shard.00001.mds").rename(tmp_path / "kept")
    assert run("copy", tmp_path / "new", out, "--exist-ok", *secrets).code == 1
    kept.rename(tmp_path / "new" / "shard.00001.mds")
    assert run("copy", tmp_path / "new", out, *secrets).code == 0
    found = on_store(out, s3) if on_s3 else contents(tmp_path / "out")
    assert found == contents(tmp_path / "new")


def test_files_that_belong_to_nobody_known_are_not_written_over(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "shard.00001.mds").write_text("mine")
    (tmp_path / "out" / "notes.txt").write_text("mine too")
    refused = run("copy", tmp_path / "data", tmp_path / "out")
    assert refused.code == 2
    assert "shard.00001.mds" in refused.err
    assert contents(tmp_path / "out") == {"shard.00001.mds": b"mine", "notes.txt": b"mine too"}
    assert run("copy", tmp_path / "data", tmp_path / "out", "--exist-ok").code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "data") | {"notes.txt": b"mine too"}


def test_bad_files_are_told_and_no_index_is_published(tmp_path: Path, s3: S3Store) -> None:
    index = write_texts(tmp_path / "data", 60)
    flip_byte(tmp_path / "data" / "shard.00001.mds")
    (tmp_path / "data" / "shard.00003.mds").unlink()
    bucket = s3.make_bucket()
    for out in (tmp_path / "out", bucket):
        done = run("copy", tmp_path / "data", out, "--json", *options(s3.options))
        assert done.code == 1
        assert [bad["file"] for bad in done.json["bad_files"]] == ["shard.00001.mds", "shard.00003.mds"]
        assert done.json["copied"] == len(index.shards) - 2
        assert done.json["complete"] is False
    assert not {"index.json", "shard.00001.mds"} & (contents(tmp_path / "out").keys() | on_store(bucket, s3).keys())
    assert "no index was published" in run("copy", tmp_path / "data", tmp_path / "out").out


def test_what_compressed_files_hold_is_looked_at_unless_it_is_to_be_quick(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_texts(source, 5, compression="zstd")
    entry = json.loads((source / "index.json").read_bytes())
    entry["shards"][0]["raw_data"]["bytes"] += 1
    (source / "index.json").write_text(json.dumps(entry))
    done = run("copy", source, tmp_path / "out", "--json")
    assert done.code == 1
    assert "cannot be decompressed" in done.json["bad_files"][0]["problem"]
    assert run("copy", source, tmp_path / "out", "--quick").code == 0


@pytest.mark.parametrize("same", ["data", "data/", "./data", "data/index.json"])
def test_onto_itself_is_refused(same: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts("data")
    refused = run("copy", "data", same, "--exist-ok")
    assert refused.code == 2
    assert "to another location" in refused.err


def test_into_itself_is_refused(tmp_path: Path, s3: S3Store) -> None:
    source = str(golden_path("mds", "scalars"))
    make_copy = run("copy", source, tmp_path / "og")
    assert make_copy.code == 0
    before = sorted((tmp_path / "og").rglob("*"))
    outcome = run("copy", tmp_path / "og", tmp_path / "og" / "sub")
    assert outcome.code == 2
    assert "a dataset must not be copied into itself" in outcome.err
    assert sorted((tmp_path / "og").rglob("*")) == before
    bucket = s3.make_bucket()
    assert run("copy", source, f"{bucket}/og", *options(s3.options)).code == 0
    outcome = run("copy", f"{bucket}/og", f"{bucket}/og/sub", *options(s3.options))
    assert outcome.code == 2
    assert "copied into itself" in outcome.err
    assert run("copy", f"{bucket}/og", f"{bucket}/og2", *options(s3.options)).code == 0


def test_onto_a_file_is_refused(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    (tmp_path / "out").write_text("")
    assert run("copy", tmp_path / "data", tmp_path / "out").code == 2


def test_merged_datasets_keep_their_paths(tmp_path: Path) -> None:
    write_texts(tmp_path / "all" / "a")
    write_texts(tmp_path / "all" / "b" / "c", compression="gz")
    assert run("merge", tmp_path / "all").code == 0
    assert run("copy", tmp_path / "all", tmp_path / "out").code == 0
    assert run("verify", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "b" / "c" / "shard.00000.mds.gz").exists()


def test_people_are_told_what_was_done(tmp_path: Path) -> None:
    index = write_texts(tmp_path / "data")
    done = run_process("copy", tmp_path / "data", tmp_path / "out")
    assert done.code == 0
    assert done.err == "", "no progress bar where there is no terminal"
    count = len(index.shards)
    assert done.out.startswith(f"{tmp_path / 'data'} to {tmp_path / 'out'}: {count} of {count} files copied (")
    (tmp_path / "out" / "shard.00000.mds").unlink()
    assert f", {count - 1} existed\n" in run("copy", tmp_path / "data", tmp_path / "out").out


def test_shards_of_the_dataset_that_was_there_stay_and_are_told(tmp_path: Path) -> None:
    write_texts(tmp_path / "out", samples=45)
    write_texts(tmp_path / "data", samples=15)
    before = contents(tmp_path / "out")
    done = run("copy", tmp_path / "data", tmp_path / "out", "--exist-ok")
    stay = ["shard.00002.mds", "shard.00003.mds"]
    assert done.code == 0
    assert done.out.endswith(f"not part of this dataset, and left unchanged: 2 files ({', '.join(stay)})\n")
    after = contents(tmp_path / "out")
    assert all(after[name] == before[name] for name in stay)
    again = run("copy", tmp_path / "data", tmp_path / "out", "--json")
    assert again.json["unnamed_files"] == stay
    found = run("verify", tmp_path / "out")
    assert found.code == 0
    assert found.out.endswith(f"not named by the index, to be removed when you like: 2 files ({', '.join(stay)})\n")


@pytest.mark.nightly
@pytest.mark.parametrize("more", [[], ["--part-size", "1kb"]], ids=["one part", "parts"])
def test_a_conversion_does_not_go_on_where_its_dataset_was_written_over(more: list[str], tmp_path: Path) -> None:
    for name, first in {"old": 0, "new": 1000}.items():
        rows = [f'{{"text": "{number:030}"}}\n' for number in range(first, first + 60)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    converted = [tmp_path / "old.jsonl", tmp_path / "out", *more]
    assert run("convert", *converted).code == 0
    assert run("convert", tmp_path / "new.jsonl", tmp_path / "new", *more).code == 0
    assert run("copy", tmp_path / "new", tmp_path / "out", "--exist-ok").code == 0
    before = contents(tmp_path / "out")
    assert run("convert", *converted, "--resume").code == 2
    assert contents(tmp_path / "out") == before


def test_a_store_that_refuses_ends_the_copy(tmp_path: Path, s3: S3Store) -> None:
    write_texts(tmp_path)
    refused = run("copy", tmp_path, "s3://no-such-bucket-at-all/data", *options(s3.options))
    assert refused.code == 2
    assert "the bucket does not exist" in refused.err
