"""Show and move the position in the data that a checkpoint contains.

CKPT is a Lightning checkpoint, the directory of a sharded one (FSDP, ModelParallel), or a file with only the state of a
loader or dataset, saved by torch.save or as JSON. Checkpoints of Fabric and Composer can be shown, too. A change
replaces the file atomically, and the earlier file stays as CKPT.bak, CKPT.bak2, and so on.

    lightning-streaming state show run/last.ckpt
    lightning-streaming state set run/last.ckpt --epoch 1 --sample 51200
    lightning-streaming state skip run/last.ckpt --batches 100
    lightning-streaming state import composer.pt run/last.ckpt
    lightning-streaming state branch run/last.ckpt
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_streaming import lightning_checkpoint
from lightning_streaming.errors import ConfigError, UnsupportedError
from lightning_streaming.escaping import shell_word
from lightning_streaming.resume.saved_fingerprint import SavedFingerprint, SavedPhase
from lightning_streaming.resume.state import Cursor, SavedPosition
from lightning_streaming.sequence.skips import EpochPosition
from lightning_streaming.tools.commands import (
    add_action,
    add_json,
    add_loader,
    add_storage_options,
    amount,
    position,
)
from lightning_streaming.tools.console import (
    FINE,
    PROGRAM,
    counted,
    print_json,
    print_line,
    print_table,
    printable_name,
)
from lightning_streaming.tools.runs import checkpoints, positions
from lightning_streaming.tools.runs.checkpoints import Places, SavedLoader, find_places, find_state_file, settled
from lightning_streaming.tools.runs.positions import StreamSeen, phase_line
from lightning_streaming.tools.stored.stored_dataset import find_dataset


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    actions = parser.add_subparsers(metavar="ACTION", required=True, help="the action; ACTION --help explains each")
    _add_show(add_action(actions, "show", "show the position", show))
    _add_set(add_action(actions, "set", "move it to a sample of an epoch", _set_place))
    _add_skip(add_action(actions, "skip", "move it forward", skip))
    _add_import(add_action(actions, "import", "take it from MosaicML Streaming", _import_state))
    _add_branch(
        add_action(
            actions, "branch", "show how to end the current phase at the checkpoint and continue with others", branch
        )
    )


def run(args: Namespace) -> int:
    """Run the requested action."""
    code: int = args.action(args)
    return code


def _add_show(parser: ArgumentParser) -> None:
    _add_checkpoint(parser)
    parser.add_argument("--loader", metavar="NAME", help="show only this train loader")
    parser.add_argument(
        "--data",
        metavar="NAME=PLACE",
        action="append",
        default=[],
        help="directory or URL of a stream; given for all of them, the samples of each in this epoch are counted, too. "
        "NAME= may be omitted for a single stream",
    )
    words = "configuration of the run, instead of --data; may be repeated. Required with a selection or phases"
    parser.add_argument("--config", metavar="C", action="append", default=[], help=words)
    add_json(parser)
    add_storage_options(parser, of="the store of --data")


def _add_set(parser: ArgumentParser) -> None:
    _add_checkpoint(parser)
    parser.add_argument("--epoch", metavar="E", type=position, required=True, help="epoch of the data, from 0")
    parser.add_argument(
        "--sample",
        metavar="S",
        type=position,
        required=True,
        help="number of its samples, over all ranks, that count as read; of packed documents, packs",
    )
    add_loader(parser)
    _add_output(parser)


def _add_skip(parser: ArgumentParser) -> None:
    _add_checkpoint(parser)
    moved = parser.add_mutually_exclusive_group(required=True)
    moved.add_argument("--samples", metavar="N", type=amount, help="number of samples, or packs, over all ranks")
    moved.add_argument("--batches", metavar="N", type=amount, help="number of batches of all ranks, or steps")
    add_loader(parser, ", except with --batches, which moves all")
    _add_output(parser)


def _add_import(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="file with the state: of Composer, or of torch.save or JSON")
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="Lightning checkpoint to add it to; or a new file, .pt or .json, for the state alone",
    )
    parser.add_argument("--source", dest="name", metavar="NAME", help="which state of SRC, as show SRC names them")
    parser.add_argument("--loader", metavar="NAME", help='the train loader; by default the only one, or "train"')
    _add_output(parser)


def _add_branch(parser: ArgumentParser) -> None:
    _add_checkpoint(parser)
    add_loader(parser)
    add_json(parser)


def _add_checkpoint(parser: ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint or file with a state")


def _add_output(parser: ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", type=Path, help="write to this new file and leave CKPT unchanged")
    parser.add_argument(
        "--allow-unsafe-types",
        action="store_true",
        help="also take a checkpoint with objects of any class, which can run any code of its author",
    )
    add_json(parser)


def show(args: Namespace) -> int:
    """Show the place of each train loader: epoch, sample, what it belongs to, and what was read of each stream.

    Nothing that the file names is run, and no tensor of it is read.
    """
    places = find_places(find_state_file(Path(args.checkpoint)).peek(), args.checkpoint)
    chosen = places.loaders
    if args.loader is not None or args.data or args.config:
        name = places.choose(args.loader)
        chosen = {name: places.loaders[name]}
    if args.data and args.config:
        raise ConfigError("--config says where the data is", hint="give it, or --data for each stream", option="--data")
    counted = {name: _count(loader, args) for name, loader in chosen.items()}
    if args.json:
        loaders = {name: _loader_as_json(loader, *counted[name]) for name, loader in chosen.items()}
        print_json({"file": args.checkpoint, "trainer": _trainer_as_json(places), "loaders": loaders})
    else:
        _print_head(args.checkpoint, places)
        for name, loader in chosen.items():
            by_config = _show_by_config(args.checkpoint, name if len(places.loaders) > 1 else None)
            _print_loader(name, loader, *counted[name], by_config)
    return FINE


def _count(loader: SavedLoader, args: Namespace) -> tuple[int | None, list[StreamSeen]]:
    """The size of an epoch and what was read of each stream, as far as the state, data or configuration tell."""
    seen, data, options = positions.seen_by_fingerprint(loader.position), args.data, args.storage_options
    if not data and not args.config:
        return loader.epoch_size, seen
    if loader.position.fingerprint is None and data:  # then it was not weighted, as far as anybody can know
        sizes = [find_dataset(place.partition("=")[2] or place, options).read_index().num_samples for place in data]
        return sum(sizes), []
    if not seen:
        raise ConfigError(
            "the state does not list its streams, so there is nothing to count by --data or --config", option="--data"
        )
    names = [one.name for one in seen]
    # It imports torch, which takes seconds.
    describe = import_module("lightning_streaming.tools.runs.describe")
    if args.config:
        counts = describe.read_by_config(loader.position, args.config)
    else:
        _check_data_is_enough(loader.position, args)
        counts = describe.read_by_data(loader.position, _places(data, names), options)
    return loader.epoch_size, [replace(one, this_epoch=counts.get(one.name, 0)) for one in seen]


def _check_data_is_enough(position: SavedPosition, args: Namespace) -> None:
    """Refuse ``--data`` where a state does not hold what else decides on its order.

    Raises:
        UnsupportedError: It is of a run with phases, or with selections.
    """
    fingerprint = position.fingerprint
    assert fingerprint is not None, "it lists its streams"
    selected = [name for name, stream in fingerprint.streams.items() if stream.selection is not None]
    if fingerprint.packing is not None:
        raise UnsupportedError(
            "the state is of packed documents, of which it does not hold how long they are, so --data is not enough",
            hint=f"give the configuration of the run: `{_show_by_config(args.checkpoint, args.loader)}`",
            option="--data",
        )
    way_out = f"give the configuration of the run: `{_show_by_config(args.checkpoint, args.loader)}`"
    if fingerprint.schedule is not None:
        raise UnsupportedError(
            "the state is of a run with phases, of which it tells too little to count by --data",
            hint=way_out,
            option="--data",
        )
    if selected:
        raise UnsupportedError(
            f"the state was saved with a selection of {', '.join(selected)}, which it does not hold, so "
            "--data is not enough",
            hint=way_out,
            option="--data",
        )


def _show_by_config(checkpoint: str, loader: str | None) -> str:
    """The command that counts by the configuration of a run."""
    of = "" if loader is None else f" --loader {shell_word(loader)}"
    return f"{PROGRAM} state show {shell_word(checkpoint)}{of} --config run.yaml"


def _places(data: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """``NAME=PLACE`` by name; a place may hold an equals sign, and a lone one need not be named."""
    pairs = [text.partition("=") for text in data]
    if len(data) == len(names) == 1 and pairs[0][0] != names[0]:
        return {names[0]: data[0]}
    return {name: place for name, _, place in pairs}


def branch(args: Namespace) -> int:
    """Say what to write into the configuration so that the phase that CKPT stands in ends there.

    The run then goes on from CKPT with whatever phases follow: nothing of CKPT changes. What the phase had drawn and
    not read comes first in them, so that no sample is lost or read early.
    """
    places = find_places(find_state_file(Path(args.checkpoint)).peek(), args.checkpoint)
    loader = places.choose(args.loader)
    position, sample = places.loaders[loader].position, places.loaders[loader].position.cursor.sample_in_epoch
    phases = _phases_begun(position, args.checkpoint)
    running = list(phases)[-1] if phases else ""
    is_at_end = not phases or sample == phases[running].end
    if args.json:
        ended_at = None if is_at_end else sample
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
    assert position.fingerprint is not None, "it has phases"
    _print_begun(phases, position.fingerprint.streams, None if is_at_end else sample)
    return FINE


def _phases_begun(position: SavedPosition, checkpoint: str) -> Mapping[str, SavedPhase]:
    """Return the phases of a state that have begun, if others can follow.

    Raises:
        ConfigError: None can: the run has no phases, or does not stand in the last of them that it has begun.
    """
    fingerprint, (epoch, sample) = position.fingerprint, position.cursor
    if fingerprint is None or fingerprint.schedule is None:
        raise ConfigError(
            f"the run of {checkpoint} has no phases, and nothing else can change within an epoch",
            hint="set a schedule from the start, or start a new run from its weights",
            path=checkpoint,
        )
    phases = fingerprint.schedule
    if fingerprint.packing is not None:
        raise ConfigError(
            f"{checkpoint} is of packed documents: it counts packs, and a phase ends after so many documents, so it "
            "cannot be cut there",
            hint="keep the phase to its end, and change only later ones",
            path=checkpoint,
        )
    if epoch:
        raise ConfigError(
            f"{checkpoint} stands in epoch {epoch}, and all phases were read in the one before",
            hint="to let more phases follow the last one, put it back to the end of epoch 0: `lightning-streaming "
            f"state set CHECKPOINT --epoch 0 --sample {fingerprint.order.epoch_size}`",
            path=checkpoint,
        )
    method = fingerprint.order.batching_method
    if method != "random":
        raise ConfigError(
            f"batching_method={method!r} composes the batches of a phase as a whole, so none can be cut: the phase "
            "that is being read goes on to its end, and only what follows it may change",
            path=checkpoint,
        )
    running = list(phases)[-1] if phases else ""
    start = max((one.stop for name, one in phases.items() if name != running), default=0)
    if phases and not start < sample <= phases[running].end:
        raise ConfigError(
            f"{checkpoint} was moved to sample {sample}, which is not in phase {running!r}, the last that the run had "
            "begun",
            hint="go on from a checkpoint as the run saved it",
            path=checkpoint,
        )
    return phases


def _print_begun(phases: Mapping[str, SavedPhase], streams: Collection[str], ended_at: int | None) -> None:
    """Print the phases that have begun, each as a line to paste; the last with ``ended_at``, if it is to end."""
    if phases:
        print_line(
            "Borders in % become numbers, as below. Keep `max_repeats` if it was set: a state does not contain it."
        )
    print_line("\n    schedule:")
    for number, (name, one) in enumerate(phases.items(), 1):
        print_line(f"      {phase_line(name, one, streams, ended_at if number == len(phases) else None)}")
    print_line("      NAME: {end: ..., mix: ...}  # the next phase")


_BARE = (".pt", ".json")
"""What the name of a file with a state alone ends with."""


def _set_place(args: Namespace) -> int:
    """Move the place to a sample of an epoch.

    ``Trainer.fit(ckpt_path=CKPT)`` then goes on with this sample. The trainer's epoch and batches are moved with it;
    weights, optimizer and the global step stay. Of several loaders only the named one is moved, and the trainer stays.
    """
    edited = _Edited(args)
    name = edited.before.choose(args.loader)
    return edited.move({name: positions.placed(edited.before.loaders[name], Cursor(args.epoch, args.sample))})


def skip(args: Namespace) -> int:
    """Move the place forward, for example over samples that make the loss diverge.

    An epoch's end leads into the next epoch. How many samples a batch of all ranks has is saved by the run; with
    --batches all loaders are moved, and the trainer's count of batches with them.
    """
    edited = _Edited(args)
    before = edited.before
    if args.samples is not None:
        name = before.choose(args.loader)
        return edited.move({name: positions.samples_later(before.loaders[name], args.samples)})
    names = tuple(before.loaders) if args.loader is None else (before.choose(args.loader),)
    return edited.move(positions.batches_later(before, names, args.batches))


def _import_state(args: Namespace) -> int:
    """Take the place of a run with MosaicML Streaming, release 0.2 or later, or of any file with a state.

    Put it into a checkpoint of Lightning, which then resumes there; or make a file with the state alone, for
    ``load_state_dict``. Such a state tells nothing of its data, so nothing is checked on resume: give the dataset the
    settings it had there.
    """
    found = find_places(find_state_file(Path(args.source)).peek(), args.source)
    position = found.loaders[_chosen_source(found, args.name)].position
    target = Path(args.checkpoint)
    if target.suffix in _BARE and not target.exists():
        checkpoints.write_new(target, position.as_state(), is_json=target.suffix == ".json")
        _print_moves(target, None, None, find_places(position.as_state(), args.checkpoint), as_json=args.json)
        return FINE
    return _Edited(args).put(position, args.loader)


class _Edited:
    """A file that is being edited: its content is changed here, and then written.

    Args:
        args: ``checkpoint``, ``out``, ``allow_unsafe_types`` and ``json``.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        if args.out is not None and Path(args.checkpoint).is_dir():
            raise ConfigError(
                "--out makes one file, and this checkpoint is a directory",
                hint="copy it, and edit the copy",
                option="--out",
            )
        self._file = find_state_file(Path(args.checkpoint))
        self._content = self._file.load(allow_unsafe_types=args.allow_unsafe_types)

    @cached_property
    def before(self) -> Places:
        """The places that the file holds."""
        return find_places(self._content, self._args.checkpoint)

    def move(self, moved: Mapping[str, Cursor]) -> int:
        """Move these loaders, and the trainer with them; then write."""
        trainer = positions.trainer_at(self.before, moved)
        for name, cursor in moved.items():
            checkpoints.move(checkpoints.at(self._content, self.before.loaders[name].keys), cursor)
        if trainer is not None:
            checkpoints.move_trainer(self._content, trainer.epoch, trainer.batches)
        return self._write(self.before)

    def put(self, position: SavedPosition, name: str | None) -> int:
        """Put a place into a checkpoint, in place of the one it has, if any; then write."""
        before = self.before if checkpoints.holds_places(self._content) else None
        if name is None:
            name = "train" if before is None else before.choose(None)
        position = positions.imported(position, before, name)
        trained = lightning_checkpoint.batches_of_epoch_trained(self._content)
        checkpoints.add_place(self._content, name, position)
        after = find_places(self._content, self._args.checkpoint)
        assert after.trainer is not None, "just put there"
        if len(after.loaders) == 1:
            epoch, sample = position.cursor
            size = after.loaders[name].global_batch
            read = trained if size is None else after.loaders[name].samples_read(position.cursor) // size
            batches = read if sample else 0
            fits = after.trainer.batches_in_epoch == 0 or batches < after.trainer.batches_in_epoch
            checkpoints.move_trainer(self._content, epoch, batches if fits else 0)
        else:
            checkpoints.move_trainer(self._content, settled(after.trainer).epoch, settled(after.trainer).batches)
        return self._write(before)

    def _write(self, before: Places | None) -> int:
        after = find_places(self._content, self._args.checkpoint)  # nothing is written that could not be read
        out: Path | None = self._args.out
        backup = self._file.replace(self._content) if out is None else None
        if out is not None:
            checkpoints.write_new(out, self._content, is_json=self._file.is_json)
        _print_moves(out or self._file.path, backup, before, after, as_json=self._args.json)
        return FINE


