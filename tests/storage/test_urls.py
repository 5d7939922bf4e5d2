from __future__ import annotations

from pathlib import Path

import pytest

from lightning_streaming.storage import is_url, join_url, local_path, location_key, mask_url


@pytest.mark.parametrize("location", ["s3://bucket/key", "gs://b", "https://host/x", "abfs://c@a.net/x", "a+b://x"])
def test_a_scheme_makes_a_url(location: str) -> None:
    assert is_url(location)
    assert local_path(location) is None


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("/data/x", Path("/data/x")),
        ("data/x", Path("data/x")),
        ("~/x", Path.home() / "x"),
        ("file:///data/x", Path("/data/x")),
        ("local:///data/x", Path("/data/x")),
        ("C:/x", Path("C:/x")),
    ],
)
def test_everything_else_is_local(location: str, path: Path) -> None:
    assert not is_url(location)
    assert local_path(location) == path


@pytest.mark.parametrize(
    ("url", "parts", "joined"),
    [
        ("s3://bucket", ["index.json"], "s3://bucket/index.json"),
        ("s3://bucket/a/", ["train", "shard.mds"], "s3://bucket/a/train/shard.mds"),
        ("s3://bucket/a", ["", "x"], "s3://bucket/a/x"),
        ("s3://bucket/a", ["50% #1?.mds"], "s3://bucket/a/50% #1?.mds"),
        ("/data", ["train", "x"], "/data/train/x"),
        ("/", ["x"], "/x"),
        ("data", ["x"], "data/x"),
        ("file:///", ["x"], "file:///x"),
        ("https://host/data", ["a b#1.mds"], "https://host/data/a%20b%231.mds"),
        ("https://host/data/?sig=x/y", ["sub/x"], "https://host/data/sub/x?sig=x/y"),
    ],
)
def test_names_are_joined_to_a_directory(url: str, parts: list[str], joined: str) -> None:
    assert join_url(url, *parts) == joined


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("s3://bucket/key", "s3://bucket/key"),
        ("s3://id:secret@bucket/key", "s3://bucket/key"),
        ("https://user:p@ss@host:80/x?sig=secret#secret", "https://host:80/x"),
        ("https://host?sig=a@b", "https://host"),
        ("https://host/a@b", "https://host/a@b"),
        ("abfs://container@account.net/x", "abfs://container@account.net/x"),  # not a user
        ("/data/a?b#c@d", "/data/a?b#c@d"),
    ],
)
def test_a_masked_url_shows_no_secret(url: str, masked: str) -> None:
    assert mask_url(url) == masked


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3://bucket/a", "s3://bucket/b"),
        ("https://host/?set=a", "https://host/?set=b"),
        ("abfs://one@account.net/x", "abfs://other@account.net/x"),
    ],
)
def test_locations_of_different_data_have_different_keys(one: str, other: str) -> None:
    assert location_key(one, {}) != location_key(other, {})


@pytest.mark.parametrize(
    "options",
    [{"endpoint_url": "http://here"}, {"client_kwargs": {"endpoint_url": "http://here"}}, {"account_name": "mine"}],
)
def test_the_same_url_at_another_store_has_another_key(options: dict[str, object]) -> None:
    assert location_key("s3://bucket/x", options) != location_key("s3://bucket/x", {})


def test_an_endpoint_from_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = location_key("s3://bucket/x", {}), location_key("gs://bucket/x", {})
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://here")
    assert location_key("s3://bucket/x", {}) != before[0]
    assert location_key("gs://bucket/x", {}) == before[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3://bucket/a", "s3://bucket/a/"),
        ("https://me:secret@host/a", "https://you@host/a"),
        ("data/../data/x", "file://data/x"),
    ],
)
def test_credentials_and_spelling_do_not_change_the_key(one: str, other: str) -> None:
    assert location_key(one, {"key": "mine"}) == location_key(other, {"key": "yours"})


def test_an_endpoint_that_options_take_from_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_URL", "http://here")
    taken, written = ({"endpoint_url": text} for text in ("${STORE_URL}", "http://here"))
    assert location_key("s3://bucket/x", taken) == location_key("s3://bucket/x", written)


SIGNED = [
    (
        "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=A%2F1&X-Amz-Date={0}&X-Amz-Expires=9&X-Amz-Signature={0}",
        "s3",
    ),
    ("AWSAccessKeyId=A&Expires={0}&Signature={0}", "s3 of old"),
    ("x-amz-security-token={0}&AWSAccessKeyId=A&Signature={0}&Expires={0}", "s3 of old, temporary"),
    ("X-Goog-Date={0}&X-Goog-SignedHeaders=host&X-Goog-Signature={0}", "gcs"),
    ("GoogleAccessId=a&Expires={0}&Signature={0}", "gcs of old"),
    ("Policy={0}&Signature={0}&Key-Pair-Id=K", "cloudfront"),
    ("sv=2024-11-04&st={0}&se={0}&sr=c&sp=rl&sig={0}", "azure"),
    ("q-sign-time={0}&q-ak=a&q-signature={0}", "cos"),
]


@pytest.mark.parametrize("scheme", ["https", "http"])
@pytest.mark.parametrize("query", [query for query, _ in SIGNED], ids=[name for _, name in SIGNED])
def test_a_renewed_signature_is_the_same_place(query: str, scheme: str) -> None:
    base = f"{scheme}://host/data"
    old, new = query.format(1), query.format("2%2F%3D")
    assert location_key(f"{base}?{old}", {}) == location_key(f"{base}/?{new}", {}) == location_key(base, {})
    one, other = (location_key(f"{base}?version={version}&{query.format(version)}", {}) for version in (1, 2))
    assert one == location_key(f"{base}?{new}&version=1", {}) == location_key(f"{base}?version=1", {})
    assert one != other
    assert location_key(f"{base}?{new}", {}) != location_key(f"{scheme}://host/other?{new}", {})


@pytest.mark.parametrize(
    "query", ["se={}", "Expires={}", "Policy={}", "st={}&sv=1", "X-Amz-Date={}", "q-x={}", "token={}"]
)
@pytest.mark.parametrize("base", ["https://host/data", "s3://bucket/data"])
def test_a_query_without_a_signature_may_select_the_data(base: str, query: str) -> None:
    assert location_key(f"{base}?{query.format(1)}", {}) != location_key(f"{base}?{query.format(2)}", {})
