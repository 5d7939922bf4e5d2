"""The data of :mod:`benchmarks.training_wait`, and the process of one rank: its loader and its trainer."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

STUBS = Path(__file__).parent / "reading" / "stubs"
"""Packages that peers import and do not need here."""
BUCKET, BATCH_SIZE, MAX_TOKENS, VOCABULARY, CHECKPOINT_STEPS = "bucket", 8, 512, 4000, 25
SYSTEMS = {
    "cached batch": ("ours", "", ("torch",)),
    "ours, Parquet": ("ours", "parquet", ("lightning_streaming.reading.loader", "s3fs", "pyarrow")),
    "ours, MDS": ("ours", "mds", ("lightning_streaming.reading.loader", "s3fs")),
    "Hugging Face": ("hugging_face", "parquet", ("datasets", "s3fs", "torchdata.stateful_dataloader")),
    "litData": ("peers", "litdata", ("litdata", "boto3")),
    "MosaicML": ("peers", "mds", ("streaming", "boto3")),
}
"""Environment, stored format, and what is imported before the clock runs."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the trainer; a process per rank."""

    system: str
    root: str
    cache: str
    endpoint: str
    log: str
    ranks: int
    workers: int
    shuffle_buffer: int
    sleep: float = 0.0
    steps: int = -1
    """-1 for a whole epoch."""
    kill_at: int = -1
    checkpoints: bool = False
    resume: bool = False


# --- data ---


def write_data(root: Path, samples: int, files: int, shard_bytes: int) -> None:
    """Write a tokenizer and the same texts as Parquet and MDS."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from lightning_streaming import MDSWriter

    rng = np.random.default_rng(0)
    letters = rng.choice(list("aaabcdeeeefghiiklmnooprstuvw"), (VOCABULARY, 12))
    words = np.array(["".join(row[: 2 + number % 10]) for number, row in enumerate(letters)])
    texts = [" ".join(words[rng.zipf(1.2, rng.integers(200, 600)) % VOCABULARY]) for _ in range(samples)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["[PAD]"], show_progress=False)
    tokenizer.train_from_iterator(texts[:500], trainer)
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding(length=MAX_TOKENS)
    tokenizer.save(str(root / "tokenizer.json"))
    (root / BUCKET / "parquet").mkdir(parents=True)
    for number, ids in enumerate(np.array_split(np.arange(samples), files)):
        table = pa.table({"id": ids, "text": texts[ids[0] : ids[-1] + 1]})
        pq.write_table(table, root / BUCKET / "parquet" / f"{number:05}.parquet", row_group_size=1000)
    columns = {"id": "int", "text": "str"}
    with MDSWriter(out=str(root / BUCKET / "mds"), columns=columns, size_limit=shard_bytes) as writer:
        for number, text in enumerate(texts):
            writer.write({"id": number, "text": text})


def write_litdata(root: Path, shard_bytes: int) -> None:
    """Write the texts of the Parquet files as litData's chunks."""
    import pyarrow.parquet as pq

    sys.path.append(str(STUBS))
    from litdata.streaming.writer import BinaryWriter

    (root / BUCKET / "litdata").mkdir()
    writer = BinaryWriter(str(root / BUCKET / "litdata"), chunk_bytes=shard_bytes)
    for sample in pq.read_table(root / BUCKET / "parquet").to_pylist():
        writer[sample["id"]] = sample
    writer.done()
    writer.merge()


# --- the process of a rank ---


