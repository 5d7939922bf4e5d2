"""Show and move the place in the data that a checkpoint holds.

CKPT is a checkpoint of Lightning, the directory of a sharded one (FSDP, ModelParallel), or a file with the state of a
loader or dataset alone, of torch.save or JSON. Checkpoints of Fabric and Composer can be shown, too. What is written
replaces the file in one step, and what was there before stays as CKPT.bak, CKPT.bak2, and so on.

    lightning-streaming state show run/last.ckpt
    lightning-streaming state set run/last.ckpt --epoch 1 --sample 51200
    lightning-streaming state skip run/last.ckpt --batches 100
    lightning-streaming state import composer.pt run/last.ckpt
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from inspect import getdoc
from pathlib import Path
from typing import Any

from lightning_streaming.tools.options import add_json, add_storage_options, not_negative, positive
from lightning_streaming.tools.states.edit import import_state, set_place, skip
from lightning_streaming.tools.states.show import show

_LOADER = "name of the train loader; needed if there are several"


def add_arguments(parser: ArgumentParser) -> None:
    """Say what it can be told."""
    actions = parser.add_subparsers(metavar="ACTION", required=True, help="what to do; ACTION --help explains each")
    _add_show(actions.add_parser("show", help="show the place", **_described(show)))
    _add_set(actions.add_parser("set", help="move it to a sample of an epoch", **_described(set_place)))
    _add_skip(actions.add_parser("skip", help="move it forward", **_described(skip)))
    _add_import(actions.add_parser("import", help="take it from MosaicML Streaming", **_described(import_state)))


def run(args: Namespace) -> int:
    """Do what was asked for."""
    code: int = args.action(args)
    return code


def _described(action: Callable[[Namespace], int]) -> dict[str, Any]:
    return {
        "description": getdoc(action),
        "formatter_class": RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }


def _add_show(parser: ArgumentParser) -> None:
    parser.set_defaults(action=show)
    _add_checkpoint(parser)
    parser.add_argument("--loader", metavar="NAME", help="show this one alone")
    parser.add_argument(
        "--data",
        metavar="NAME=PLACE",
        action="append",
        default=[],
        help="directory or URL of a stream; given for all of them, also what this epoch has read of each is counted. "
        "NAME= may be left out where there is only one",
    )
    add_json(parser)
    add_storage_options(parser, of="the store of --data")


def _add_set(parser: ArgumentParser) -> None:
    parser.set_defaults(action=set_place)
    _add_checkpoint(parser)
    parser.add_argument("--epoch", metavar="E", type=not_negative, required=True, help="epoch of the data, from 0")
    parser.add_argument(
        "--sample", metavar="S", type=not_negative, required=True, help="samples of it that count as read, by all ranks"
    )
    parser.add_argument("--loader", metavar="NAME", help=_LOADER)
    _add_output(parser)


def _add_skip(parser: ArgumentParser) -> None:
    parser.set_defaults(action=skip)
    _add_checkpoint(parser)
    amount = parser.add_mutually_exclusive_group(required=True)
    amount.add_argument("--samples", metavar="N", type=positive, help="so many samples, by all ranks")
    amount.add_argument("--batches", metavar="N", type=positive, help="so many batches of all ranks, or steps")
    parser.add_argument("--loader", metavar="NAME", help=f"{_LOADER}, except with --batches, which moves all")
    _add_output(parser)


def _add_import(parser: ArgumentParser) -> None:
    parser.set_defaults(action=import_state)
    parser.add_argument("source", metavar="SRC", help="file with the state: of Composer, or of torch.save or JSON")
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="checkpoint of Lightning to put it in; or a file to be made, .pt or .json, for the state alone",
    )
    parser.add_argument("--source", dest="name", metavar="NAME", help="which state of SRC, as show SRC names them")
    parser.add_argument("--loader", metavar="NAME", help='the train loader; by default the only one, or "train"')
    _add_output(parser)


def _add_checkpoint(parser: ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint or file with a state")


def _add_output(parser: ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", type=Path, help="write this new file and leave CKPT as it is")
    parser.add_argument(
        "--allow-unsafe-types",
        action="store_true",
        help="also take a checkpoint with objects of any class, which can run any code of whoever wrote it",
    )
    add_json(parser)
