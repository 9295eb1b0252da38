"""benchmark/curves/many_seeds.py: many seeds of one command, whatever happens to them."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from processes import Launched, Result, launch
from runs import ROOT

LAUNCHER = ROOT / "benchmark/curves/many_seeds.py"

# A command that notes how it was called, leaves a run as ours do, and does what the file `behaviour` says.
JOB = """
import json, os, signal, sys, time
from pathlib import Path
seed = int(sys.argv[sys.argv.index("--seed") + 1])
home = Path(__file__).parent
with (home / "calls").open("a") as file:
    names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    call = {"argv": sys.argv[1:], "cwd": os.getcwd(), **{name: os.environ.get(name) for name in names}}
    file.write(json.dumps(call) + "\\n")
behaviour = (home / "behaviour").read_text() if (home / "behaviour").exists() else ""
run = Path("runs") / f"run{seed}"
run.mkdir(parents=True, exist_ok=True)
finished = "stops" not in behaviour or "--resume" in sys.argv
(run / "meta.json").write_text(json.dumps({"finished": finished}))
print("hello from", seed)
if behaviour == f"fails {seed}":
    sys.exit("it broke")
if behaviour == "meets":  # two that wait for each other
    (home / f"here{seed}").touch()
    while len(list(home.glob("here*"))) < 2:
        time.sleep(0.01)
if behaviour in ("stops when told", "stops at nothing"):
    stubborn = "nothing" in behaviour
    signal.signal(signal.SIGTERM, lambda *_: (home / "no").touch() if stubborn else sys.exit(0))
    (home / "started").touch()
    while "--resume" not in sys.argv:
        time.sleep(0.01)
