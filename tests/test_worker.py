"""rlvr/confined_worker.py: functions that read what a model writes run in a process of their own."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ppo_rlhf.rlvr.confined_worker import LONG, NONSENSE, SLOW, Worker

SCORER = """
import ctypes, os, signal, socket, sys, time
def score(text): return eval(text)
"""


@pytest.fixture
def scorer(tmp_path, monkeypatch) -> Iterator[Worker]:
    """A confined worker that evaluates what it is asked."""
    (tmp_path / "careless.py").write_text(SCORER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = Worker("careless:score", computing=2, seconds=600)
    yield worker
    worker.close()


# What a response may try, and what comes of it.
ATTACKS = {
    "[0 for _ in iter(int, 1)]": SLOW,
    "os.kill(os.getpid(), signal.SIGKILL)": "its process ended with status -9",
    "print('[1.0, \"\"]') or sys.stdout.flush() or 0 / 0": "ZeroDivisionError: division by zero",
    "len(bytearray(5 * 2**30))": "MemoryError",
    "'7' * (2**20 - 8)": LONG,  # with what JSON puts around it, no room is left for the end of the line
    "open(os.environ['PYTHONPATH'] + '/made', 'w', buffering=1).write('a\\n')": "OSError: [Errno 27] File too large",
}
# It finds the socket, and answers in the scorer's place: by one value, too deeply, and without an end.
ANSWER = "[os.write(n, b'{}') for n in range(3, 64) if 'socket' in os.readlink(f'/dev/fd/{{n}}') for _ in {}]"
ATTACKS |= {ANSWER.format(said, "[0]"): NONSENSE for said in (r"[1.0]\n", "[" * 50_000 + r"\n")}
ATTACKS |= {ANSWER.format("7" * 999, "iter(int, 1)"): NONSENSE}


def test_an_attack_gives_nothing_and_the_next_request_is_answered(scorer):
    for text, problem in ATTACKS.items():
        assert scorer.ask(text) == (None, problem), text[:99]
        assert scorer.ask("1 + 1") == (2, "")


def test_what_waits_is_ended_too(scorer):
    """Even if it has changed its timers."""
    hasty = Worker("careless:score", computing=2, seconds=1)
    assert hasty.ask("[signal.alarm(0), time.sleep(1_000)]") == (None, SLOW)
    assert hasty.ask("os.kill(os.getpid(), signal.SIGSTOP)") == (None, SLOW)


def test_a_worker_may_wait(scorer):
    """For the next request for longer than one may take, and within a request for longer than it may compute."""
    hasty = Worker("careless:score", computing=1, seconds=1)
    assert hasty.ask("1 + 1") == (2, "")
    with pytest.raises(subprocess.TimeoutExpired):
        hasty.process.wait(2)
    assert hasty.ask("1 + 2") == (3, "")
    hasty.close()
    patient = Worker("careless:score", computing=0.5, seconds=600)
    assert patient.ask("time.sleep(1)") == (None, "")
    patient.close()


def test_there_is_no_network(scorer):
    try_it = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x50000000))"
    if subprocess.run([sys.executable, "-c", try_it], stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("this system does not let a process give up its network")
    _, problem = scorer.ask("socket.create_connection(('127.0.0.1', 9))")
    assert problem == "OSError: [Errno 101] Network is unreachable"
    free = Worker("os:readlink", computing=0, seconds=600, confined=False)
    assert free.ask("/proc/self/ns/net") == (os.readlink("/proc/self/ns/net"), "")
    free.close()


def test_an_answer_that_nobody_waited_for_is_not_the_next_ones(scorer, monkeypatch):
    def interrupted(size):
        raise KeyboardInterrupt

    assert scorer.ask("1 + 1") == (2, "")
    sends = SimpleNamespace(write=scorer.channel.write, flush=scorer.channel.flush, readline=interrupted)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(scorer, "channel", sends)
        scorer.ask("1 + 2")
    assert scorer.ask("1 + 3") == (4, "")


def test_what_cannot_be_called_is_said_at_the_start():
    with pytest.raises(ImportError, match="that is no function"):
        Worker("os:name", computing=1, seconds=600).start()


def test_no_process_outlives_its_script(tmp_path):
    script = """
        from ppo_rlhf.rlvr.confined_worker import Worker
        worker = Worker("time:sleep", computing=0, seconds=600, confined=False)
        worker.ask(0)
        worker.channel.write(b"[600]\\n")
        worker.channel.flush()
        print(worker.process.pid)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300, check=True
    )
    assert not Path(f"/proc/{ended.stdout.strip()}").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(ended.stdout), 0)
