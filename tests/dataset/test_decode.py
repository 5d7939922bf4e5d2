"""Columns of pictures of every format, decoded as asked for: the same with threads, workers, and by sample number."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from lightning_streaming import EncodedImage, LocalDataset, MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_streaming.errors import ConfigError, EncodingError, MissingDependencyError, SampleError
from lightning_streaming.logs import read_bad_samples
from tests.broken_data import replacing
from tests.formats.tar_data import write_samples
from tests.helpers import assert_error, assert_resumes_at_every_step, ids, make_dataset, make_loader, raises
from tests.servers import HttpStore

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

COUNT = 23


def file_of(number: int, kind: str = "JPEG") -> bytes:
    """A picture of 16 x 24 pixels; no two are the same."""
    pixels = np.random.default_rng(number).integers(0, 256, (3, 2, 3), np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).resize((16, 24)).save(file, kind)
    return file.getvalue()


def pixels_of(number: int, kind: str = "JPEG") -> Any:
    return np.asarray(PIL.Image.open(io.BytesIO(file_of(number, kind))).convert("RGB"))


def write_mds(root: Path, encoding: str = "jpeg", bad: tuple[int, ...] = ()) -> dict[str, Any]:
    kind = "PNG" if encoding == "png" else "JPEG"
    with MDSWriter(out=str(root), columns={"id": "int", "image": encoding}, size_limit=4000) as written:
        for number in range(COUNT):
            file = file_of(number, kind)
            if number in bad:
                file = file[:300] + b"\xff\xd9"
            value: Any = file if encoding != "pil" else PIL.Image.open(io.BytesIO(file))
            if encoding.startswith("list"):
                value = [PIL.Image.open(io.BytesIO(file))]
            written.write({"id": number, "image": [file] if encoding == "jpeg_array" else value})
    return {"remote": str(root)}


def write_tars(root: Path) -> dict[str, Any]:
    files: list[Any] = [
        {"__key__": f"{number:03}", "id": str(number).encode(), "image.jpg": file_of(number)} for number in range(COUNT)
    ]
    write_samples(root / "0.tar", files)
    return {"remote": str(root), "format": "webdataset"}


def write_parquet(root: Path, is_hugging_face: bool) -> dict[str, Any]:
    import pyarrow
    import pyarrow.parquet

    root.mkdir()
    files: list[Any] = [file_of(number) for number in range(COUNT)]
    table = pyarrow.table({"id": list(range(COUNT)), "image": files})
    if is_hugging_face:
        table = pyarrow.table({"id": list(range(COUNT)), "image": [{"bytes": one, "path": None} for one in files]})
        features = {"id": {"dtype": "int64", "_type": "Value"}, "image": {"_type": "Image"}}
        told = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": told})
    pyarrow.parquet.write_table(table, root / "a.parquet")
    return {"remote": str(root), "format": "parquet"}


FORMS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "mds": write_mds,
    "png": lambda root: write_mds(root, "png"),
    "pixels": lambda root: write_mds(root, "pil"),
    "tar": write_tars,
    "hugging face": lambda root: write_parquet(root, True),
    "bytes": lambda root: write_parquet(root, False),
}


def column(form: str) -> str:
    return "image.jpg" if form == "tar" else "image"


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[name]) for name, value in one.items())
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return bool((torch.as_tensor(one) == torch.as_tensor(other)).all())
    return bool(one == other)


@pytest.mark.rotate(2)
@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_every_format_gives_pixels(form: str, kind: str, tmp_path: Path) -> None:
    written, name = FORMS[form](tmp_path / "data"), column(form)
    dataset = StreamingDataset(**written, decode={"columns": {name: kind}}, batch_size=4)
    stored = {int(one["id"]): one[name] for one in (dataset[place] for place in range(COUNT))}
    assert sorted(stored) == list(range(COUNT))
    for number, found in stored.items():
        pixels = found if kind == "array" else found.permute(1, 2, 0).numpy()
        assert (pixels == pixels_of(number, "PNG" if form == "png" else "JPEG")).all()
        assert pixels.dtype == np.uint8
    for threads, workers in ((0, 0), (3, 0), (0, 2), (2, 1)):
        loader = make_loader(**written, decode={"columns": {name: kind}, "threads": threads}, workers=workers)
        for batch in loader:
            for number, found in zip(batch["id"].tolist(), batch[name], strict=True):
                assert equal(found, torch.as_tensor(stored[number]))


def test_every_format_gives_what_is_not_decoded(form: str, tmp_path: Path) -> None:
    written, name = FORMS[form](tmp_path / "data"), column(form)

    def asked(kind: str) -> Any:
        dataset = StreamingDataset(**written, decode={"columns": {name: kind}}, batch_size=4)
        return {int(one["id"]): one[name] for one in dataset[:]}

    image = asked("pil")[5]
    assert (np.asarray(image.convert("RGB")) == pixels_of(5, "PNG" if form == "png" else "JPEG")).all()
    if form == "pixels":
        with pytest.raises(ConfigError, match="stored as pixels"):
            asked("encoded")
        return
    file = file_of(5, "PNG" if form == "png" else "JPEG")
    assert asked("bytes")[5] == file
    assert asked("encoded")[5] == EncodedImage(file)


@pytest.mark.parametrize("encoding", ["jpeg_array", "list[jpeg]"])
def test_lists_of_pictures_become_lists(encoding: str, tmp_path: Path) -> None:
    dataset = StreamingDataset(
        **write_mds(tmp_path / "data", encoding), decode={"columns": {"image": "array"}}, batch_size=4
    )
    (found,) = dataset[7]["image"]
    assert found.shape == (24, 16, 3)


def test_pictures_of_litdata_are_turned_unless_decoded_here(tmp_path: Path) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    PIL.Image.new("RGB", (16, 24)).save(file, "JPEG", exif=exif)
    chunk, sample = tmp_path / "data", len(file.getvalue()).to_bytes(4, "little") + file.getvalue()
    chunk.mkdir()
    head = np.array([1, 12, 12 + len(sample)], "<u4").tobytes()
    (chunk / "chunk-0-0.bin").write_bytes(head + sample)
    spec = [1, {"type": "builtins.dict", "context": '["image"]', "children_spec": [_LEAF]}]
    config: dict[str, Any] = {"compression": None, "chunk_size": 1, "chunk_bytes": 10**6, "data_format": ["jpeg"]}
    config |= {"data_spec": json.dumps(spec), "encryption": None, "item_loader": "PyTreeLoader"}
    told = {"filename": "chunk-0-0.bin", "chunk_bytes": len(head + sample), "chunk_size": 1, "dim": None}
    (chunk / "index.json").write_text(json.dumps({"chunks": [told], "config": config}))

    def read(**asked: Any) -> Any:
        return StreamingDataset(remote=str(chunk), format="litdata", batch_size=1, **asked)[0]["image"]

    assert read().shape == (3, 16, 24)
    assert read(decode={"columns": {"image": "tensor"}}).shape == (3, 24, 16)
    assert read(decode={"columns": {"image": "bytes"}}) == file.getvalue()
    assert read(decode={"columns": {"image": "pil"}}).size == (16, 24)


_LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}


@pytest.mark.parametrize("on", [None, "id"])
def test_joined_columns_are_decoded_by_their_names_in_samples(on: str | None, tmp_path: Path) -> None:
    write_mds(tmp_path / "images")
    with MDSWriter(out=str(tmp_path / "own"), columns={"id": "int"}) as written:
        for number in range(COUNT):
            written.write({"id": number})
    join = {"more": {"remote": str(tmp_path / "images"), "key": on, "columns": ["image"], "prefix": "of_"}}
    for kind in ("array", "encoded"):
        asked: dict[str, Any] = {"remote": str(tmp_path / "own"), "join": join}
        asked["decode"] = {"columns": {"of_image": kind}, "threads": 2}
        dataset = make_dataset(**asked)
        samples = [*make_loader(**asked, loader={"collate_fn": list}), [dataset[4], dataset[-1]]]
        for sample in (one for batch in samples for one in batch):
            found = sample["of_image"] if kind == "array" else sample["of_image"].decode()
            assert (found == pixels_of(sample["id"])).all()


def test_a_sample_that_is_read_alone_is_decoded(http_store: HttpStore) -> None:
    write_mds(http_store.root)
    dataset = make_dataset(http_store.url, storage={"on_demand": True}, decode={"columns": {"image": "array"}})
    assert (dataset[4]["image"] == pixels_of(4)).all()
    assert dataset.cache_usage < 4000


def test_a_directory_as_a_map_is_decoded(tmp_path: Path) -> None:
    write_mds(tmp_path / "data")
    assert (LocalDataset(tmp_path / "data", decode={"columns": {"image": "array"}})[3]["image"] == pixels_of(3)).all()
    with assert_error(ConfigError, option="decode.columns.image"):
        LocalDataset(tmp_path / "data", decode={"columns": {"image": "rgb"}})
    with assert_error(ConfigError, option="decode.threads"):
        LocalDataset(tmp_path / "data", decode={"threads": 2})


# --- transforms ---


def augment(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    left, upper = rng.integers(0, 8, 2).tolist()
    crop = sample["image"].crop((left, upper, left + 8, upper + 8), 6)
    return {"id": sample["id"], "crop": crop, "drawn": rng.random()}


def singly(batches: Any) -> list[dict[str, Any]]:
    """The samples of some batches."""
    return [{name: values[place] for name, values in one.items()} for one in batches for place in range(len(one["id"]))]


@pytest.mark.rotate(2)
@pytest.mark.parametrize(("threads", "workers", "size"), [(1, 0, 4), (5, 0, 4), (2, 2, 4), (3, 0, 1), (2, 0, 30)])
def test_a_transform_in_threads_gives_the_same_samples(threads: int, workers: int, size: int, tmp_path: Path) -> None:
    written = {**write_mds(tmp_path / "data"), "transform": augment, "batch_size": size}
    none, many = ({"columns": {"image": "encoded"}, "threads": count} for count in (0, threads))
    read = (list(make_loader(**written, decode=decode, workers=workers)) for decode in (many, none))
    assert all(equal(one, other) for one, other in zip(*map(singly, read), strict=True))
    loader = make_loader(**written, decode=many, loader={"return_keys": True})
    for batch, keys in loader:
        for one, key in zip(singly([batch]), keys, strict=True):
            assert equal(make_dataset(**written, decode=many).restore_sample(key), one)


def test_the_threads_are_those_that_were_asked_for(tmp_path: Path) -> None:
    names = set[str]()
    barrier = threading.Barrier(2)

    def note(sample: dict[str, Any]) -> dict[str, Any]:
        names.add(threading.current_thread().name + str(threading.get_ident()))
        if len(names) < 2:
            barrier.wait(20)  # two are at work at the same time
        elif not barrier.broken and barrier.n_waiting:
            barrier.wait(20)
        return sample

    before = threading.active_count()
    read = ids(make_loader(**write_mds(tmp_path / "data"), columns=["id"], transform=note, decode={"threads": 2}))
    assert sum(map(len, read)) == COUNT
    assert len(names) == 2
    assert threading.active_count() == before


def test_a_pass_that_is_left_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    written = {**write_mds(tmp_path / "data"), "decode": {"columns": {"image": "array"}, "threads": 3}}
    batches = iter(make_loader(**written))
    next(batches)
    assert threading.active_count() > before
    del batches
    assert threading.active_count() == before


def test_each_thread_uses_one_of_torch_and_no_other_does(tmp_path: Path) -> None:
    before, others = torch.get_num_threads(), list[int]()

    def note(sample: dict[str, Any]) -> dict[str, Any]:
        return {"threads": torch.get_num_threads()}

    torch.set_num_threads(3)
    try:
        for batch in make_loader(**write_mds(tmp_path / "data"), transform=note, decode={"threads": 2}):
            assert batch["threads"].tolist() == [1] * len(batch["threads"])
            other = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
            other.start()
            other.join()
        assert torch.get_num_threads() == 3
        assert set(others) == {3}
    finally:
        torch.set_num_threads(before)


def test_a_thread_that_is_told_to_end_begins_no_further_sample(tmp_path: Path) -> None:
    begun, may_go_on = list[int](), threading.Event()

    def wait(sample: dict[str, Any]) -> dict[str, Any]:
        begun.append(sample["id"])
        if len(begun) > 16:
            may_go_on.wait(20)
        return sample

    loader = make_loader(
        **write_mds(tmp_path / "data"), columns=["id"], transform=wait, decode={"threads": 1}, batch_size=16
    )
    batches = iter(loader)
    next(batches)
    closing = threading.Thread(target=loader.close)
    closing.start()
    closing.join(0.3)
    may_go_on.set()
    closing.join(20)
    assert not closing.is_alive()
    assert len(begun) <= 17


def test_a_bad_picture_that_is_read_twice_is_replaced_alike(tmp_path: Path) -> None:
    written = write_mds(tmp_path / "data", bad=(3, 13))
    asked: dict[str, Any] = {**written, "epoch_size": 3 * COUNT, "batch_size": 16}
    read = []
    for threads in (0, 2):
        log = tmp_path / f"bad{threads}"
        decode = {"columns": {"image": "array"}, "threads": threads}
        loader = make_loader(**asked, bad_samples=replacing(log, 8), decode=decode)
        batches = list(loader)
        told = [(one.key.position, one.key.shard, one.key.sample_index) for one in read_bad_samples(log)]
        read.append((ids(batches), told, loader.statistics().bad_samples))
    assert read[0] == read[1]


def test_resumes_are_exact(tmp_path: Path) -> None:
    def loader(threads: int) -> StreamingDataLoader:
        return make_loader(**written, decode={"columns": {"image": "encoded"}, "threads": threads}, transform=augment)

    written = write_mds(tmp_path / "data")
    assert_resumes_at_every_step(partial(loader, 2), partial(loader, 0), epochs=1)


# --- errors ---


@pytest.mark.parametrize("threads", [0, 2])
def test_damage_is_an_error_of_its_sample_after_all_before_it(threads: int, tmp_path: Path) -> None:
    written = write_mds(tmp_path / "data", bad=(13,))
    loader = make_loader(
        **written, decode={"columns": {"image": "array"}, "threads": threads}, shuffle=False, num_canonical_nodes=1
    )
    found = []
    with raises(EncodingError, "stream '0'", "shard.00002.mds, sample 3: column 'image'"):
        for batch in loader:
            found += batch["id"].tolist()
    assert found == list(range(12))


@pytest.mark.rotate(2)
@pytest.mark.parametrize("kind", ["array", "encoded"])
@pytest.mark.parametrize("workers", [0, 1])
def test_damaged_pictures_are_replaced(kind: str, workers: int, tmp_path: Path) -> None:
    written = write_mds(tmp_path / "data", bad=(3, 13))
    asked = {"transform": augment} if kind == "encoded" else {}
    read = []
    for threads in (0, 2):
        log = tmp_path / f"bad{threads}"
        decode = {"columns": {"image": kind}, "threads": threads}
        options = {**written, **asked, "bad_samples": replacing(log, 2), "decode": decode}
        read.append(list(make_loader(**options, workers=workers)))
        assert len(list(read_bad_samples(log))) == 2
    assert all(equal(one, other) for one, other in zip(*read, strict=True))
    assert not {3, 13} & {one for batch in ids(read[0]) for one in batch}


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_of_a_transform_is_told_as_ever(threads: int, tmp_path: Path) -> None:
    def fail(sample: dict[str, Any]) -> None:
        raise KeyError("mine")

    loader = make_loader(**write_mds(tmp_path / "data"), columns=["id"], transform=fail, decode={"threads": threads})
    with raises(SampleError, "transform failed on sample", "KeyError: 'mine'", "restore_sample"):
        next(iter(loader))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    written = write_mds(tmp_path / "data")
    for asked, option in (
        ({"decode": {"columns": {"image": "rgb"}}}, "decode.columns.image"),
        ({"decode": {"columns": ["image"]}}, "decode.columns"),
        ({"decode": {"columns": {"image": "array"}}, "columns": ["id"]}, "decode.columns.image"),
        ({"decode": {"threads": -1}}, "decode.threads"),
        ({"decode": {"threads": 2}, "seed_global_rng": True}, "decode.threads"),
    ):
        with assert_error(ConfigError, option=option):
            StreamingDataset(**written, **asked)
    with pytest.raises(ConfigError, match=r"no stream has; the columns are id, image"):
        next(iter(make_loader(**written, decode={"columns": {"picture": "array"}})))
    with pytest.raises(ConfigError, match=r"'id': 'array'.*has no images"):
        next(iter(make_loader(**written, decode={"columns": {"id": "array"}})))


class Doubled(StreamingDataset):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)["image"] // 2


def test_a_subclass_is_given_pixels_and_has_no_threads(tmp_path: Path) -> None:
    written = write_mds(tmp_path / "data")
    dataset = Doubled(**written, decode={"columns": {"image": "array"}}, batch_size=4)
    assert (next(iter(dataset)) <= 127).all()
    with pytest.raises(ConfigError, match="creates them one by one"):
        next(iter(Doubled(**written, decode={"columns": {"image": "array"}, "threads": 1}, batch_size=4)))


def test_what_decodes_is_named_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write_mds(tmp_path / "data")
    monkeypatch.setitem(__import__("sys").modules, "simplejpeg", None)
    with pytest.raises(MissingDependencyError, match=r"lightning-streaming\[jpeg\]"):
        StreamingDataset(**written, decode={"columns": {"image": "array"}}, batch_size=4)[0]
    assert StreamingDataset(**written, decode={"columns": {"image": "bytes"}}, batch_size=4)[0]["image"] == file_of(0)
