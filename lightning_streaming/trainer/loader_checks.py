"""Refuses arrangements of loaders in which a place could not be kept."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import IterableDataset

from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.dataloader import StreamingDataLoader, why_empty
from lightning_streaming.loading.dataset import StreamingDataset
from lightning_streaming.loading.within import datasets_within
from lightning_streaming.trainer import fit_loop


def check_loaders(trainer: Trainer, loaders: Mapping[str, StreamingDataLoader]) -> None:
    """Refuse train loaders whose place nobody could tell, or that others would move.

    Raises:
        ConfigError: A loader of torch's own reads a StreamingDataset; a CombinedLoader within other train loaders holds
            streaming ones; or two train loaders, or one and a validation loader, read the same dataset.
    """
    for name, loader in fit_loop.named_loaders(trainer.train_dataloader):
        within = loader.flattened if isinstance(loader, CombinedLoader) else [loader]
        if any(_reads_past_us(one) for one in within):
            raise ConfigError(
                f"the train loader {name or 'train'!r} is a torch DataLoader that reads a StreamingDataset: no "
                "checkpoint would hold its place in the data, and a resumed run would read samples again. Use "
                "StreamingDataLoader; what a dataset around it does, a transform or the loader's collate_fn can do"
            )
        if isinstance(loader, CombinedLoader) and any(isinstance(one, StreamingDataLoader) for one in within):
            raise ConfigError(
                f"the train loader {name!r} is a CombinedLoader within other train loaders, and the place of the "
                "streaming loaders in it cannot be told; give Lightning one CombinedLoader of them all"
            )
    found = [(f"train loader {name!r}", loader) for name, loader in loaders.items()]
    for name, loader in fit_loop.named_loaders(trainer.val_dataloaders):
        if isinstance(loader, StreamingDataLoader):
            found.append((f"validation loader {name or 'val'!r}", loader))
    first_readers: dict[int, str] = {}
    for reader, loader in found:
        first = first_readers.setdefault(id(loader.dataset), reader)
        if first != reader and first.startswith("train"):
            raise ConfigError(
                f"the {first} and the {reader} read one dataset, so each would move the other's place in it; give each "
                "a StreamingDataset of its own"
            )


def _reads_past_us(loader: object) -> bool:
    """Whether a loader that is none of ours iterates over a dataset of ours; what picks single samples may."""
    dataset = getattr(loader, "dataset", None)
    if isinstance(loader, StreamingDataLoader) or not isinstance(dataset, IterableDataset):
        return False
    return any(isinstance(one, StreamingDataset) for one in datasets_within(dataset))


def check_for_batches(trainer: Trainer, loaders: Mapping[str, StreamingDataLoader]) -> None:
    """In ``on_fit_end``: tell why there was nothing to train on, which Lightning takes for a run that has ended.

    Raises:
        ConfigError: An epoch of a train loader has fewer samples than a batch, and those are to be left out.
    """
    if fit_loop.batches_in_epoch(trainer) or not trainer.limit_train_batches:
        return
    for name, loader in loaders.items():
        why = why_empty(loader)
        if why is not None:
            raise ConfigError(f"train loader {name!r}: {why}")
