"""``state set``, ``state skip`` and ``state import``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.cursor import Cursor
from lightning_streaming.loading.state import SavedPosition
from lightning_streaming.tools.console import FINE
from lightning_streaming.tools.states.counters import add_place, move_trainer, trained_batches
from lightning_streaming.tools.states.files import find_state_file, write_new
from lightning_streaming.tools.states.moves import batches_later, imported, placed, samples_later, trainer_at
from lightning_streaming.tools.states.places import Places, at, find_places, holds_places
from lightning_streaming.tools.states.report import print_moves

_BARE = (".pt", ".json")
"""What the name of a file with a state alone ends with."""


def set_place(args: Namespace) -> int:
    """Move the place to a sample of an epoch.

    ``Trainer.fit(ckpt_path=CKPT)`` then goes on with this sample. The trainer's epoch and batches are moved with it;
    weights, optimizer and the global step stay. Of several loaders only the named one is moved, and the trainer stays.
    """
    edited = _Edited(args)
    name = edited.before.choose(args.loader)
    return edited.move({name: placed(edited.before.loaders[name], Cursor(args.epoch, args.sample))})


def skip(args: Namespace) -> int:
    """Move the place forward, for example over samples that make the loss diverge.

    An epoch's end leads into the next epoch. How many samples a batch of all ranks has is saved by the run; with
    --batches all loaders are moved, and the trainer's count of batches with them.
    """
    edited = _Edited(args)
    before = edited.before
    if args.samples is not None:
        name = before.choose(args.loader)
        return edited.move({name: samples_later(before.loaders[name], args.samples)})
    names = tuple(before.loaders) if args.loader is None else (before.choose(args.loader),)
    return edited.move(batches_later(before, names, args.batches))


def import_state(args: Namespace) -> int:
    """Take the place of a run with MosaicML Streaming, release 0.2 or later, or of any file with a state.

    Put it into a checkpoint of Lightning, which then resumes there; or make a file with the state alone, for
    ``load_state_dict``. Such a state tells nothing of its data, so nothing is checked on resume: give the dataset the
    settings it had there.
    """
    found = find_places(find_state_file(Path(args.source)).peek(), args.source)
    position = found.loaders[_chosen_source(found, args.name)].position
    target = Path(args.checkpoint)
    if target.suffix in _BARE and not target.exists():
        write_new(target, position.as_state(), is_json=target.suffix == ".json")
        print_moves(target, None, None, find_places(position.as_state(), args.checkpoint), as_json=args.json)
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
            raise ConfigError("--out makes one file, and this checkpoint is a directory; copy it, and edit the copy")
        self._file = find_state_file(Path(args.checkpoint))
        self._content = self._file.load(allow_unsafe_types=args.allow_unsafe_types)

    @cached_property
    def before(self) -> Places:
        """The places that the file holds."""
        return find_places(self._content, self._args.checkpoint)

    def move(self, moved: Mapping[str, Cursor]) -> int:
        """Move these loaders, and the trainer with them; then write."""
        trainer = trainer_at(self.before, moved)
        for name, cursor in moved.items():
            state = at(self._content, self.before.loaders[name].keys)
            state.update(cursor._asdict())
            if cursor.sample_in_epoch == 0:  # an epoch that begins is batched by whoever reads it
                state.pop("batch_geometry", None)
        if trainer is not None:
            move_trainer(self._content, trainer.epoch, trainer.batches)
        return self._write(self.before)

    def put(self, position: SavedPosition, name: str | None) -> int:
        """Put a place into a checkpoint, in place of the one it has, if any; then write."""
        before = self.before if holds_places(self._content) else None
        if name is None:
            name = "train" if before is None else before.choose(None)
        position = imported(position, before, name)
        trained = trained_batches(self._content)
        add_place(self._content, name, position.as_state())
        after = find_places(self._content, self._args.checkpoint)
        assert after.trainer is not None, "just put there"
        if len(after.loaders) == 1:
            epoch, sample = position.cursor
            size = after.loaders[name].global_batch
            batches = (
                0
                if sample == 0
                else trained
                if size is None
                else after.loaders[name].samples_read(position.cursor) // size
            )
            fits = after.trainer.batches_in_epoch == 0 or batches < after.trainer.batches_in_epoch
            move_trainer(self._content, epoch, batches if fits else 0)
        else:
            move_trainer(self._content, after.trainer.settled.epoch, after.trainer.settled.batches)
        return self._write(before)

    def _write(self, before: Places | None) -> int:
        after = find_places(self._content, self._args.checkpoint)  # nothing is written that could not be read
        out: Path | None = self._args.out
        backup = None
        if out is None:
            backup = self._file.replace(self._content)
        else:
            write_new(out, self._content, is_json=self._file.is_json)
        written = out or self._file.path
        print_moves(written, backup, before, after, as_json=self._args.json)
        return FINE


def _chosen_source(found: Places, name: str | None) -> str:
    """The state that was named; else the only one, or the only one for training."""
    if name is None and len(found.loaders) > 1:
        of_training = [one for one in found.loaders if one.split(".")[-1] == "train"]
        if len(of_training) == 1:
            return of_training[0]
    if name is None and len(found.loaders) > 1:
        raise ConfigError(f"there are {len(found.loaders)} states; say --source, one of {', '.join(found.loaders)}")
    return found.choose(name)
