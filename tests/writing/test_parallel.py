from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    MissingDependencyError,
    ObjectNotFoundError,
    PartError,
)
from lightning_streaming.formats.index import parse_index
from lightning_streaming.storage import Location
from lightning_streaming.writing.parallel import write_parallel
from lightning_streaming.writing.parts import (
    PartPlan,
    check_same,
    describe_input,
    dump_plan,
    make_plan,
    parse_plan,
    plan_parts,
)
from lightning_streaming.writing.shards import parse_settings
from lightning_streaming.writing.writers import MDSWriter
from tests.helpers import assert_error
from tests.reading.processes import is_alive, wait_until
from tests.servers import S3Store
from tests.tiers import examples
from tests.writing import part_functions as make
from tests.writing.test_merge import contents, ids

PLAN_SETTINGS = parse_settings("zstd", ["sha1"], "1mb")


@dataclass
class Shot:
    folder: Path
    scale: float


def plan(*inputs: Any, **changes: Any) -> PartPlan:
    return replace(make_plan(inputs or (1, 2), {"b": "int", "a": "str"}, PLAN_SETTINGS), **changes)


@given(st.lists(st.text() | st.binary() | st.floats() | st.tuples(st.integers(), st.text()), min_size=1))
@budget(max_examples=examples(50))
def test_a_plan_comes_back_and_is_the_same(inputs: list[Any]) -> None:
    made = make_plan(inputs, None, PLAN_SETTINGS)
    read = parse_plan(dump_plan(made), "plan")
    assert read == made
    check_same(read, made, "plan")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", 1),
        ("x" * 500, "x" * 499 + "y"),
        (np.arange(5000), np.where(np.arange(5000) == 2500, 0, np.arange(5000))),
        (np.array([0.1]), np.array([0.1 + 1e-15])),
        (Shot(Path("a"), 1.0), Shot(Path("a"), 2.0)),
        (range(10), range(11)),
        ("\ud800" * 200, "\ud801" * 200),
    ],
)
def test_inputs_are_told_apart_in_few_words(one: Any, other: Any) -> None:
    assert describe_input(one) != describe_input(other)
    assert describe_input(one) == describe_input(one)
    assert max(len(describe_input(one)), len(describe_input(other))) < 200


def test_an_input_with_an_address_is_refused() -> None:
    with assert_error(ConfigError, option="inputs") as caught:
        describe_input([object()])
    assert "every" in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (plan(1, 3), "input 1 is 3, but was 2"),
        (plan(1), "there are 1 inputs, but there were 2"),
        (plan(settings={"compression": None}), "compression is None, but was 'zstd'"),
    ],
)
def test_the_first_difference_is_named(wanted: PartPlan, words: str) -> None:
    with assert_error(ConfigError, path="there/plan") as caught:
        check_same(plan(), wanted, "there/plan")
    assert words in str(caught.value)


def test_every_setting_that_differs_is_named() -> None:
    other = plan(1, 3, 4, settings={"columns": {"a": "int"}, "compression": None, "hashes": [], "size_limit": 5})
    with pytest.raises(ConfigError) as told:
        check_same(plan(), other, "there/plan")
    for words in ("columns is ", "compression is None", "hashes is ", "size_limit is 5", "there are 3 inputs"):
        assert words in str(told.value)


def test_columns_are_compared_without_their_order() -> None:
    check_same(plan(), make_plan((1, 2), {"a": "str", "b": "int"}, PLAN_SETTINGS), "plan")


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b"{}", b'{"version": 1, "settings": 3, "inputs": []}'])
def test_a_damaged_plan_is_refused(damaged: bytes) -> None:
    with assert_error(ConfigError, path="plan") as caught:
        parse_plan(damaged, "there/plan")
    assert "damaged" in str(caught.value)


def test_a_plan_of_another_version_is_refused() -> None:
    other = json.dumps({"version": 2, "settings": {}, "inputs": []}).encode()
    with assert_error(ConfigError, path="plan") as caught:
        parse_plan(other, "plan")
    assert "has version 2" in str(caught.value)


pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

INPUTS = [range(first, first + 10) for first in range(0, 50, 10)]
SETTINGS: dict[str, Any] = {
    "columns": {"id": "int", "text": "str"},
    "size_limit": make.SIZE_LIMIT,
    "num_workers": 2,
    "progress_bar": False,
    "start_method": "fork",
}


