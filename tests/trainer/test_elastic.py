"""Nodes that leave and return within one job of torchrun: real agents and processes, of which some are killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from examples.demo import ROOT
from examples.elastic import EPOCHS, SAMPLES
from tests.trainer import elastic_run

SETTINGS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
"""The first lets nodes join later: a store that torchrun shares lacks the address of rank 0 in all rounds but one."""


class Node:
    """An agent of torchrun with one worker process, as on one node."""

    def __init__(self, directory: Path, port: int) -> None:
        self.worker = 0
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=9"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=1"),
            "--rdzv-conf=last_call_timeout=1,keep_alive_interval=2",
            *("-m", "tests.trainer.elastic_run", str(directory)),
        ]
        with (directory / f"errors{port}").open("a") as errors:
            self.agent = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **SETTINGS}, stdout=subprocess.PIPE, stderr=errors,
                text=True, start_new_session=True,
            )  # fmt: skip

    def wait_for(self, pattern: str) -> str:
        """Return the first group of the next line that matches; its worker process, if it prints that, is noted."""
        assert self.agent.stdout is not None
        for line in self.agent.stdout:
            if match := re.search(pattern, line):
                if "process" in line:
                    self.worker = int(line.split()[-1])
                return match[1]
        raise AssertionError(f"the agent ended with {self.agent.wait()} before {pattern!r}")

    def kill(self) -> None:
        """End the agent and its worker, as the loss of the node would."""
        self.agent.kill()
        with suppress(ProcessLookupError):
            os.kill(self.worker, signal.SIGKILL)
        self.agent.wait()


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Nodes to end after the test."""
    started: list[Node] = []
    yield started
    for node in started:
        if node.agent.poll() is None:
            node.kill()
        assert node.agent.stdout is not None
        node.agent.stdout.close()


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning", "ignore:.*there is no last checkpoint")
def test_nodes_leave_and_return_within_one_job(tmp_path: Path, nodes: list[Node]) -> None:
    (whole := tmp_path / "whole").mkdir()
    (whole / "stop").write_text("-1 pipe")
    elastic_run.main(whole)

    directory, port = tmp_path / "elastic", int(os.environ["STANDALONE_PORT"])  # no other process takes it
    directory.mkdir()
    stop = directory / "stop"

    def start() -> Node:
        nodes.append(Node(directory, port))
        return nodes[-1]

    stop.write_text("4 signal")
    first = start()
    assert first.wait_for(r"rank 0 of 1 from step (\d+)") == "0"
    first.wait_for("stopped at step (4)")

    stop.write_text("23 pipe")
    second = start()  # a node joins: torchrun sends SIGTERM to the first worker, which saves
    for node in nodes:
        assert node.wait_for(r"rank \d of 2 from step (\d+)") == "4"
    for node in nodes:
        node.wait_for("stopped at step (23)")

    stop.write_text("27 signal")
    second.kill()  # a node is lost; the last checkpoint is of step 20
    (directory / str(first.worker)).write_text("")
    assert first.wait_for(r"rank 0 of 1 from step (\d+)") == "20"
    first.wait_for("stopped at step (27)")

    stop.write_text("44 pipe")
    again = start()  # it returns, in mid-epoch as all this
    for node in (first, again):
        assert node.wait_for(r"rank \d of 2 from step (\d+)") == "27"
    for node in (first, again):
        node.wait_for("stopped at step (44)")

    stop.write_text("-1 pipe")
    os.kill(again.worker, signal.SIGKILL)  # a process dies, in the second epoch; its node remains
    (directory / str(first.worker)).write_text("")
    for node in (first, again):
        assert node.wait_for(r"rank \d of 2 from step (\d+)") == "40"
    for node in (first, again):
        assert node.agent.communicate(timeout=300)
        assert node.agent.returncode == 0

    weights = torch.load(directory / "weights.pt")
    assert weights.shape == (SAMPLES,)
    assert len(weights.unique()) > EPOCHS, "weights depend on the step"
    assert weights.equal(torch.load(whole / "weights.pt")), "each sample in the same steps as without a restart"