class Collate:
    """Tokenizes the texts of a batch."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tokenizer: Any = None

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        import torch
        from tokenizers import Tokenizer

        self.tokenizer = self.tokenizer or Tokenizer.from_file(self.path)
        encodings = self.tokenizer.encode_batch([sample["text"] for sample in samples])
        tokens = torch.tensor([encoding.ids for encoding in encodings])
        return {"id": torch.tensor([int(sample["id"]) for sample in samples]), "tokens": tokens}


def make_loader(job: Job) -> Any:
    """Return the loader of a system."""
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": job.workers}
    options["collate_fn"] = Collate(f"{job.root}/tokenizer.json")
    url = f"s3://{BUCKET}/{SYSTEMS[job.system][1]}"
    fsspec_options = {"key": "key", "secret": "secret", "endpoint_url": job.endpoint}
    if job.system == "cached batch":
        from torch.utils.data import DataLoader

        batch = options["collate_fn"]([{"id": number, "text": "a " * 400} for number in range(BATCH_SIZE)])
        batches: Any = [batch] * job.steps
        return DataLoader(batches, batch_size=None)
    if job.system == "Hugging Face":
        from datasets import load_dataset
        from datasets.distributed import split_dataset_by_node
        from torchdata.stateful_dataloader import StatefulDataLoader

        texts = load_dataset(
            "parquet",
            data_files=f"{url}/*.parquet",
            split="train",
            streaming=True,
            columns=["id", "text"],
            storage_options=fsspec_options,
        )
        texts = texts.shuffle(seed=0, buffer_size=job.shuffle_buffer, max_buffer_input_shards=10)
        texts = split_dataset_by_node(texts, int(os.environ["RANK"]), job.ranks)
        workers = {"persistent_workers": True, "prefetch_factor": 2, "multiprocessing_context": "forkserver"}
        return StatefulDataLoader(texts, **options, **workers)
    if job.system == "litData":
        import litdata
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it would talk to an endpoint by https only
        keys = {"endpoint_url": job.endpoint, "aws_access_key_id": "key", "aws_secret_access_key": "secret"}
        chunks = litdata.StreamingDataset(url, cache_dir=job.cache, shuffle=True, storage_options=keys, batch_decode=0)
        return litdata.StreamingDataLoader(chunks, **options)
    if job.system == "MosaicML":
        import streaming

        if job.resume:
            streaming.base.util.clean_stale_shared_memory()
        shards = streaming.StreamingDataset(remote=url, local=f"{job.cache}/mds", shuffle=True, batch_size=BATCH_SIZE)
        return streaming.StreamingDataLoader(shards, **options)
    from lightning_streaming import StreamingDataLoader, StreamingDataset

    ours: dict[str, Any] = {"format": "parquet", "columns": ["id", "text"]} if url.endswith("parquet") else {}
    dataset = StreamingDataset(
        remote=url, local=f"{job.cache}/ours", shuffle=True, storage={"options": fsspec_options}, **ours
    )
    return StreamingDataLoader(dataset, **options)


def train(job: Job) -> None:
    """Fit as one rank, and write what its steps were on and how long they took."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    from benchmarks.stream_memory import memory

    sys.path.append(str(STUBS))  # not before torchmetrics, which would use a stub
    for package in SYSTEMS[job.system][2]:
        importlib.import_module(package)
    torch.set_num_threads(1)
    rank, marks, measured = os.environ["RANK"], list[tuple[float, float]](), dict[str, float]()

    class Sleeper(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

        def train_dataloader(self) -> Any:
            self.began = time.perf_counter()
            return make_loader(job)

        def training_step(self, batch: dict[str, Any]) -> Any:
            start = time.perf_counter()
            measured.setdefault("first_batch", start - self.began)
            print(self.global_step, *batch["id"].tolist(), file=steps, flush=True)
            if self.global_step == job.kill_at:
                print("kill", flush=True)
                signal.pause()
            time.sleep(job.sleep)
            loss = self.weight.sum() * batch["tokens"].shape[1]
            if self.global_step == job.steps - 1:
                measured["pss"] = memory()["pss"]
            marks.append((start, time.perf_counter()))
            return loss

    callbacks: list[Callback] = []
    if job.checkpoints:
        callbacks = [ModelCheckpoint(dirpath=job.cache, every_n_train_steps=CHECKPOINT_STEPS, save_last=True)]
    if job.system.startswith("ours"):
        from lightning_streaming import StreamingStateCallback

        callbacks.append(StreamingStateCallback())
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=job.ranks,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=1,
        max_steps=job.steps,
        callbacks=callbacks,
        enable_checkpointing=job.checkpoints,
        use_distributed_sampler=False,
        **quiet,
    )
    with Path(f"{job.log}.{rank}.steps").open("w") as steps:
        trainer.fit(Sleeper(), ckpt_path=f"{job.cache}/last.ckpt" if job.resume else None)
    Path(f"{job.log}.{rank}.json").write_text(json.dumps({"marks": marks, **measured}))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["train", text]:
            train(Job(**json.loads(text)))
        case ["write-litdata", path, size]:
            write_litdata(Path(path), int(size))