def write(out: Path | str, fn: Any = make.count, inputs: Any = INPUTS, **settings: Any) -> Any:
    write_parallel(inputs, fn, out, **{**SETTINGS, **settings})
    return out


def notes(directory: Path) -> list[int]:
    """Inputs of the calls that were noted."""
    return sorted(int(path.name.split("-")[0]) for path in directory.glob("*-*"))


def with_notes(directory: Path) -> list[tuple[str, range]]:
    directory.mkdir()
    return [(str(directory), numbers) for numbers in INPUTS]


@pytest.mark.rotate(1)
@pytest.mark.parametrize("start_method", ["spawn", "forkserver", "fork"])
def test_samples_stand_in_the_order_of_the_inputs(start_method: str, tmp_path: Path) -> None:
    out = write(tmp_path / "out", make.count_last_first, start_method=start_method)
    assert ids(out) == list(range(50))
    assert not children_of_pool()


def test_each_input_has_a_part_and_bytes_do_not_depend_on_workers(tmp_path: Path) -> None:
    one, two = (contents(write(tmp_path / str(workers), num_workers=workers)) for workers in (1, 2))
    assert one == two
    tops = {name.split("/")[0] for name in one}
    assert tops == {"index.json", "parts.plan", *(f"part.{number:06}" for number in range(5))}


def test_settings_reach_every_shard(tmp_path: Path) -> None:
    out = write(tmp_path / "out", compression="zstd", hashes=["sha1"], size_limit="300b")
    names = [name for name in contents(out) if "shard" in name]
    assert len(names) > 5
    assert all(name.endswith(".mds.zstd") for name in names)
    assert ids(out, validate_hash="sha1") == list(range(50))


def test_columns_may_be_told_and_must_agree(tmp_path: Path) -> None:
    assert ids(write(tmp_path / "a", columns=None)) == list(range(50))
    with assert_error(ConfigError, option="columns", path="shard.00000.mds") as caught:
        write(tmp_path / "b", make.give_another_type, columns=None)
    assert "'float64'" in str(caught.value)
    assert not (tmp_path / "b" / "index.json").exists()


def test_parts_may_be_empty_and_fewer_than_workers(tmp_path: Path) -> None:
    assert ids(write(tmp_path / "out", inputs=[range(0), range(3), range(0)], num_workers=8)) == [0, 1, 2]


@pytest.mark.nightly
def test_a_bucket_is_written(s3: S3Store, tmp_path: Path) -> None:
    url = f"{s3.make_bucket()}/corpus"
    for mode in ("create", "resume"):
        write(url, mode=mode, storage_options=s3.options)
    assert ids(url, local=str(tmp_path / "cache"), storage_options=s3.options) == list(range(50))
    local = write(tmp_path / "out")
    assert Location(url, s3.options, attempts=1, timeout=10).walk() == sorted(contents(local))
    for taken in ("create", "resume"):
        with pytest.raises(ConfigError):
            write(url, mode=taken, inputs=INPUTS[1:], storage_options=s3.options)


@pytest.mark.nightly
def test_a_part_that_was_half_in_a_bucket_is_written_again(s3: S3Store, tmp_path: Path) -> None:
    url = s3.make_bucket()
    settings = {"size_limit": 250, "storage_options": s3.options}
    with pytest.raises(PartError, match="part 2"):
        write(url, make.fail_at_20, **settings)
    assert "part.000002/shard.00000.mds" in Location(url, s3.options, attempts=1, timeout=10).walk()
    write(url, mode="resume", **settings)
    assert Location(url, s3.options, attempts=1, timeout=10).walk() == sorted(
        contents(write(tmp_path / "out", size_limit=250))
    )
    assert ids(url, local=str(tmp_path / "cache"), storage_options=s3.options) == list(range(50))


def test_a_failure_names_its_input_and_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(PartError) as caught:
        write(tmp_path / "out", make.fail_at_20)
    message = str(caught.value)
    assert "part 2 could not be written, from input range(20, 30): " in message
    assert "LocalOnlyError: cannot make number 25" in message
    assert type(caught.value.__cause__) is make.LocalOnlyError
    shown = "".join(traceback.format_exception(caught.value))
    assert "in fail_at_20" in shown
    assert 'raise LocalOnlyError("cannot make number 25")' in shown
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied)) == (PartError, message)
    assert not (tmp_path / "out" / "index.json").exists()


