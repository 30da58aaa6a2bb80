"""``python -m sim.run`` as a process: exit codes, terminals, pipes, signals, several processes."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.helpers.scenario import changed

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "sim.run"]
LONG = changed("horizon: 2s", "horizon: 300h").replace("rate_per_s: 4", "rate_per_s: 40")


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_processes_write_the_same_bytes_and_a_pipe_gets_no_progress(run, tiny_file, here, environment):
    ended = run(tiny_file.read_bytes(), plots=True)
    (here / "runs/tiny").rename(here / "one")
    process = subprocess.run(
        [*COMMAND, "s.yaml", "--jobs", "2"], cwd=here, env=environment, capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, ended.out, "")
    files = sorted(path.relative_to(here / "one") for path in (here / "one").rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(here / "runs/tiny") for path in (here / "runs/tiny").rglob("*.*"))
    for file in files:
        assert (here / "one" / file).read_bytes() == (here / "runs/tiny" / file).read_bytes(), file


def test_a_terminal_gets_a_progress_bar_on_stderr_alone(tiny_file, here, environment):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, "s.yaml", "--jobs", "1"], cwd=here, env=environment, stdout=subprocess.PIPE, stderr=slave
    )
    os.close(slave)
    assert process.stdout is not None
    with process.stdout:
        out = process.stdout.read().decode()
    shown = b""
    while True:
        try:
            shown += (piece := os.read(master, 4096))
        except OSError:  # the other end was closed
            break
        if not piece:
            break
    os.close(master)
    assert process.wait() == 0
    assert b"tiny: 100%" in shown
    assert "%|" not in out


def test_a_fault_ends_with_2_and_without_a_traceback(here, environment):
    (here / "s.yaml").write_text("name: x\n")
    process = subprocess.run(
        [*COMMAND, "s.yaml"], cwd=here, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("s.yaml:1: horizon: missing\n")
    assert "Traceback" not in process.stderr


def test_ctrl_c_leaves_nothing_behind(here, environment):
    (here / "s.yaml").write_text(LONG)
    process = subprocess.Popen(
        [*COMMAND, "s.yaml", "--out", "mine", "--jobs", "2"],
        cwd=here,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not (here / ".mine.part").is_dir() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes of the command
    out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert sorted(path.name for path in here.iterdir()) == ["s.yaml"]


def test_a_reader_that_goes_away_is_no_fault(environment):
    process = subprocess.Popen(
        [*COMMAND, "--list"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), err) == (0, b"")