def _chosen_source(found: Places, name: str | None) -> str:
    """The state that was named; else the only one, or the only one for training."""
    if name is None and len(found.loaders) > 1:
        of_training = [one for one in found.loaders if one.split(".")[-1] == "train"]
        if len(of_training) != 1:
            raise ConfigError(
                f"there are {len(found.loaders)} states",
                hint=f"say --source, one of {', '.join(found.loaders)}",
                option="--source",
            )
        return of_training[0]
    return found.choose(name)


def _loader_as_json(loader: SavedLoader, epoch_size: int | None, streams: Sequence[StreamSeen]) -> dict[str, Any]:
    """One loader's place and what it belongs to, with the streams that were counted."""
    position = loader.position
    return {
        "epoch": position.cursor.epoch,
        "sample_in_epoch": position.cursor.sample_in_epoch,
        "epoch_size": epoch_size,
        "epoch_done": _share(position.cursor, epoch_size),
        "shuffle_seed": position.shuffle_seed,
        "num_canonical_nodes": position.num_canonical_nodes,
        "initial_physical_nodes": position.initial_physical_nodes,
        "counts": f"{loader.unit}s",
        "samples_per_global_batch": loader.global_batch,
        "batch_geometry": None if position.geometry is None else position.geometry.facts,
        "skipped": {name: [Cursor(*place)._asdict() for place in ends] for name, ends in position.skipped.items()},
        "fingerprint": None if position.fingerprint is None else position.fingerprint.as_state(),
        "streams": [asdict(stream) for stream in streams],
    }