def test_an_error_that_cannot_travel_comes_as_text(tmp_path: Path) -> None:
    with pytest.raises(PartError, match="PickyError: not here") as caught:
        write(tmp_path / "out", make.fail_with_a_picky_error, num_workers=1)
    assert "in fail_with_a_picky_error" in str(caught.value.__cause__)


def test_a_sample_that_does_not_fit_is_a_failure_of_its_input(tmp_path: Path) -> None:
    with pytest.raises(PartError, match=r"range\(0, 10\).*column 'id'") as caught:
        write(tmp_path / "out", columns={"id": "str"}, num_workers=1)
    assert isinstance(caught.value.__cause__, EncodingError)


def test_after_a_failure_no_part_is_begun_and_finished_ones_are_kept(tmp_path: Path) -> None:
    inputs = with_notes(tmp_path / "notes")
    with pytest.raises(PartError, match="part 2"):
        write(tmp_path / "out", make.fail_unless_mended, inputs, num_workers=1)
    assert notes(tmp_path / "notes") == [0, 10, 20]
    (tmp_path / "notes" / "mended").touch()
    write(tmp_path / "out", make.fail_unless_mended, inputs, num_workers=1, mode="resume")
    assert notes(tmp_path / "notes") == [0, 10, 20, 20, 30, 40]
    assert ids(tmp_path / "out") == list(range(50))


def test_a_finished_dataset_is_resumed_without_a_call(tmp_path: Path) -> None:
    inputs = with_notes(tmp_path / "notes")
    out = write(tmp_path / "out", make.record_calls, inputs, mode="resume")
    before = contents(out)
    (out / "index.json").unlink()
    write(out, make.record_calls, inputs, mode="resume")
    assert contents(out) == before
    assert notes(tmp_path / "notes") == [0, 10, 20, 30, 40]


def test_a_part_that_a_crash_cut_short_is_written_again(tmp_path: Path) -> None:
    out = write(tmp_path / "out")
    before = contents(out)
    (out / "part.000001" / "index.json").write_bytes(b'{"sha')
    shard = out / "part.000003" / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-1])
    (out / "part.000004" / "shard.00000.mds").unlink()
    (out / "part.000000" / "index.json").unlink()
    (out / "part.000000" / "shard.00009.mds").touch()
    (out / "part.000000" / "shard.00000.mds.some-host-77-8.part").touch()
    write(out, mode="resume")
    assert contents(out) == before


def test_what_no_writer_made_stops_a_part_and_stays(tmp_path: Path) -> None:
    out = write(tmp_path / "out")
    (out / "part.000001" / "index.json").unlink()
    (out / "part.000001" / "notes.txt").write_text("mine")
    with pytest.raises(PartError, match=r"part 1 .*holds notes.txt"):
        write(out, mode="resume")
    assert (out / "part.000001" / "notes.txt").read_text() == "mine"


