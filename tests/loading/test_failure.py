"""An exception of the user's own code, told with its sample: the same from a worker as in the process itself."""

from __future__ import annotations

import json
import pickle
import traceback
from contextlib import closing
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_streaming import SampleKey, Stream, StreamingDataLoader, StreamingDataset
from lightning_streaming.errors import EncodingError, SampleError, StreamingError
from tests.helpers import make_dataset, make_loader, write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

WORKERS = pytest.mark.parametrize("workers", [0, 2])


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stream]:
    roots = tmp_path_factory.mktemp("data")
    return {
        "a": Stream(remote=str(write_dataset(roots / "a", 17))),
        "b": Stream(remote=str(write_dataset(roots / "b", 12, first_id=100))),
    }


class OddError(Exception):
    """An exception that pickles, and comes back as it was."""


class TwoArgumentsError(Exception):
    """An exception that pickles, and cannot come back."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def _fails(sample: dict[str, Any], kind: type[Exception]) -> dict[str, Any]:
    if sample["id"] == 107:
        raise TwoArgumentsError("no", "good") if kind is TwoArgumentsError else kind("no good")
    return sample


class Failing(StreamingDataset):
    """A subclass whose samples cannot all be made."""

    kind: type[Exception] = OddError

    def __getitem__(self, idx: Any) -> Any:
        return _fails(super().__getitem__(idx), self.kind)


class FailingToGet(StreamingDataset):
    """One that overrides the other method."""

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        return _fails(super().get_item(sample_id, retry), OddError)


def _error_of(loader: Any) -> StreamingError:
    with pytest.raises(StreamingError) as caught:
        list(loader)
    traceback.clear_frames(caught.tb)
    return caught.value


def _assert_names_its_sample(error: BaseException, streams: dict[str, Stream], who: str) -> None:
    told = str(error)
    assert f"{who} failed on sample 2 of shard 1 of stream 'b': " in told
    start = told.index("dataset.restore_sample(") + len("dataset.restore_sample(")
    key = SampleKey.from_dict(json.loads(told[start : told.index(")", start)]))
    assert make_dataset(streams=streams).restore_sample(key) == {"id": 107}
    failing = Failing(streams=streams)
    with pytest.raises(OddError, match=r"^no good$"):
        failing.restore_sample(key)


@WORKERS
@pytest.mark.parametrize("kind", [Failing, FailingToGet, None])
def test_what_fails_names_its_sample_and_has_the_exception_as_its_cause(
    streams: dict[str, Stream], workers: int, kind: type[StreamingDataset] | None
) -> None:
    settings: dict[str, Any] = {"streams": streams, "batch_size": 4, "shuffle": True}
    who = "transform" if kind is None else f"dataset[i] of {kind.__name__}"
    if kind is None:
        kind, settings["transform"] = StreamingDataset, lambda sample: _fails(sample, OddError)
    with closing(StreamingDataLoader(kind(**settings), num_workers=workers)) as loader:
        error = _error_of(loader)
    assert type(error) is SampleError
    _assert_names_its_sample(error, streams, who)
    assert (type(error.__cause__), str(error.__cause__)) == (OddError, "no good")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert "in _fails" in "".join(traceback.format_exception(error))


def test_so_does_a_pass_without_a_loader_and_one_of_torchs(streams: dict[str, Stream]) -> None:
    settings: dict[str, Any] = {"streams": streams, "batch_size": 4}
    error = _error_of(Failing(**settings))
    _assert_names_its_sample(error, streams, "dataset[i] of Failing")
    assert isinstance(error.__cause__, OddError)
    loader: DataLoader[Any] = DataLoader(Failing(**settings), batch_size=4, num_workers=1)
    _assert_names_its_sample(_error_of(loader), streams, "dataset[i] of Failing")


@WORKERS
@pytest.mark.parametrize("kind", [TwoArgumentsError, type("Local", (Exception,), {})])
def test_an_exception_that_cannot_travel_is_told_all_the_same(
    streams: dict[str, Stream], workers: int, kind: type[Exception]
) -> None:
    loader = make_loader(streams=streams, workers=workers, transform=lambda sample: _fails(sample, kind))
    error = _error_of(loader)
    _assert_names_its_sample(error, streams, "transform")
    assert f"{kind.__name__}: no good" in str(error)
    assert "in _fails" in "".join(traceback.format_exception(error))


@WORKERS
def test_an_error_of_ours_keeps_its_class(streams: dict[str, Stream], workers: int) -> None:
    loader = make_loader(streams=streams, workers=workers, transform=lambda sample: _fails(sample, EncodingError))
    error = _error_of(loader)
    assert type(error) is EncodingError
    _assert_names_its_sample(error, streams, "transform")


class OwnError(StreamingError):
    """A user's own, of one of our classes."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class FailingToIterate(StreamingDataset):
    def __iter__(self) -> Any:
        yield from super().__iter__()
        raise OwnError("no", "good")


def test_an_error_of_a_users_own_class_travels_as_one_that_is_known(streams: dict[str, Stream]) -> None:
    error = _error_of(StreamingDataLoader(FailingToIterate(streams=streams, batch_size=4), num_workers=1))
    assert (type(error), str(error)) == (SampleError, "no good")
    assert "OwnError" in "".join(traceback.format_exception(error))
