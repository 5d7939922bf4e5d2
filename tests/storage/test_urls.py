from __future__ import annotations

from pathlib import Path

import pytest

from lightning_streaming.errors import ConfigError
from lightning_streaming.storage import Location, is_url, join_url, local_path, mask_url
from lightning_streaming.storage.secrets import expand, expand_known
from tests.helpers import assert_error


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
    assert Location(one).key != Location(other).key


@pytest.mark.parametrize(
    "options",
    [{"endpoint_url": "http://here"}, {"client_kwargs": {"endpoint_url": "http://here"}}, {"account_name": "mine"}],
)
def test_the_same_url_at_another_store_has_another_key(options: dict[str, object]) -> None:
    assert Location("s3://bucket/x", options).key != Location("s3://bucket/x").key


def test_an_endpoint_from_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Location("s3://bucket/x").key, Location("gs://bucket/x").key
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://here")
    assert Location("s3://bucket/x").key != before[0]
    assert Location("gs://bucket/x").key == before[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3://bucket/a", "s3://bucket/a/"),
        ("https://me:secret@host/a", "https://you@host/a"),
        ("data/../data/x", "file://data/x"),
    ],
)
def test_credentials_and_spelling_do_not_change_the_key(one: str, other: str) -> None:
    assert Location(one, {"key": "mine"}).key == Location(other, {"key": "yours"}).key


def test_an_endpoint_that_options_take_from_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_URL", "http://here")
    taken, written = ({"endpoint_url": text} for text in ("${STORE_URL}", "http://here"))
    assert Location("s3://bucket/x", taken).key == Location("s3://bucket/x", written).key


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
    assert Location(f"{base}?{old}").key == Location(f"{base}/?{new}").key == Location(base).key
    one, other = (Location(f"{base}?version={version}&{query.format(version)}").key for version in (1, 2))
    assert one == Location(f"{base}?{new}&version=1").key == Location(f"{base}?version=1").key
    assert one != other
    assert Location(f"{base}?{new}").key != Location(f"{scheme}://host/other?{new}").key


@pytest.mark.parametrize(
    "query", ["se={}", "Expires={}", "Policy={}", "st={}&sv=1", "X-Amz-Date={}", "q-x={}", "token={}"]
)
@pytest.mark.parametrize("base", ["https://host/data", "s3://bucket/data"])
def test_a_query_without_a_signature_may_select_the_data(base: str, query: str) -> None:
    assert Location(f"{base}?{query.format(1)}").key != Location(f"{base}?{query.format(2)}").key


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_SECRET", "hush")
    monkeypatch.setenv("STORE_HOST", "here")
    monkeypatch.delenv("STORE_MISSING", raising=False)


def test_variables_are_replaced_at_any_depth() -> None:
    options = {
        "secret": "${STORE_SECRET}",
        "client_kwargs": {"endpoint_url": "http://${STORE_HOST}:9000/${STORE_HOST}", "list": ["${STORE_HOST}", 1]},
        "anon": False,
    }
    assert expand(options) == {
        "secret": "hush",
        "client_kwargs": {"endpoint_url": "http://here:9000/here", "list": ["here", 1]},
        "anon": False,
    }
    assert options["secret"] == "${STORE_SECRET}"


@pytest.mark.parametrize("text", ["$STORE_HOST", "${}", "${1A}", "{STORE_HOST}", "a$b", "${oc.env:HOME}"])
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert expand({"x": text}) == {"x": text}


def test_what_a_variable_holds_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_SECRET", "${STORE_HOST}")
    assert expand({"x": "${STORE_SECRET}"}) == {"x": "${STORE_HOST}"}


def test_a_variable_that_is_not_set_is_named() -> None:
    options = {"key": "literal-key", "x": "${STORE_MISSING}"}
    with assert_error(ConfigError, option="storage_options") as caught:
        expand(options)
    assert "STORE_MISSING" in str(caught.value)
    assert "literal-key" not in str(caught.value)
    assert expand_known(options) == options