def test_creating_where_something_is_is_refused(tmp_path: Path) -> None:
    out = write(tmp_path / "out")
    with assert_error(ConfigError, option="out", path="/out", hint="mode='resume'"):
        write(out)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    for mode in ("create", "resume"):
        with assert_error(ConfigError, option="out", path="other") as caught:
            write(tmp_path / "other", mode=mode)
        assert "notes" in str(caught.value)
    with assert_error(ConfigError, option="out", path="notes.txt") as caught:
        write(tmp_path / "other" / "notes.txt")
    assert "is a file" in str(caught.value)


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inputs": INPUTS[:4]}, "there are 4 inputs, but there were 5"),
        ({"inputs": [*INPUTS[:4], range(1)]}, "input 4 is range(0, 1), but was range(40, 50)"),
        ({"inputs": INPUTS[::-1]}, "input 0 is"),
        ({"compression": "zstd"}, "compression is 'zstd', but was None"),
        ({"hashes": ["md5"]}, "hashes is"),
        ({"size_limit": 500}, "size_limit is 500, but was 400"),
        ({"columns": None}, "columns is None"),
        ({"columns": {"id": "int"}}, "columns is"),
    ],
)
def test_a_resume_with_other_inputs_or_settings_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    out = write(tmp_path / "out")
    before = contents(out)
    with assert_error(ConfigError, path="parts.plan") as caught:
        write(out, mode="resume", **change)
    assert words in str(caught.value)
    assert contents(out) == before


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"inputs": []}, "at least one"),
        ({"inputs": iter([])}, "at least one"),
        ({"inputs": "abc"}, "at least one"),
        ({"inputs": b"abc"}, "at least one"),
        ({"inputs": 7}, "at least one, one for each part, but got int 7"),
        ({"inputs": None}, "at least one"),
        ({"inputs": {1, 2}}, "at least one"),
        ({"inputs": {1: 2}}, "at least one"),
        ({"fn": 7}, "fn must be a function"),
        ({"inputs": [object()]}, "repr that is the same in every run"),
        ({"num_workers": 0}, "num_workers must be a whole number of at least 1"),
        ({"num_workers": 1.5}, "num_workers must be a whole number of at least 1"),
        ({"num_workers": True}, "num_workers must be a whole number of at least 1"),
        ({"num_workers": "2"}, "num_workers must be a whole number of at least 1"),
        ({"engine": "threads"}, "engine must be one of processes, ray"),
        ({"mode": "append"}, "mode must be"),
        ({"start_method": "thread"}, "start_method must be one of"),
        ({"columns": {"id": "integer"}}, "integer"),
        ({"hashes": ["sha1", "md5"]}, "sorted"),
        ({"out": ("/here", "/there")}, "must be a directory or a URL"),
        ({"out": "nowhere://bucket/x"}, "nowhere"),
    ],
)
def test_arguments_are_checked_before_anything_is_touched(wrong: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        write(**{"out": tmp_path / "out", **wrong})
    assert contents(tmp_path) == {}


def test_inputs_may_come_from_a_generator_or_an_array(tmp_path: Path) -> None:
    expected = contents(write(tmp_path / "list"))
    assert contents(write(tmp_path / "generated", inputs=(one for one in INPUTS))) == expected
    with assert_error(ConfigError, option="inputs") as caught:
        plan_parts((one for one in INPUTS), make.count, tmp_path / "planned")  # type: ignore[arg-type]
    assert "generator" in str(caught.value)
    made = write(tmp_path / "array", make.count_one, np.arange(3))
    assert ids(made) == [0, 1, 2]


@pytest.mark.parametrize("place", ["directory", "bucket"])
def test_a_single_writer_does_not_go_on_with_parts(place: str, tmp_path: Path, s3: S3Store) -> None:
    out = str(tmp_path / "out") if place == "directory" else f"{s3.make_bucket()}/out"
    options = {} if place == "directory" else s3.options
    plan_parts(INPUTS, make.count, out, columns=SETTINGS["columns"], storage_options=options)
    with assert_error(ConfigError, option="mode") as caught:
        MDSWriter(out=out, columns=SETTINGS["columns"], mode="resume", storage_options=options)
    assert "was started here" in str(caught.value)


def test_parts_do_not_go_on_where_a_single_writer_wrote_over_them(s3: S3Store) -> None:
    out, settings = f"{s3.make_bucket()}/out", {"columns": SETTINGS["columns"], "storage_options": s3.options}
    job = plan_parts([range(3)], make.count, out, **settings)
    job.write(0, range(3))
    job.publish()
    with MDSWriter(out=out, exist_ok=True, **settings) as writer:
        writer.write({"id": 7, "text": ""})
    with assert_error(ConfigError, option="out", path="/out") as caught:
        plan_parts([range(3)], make.count, out, mode="resume", **settings)
    assert "written" in str(caught.value)


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_a_function_that_cannot_be_sent_is_refused(start_method: str, tmp_path: Path) -> None:
    with assert_error(ConfigError, option="fn"):
        write(tmp_path / "out", lambda numbers: [], start_method=start_method)
    assert contents(tmp_path) == {}  # so that the corrected call is not refused


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_an_input_that_cannot_be_sent_is_refused(start_method: str, tmp_path: Path) -> None:
    with assert_error(ConfigError, option="inputs") as caught:
        write(tmp_path / "out", inputs=[range(3), Unpicklable()], start_method=start_method)
    assert "cannot" in str(caught.value)
    assert contents(tmp_path) == {}


def test_inputs_without_samples_come_to_an_index_without_shards(tmp_path: Path) -> None:
    out = write(tmp_path / "out", make.count, [range(0), range(0)])
    assert parse_index(contents(out)["index.json"], "out").num_samples == 0


class Unpicklable:
    def __repr__(self) -> str:
        return "Unpicklable()"

    def __reduce__(self) -> str:
        raise TypeError("stays here")


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (make.die_in_the_middle, "was killed by SIGKILL; it may have run out of memory"),
        (make.exit_in_the_middle, "ended with exit code 3"),
    ],
)
def test_a_worker_that_dies_is_told_by_its_input(fn: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(PartError, match=rf"part 2 .* from input range\(20, 30\): its worker process {words}") as caught:
        write(tmp_path / "out", fn)
    assert caught.value.__cause__ is None
    assert not children_of_pool()
    write(tmp_path / "out", mode="resume")
    assert contents(tmp_path / "out") == contents(write(tmp_path / "undisturbed"))


def children_of_pool() -> list[Any]:
    return [child for child in multiprocessing.active_children() if child.name == "write_parallel"]


SCRIPT = """
from tests.writing import part_functions as make
from lightning_streaming.writing.parallel import write_parallel
{guard}write_parallel({inputs!r}, make.{fn}, {out!r}, start_method={start_method!r}, num_workers=2)
"""


def script(path: Path, **words: Any) -> list[str]:
    defaults = {"guard": 'if __name__ == "__main__": ', "inputs": INPUTS, "fn": "count", "start_method": "spawn"}
    path.write_text(SCRIPT.format(**{**defaults, **words}))
    return [sys.executable, "-W", "error", str(path)]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def test_a_script_shows_one_bar_on_stderr_and_nothing_on_stdout(tmp_path: Path) -> None:
    command = script(tmp_path / "convert.py", out=str(tmp_path / "out"))
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.rpartition("\r")[2].startswith("writing: 100%")
    assert "5/5" in last
    assert "samples=50" in last
    assert ids(tmp_path / "out") == list(range(50))


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    command = script(tmp_path / "convert.py", out=str(tmp_path / "out"), guard="")
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'must call write_parallel under if __name__ == "__main__":' in done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("start_method", "kill"),
    [
        ("spawn", signal.SIGINT),
        ("spawn", signal.SIGTERM),
        ("spawn", signal.SIGKILL),
        ("forkserver", signal.SIGKILL),
        ("fork", signal.SIGKILL),
        ("fork", signal.SIGINT),
    ],
)
def test_workers_end_with_the_program(start_method: str, kill: signal.Signals, tmp_path: Path) -> None:
    command = script(
        tmp_path / "convert.py",
        out=str(tmp_path / "out"),
        fn="wait_for_ever",
        inputs=with_notes(tmp_path / "notes"),
        start_method=start_method,
    )
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL, start_new_session=True) as program:
        assert wait_until(lambda: len(notes(tmp_path / "notes")) == 2, seconds=60)
        workers = [int(path.name.split("-")[1]) for path in (tmp_path / "notes").iterdir()]
        assert all(map(is_alive, workers))
        if kill == signal.SIGINT:  # as a terminal does on Ctrl-C
            os.killpg(program.pid, kill)
        else:
            program.send_signal(kill)
        assert program.wait(timeout=60) == -kill
    assert wait_until(lambda: not any(map(is_alive, workers)))


