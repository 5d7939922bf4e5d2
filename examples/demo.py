"""Train on two weighted streams, kill the training with SIGKILL in mid-epoch, resume it, and compare with a whole run.

    python examples/demo.py                  # or `make demo`; a minute on two cores, no network
    python examples/demo.py --steps 60       # faster

Prints each command that it runs, which you can repeat from the repository's root, and tables of repeated and skipped
samples; the output of each training is in a log next to its checkpoints. Exits with 0 if the weights of the resumed run
include the same samples in the same order as those of the uninterrupted run, else with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/demo.yaml"
STEPS, STEPS_PER_EPOCH, STEPS_PER_CHECKPOINT = 240, 90, 20
"""Values of the configuration; --steps scales all three."""
BATCH_SIZE = 16
OUT = ROOT / "demo_output"
"""The directory that the configuration reads from."""
WRITTEN = ("data", "cache", "interrupted", "uninterrupted", "losses.png")
"""All names that a demo writes in its directory."""
MARK = ".lightning_streaming_demo"
"""Marks another directory as a demo's, so that the next demo may remove the names in WRITTEN."""
CLEAR = "\r\x1b[K" if sys.stdout.isatty() else ""
"""Erases the line on a terminal; empty where the output is a file."""
PATIENCE = 120.0
"""Seconds without any progress of the training after which the demo gives up; see :func:`progress`."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="default: demo_output")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps, at least 32 (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=4000, help="samples per stream to write (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.steps < 32:
        parser.error(f"--steps must be at least 32, but got {arguments.steps}")
    out = arguments.out.resolve()
    clear(out)
    sys.exit(demonstrate(out, arguments.steps, arguments.samples))


def clear(out: Path) -> None:
    """Create the directory, and remove the files of an earlier demo from it, no others."""
    if out != OUT and out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        sys.exit(f"{out} has files that no demo wrote: pass another directory as --out")
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()
    for name in WRITTEN:
        if (out / name).is_dir():
            shutil.rmtree(out / name)
        else:
            (out / name).unlink(missing_ok=True)


def demonstrate(out: Path, steps: int, samples: int) -> int:
    """Run all five parts, and return the exit status."""
    interrupted, whole = out / "interrupted", out / "uninterrupted"

    say(1, "Write two datasets in MDS format: source code, and documents")
    run([sys.executable, "examples/write_dataset.py", "--out", shown(out / "data"), "--most", str(samples)])

    kill_after = steps // 2 + scaled(STEPS_PER_CHECKPOINT, steps) // 2
    say(2, f"Train {steps} steps on 70 % code and 30 % documents; SIGKILL after step {kill_after}, in mid-epoch")
    train(fit_command(out, interrupted, steps), interrupted, "killed", steps, kill_after)
    print(f"Killed with SIGKILL after step {steps_logged(interrupted)}.")

    checkpoint = newest_checkpoint(interrupted)
    say(3, "Resume from the newest checkpoint")
    log = train(
        [*fit_command(out, interrupted, steps), "--ckpt_path", shown(checkpoint)], interrupted, "resumed", steps
    )
    print("".join(line for line in log.read_text().splitlines(keepends=True) if line.startswith("Resumed ")), end="")

    say(4, "Train once more without an interruption, for comparison")
    train(fit_command(out, whole, steps), whole, "uninterrupted", steps)

    say(5, "Compare the samples of the two runs")
    picture = out / "losses.png"
    compare = [sys.executable, "examples/compare_runs.py", shown(interrupted), shown(whole), "--plot", shown(picture)]
    status = run(compare, check=False)
    print(f"\nLoss curves: {picture}\nLogs:        {interrupted}/steps.jsonl\n             {whole}/steps.jsonl\n")
    print("Exact: 0 samples repeated, 0 skipped, in the same order." if status == 0 else "NOT EXACT: see the tables.")
    return status


def fit_command(out: Path, directory: Path, steps: int) -> list[str]:
    """Return the training command, with options that differ from the configuration."""
    program = shutil.which("lightning-streaming", path=sysconfig.get_path("scripts"))
    if program is None:
        sys.exit("lightning-streaming is not installed in this Python environment: run `pip install --editable .`")
    command = [program, "fit", "--config", CONFIG, "--trainer.default_root_dir", shown(directory)]
    command += ["--trainer.enable_progress_bar", "false"]
    if steps != STEPS:
        epoch_size = BATCH_SIZE * scaled(STEPS_PER_EPOCH, steps)
        command += ["--trainer.max_steps", str(steps), "--data.train.epoch_size", str(epoch_size)]
        # Sets the last callback, which saves the checkpoints.
        every = scaled(STEPS_PER_CHECKPOINT, steps)
        command += ["--trainer.callbacks.init_args.every_n_train_steps", str(every)]
    if out != OUT:
        for stream in ("code", "docs"):
            command += [f"--data.train.streams.{stream}.remote", shown(out / "data" / stream)]
            command += [f"--data.train.streams.{stream}.local", shown(out / "cache" / stream)]
    return command


def scaled(number: int, steps: int) -> int:
    """Return a number of the configuration, scaled to a run of another length."""
    return max(1, number * steps // STEPS)


def run(command: list[str], *, check: bool = True) -> int:
    """Run a command and return its exit status; with ``check``, exit with it if it is not 0."""
    status = start(command).wait()
    if check and status != 0:
        sys.exit(status)
    return status


def train(command: list[str], directory: Path, name: str, steps: int, kill_after: int | None = None) -> Path:
    """Run a training command, show its steps, and return the log of its output.

    Args:
        command: Command to run.
        directory: Directory in which the run logs its steps.
        name: Name of the log.
        steps: Last step.
        kill_after: Step after which to kill it. None: let it end.
    """
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / f"{name}.log"
    with log.open("w") as output:
        process = start(command, output)
    logged, known, waited_from = steps_logged(directory), progress(process, directory, log), time.monotonic()
    show_step(directory, steps)
    while process.poll() is None and (kill_after is None or logged < kill_after):
        if time.monotonic() > waited_from + PATIENCE:
            before, known = known, progress(process, directory, log)
            if known == before:
                process.kill()
                process.wait()
                sys.exit(f"no progress after step {last_step(directory)} in {PATIENCE:g} seconds; output: {log}")
            waited_from = time.monotonic()
        time.sleep(0.02)
        if steps_logged(directory) > logged:
            logged = steps_logged(directory)
            show_step(directory, steps)
    if kill_after is not None:
        process.kill()
    status = process.wait()
    print(f"{CLEAR}step {last_step(directory)} of {steps}; output: {shown(log)}", flush=True)
    if kill_after is not None and status != -signal.SIGKILL:
        sys.exit(f"{log.read_text()}\nthe training ended with {status} before it could be killed; try more --steps")
    if kill_after is None and status != 0:
        sys.exit(f"{log.read_text()}\nthe training ended with {status}")
    return log


def progress(process: subprocess.Popen[bytes], directory: Path, log: Path) -> tuple[object, ...]:
    """Return values of which at least one changes while a training makes progress, however slow the machine is.

    They are the number of its steps, the size of its output, and the seconds that it has used the processor: before the
    first step, while it imports its libraries, nothing else changes. A process that only waits uses next to none.
    """
    return steps_logged(directory), log.stat().st_size, processor_seconds(process.pid)


def processor_seconds(pid: int) -> str:
    """Return how long a process has used the processor, in whole seconds: a number, or as `ps` writes it."""
    stat = Path(f"/proc/{pid}/stat")  # Linux, where `ps` may not be installed
    if not stat.exists():
        return subprocess.check_output(["ps", "-o", "time=", "-p", str(pid)], text=True).partition(".")[0]
    user, system = stat.read_text().rpartition(")")[2].split()[11:13]
    return str((int(user) + int(system)) // os.sysconf("SC_CLK_TCK"))


def show_step(directory: Path, steps: int) -> None:
    """On a terminal, show the step of a training on one line."""
    if CLEAR:
        step = last_step(directory)
        print(f"{CLEAR}step {step} of {steps}" if step else f"{CLEAR}starting ...", end="", flush=True)


def start(command: list[str], output: TextIO | None = None) -> subprocess.Popen[bytes]:
    """Print a command, and start it in the repository's root."""
    print(f"$ {shlex.join([Path(command[0]).name, *command[1:]])}\n", flush=True)
    # Warnings of Lightning and torch would hide the lines that matter here.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output and subprocess.STDOUT)


def steps_logged(directory: Path) -> int:
    """Return the number of steps that a run has logged; repeated ones count again."""
    log = directory / "steps.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def last_step(directory: Path) -> int:
    """Return the last step that a run has logged, or 0."""
    log = directory / "steps.jsonl"
    whole_lines = log.read_text().rpartition("\n")[0].splitlines() if log.exists() else []
    return int(json.loads(whole_lines[-1])["step"]) if whole_lines else 0


def newest_checkpoint(directory: Path) -> Path:
    """Return the checkpoint of the latest step; its name is like `step=200.ckpt`."""
    checkpoints = (directory / "checkpoints").glob("step=*.ckpt")
    return max(checkpoints, key=lambda path: int(path.stem.removeprefix("step=")))


def shown(path: Path) -> str:
    """Return a path relative to the repository's root, if it is in it."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def say(number: int, what: str) -> None:
    """Print the title of a part."""
    print(f"\n[{number}/5] {what}\n", flush=True)


if __name__ == "__main__":
    main()
