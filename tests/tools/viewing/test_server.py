"""``lightning-streaming view`` over HTTP: who may come in, what a browser may do, and what is read for the pages."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.servers.stores import S3Bucket
from tests.tools.running import options, write_texts
from tests.tools.viewing.asking import Viewer, snapshot, viewer, write_rich


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rich") / "data"
    write_rich(directory)
    return directory


@pytest.fixture(scope="module")
def shown(rich: Path) -> Iterator[Viewer]:
    with viewer(rich) as one:
        yield one


def test_the_address_leads_to_the_pages(shown: Viewer) -> None:
    found = shown.get()
    assert found.status == 200
    assert "Show the samples" in found.text
    assert shown.get(url=shown.url.removesuffix("/")).status == 200
    assert shown.url.startswith(f"http://127.0.0.1:{shown.port}/")
    assert len(shown.url.rstrip("/").rpartition("/")[2]) >= 32


def test_localhost_is_another_name_of_this_machine(shown: Viewer) -> None:
    assert shown.get(Host=f"localhost:{shown.port}").status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost", "[::1]:{port}"]
)
def test_another_host_is_refused(shown: Viewer, host: str) -> None:
    found = shown.get(Host=host.format(port=shown.port))
    assert found.status == 403
    assert "shard" not in found.text


@pytest.mark.parametrize("path", ["", "wrong/", "wrong/s/0/", "style.css", "%00/", "..//", "%F0%9F/", "a" * 4000])
def test_without_the_token_there_is_nothing(shown: Viewer, path: str) -> None:
    found = shown.get(url=f"http://127.0.0.1:{shown.port}/{path}")
    assert found.status == 404
    assert found.text == "404: there is nothing here\n"
    assert found.headers["Server"] == "lightning-streaming"


def test_a_token_that_is_nearly_right_is_wrong(shown: Viewer) -> None:
    token = shown.url.rstrip("/").rpartition("/")[2]
    for other in (token[:-1], token + "a", token.swapcase(), token[::-1]):
        assert shown.get(url=f"http://127.0.0.1:{shown.port}/{other}/").status == 404


@pytest.mark.parametrize(
    "path",
    [
        "../../etc/passwd",
        "%2e%2e/%2e%2e/etc/passwd",
        "s/0/../../../etc/passwd",
        "..%2f..%2fetc%2fpasswd",
        "style.css/../__init__.py",
        "base.html",
        "view_dataset.html",
        "s/0/file/0/0/../../index.json",
        "//etc/passwd",
        "s/0/%00",
    ],
)
def test_a_path_leads_to_pages_and_never_to_files(shown: Viewer, path: str) -> None:
    found = _raw(shown, f"GET {shown.url.partition(str(shown.port))[2]}{path} HTTP/1.1")
    assert found.startswith("HTTP/1.1 4")
    assert "root:" not in found
    assert "block content" not in found


def _raw(shown: Viewer, line: str, host: str | None = None) -> str:
    """What is answered to a request that no client would make."""
    with socket.create_connection(("127.0.0.1", shown.port), timeout=30) as one:
        one.sendall(f"{line}\r\nHost: {host or f'127.0.0.1:{shown.port}'}\r\nConnection: close\r\n\r\n".encode())
        found = b""
        while data := one.recv(65536):
            found += data
    return found.decode("utf-8", "replace")


def test_an_address_within_the_request_is_no_way_around_the_host(shown: Viewer) -> None:
    path = shown.url.partition(str(shown.port))[2]
    found = _raw(shown, f"GET http://evil.example{path} HTTP/1.1", host="evil.example")
    assert found.startswith("HTTP/1.1 403")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_pages_are_only_looked_at(shown: Viewer, method: str) -> None:
    found = shown.get(method=method)
    assert found.status == 405
    assert found.headers["Allow"] == "GET, HEAD"


def test_a_browser_may_run_nothing_and_tell_nobody(shown: Viewer) -> None:
    for path in ("", "s/0/samples", "style.css", "s/0/file/0/2/0", "nothing", "s/0/sample/99999"):
        headers = shown.get(path).headers
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'")
        assert "script-src" not in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Cache-Control"] == "no-store"
    head = shown.get("s/0/samples", method="HEAD")
    assert head.status == 200
    assert head.data == b""


def test_only_this_machine_is_listened_to(shown: Viewer) -> None:
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{shown.process.pid}/net/{name}").read_text().splitlines()[1:]:
            _, address, _, state, *_ = line.split()
            if state == "0A" and int(address.rpartition(":")[2], 16) == shown.port:
                found.add(address.rpartition(":")[0])
    assert found == {"0100007F"}


def test_the_browser_is_told_the_address_by_a_file_that_nobody_else_can_read(rich: Path, tmp_path: Path) -> None:
    browser, told = tmp_path / "browser", tmp_path / "told"
    browser.write_text(
        f"#!/bin/sh\nstat -c %a ${{1#file://}} $(dirname ${{1#file://}}) >{told}.part\n"
        f'echo "$@" >>{told}.part; cat ${{1#file://}} >>{told}.part; mv {told}.part {told}\n'
    )
    browser.chmod(0o700)
    (tmp_path / "scratch").mkdir()
    env = {**os.environ, "BROWSER": f"{browser} %s", "TMPDIR": str(tmp_path / "scratch")}
    with viewer(rich, "--open", env=env) as one:
        ends = time.monotonic() + 60
        while not told.exists() and time.monotonic() < ends:
            time.sleep(0.05)
        of_file, of_directory, arguments, *page = told.read_text().splitlines()
        token = one.url.rstrip("/").rpartition("/")[2]
        assert (of_file, of_directory) == ("600", "700")
        assert arguments.startswith("file:///")
        assert token not in arguments
        assert f'content="0; url={one.url}"' in "".join(page)
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.nightly
def test_where_there_is_no_browser_that_is_told(rich: Path, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")}
    with viewer(rich, "--open", env={**env, "PATH": str(tmp_path)}) as one:
        assert one.get("s/0/").status == 200
        time.sleep(0.5)
    assert "no browser could be opened" in one.notes[0]


_SOUND = "s/0/file/7/6/0"


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ("bytes=0-", slice(0, None)),
        ("bytes=0-1", slice(0, 2)),
        ("bytes=10-19", slice(10, 20)),
        ("bytes=800-99999", slice(800, None)),
        ("bytes=-20", slice(-20, None)),
        ("bytes=-99999", slice(0, None)),
    ],
)
def test_of_a_sound_the_part_is_given_that_is_asked_for(shown: Viewer, asked: str, part: slice) -> None:
    whole = shown.get(_SOUND)
    assert whole.status == 200
    assert whole.headers["Accept-Ranges"] == "bytes"
    assert len(whole.data) > 800
    found = shown.get(_SOUND, Range=asked)
    start, stop, _ = part.indices(len(whole.data))
    assert (found.status, found.data) == (206, whole.data[part])
    assert found.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(whole.data)}"
    assert found.headers["Content-Length"] == str(len(found.data))
    assert found.headers["Content-Type"] == "audio/wav"
    assert found.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("asked", ["bytes=99999-", "bytes=99999-100000"])
def test_a_part_that_is_not_there_is_refused(shown: Viewer, asked: str) -> None:
    found = shown.get(_SOUND, Range=asked)
    assert found.status == 416
    assert found.headers["Content-Range"] == f"bytes */{len(shown.get(_SOUND).data)}"


@pytest.mark.parametrize("asked", ["bytes=0-1,5-6", "lines=0-1", "bytes=", "bytes=x-y", "bytes=9-3", "x" * 1000])
def test_what_asks_for_no_one_part_is_given_the_whole(shown: Viewer, asked: str) -> None:
    whole = shown.get(_SOUND)
    assert whole.status == shown.get(_SOUND, Range=asked).status == 200
    assert shown.get(_SOUND, Range=asked).data == whole.data
    assert shown.get(_SOUND, Range="bytes=0-1", **{"If-Range": '"x"'}).data == whole.data


@pytest.mark.rotate(1)
@pytest.mark.parametrize(("ends", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_it_ends_when_told_and_leaves_nothing(tmp_path: Path, ends: int, code: int) -> None:
    write_texts(tmp_path / "data", compression="zstd")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with viewer(tmp_path / "data", env={**os.environ, "TMPDIR": str(scratch)}, ends=ends) as one:
        assert "text 003" in one.get("s/0/sample/3").text
        assert list(scratch.iterdir())
    assert one.process.returncode == code
    assert list(scratch.iterdir()) == []


def test_a_port_that_is_taken_is_told(rich: Path, shown: Viewer) -> None:
    from tests.tools.running import run_process

    found = run_process("view", rich, "--port", shown.port)
    assert found.code == 2
    assert f"port {shown.port} of 127.0.0.1 is not available" in found.err


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of 1 MB or so: large enough that a range is a small part of one."""
    directory = tmp_path_factory.mktemp("stored")
    write_rich(directory, 400, size_limit=1_000_000)
    return directory


