"""Show or change the position in the data that a checkpoint contains.

CKPT is a Lightning checkpoint, the directory of a sharded one (FSDP, ModelParallel), or a file with only the state of a
loader or dataset, saved by torch.save or as JSON. Checkpoints of Fabric and Composer can be shown, too. A change
replaces the file atomically, and keeps the earlier file as CKPT.bak, CKPT.bak2, and so on.

    lightning-streaming state show run/last.ckpt
    lightning-streaming state set run/last.ckpt --epoch 1 --sample 51200
    lightning-streaming state skip run/last.ckpt --batches 100
    lightning-streaming state import composer.pt run/last.ckpt
    lightning-streaming state branch run/last.ckpt
"""

from __future__ import annotations

import math
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_streaming.errors import ConfigError, UnsupportedError
from lightning_streaming.escaping import shell_word
from lightning_streaming.resume import lightning_checkpoint
from lightning_streaming.resume.saved_fingerprint import SavedPhase
from lightning_streaming.resume.state import Cursor, SavedPosition
from lightning_streaming.tools import commands
from lightning_streaming.tools.console import (
    FINE,
    PROGRAM,
    counted,
    print_json,
    print_line,
    print_table,
    printable_name,
)
from lightning_streaming.tools.runs import checkpoints
from lightning_streaming.tools.runs.checkpoints import Places, SavedLoader, StreamSeen, find_places, read_places
from lightning_streaming.tools.stored.stored_dataset import find_dataset