def _trainer_as_json(places: Places) -> dict[str, Any] | None:
    """How far the trainer has come."""
    return None if places.trainer is None else {**places.trainer.as_state(), "global_step": places.global_step}


def _print_head(shown: str, places: Places) -> None:
    """Print what the file is of."""
    trainer = places.trainer
    if trainer is None:
        print_line(f"{shown}: no checkpoint of StreamingStateCallback, but it holds the place of a dataset\n")
        return
    of = f" of {trainer.batches_in_epoch}" if trainer.batches_in_epoch else ""
    step = "" if places.global_step is None else f", global step {places.global_step}"
    print_line(f"{shown}: trainer at epoch {trainer.epoch}, {trainer.batches}{of} batches done{step}\n")


def _print_loader(
    name: str, loader: SavedLoader, epoch_size: int | None, streams: Sequence[StreamSeen], by_config: str
) -> None:
    """Print one loader's place, its fingerprint, and what was read of each stream, or which command tells that."""
    position = loader.position
    fingerprint = position.fingerprint
    rows = [
        ("epoch", str(position.cursor.epoch)),
        (f"{loader.unit} in epoch", _sample(position.cursor, epoch_size)),
        ("global batch", "-" if loader.global_batch is None else counted(loader.global_batch, loader.unit)),
        ("shuffle seed", str(position.shuffle_seed)),
        ("canonical nodes", str(position.num_canonical_nodes)),
        ("nodes at first", str(position.initial_physical_nodes or "-")),
        *((f"skips {batches}", _ends(*ends, f"{loader.unit}s")) for batches, ends in position.skipped.items()),
        *(() if fingerprint is None else _settings(fingerprint)),
    ]
    print_table(name, (), rows)
    if fingerprint is None:
        print_line("no fingerprint: it is not known to which data and order this place belongs\n")
        return
    listed, phases = fingerprint.streams, fingerprint.schedule
    if phases:
        _print_phases(name, position, fingerprint, phases)
    if fingerprint.all_streams is not None:
        print_line(f"all {fingerprint.all_streams.count} streams: too many for the state to tell each\n")
    elif not listed:
        print_line("no phase had begun, so nothing was read of any stream\n")
    else:
        heads = ("stream", "samples", "drawn" if phases else "per epoch", "before", "this epoch", "in all", "digest")
        cells = [
            (one.name, *map(_value, (one.samples, one.drawn, one.before, one.this_epoch, one.total)), stream.digest)
            for one, stream in zip(streams, listed.values(), strict=True)
        ]
        title = f"{'documents' if loader.is_packed else 'samples'} read, {name}"
        if phases:
            title += f"; drawn: from an epoch's beginning to the end of {printable_name(list(phases)[-1])}"
        print_table(title, heads, cells, right=heads[1:-1], whole=heads[1:])
        if any(one.this_epoch is None for one in streams):
            needs_config = phases or loader.is_packed or any(stream.selection is not None for stream in listed.values())
            how = f"by `{by_config}`" if needs_config else "with --data NAME=PLACE for each of them"
            print_line(f"what this epoch has read of each stream is told {how}\n")


