"""One server, until standard input ends or it is interrupted; it prints its URL.

python -m tests.servers http DIRECTORY --latency 0.05 --per-connection 20e6 --total 160e6
python -m tests.servers proxy http://127.0.0.1:4443
python -m tests.servers s3
python -m tests.servers hub DIRECTORY
python -m tests.servers oci DIRECTORY
"""

from __future__ import annotations

import argparse

from tests.servers.fault_server import Link
from tests.servers.processes import serve_before, serve_files, serve_hub, serve_oci, serve_s3, until_input_ends


def main() -> None:
    """Serve what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.servers", description="An object server on loopback.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, what in (("http", "directory"), ("hub", "directory"), ("oci", "directory"), ("proxy", "upstream")):
        one = kinds.add_parser(kind)
        one.add_argument(what)
        one.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
        one.add_argument("--per-connection", type=float, default=0.0, help="bytes a second of each connection")
        one.add_argument("--total", type=float, default=0.0, help="bytes a second of all connections together")
    kinds.add_parser("s3")
    given = parser.parse_args()
    if given.kind == "s3":
        until_input_ends(serve_s3)
    link = Link(latency=given.latency, per_connection=given.per_connection, total=given.total)
    if given.kind == "http":
        until_input_ends(serve_files, given.directory, link)
    if given.kind == "hub":
        until_input_ends(serve_hub, given.directory, link)
    if given.kind == "oci":
        until_input_ends(serve_oci, given.directory, link)
    until_input_ends(serve_before, given.upstream, link)


if __name__ == "__main__":
    main()