_BARE = (".pt", ".json")
"""Suffixes of files that contain only a state."""
_WEIGHT = r"(?:\d[\d.]*(?:e[+-]?\d+)?)"
_SHARE = re.compile(rf"(?P<name>.*?) (?P<begin>{_WEIGHT})(?: to (?P<end>{_WEIGHT}))?(?:, |$)", re.DOTALL)
_SUMMARY = re.compile(r"of \d+ streams, ")
_STEPS = 16
"""Default steps of a ramp."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    actions = parser.add_subparsers(metavar="ACTION", required=True, help="the action; ACTION --help explains each")

    to_show = _add_action(actions, "show", "show the position", show)
    to_show.add_argument("--loader", metavar="NAME", help="show only this train loader")
    to_show.add_argument(
        "--data",
        metavar="NAME=PLACE",
        action="append",
        default=[],
        help="directory or URL of a stream; if given for all streams, their samples in this epoch are counted too. "
        "NAME= may be omitted for a single stream",
    )
    words = (
        "configuration of the run, instead of --data; may be repeated. Required for a selection, phases, weights in "
    )
    words += "tokens, and lengths of documents that are in no column"
    to_show.add_argument("--config", metavar="C", action="append", default=[], help=words)
    commands.add_json(to_show)
    commands.add_storage_options(to_show, of="the store of --data")

    to_set = _add_action(actions, "set", "move it to a sample of an epoch", _set_place)
    to_set.add_argument("--epoch", metavar="E", type=commands.position, required=True, help="epoch of the data, from 0")
    words = "number of samples of the epoch, over all ranks, that count as read; with packing, of packs"
    to_set.add_argument("--sample", metavar="S", type=commands.position, required=True, help=words)
    commands.add_loader(to_set)
    _add_output(to_set)

    to_skip = _add_action(actions, "skip", "move it forward", skip)
    moved = to_skip.add_mutually_exclusive_group(required=True)
    moved.add_argument(
        "--samples", metavar="N", type=commands.amount, help="number of samples, or packs, over all ranks"
    )
    moved.add_argument("--batches", metavar="N", type=commands.amount, help="number of batches of all ranks, or steps")
    commands.add_loader(to_skip, ", except with --batches, which moves all of them")
    _add_output(to_skip)

    to_import = commands.add_action(actions, "import", "take it from MosaicML Streaming", _import_state)
    to_import.add_argument(
        "source", metavar="SRC", help="file with the state, written by Composer or torch.save, or JSON"
    )
    words = "Lightning checkpoint to add it to; or a new file, .pt or .json, for the state alone"
    to_import.add_argument("checkpoint", metavar="CKPT", help=words)
    to_import.add_argument(
        "--source", dest="name", metavar="NAME", help="name of the state in SRC, as `state show SRC` prints it"
    )
    words = 'name of the train loader; by default the only one, or "train"'
    to_import.add_argument("--loader", metavar="NAME", help=words)
    _add_output(to_import)

    words = "show how to end the current phase at the checkpoint and continue with others"
    to_branch = _add_action(actions, "branch", words, branch)
    commands.add_loader(to_branch)
    commands.add_json(to_branch)


def _add_action(actions: Any, word: str, words: str, action: Any) -> ArgumentParser:
    parser = commands.add_action(actions, word, words, action)
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint or file with a state")
    return parser


def _add_output(parser: ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", type=Path, help="write to this new file and leave CKPT unchanged")
    words = "also load a checkpoint with objects of any class, which can run any code of its author"
    parser.add_argument("--allow-unsafe-types", action="store_true", help=words)
    commands.add_json(parser)


def run(args: Namespace) -> int:
    """Run the requested action."""
    code: int = args.action(args)
    return code


# show


def show(args: Namespace) -> int:
    """Show the position of each train loader: epoch, sample, settings of its order, and samples read of each stream.

    Epochs before this one are counted whole; with --config, without what `drop_last` and `limit_train_batches` left
    out. Nothing that the file names is executed, and its tensors are not read.
    """
    places = read_places(args.checkpoint)
    chosen = places.loaders
    if args.loader is not None or args.data or args.config:
        name = places.choose(args.loader)
        chosen = {name: places.loaders[name]}
    if args.data and args.config:
        raise ConfigError("--config says where the data is", hint="give it, or --data for each stream", option="--data")
    counts = {name: _count(loader, args) for name, loader in chosen.items()}
    trainer = places.trainer
    if args.json:
        loaders = {}
        for name, loader in chosen.items():
            saved, (epoch_size, streams) = loader.position, counts[name]
            loaders[name] = {
                **saved.cursor._asdict(),
                "epoch_size": epoch_size,
                "epoch_done": _share(saved.cursor, epoch_size),
                "shuffle_seed": saved.shuffle_seed,
                "num_canonical_nodes": saved.num_canonical_nodes,
                "initial_physical_nodes": saved.initial_physical_nodes,
                "counts": f"{loader.unit}s",
                "samples_per_global_batch": loader.global_batch,
                "batch_geometry": None if saved.geometry is None else saved.geometry.facts,
                "skipped": {name: [Cursor(*end)._asdict() for end in ends] for name, ends in saved.skipped.items()},
                "fingerprint": None if saved.fingerprint is None else saved.fingerprint.as_state(),
                "streams": [asdict(stream) for stream in streams],
            }
        print_json({"file": args.checkpoint, "trainer": _trainer_as_json(places), "loaders": loaders})
        return FINE
    if trainer is None:
        print_line(
            f"{args.checkpoint}: no checkpoint of StreamingStateCallback, but it contains the position of a dataset\n"
        )
    else:
        of = f" of {trainer.batches_in_epoch}" if trainer.batches_in_epoch else ""
        step = "" if places.global_step is None else f", global step {places.global_step}"
        print_line(f"{args.checkpoint}: trainer at epoch {trainer.epoch}, {trainer.batches}{of} batches done{step}\n")
    for name, loader in chosen.items():
        command = _show_by_config(args.checkpoint, name if len(places.loaders) > 1 else None)
        _print_loader(name, loader, *counts[name], command, by_config=bool(args.config))
    return FINE


def _count(loader: SavedLoader, args: Namespace) -> tuple[int | None, list[StreamSeen]]:
    """Return the size of an epoch and the samples read of each stream, as far as they are known."""
    seen, data, options = checkpoints.seen_by_fingerprint(loader.position), args.data, args.storage_options
    if not data and not args.config:
        return loader.epoch_size, seen
    fingerprint = loader.position.fingerprint
    if fingerprint is None and data:  # the state does not say that streams were weighted
        urls = [text.partition("=")[2] or text for text in data]
        return sum(find_dataset(url, options).read_index().num_samples for url in urls), []
    if not seen or fingerprint is None:
        raise ConfigError(
            "the state does not list its streams, so there is nothing to count by --data or --config", option="--data"
        )
    # It imports torch, which takes seconds.
    describe = import_module("lightning_streaming.tools.runs.describe")
    if args.config:
        reads = describe.read_by_config(loader, args.config)
    else:
        selected = [name for name, stream in fingerprint.streams.items() if stream.selection is not None]
        lacks = None
        if fingerprint.packing is not None and describe.saved_packing(fingerprint.packing) is None:
            lacks = f"is of packed documents, whose lengths are in no column: {fingerprint.packing.lengths}"
        elif fingerprint.schedule is not None:
            lacks = "is of a run with phases or weights in tokens, which it does not contain in full"
        elif selected:
            lacks = f"was saved with a selection of {', '.join(selected)}, which it does not contain"
        if lacks is not None:
            raise UnsupportedError(
                f"the state {lacks}, so --data is not enough",
                hint=f"give the configuration of the run: `{_show_by_config(args.checkpoint, args.loader)}`. For a run "
                "in Python, write run.yaml with the arguments of its StreamingConfig as data.init_args.train",
                option="--data",
            )
        pairs = [text.partition("=") for text in data]
        places = {name: url for name, _, url in pairs}
        if len(data) == len(seen) == 1 and pairs[0][0] != seen[0].name:  # unnamed; a URL may have an equals sign
            places = {seen[0].name: data[0]}
        reads = describe.read_by_data(loader.position, places, options)
    counted_streams = []
    for stream in seen:
        samples = [read.samples.get(stream.name, 0) for read in reads]
        tokens = [read.tokens.get(stream.name, 0) for read in reads if read.tokens is not None]
        before, now = sum(samples[:-1]), samples[-1]
        all_tokens = sum(tokens) if len(tokens) == len(reads) else None
        counted_streams.append(replace(stream, before=before, this_epoch=now, tokens=all_tokens))
    return loader.epoch_size, counted_streams


def _show_by_config(checkpoint: str, loader: str | None) -> str:
    """Return the command that counts by the configuration of a run."""
    of = "" if loader is None else f" --loader {shell_word(loader)}"
    return f"{PROGRAM} state show {shell_word(checkpoint)}{of} --config run.yaml"


def _trainer_as_json(places: Places) -> dict[str, Any] | None:
    return None if places.trainer is None else {**places.trainer.as_state(), "global_step": places.global_step}


def _share(cursor: Cursor, epoch_size: int | None) -> float | None:
    return round(min(1.0, cursor.sample_in_epoch / epoch_size), 6) if epoch_size else None


def _print_loader(
    name: str,
    loader: SavedLoader,
    epoch_size: int | None,
    streams: Sequence[StreamSeen],
    command: str,
    *,
    by_config: bool,
) -> None:
    """Print one loader's position, its fingerprint, and the samples read of each stream, or how to count them.

    Args:
        name: Name of the loader.
        loader: Its saved position.
        epoch_size: Samples per epoch, if known.
        streams: What was read of each stream.
        command: The command that counts by the configuration of the run.
        by_config: Whether that was done.
    """
    saved, unit = loader.position, loader.unit
    fingerprint, sample = saved.fingerprint, saved.cursor.sample_in_epoch
    of = f" of {epoch_size:,}, {_share(saved.cursor, epoch_size):.1%}" if epoch_size else ""
    rows = [
        ("epoch", str(saved.cursor.epoch)),
        (f"{unit} in epoch", f"{sample:,}{of}"),
        ("global batch", "-" if loader.global_batch is None else counted(loader.global_batch, unit)),
        ("shuffle seed", str(saved.shuffle_seed)),
        ("canonical nodes", str(saved.num_canonical_nodes)),
        ("nodes at first", str(saved.initial_physical_nodes or "-")),
    ]
    for batches, (start, stop) in saved.skipped.items():
        last = f"{stop[1]:,}" if start[0] == stop[0] else str(Cursor(*stop))
        skipped = f"epoch {start[0]}, {unit}s {start[1]:,} to {last}"
        rows.append((f"skips {batches}", skipped if start != stop else "nothing: it was requested too late"))
    if fingerprint is None:
        print_table(name, (), rows)
        print_line("no fingerprint: the data and order of this position are not known\n")
        return
    settings = {name: _value(value) for name, value in fingerprint.order.as_state().items()}
    packing, phases, listed = fingerprint.packing, fingerprint.schedule, fingerprint.streams
    if packing is not None:
        settings["epoch_size"] = counted(fingerprint.order.epoch_size, "document")
        facts = (f"{name} {_value(value)}" for name, value in packing.settings.items())
        settings[packing.option] = ", ".join([*facts, packing.lengths])
    print_table(name, (), [*rows, *((name.replace("_", " "), value) for name, value in settings.items())])
    if phases:
        # Positions in composed batches, or of packs, are not those of samples that are drawn.
        has_progress = fingerprint.order.batching_method == "random" and packing is None
        begins, cells = 0, []
        for phase, drawn in phases.items():
            now = "read" if drawn.stop <= sample else "under way" if begins < sample else "to be read"
            cells.append((printable_name(phase), f"{begins:,}", f"{drawn.stop:,}", *[now] * has_progress, drawn.mix))
            begins = drawn.stop
        heads = ("phase", "begins", "ends", *["this epoch"] * has_progress, "weights")
        print_table(f"phases begun, {name}", heads, cells, right=heads[1:3])
    if fingerprint.weights_set:
        cells = [
            (
                f"{change.epoch:,}",
                f"{change.step:,}",
                ", ".join(f"{printable_name(stream)} {weight!r}" for stream, weight in change.mix),
            )
            for change in fingerprint.weights_set
        ]
        heads = ("epoch", "from mixture step", "weights")
        print_table(f"weights set by the run, {name}", heads, cells, right=heads[:2])
    if fingerprint.all_streams is not None:
        print_line(f"all {fingerprint.all_streams.count} streams: too many to list in the state\n")
        return
    if not listed:
        print_line("no phase had begun, so nothing was read of any stream\n")
        return
    by_tokens = ["tokens"] * any(stream.tokens is not None for stream in streams)
    of_epoch = "drawn" if phases else "per epoch"
    heads = ("stream", "samples", of_epoch, "before", "this epoch", "in all", *by_tokens, "digest")
    cells = []
    for stream, saved_stream in zip(streams, listed.values(), strict=True):
        counts = [stream.samples, stream.drawn, stream.before, stream.this_epoch, stream.total]
        counts += [stream.tokens] * len(by_tokens)
        cells.append((stream.name, *map(_value, counts), saved_stream.digest))
    title = f"{'documents' if loader.is_packed else 'samples'} read, {name}"
    if phases:
        title += f"; drawn: from an epoch's beginning to the end of {printable_name(list(phases)[-1])}"
    print_table(title, heads, cells, right=heads[1:-1], whole=heads[1:])
    if any(stream.this_epoch is None for stream in streams):
        needs_config = phases or any(stream.selection is not None for stream in listed.values())
        how = f"`{command}`" if needs_config else "--data NAME=PLACE for each of them"
        print_line(f"to count what this epoch has read of each stream, use {how}\n")
    elif not by_config and any(stream.before for stream in streams):
        words = "epochs before this one are counted whole, with what drop_last and limit_train_batches left out"
        print_line(f"{words}; `{command}` counts without it\n")


def _value(value: object) -> str:
    return "-" if value is None else f"{value:,}" if type(value) is int else str(value)


# branch


def branch(args: Namespace) -> int:
    """Show what to add to the configuration so that the current phase of CKPT ends there.

    The run then resumes from CKPT with any phases that follow; CKPT itself is unchanged. Samples that the phase had
    drawn but not read come first in them, so that no sample is lost or read early.
    """
    places = read_places(args.checkpoint)
    loader = places.choose(args.loader)
    saved, sample = places.loaders[loader].position, places.loaders[loader].position.cursor.sample_in_epoch
    phases = _phases_begun(saved, args.checkpoint)
    running = list(phases)[-1] if phases else ""
    is_at_end = not phases or sample == phases[running].end
    ended_at = None if is_at_end else sample
    if args.json:
        report = {"file": args.checkpoint, "loader": loader, "phases": list(phases), "ended_at": ended_at}
        print_json({**report, "sample": sample})
        return FINE
    if is_at_end:
        print_line(f"{args.checkpoint} is at sample {sample}, where a phase begins: add other phases from there on.")
    else:
        print_line(
            f"{args.checkpoint} is at sample {sample} of phase {running!r}, which was planned up to "
            f"{phases[running].end}."
        )
        print_line(
            f"To continue with other phases, add `ended_at: {sample}` to it, keep its other fields, and add them "
            "after it."
        )
        print_line("The epoch is then the last one of the run. Keep the streams of this phase in `streams`.")
    assert saved.fingerprint is not None, "it has phases"
    if phases:
        print_line(
            "Borders in % become numbers, as below. Keep `max_repeats` if it was set: a state does not contain it."
        )
        print_line(
            "With `mixing.size_exponent`, keep each `mix` of the configuration too: below, sizes are in the weights."
        )
    print_line("\n    schedule:")
    for name, phase in phases.items():
        line = phase_line(name, phase, saved.fingerprint.streams, ended_at if name == running else None)
        print_line(f"      {line}")
    print_line("      NAME: {end: ..., mix: ...}  # the next phase")
    return FINE


def _phases_begun(saved: SavedPosition, checkpoint: str) -> Mapping[str, SavedPhase]:
    """Return the phases of a state that have begun, if others can follow.

    Raises:
        ConfigError: None can: the run has no phases, or is not in the last of them that it has begun.
    """
    fingerprint, (epoch, sample) = saved.fingerprint, saved.cursor
    if fingerprint is None or fingerprint.schedule is None:
        raise ConfigError(
            f"the run of {checkpoint} has no phases, and nothing else can change within an epoch",
            hint="set a schedule from the start, or start a new run from its weights",
            path=checkpoint,
        )
    phases, method, hint = fingerprint.schedule, fingerprint.order.batching_method, None
    running = list(phases)[-1] if phases else ""
    start = max((phase.stop for name, phase in phases.items() if name != running), default=0)
    if fingerprint.mixing.get("weights_in") == "tokens":
        why = f"weights of {checkpoint} count tokens, and the tokens of the samples read so far end no phase"
        hint = "keep the phase to its end, and change only later ones"
    elif fingerprint.packing is not None:
        why = f"{checkpoint} counts packs, and a phase ends after a number of documents, so it cannot be cut there"
        hint = "keep the phase to its end, and change only later ones"
    elif epoch:
        why = f"{checkpoint} is in epoch {epoch}, and all phases were read in the one before"
        command = f"lightning-streaming state set CHECKPOINT --epoch 0 --sample {fingerprint.order.epoch_size}"
        hint = f"to let more phases follow the last one, put it back to the end of epoch 0: `{command}`"
    elif method != "random":
        why = (
            f"batching_method={method!r} composes the batches of a phase as a whole, so none can be cut: the phase "
            "that is being read continues to its end, and only what follows it may change"
        )
    elif phases and not start < sample <= phases[running].end:
        why = f"{checkpoint} was moved to sample {sample}, not in phase {running!r}, the last that the run had begun"
        hint = "use a checkpoint as the run saved it"
    else:
        return phases
    raise ConfigError(why, hint=hint, path=checkpoint)


def phase_line(name: str, phase: SavedPhase, streams: Collection[str], ended_at: int | None = None) -> str:
    """Return a phase as a line of YAML; its mix is left open if the state does not contain it.

    Args:
        name: Name of the phase.
        phase: The phase in the state.
        streams: Names of the streams that the state lists.
        ended_at: Sample at which it ends early, if it does.
    """
    mix = read_mix(phase.mix, streams)
    ended_at = ended_at if phase.ended_at is None else phase.ended_at
    ramps = mix is None or any(isinstance(weight, list) for weight in mix.values())
    fields = {
        "end": phase.end,
        **({} if ended_at is None else {"ended_at": ended_at}),
        **({"steps": phase.steps} if ramps and phase.steps not in (1, _STEPS) else {}),
        "mix": {} if mix is None else mix,
    }
    flow = {"default_flow_style": True, "sort_keys": False, "allow_unicode": True, "width": math.inf}
    key = yaml.safe_dump({name: None}, **flow).strip().removeprefix("{").removesuffix(": null}")
    line = f"{key}: {yaml.safe_dump(fields, **flow).strip()}"
    return line if mix is not None else f"{line.removesuffix('mix: {}}')}mix: ...}}  # as it was: of too many streams"


def read_mix(text: str, streams: Collection[str]) -> dict[str, float | list[float]] | None:
    """Parse the weights of a phase in a state, by stream; return None if it contains only a summary.

    >>> read_mix("code 0.1, web 0.9 to 0.5", ["web", "code"])
    {'code': 0.1, 'web': [0.9, 0.5]}
    """
    mix: dict[str, float | list[float]] = {}
    start = 0
    if _SUMMARY.match(text) or any("," in name for name in streams):  # such a name looks like two
        return None
    while start < len(text):
        share = _SHARE.match(text, start)
        if share is None:
            return None
        weights = [float(weight) for weight in (share["begin"], share["end"]) if weight is not None]
        # Whole numbers without a decimal point, as they are mostly written.
        weights = [int(weight) if weight.is_integer() and weight < 1e15 else weight for weight in weights]
        mix[share["name"]] = weights[0] if len(weights) == 1 else weights
        start = share.end()
    return mix


# set, skip and import


def _set_place(args: Namespace) -> int:
    """Move the position to a sample of an epoch.

    `Trainer.fit(ckpt_path=CKPT)` then continues with this sample. The trainer's epoch and batches are changed too, but
    not weights, optimizer and global step. With several loaders, only the named one is changed, and not the trainer.
    """
    edited = _Edited(args)
    name = edited.before.choose(args.loader)
    return edited.move({name: checkpoints.placed(edited.before.loaders[name], Cursor(args.epoch, args.sample))})


def skip(args: Namespace) -> int:
    """Move the position forward, for example over samples that make the loss diverge.

    After the end of an epoch, the next one begins. The global batch size is that of the checkpoint. --batches moves all
    loaders, and the trainer's count of batches with them.
    """
    edited = _Edited(args)
    before = edited.before
    if args.samples is not None:
        name = before.choose(args.loader)
        return edited.move({name: checkpoints.samples_later(before.loaders[name], args.samples)})
    names = tuple(before.loaders) if args.loader is None else (before.choose(args.loader),)
    return edited.move(checkpoints.batches_later(before, names, args.batches))


def _import_state(args: Namespace) -> int:
    """Take the position of a run with MosaicML Streaming, release 0.2 or later, or of any file with a state.

    Put it into a Lightning checkpoint, which then resumes there; or create a file with only the state, for
    `load_state_dict`. Such a state does not identify its data, so a resume checks nothing: use the settings of the
    earlier run.
    """
    sources, name = read_places(args.source), args.name
    if name is None and len(sources.loaders) > 1:
        of_training = [source for source in sources.loaders if source.split(".")[-1] == "train"]
        if len(of_training) != 1:
            raise ConfigError(
                f"there are {len(sources.loaders)} states",
                hint=f"pass --source, one of {', '.join(sources.loaders)}",
                option="--source",
            )
        name = of_training[0]
    saved, target = sources.loaders[sources.choose(name)].position, Path(args.checkpoint)
    if target.suffix in _BARE and not target.exists():
        checkpoints.write_new(target, saved.as_state(), is_json=target.suffix == ".json")
        _print_moves(target, None, None, find_places(saved.as_state(), args.checkpoint), as_json=args.json)
        return FINE
    return _Edited(args).put(saved, args.loader)


class _Edited:
    """A file that is edited: its content is changed in memory, and then written.

    Args:
        args: ``checkpoint``, ``out``, ``allow_unsafe_types`` and ``json``.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        if args.out is not None and Path(args.checkpoint).is_dir():
            raise ConfigError(
                "--out creates one file, and this checkpoint is a directory",
                hint="copy it, and edit the copy",
                option="--out",
            )
        self._file = checkpoints.find_state_file(Path(args.checkpoint))
        self._content = self._file.load(allow_unsafe_types=args.allow_unsafe_types)

    @cached_property
    def before(self) -> Places:
        """The positions that the file contains."""
        return find_places(self._content, self._args.checkpoint)

    def move(self, moved: Mapping[str, Cursor]) -> int:
        """Move these loaders, and the trainer with them; then write."""
        trainer = checkpoints.trainer_at(self.before, moved)
        for name, cursor in moved.items():
            checkpoints.move(self._content, self.before.loaders[name].keys, cursor)
        if trainer is not None:
            checkpoints.move_trainer(self._content, trainer.epoch, trainer.batches)
        return self._write(self.before)

    def put(self, saved: SavedPosition, name: str | None) -> int:
        """Put a position into a checkpoint, replacing the one it has, if any; then write."""
        before = self.before if checkpoints.has_positions(self._content) else None
        if name is None:
            name = "train" if before is None else before.choose(None)
        saved = checkpoints.imported(saved, before, name)
        trained = lightning_checkpoint.batches_of_epoch_trained(self._content)
        checkpoints.add_position(self._content, name, saved)
        after = find_places(self._content, self._args.checkpoint)
        assert after.trainer is not None, "just put there"
        trainer = checkpoints.settled(after.trainer)
        epoch, batches = trainer.epoch, trainer.batches
        if len(after.loaders) == 1:
            loader, epoch = after.loaders[name], saved.cursor.epoch
            size = loader.global_batch
            batches = trained if size is None else loader.samples_read(saved.cursor) // size
            fits = after.trainer.batches_in_epoch == 0 or batches < after.trainer.batches_in_epoch
            batches = batches if saved.cursor.sample_in_epoch and fits else 0
        checkpoints.move_trainer(self._content, epoch, batches)
        return self._write(before)

    def _write(self, before: Places | None) -> int:
        after = find_places(self._content, self._args.checkpoint)  # what could not be read is not written
        out: Path | None = self._args.out
        backup = self._file.replace(self._content) if out is None else None
        if out is not None:
            checkpoints.write_new(out, self._content, is_json=self._file.is_json)
        _print_moves(out or self._file.path, backup, before, after, as_json=self._args.json)
        return FINE


def _print_moves(written: Path, backup: Path | None, before: Places | None, after: Places, *, as_json: bool) -> None:
    """Print what was written, from where each loader was moved to where, and the position of the trainer.

    Args:
        written: The file.
        backup: The file with the earlier content, if there was any.
        before: The positions in the earlier content.
        after: The positions that it contains now.
        as_json: Whether to print JSON.
    """
    cursors = {} if before is None else {name: loader.position.cursor for name, loader in before.loaders.items()}
    if as_json:
        loaders = {
            name: {"from": cursors[name]._asdict() if name in cursors else None, "to": loader.position.cursor._asdict()}
            for name, loader in after.loaders.items()
        }
        trainer = _trainer_as_json(after)
        print_json({"file": str(written), "backup": backup and str(backup), "loaders": loaders, "trainer": trainer})
        return
    for name, loader in after.loaders.items():
        came = f"from {cursors[name]} " if name in cursors else ""
        print_line(f"{written}: {name} {came}to {loader.position.cursor}")
    if after.trainer is not None:
        print_line(f"the trainer continues in epoch {after.trainer.epoch}, after batch {after.trainer.batches}")
    if backup is not None:
        print_line(f"earlier contents: {backup}")