def test_ray_that_is_not_installed_is_told_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with assert_error(MissingDependencyError, option="engine"):
        write(tmp_path / "out", engine="ray")


def test_an_engine_of_ones_own_writes_the_same(tmp_path: Path) -> None:
    job = plan_parts(INPUTS, make.count, tmp_path / "own", columns=SETTINGS["columns"], size_limit=make.SIZE_LIMIT)
    job = pickle.loads(pickle.dumps(job))
    with assert_error(ObjectNotFoundError, path="part.000000"):
        job.publish()
    for number in (3, 0, 1, 4, 2, 2):
        assert job.write(number, INPUTS[number]) == 10
    job.publish()
    assert contents(tmp_path / "own") == contents(write(tmp_path / "out"))


def test_a_memory_store_is_written_by_one_process(tmp_path: Path) -> None:
    job = plan_parts(INPUTS[:2], make.count, "memory://parts/own")
    for number in range(2):
        job.write(number, INPUTS[number])
    job.publish()
    store = fsspec.filesystem("memory")
    names = [name.removeprefix("/parts/own/") for name in store.find("/parts/own")]
    store.rm("/parts", recursive=True)
    assert names == [
        "index.json",
        *(f"part.00000{n}/{name}" for n in (0, 1) for name in ("index.json", "shard.00000.mds")),
        "parts.plan",
    ]


def test_secrets_do_not_show(tmp_path: Path) -> None:
    job = plan_parts(INPUTS, make.count, tmp_path / "out", storage_options={"secret": "hush"})
    assert "hush" not in repr(job)
    assert "hush" not in (tmp_path / "out" / "parts.plan").read_text()