def _print_phases(
    name: str, position: SavedPosition, fingerprint: SavedFingerprint, phases: Mapping[str, SavedPhase]
) -> None:
    """Print the phases that had begun, and how far this epoch has come with each, unless it counts packs."""
    begins, sample = 0, position.cursor.sample_in_epoch
    # Of composed batches, places are not those of what is drawn.
    tells_now = fingerprint.order.batching_method == "random" and fingerprint.packing is None
    rows = []
    for phase, one in phases.items():
        ends = one.stop
        now = "read" if ends <= sample else "under way" if begins < sample else "to be read"
        rows.append((printable_name(phase), f"{begins:,}", f"{ends:,}", *([now] if tells_now else []), one.mix))
        begins = ends
    heads = ("phase", "begins", "ends", *(["this epoch"] if tells_now else []), "weights")
    print_table(f"phases begun, {name}", heads, rows, right=heads[1:3])


def _print_moves(written: Path, backup: Path | None, before: Places | None, after: Places, *, as_json: bool) -> None:
    """Print what was written, from where each loader was moved to where, and where the trainer stands.

    Args:
        written: The file.
        backup: The file that holds what was there before, if there was one.
        before: The places it held.
        after: The places it holds.
        as_json: Whether to print it for programs.
    """
    cursors = {} if before is None else {name: loader.position.cursor for name, loader in before.loaders.items()}
    if as_json:
        loaders = {
            name: {
                "from": cursors[name]._asdict() if name in cursors else None,
                "to": loader.position.cursor._asdict(),
            }
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


def _ends(start: EpochPosition, stop: EpochPosition, unit: str) -> str:
    if start == stop:
        return "nothing: it was asked for too late"
    last = f"{stop[1]:,}" if start[0] == stop[0] else str(Cursor(*stop))
    return f"epoch {start[0]}, {unit} {start[1]:,} to {last}"


def _share(cursor: Cursor, epoch_size: int | None) -> float | None:
    return round(min(1.0, cursor.sample_in_epoch / epoch_size), 6) if epoch_size else None


def _sample(cursor: Cursor, epoch_size: int | None) -> str:
    of = f" of {epoch_size:,}, {_share(cursor, epoch_size):.1%}" if epoch_size else ""
    return f"{cursor.sample_in_epoch:,}{of}"


def _settings(fingerprint: SavedFingerprint) -> list[tuple[str, str]]:
    """Return the settings of the order, as rows to print."""
    packing = fingerprint.packing
    told = {name: _value(value) for name, value in fingerprint.order.as_state().items()}
    if packing is not None:
        told["epoch_size"] = counted(fingerprint.order.epoch_size, "document")
        settings = (f"{name} {_value(value)}" for name, value in packing.settings.items())
        told[packing.option] = ", ".join([*settings, packing.lengths])
    return [(name.replace("_", " "), value) for name, value in told.items()]


def _value(value: object) -> str:
    return "-" if value is None else f"{value:,}" if type(value) is int else str(value)
