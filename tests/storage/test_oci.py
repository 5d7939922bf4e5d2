"""Oracle's object storage, as far as it can be tried without its cloud: options, errors, secrets and attempts."""

from __future__ import annotations

import time

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from lightning_streaming.errors import AccessDeniedError, ConfigError, DownloadError, StorageError
from lightning_streaming.storage import Location, StorageOptions
from lightning_streaming.storage.filesystems import kind_of, open_filesystem
from tests.servers import refused_port

pytest.importorskip("ocifs", reason="ocifs is not installed: pip install 'lightning-streaming[oci]'")
_KEY = rsa.generate_private_key(65537, 2048).private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
)
CONFIG = {
    "user": "ocid1.user.oc1..aaaaexample",
    "tenancy": "ocid1.tenancy.oc1..aaaaexample",
    "fingerprint": "20:3b:97:13:55:1c:5b:0d:d3:37:d8:50:4e:c5:3a:34",
    "region": "us-phoenix-1",
    "key_content": _KEY.decode(),
}


def test_a_store_that_does_not_answer_is_tried_as_often_as_it_is_told_to() -> None:
    with refused_port() as port:
        options = {"config": CONFIG, "config_kwargs": {"service_endpoint": f"http://127.0.0.1:{port}"}}
        one = Location("oci://bucket@namespace/x", options, attempts=2, timeout=10)
        begun = time.monotonic()
        for ask in (one.read, one.stat, lambda: one.put(b"1")):
            with pytest.raises(StorageError, match=r"oci://bucket@namespace/x: 2 attempts .*refused") as caught:
                ask()
            assert isinstance(caught.value, DownloadError) == (ask == one.read)
            assert CONFIG["fingerprint"] not in str(caught.value)
        assert time.monotonic() - begun < 9  # its client alone would go on for minutes


def test_its_filesystem_blocks_and_leaves_attempts_to_us() -> None:
    filesystem, path = open_filesystem("oci://bucket@namespace/a/x", {"config": CONFIG})
    assert kind_of(filesystem, "oci://bucket@namespace/a/x") is None
    assert path == "bucket@namespace/a/x"
    assert type(filesystem.oci_client.retry_strategy).__name__ == "NoneRetryStrategy"
    assert open_filesystem("oci://bucket@namespace/b", {"config": CONFIG})[0] is filesystem


def test_a_url_without_a_namespace_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"oci://bucket/x names no namespace; write oci://BUCKET@NAMESPACE/path"):
        Location("oci://bucket/x", {"config": CONFIG}).read()


@pytest.mark.parametrize("options", [{}, {"config": "/no/such/config"}])
def test_without_credentials_the_options_are_asked_for(options: dict[str, str]) -> None:
    with pytest.raises(AccessDeniedError, match=r"give config \(a file, like ~/.oci/config\) and profile, or iam_type"):
        Location("oci://bucket@namespace/x", options, attempts=3).read()


@pytest.mark.parametrize("change", [{"key_content": "hush-hush"}, {"user": None}, {"fingerprint": "hush-hush"}])
def test_credentials_that_cannot_be_are_final_and_not_shown(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="check the URL and storage_options") as caught:
        Location("oci://bucket@namespace/x", {"config": {**CONFIG, **change}}, attempts=3).read()
    assert "hush" not in f"{caught.value} {caught.value.__cause__}"


def test_the_namespace_and_the_region_make_another_key_and_are_shown() -> None:
    one, other, third = (
        Location(url, {"config": {**CONFIG, "region": region}})
        for url, region in (("oci://b@n/x", "one"), ("oci://b@m/x", "one"), ("oci://b@n/x", "other"))
    )
    assert len({one.key, other.key, third.key}) == 3
    assert str(one) == "oci://b@n/x"
    shown = repr(StorageOptions({"config": CONFIG, "region": "us-phoenix-1"}))
    assert "'region': 'us-phoenix-1'" in shown
    assert all(CONFIG[name] not in shown for name in ("user", "tenancy", "fingerprint"))
    assert "PRIVATE" not in shown
