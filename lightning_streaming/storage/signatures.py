"""Signatures in the query of a URL: they say who may read until when, and nothing of what is read."""

from __future__ import annotations

from urllib.parse import unquote_plus

_SIGNED_BY = {
    "x-amz-signature": ("x-amz-",),
    "x-goog-signature": ("x-goog-",),
    "q-signature": ("q-",),
}
"""Of a parameter that is a signature: what the names of those that go with it begin with. All in lower case."""
_SIGNED_WITH = {
    # S3 and GCS of old, CloudFront, OSS
    "signature": frozenset(
        {
            "signature",
            "expires",
            "awsaccesskeyid",
            "googleaccessid",
            "ossaccesskeyid",
            "security-token",
            "x-amz-security-token",
            "key-pair-id",
            "policy",
            "hash-algorithm",
        }
    ),
    # shared access signatures of Azure
    "sig": frozenset(
        {
            "sig",
            "sv",
            "st",
            "se",
            "sr",
            "sp",
            "ss",
            "srt",
            "spr",
            "sip",
            "si",
            "sdd",
            "skoid",
            "sktid",
            "skt",
            "ske",
            "sks",
            "skv",
            "saoid",
            "suoid",
            "scid",
            "sduoid",
            "skdutid",
        }
    ),
}
"""Of a parameter that is a signature: the names of those that go with it."""


def without_signature(query: str) -> str:
    """What a query says but for a signature of a known kind, and what goes with that.

    Parameters of these names stay where there is no signature: there they may select the data.

    Args:
        query: What follows the question mark of a URL.
    """
    pieces = query.split("&")
    names = [unquote_plus(piece.partition("=")[0]).lower() for piece in pieces]
    begins = tuple(begin for kind, all_of in _SIGNED_BY.items() if kind in names for begin in all_of)
    signed = frozenset[str]().union(*(all_of for kind, all_of in _SIGNED_WITH.items() if kind in names))
    return "&".join(
        piece for piece, name in zip(pieces, names, strict=True) if name not in signed and not name.startswith(begins)
    )