"""


@pytest.fixture
def home(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


def processes_with(words: str) -> list[psutil.Process]:
    """The running processes with these words in their command line."""
    return [one for one in psutil.process_iter(["cmdline"]) if words in " ".join(one.info["cmdline"] or ())]


def arguments(home: Path, *more: str, seeds: int = 3) -> list[str]:
    command = f"{sys.executable} {home}/job.py"
    return ["--name", "test", "--command", command, "--num_seeds", str(seeds), "--folder", str(home / "bench"), *more]


def start(home: Path, *more: str, seeds: int = 3, **environment: str) -> Result:
    return launch(LAUNCHER, *arguments(home, *more, seeds=seeds), folder=home, **environment)


def calls(home: Path) -> list[dict]:
    return [json.loads(line) for line in (home / "calls").read_text().splitlines()]


def record(home: Path, seed: int) -> dict:
    return json.loads((home / f"bench/test/seed{seed}/job.json").read_text())


def wait_for(path: Path) -> None:
    deadline = time.time() + 60
    while not path.exists():
        assert time.time() < deadline, f"{path} does not come"
        time.sleep(0.02)


def test_each_seed_runs_once_in_a_folder_of_its_own(home):
    first = start(home)
    assert first.status == 0, first
    assert [call["argv"] for call in calls(home)] == [["--seed", str(seed)] for seed in (1, 2, 3)]
    assert [call["cwd"] for call in calls(home)] == [str(home / f"bench/test/seed{seed}") for seed in (1, 2, 3)]
    assert (home / "bench/test/seed2/log.txt").read_text().endswith("hello from 2\n")
    more = start(home, seeds=4)
    assert more.status == 0 and more.stdout.count("finished") >= 4
    assert [call["argv"] for call in calls(home)[3:]] == [["--seed", "4"]]


def test_a_failure_is_reported_with_its_log_and_tried_again(home):
    (home / "behaviour").write_text("fails 2")
    first = start(home)
    assert first.status == 1
    assert "test seed 2 failed with status 1" in first.stdout and "    it broke" in first.stdout
    assert [record(home, seed)["finished"] for seed in (1, 2, 3)] == [True, False, True]
    (home / "behaviour").write_text("")
    second = start(home)
    assert second.status == 0 and len(calls(home)) == 4 and record(home, 2)["starts"] == 2


def test_what_was_cut_off_goes_on(home):
    """Status 0 is not the end: a run that was told to stop ends so too. One that never began is removed."""
    (home / "behaviour").write_text("stops")
    husk = home / "bench/test/seed1/runs/husk"
    husk.mkdir(parents=True)
    first = start(home, seeds=1)
    assert first.status == 1 and "started" in first.stdout and not husk.exists()
    assert start(home, seeds=1).status == 0
    resumed = ["--seed", "1", "--resume", str(home / "bench/test/seed1/runs/run1")]
    assert [call["argv"] for call in calls(home)] == [["--seed", "1"], resumed]


def test_an_error_of_the_launcher_stops_the_commands(home):
    """A seed that removes its own folder: one line, and no command goes on."""
    command = f"bash -c 'if [ $2 = 1 ]; then sleep 1; rm -rf {home}/bench/test/seed1; else exec sleep 7777; fi' bash"
    result = start(home, "--command", command, "--workers", "2", seeds=2)
    assert result.status == 2 and result.stderr.count("\n") == 1 and "seed1" in result.stderr, result
    psutil.wait_procs(processes_with("sleep 7777"), timeout=60)
    assert not processes_with("sleep 7777")


def test_several_at_once_share_cores_and_gpus(home):
    (home / "behaviour").write_text("meets")
    environment = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "OMP_NUM_THREADS": "3"}
    assert start(home, "--workers", "2", seeds=2, **environment).status == 0
    assert {call["CUDA_VISIBLE_DEVICES"] for call in calls(home)} == {"4,5", "6,7"}
    assert {call["OMP_NUM_THREADS"] for call in calls(home)} == {"3"}


@pytest.mark.parametrize("behaviour", ["stops when told", "stops at nothing"])
def test_sigterm_reaches_the_command_and_nothing_more_starts(home, behaviour):
    """A second one kills."""
    (home / "behaviour").write_text(behaviour)
    launched = Launched(LAUNCHER, *arguments(home), folder=home)
    wait_for(home / "started")
    os.kill(launched.process.pid, signal.SIGTERM)
    if behaviour == "stops at nothing":
        wait_for(home / "no")
        os.kill(launched.process.pid, signal.SIGTERM)
    result = launched.wait()
    assert result.status == 1 and len(calls(home)) == 1
    assert (record(home, 1)["finished"], record(home, 1)["status"]) == (False, None)
    assert "started" in result.stdout and "waiting" in result.stdout
    psutil.wait_procs(processes_with(f"{home}/job.py"), timeout=60)
    assert not processes_with(f"{home}/job.py")


def test_words_of_the_command(home):
    """Those that name a file are made absolute, and the seed is added."""
    (home / "some").mkdir()
    (home / "some/file").touch()
    command = f"{sys.executable} {home}/job.py --a some/file --b other/file some"
    assert start(home, "--command", command, "--start_seed", "5", "--seed_step", "10", seeds=2).status == 0
    expected = ["--a", f"{home}/some/file", "--b", "other/file", "some", "--seed"]
    assert [call["argv"] for call in calls(home)] == [[*expected, "5"], [*expected, "15"]]


def test_a_command_that_is_not_there_leaves_the_name_free(home):
    result = start(home, "--command", "no-such-program")
    assert result.status == 2 and "no-such-program: No such file" in result.stderr
    assert not list((home / "bench").glob("*/*/job.json"))


def test_other_commands_and_other_commits_are_refused(home):
    (home / "behaviour").write_text("fails 1")
    start(home, seeds=1)
    other = start(home, "--command", "another", seeds=1)
    assert other.status == 2 and "holds another command's run" in other.stderr
    job = home / "bench/test/seed1/job.json"
    job.write_text(json.dumps(record(home, 1) | {"commit": "0123456"}))
    (home / "behaviour").write_text("")
    other = start(home, seeds=1)
    assert other.status == 2 and "was begun at commit 0123456" in other.stderr
    assert start(home, "--any_commit", seeds=1).status == 0