def test_of_a_store_only_ranges_are_read_and_nothing_is_written(
    written: Path, s3_bucket: S3Bucket, tmp_path: Path
) -> None:
    s3_bucket.put_all(written)
    shards = {path.name: path.stat().st_size for path in written.glob("*.mds")}
    home = tmp_path / "home"
    home.mkdir()
    cache = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "LIGHTNING_STREAMING_CACHE": str(home / "own")}
    with viewer(s3_bucket.url, *options(s3_bucket.options), env={**os.environ, **cache}, cwd=home) as one:
        for path in ("s/0/", "s/0/shards", "s/0/samples", "s/0/sample/250", "s/0/file/250/2/0", "s/0/columns"):
            found = one.get(path)
            assert found.status == 200, found.text
            assert "testing-secret" not in found.data.decode("utf-8", "replace")
    log = s3_bucket.log()
    assert {entry.method for entry in log} <= {"GET", "HEAD"}
    read = [entry for entry in log if entry.name in shards and entry.method == "GET"]
    assert read
    assert all(entry.range for entry in read)
    for name, size in shards.items():
        assert sum(entry.sent or 0 for entry in read if entry.name == name) < size / 2
    assert snapshot(home) == {}


def test_a_compressed_shard_of_a_store_is_fetched_when_that_is_asked_for(
    s3_bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_streaming.tools.stored import sample_reader
    from tests.tools.viewing.asking import html, pages_of

    monkeypatch.setattr(sample_reader, "_MAX_FETCHED", 100)
    write_texts(tmp_path, compression="zstd")
    s3_bucket.put_all(tmp_path)
    pages = pages_of(s3_bucket.url, s3_bucket.options)
    assert "must be fetched" in html(pages, "s/0/sample/3")
    assert not [name for name in s3_bucket.requests() if "shard" in name]
    assert "text 003" in html(pages, "s/0/sample/3", force="1")
    assert len([name for name in s3_bucket.requests() if "shard" in name]) == 1
    pages.viewed.close()


@pytest.mark.nightly
def test_files_of_another_format_on_a_store_are_read_by_way_of_a_cache_of_its_own(
    s3_bucket: S3Bucket, tmp_path: Path
) -> None:
    table = pyarrow.table({"id": range(4000), "text": [f"row {number}" for number in range(4000)]})
    pyarrow.parquet.write_table(table, tmp_path / "part.parquet", row_group_size=100)
    s3_bucket.put_all(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    env = {**os.environ, "LIGHTNING_STREAMING_CACHE": str(home)}
    with viewer(s3_bucket.url, *options(s3_bucket.options), "--format", "parquet", env=env) as one:
        assert "row 3210" in one.get("s/0/sample/3210").text
        assert "Values of id" in one.get("s/0/columns").text
    assert snapshot(home) == {}
    read = [entry for entry in s3_bucket.log() if entry.name == "part.parquet" and entry.method == "GET"]
    assert all(entry.range for entry in read)


@pytest.mark.nightly
def test_a_store_that_fails_is_told_in_the_page_and_the_server_lives(written: Path, s3_bucket: S3Bucket) -> None:
    s3_bucket.put_all(written)
    with viewer(s3_bucket.url, *options(s3_bucket.options)) as one:
        s3_bucket.fail(r"shard\.00001", "status", status=403)
        first = int(one.get("s/0/shards").text.partition("shard.00001")[2].partition("from=")[2].partition('"')[0])
        found = one.get(f"s/0/sample/{first}")
        assert found.status == 200
        assert "could not be read" in found.text
        assert "testing-key" not in found.text
        assert "caption 0 " in one.get("s/0/sample/0").text
        s3_bucket.heal()
        assert f"caption {first} " in one.get(f"s/0/sample/{first}").text


@pytest.mark.nightly
def test_it_ends_soon_also_while_a_store_does_not_answer(written: Path, s3_bucket: S3Bucket) -> None:
    s3_bucket.put_all(written)
    s3_bucket.fail(r"shard\.00001", "hang")
    with viewer(s3_bucket.url, *options(s3_bucket.options)) as one:
        first = int(one.get("s/0/shards").text.partition("shard.00001")[2].partition("from=")[2].partition('"')[0])
        with socket.create_connection(("127.0.0.1", one.port), timeout=30) as hung:
            path = one.url.partition(str(one.port))[2]
            hung.sendall(f"GET {path}s/0/sample/{first} HTTP/1.1\r\nHost: 127.0.0.1:{one.port}\r\n\r\n".encode())
            while "shard.00001.mds" not in s3_bucket.requests():
                assert one.get("s/0/").status == 200  # others are answered meanwhile
            began = time.monotonic()
            one.process.send_signal(signal.SIGINT)
            assert one.process.wait(30) == 130
            assert time.monotonic() - began < 10


@pytest.mark.nightly
def test_a_store_that_does_not_answer_holds_up_its_own_stream_alone(
    written: Path, s3_bucket: S3Bucket, temporary: Path
) -> None:
    s3_bucket.put_all(written)
    write_texts("here")
    streams = {
        "stored": {"remote": s3_bucket.url, "storage": {"options": s3_bucket.options}},
        "here": {"remote": "here"},
    }
    data = {"init_args": {"batch_size": 2, "train": {"streams": streams}}}
    Path("run.yaml").write_text(json.dumps({"data": data, "trainer": {"devices": 1}}))
    s3_bucket.fail(r"shard\.00001", "hang")
    with viewer("--config", "run.yaml") as one, ExitStack() as hung:
        first = int(one.get("s/0/shards").text.partition("shard.00001")[2].partition("from=")[2].partition('"')[0])
        path = one.url.partition(str(one.port))[2]
        for page in [f"s/0/sample/{first + number}" for number in range(20)] + ["batches"] * 20:
            asked = hung.enter_context(socket.create_connection(("127.0.0.1", one.port), timeout=30))
            asked.sendall(f"GET {path}{page} HTTP/1.1\r\nHost: 127.0.0.1:{one.port}\r\n\r\n".encode())
        while "shard.00001.mds" not in s3_bucket.requests():
            assert one.get("s/1/").status == 200
        for path in ("style.css", "icon.svg", "s/1/samples", "", "order"):
            assert one.get(path).status == 200, path


def test_many_at_once_are_all_answered(shown: Viewer) -> None:
    paths = [f"s/0/file/{number}/2/0" for number in range(30)] + ["s/0/samples", "s/0/columns"] * 5
    with ThreadPoolExecutor(16) as pool:
        assert {found.status for found in pool.map(shown.get, paths)} == {200}


@pytest.mark.parametrize(
    "sent",
    [
        b"\0\1\2\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n",
    ],
)
def test_what_is_no_request_ends_nothing(shown: Viewer, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", shown.port), timeout=30) as one:
        one.sendall(sent)
        one.shutdown(socket.SHUT_WR)
        found = b""
        while data := one.recv(65536):
            found += data
    assert found == b"" or found.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4", b"HTTP/9.9 4"))
    assert shown.url.rstrip("/").rpartition("/")[2].encode() not in found
    assert b"Traceback" not in found
    assert shown.get("s/0/").status == 200


@pytest.mark.parametrize("line", ["get / HTTP/1.1", "GET /\u0661 HTTP/1.1", "GET / HTTP/9.9", "<script>"])
def test_what_is_no_request_is_refused_without_versions(shown: Viewer, line: str) -> None:
    found = _raw(shown, line)
    assert re.match(r"HTTP/\d\.\d 400 Bad Request\r\n", found)
    assert found.endswith("\r\n\r\n400: bad request\n")
    assert "Server: lightning-streaming\r\n" in found
    assert "Content-Security-Policy: default-src 'none'" in found
