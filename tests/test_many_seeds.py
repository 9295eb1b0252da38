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
from runs import both_arguments, metrics_of, only

ROOT = Path(__file__).parent.parent
LAUNCHER = ROOT / "benchmark/curves/many_seeds.py"
SCRIPT = "ppo_rlhf/train_both.py"

# A command that notes how it was called, leaves a run as ours do, and does what the file `behaviour` says.
JOB = """
import json, os, signal, sys, time
from pathlib import Path
seed = int(sys.argv[sys.argv.index("--seed") + 1])
home = Path(__file__).parent
with (home / "calls").open("a") as file:
    names = ("PPO_RLHF_THREADS", "CUDA_VISIBLE_DEVICES")
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
    again = start(home)
    assert again.status == 0 and len(calls(home)) == 3
    assert again.stdout.count("finished") == 3
    more = start(home, seeds=4)
    assert more.status == 0 and calls(home)[3:][0]["argv"] == ["--seed", "4"] and len(calls(home)) == 4


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
    """Status 0 is not the end: a run that was told to stop ends so too."""
    (home / "behaviour").write_text("stops")
    first = start(home, seeds=1)
    assert first.status == 1 and "started" in first.stdout
    second = start(home, seeds=1)
    assert second.status == 0
    run = home / "bench/test/seed1/runs/run1"
    assert calls(home)[1]["argv"] == ["--seed", "1", "--resume", str(run)]


def test_an_error_of_the_launcher_stops_the_commands(home):
    """A seed that removes its own folder: one line, and no command goes on."""
    command = f"bash -c 'if [ $2 = 1 ]; then sleep 1; rm -rf {home}/bench/test/seed1; else exec sleep 7777; fi' bash"
    result = start(home, "--command", command, "--workers", "2", seeds=2)
    assert result.status == 2 and result.stderr.count("\n") == 1 and "seed1" in result.stderr, result
    psutil.wait_procs(processes_with("sleep 7777"), timeout=60)
    assert not processes_with("sleep 7777")


def test_a_run_that_never_began_is_begun_anew(home):
    husk = home / "bench/test/seed1/runs/husk"
    husk.mkdir(parents=True)
    assert start(home, seeds=1).status == 0
    assert calls(home)[0]["argv"] == ["--seed", "1"] and not husk.exists()


def test_several_at_once_share_cores_and_gpus(home):
    (home / "behaviour").write_text("meets")
    environment = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "PPO_RLHF_THREADS": "3"}
    assert start(home, "--workers", "2", seeds=2, **environment).status == 0
    assert {call["CUDA_VISIBLE_DEVICES"] for call in calls(home)} == {"4,5", "6,7"}
    assert {call["PPO_RLHF_THREADS"] for call in calls(home)} == {"3"}


def test_sigterm_reaches_the_command_and_nothing_more_starts(home):
    (home / "behaviour").write_text("stops when told")
    launched = Launched(LAUNCHER, *arguments(home), folder=home)
    wait_for(home / "started")
    os.kill(launched.process.pid, signal.SIGTERM)
    result = launched.wait(60)
    assert result.status == 1 and len(calls(home)) == 1
    assert record(home, 1) | {"seconds": 0} == record(home, 1) | {"seconds": 0, "finished": False, "status": None}
    assert "started" in result.stdout and "waiting" in result.stdout
    (home / "behaviour").write_text("")
    assert start(home).status == 0 and len(calls(home)) == 4


def test_a_second_sigterm_kills(home):
    (home / "behaviour").write_text("stops at nothing")
    launched = Launched(LAUNCHER, *arguments(home, seeds=1), folder=home)
    wait_for(home / "started")
    os.kill(launched.process.pid, signal.SIGTERM)
    wait_for(home / "no")
    os.kill(launched.process.pid, signal.SIGTERM)
    result = launched.wait(60)
    assert result.status == 1 and record(home, 1)["status"] is None and "started" in result.stdout
    psutil.wait_procs(processes_with(f"{home}/job.py"), timeout=60)
    assert not processes_with(f"{home}/job.py")


def test_seeds_at_a_distance(home):
    more = ["--start_seed", "5", "--seed_step", "10"]
    assert start(home, *more, seeds=3).status == 0
    assert sorted(call["argv"] for call in calls(home)) == [["--seed", seed] for seed in ("15", "25", "5")]


def test_words_of_the_command(home):
    (home / "some").mkdir()
    (home / "some/file").touch()
    command = f"{sys.executable} {home}/job.py --a some/file --b other/file some"
    name = ["--name", "words", "--num_seeds", "1", "--start_seed", "7", "--folder", "bench", "--command", command]
    assert launch(LAUNCHER, *name, folder=home).status == 0
    absolute = f"{home}/some/file"
    expected = ["--a", absolute, "--b", "other/file", "some", "--seed", "7"]
    assert calls(home)[0]["argv"] == expected


@pytest.mark.parametrize(
    "more, message",
    [
        (["--num_seeds", "0"], "--num_seeds is 0; it must be above 0"),
        (["--command", "no-such-program"], "no-such-program: No such file"),
    ],
)
def test_bad_input(home, more, message):
    result = start(home, *more)
    assert result.status == 2 and message in result.stderr and result.stderr.count("\n") == 1, result
    assert not list((home / "bench").glob("*/*/job.json"))  # nothing has run, and the name is still free


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


def test_a_real_run_that_is_killed_goes_on_and_gives_the_same_numbers(tiny_world, tmp_path):
    """kill -9 to launcher and script at once, in the middle of PPO."""
    command = f"{sys.executable} {ROOT / SCRIPT} {' '.join(both_arguments(tiny_world))} --policy.save_interval 1"
    whole, cut = (["--name", name, "--num_seeds", "1", "--folder", "bench", "--command", command] for name in "wc")
    assert launch(LAUNCHER, *whole, folder=tmp_path).status == 0
    launched = Launched(LAUNCHER, *cut, folder=tmp_path)
    checkpoints = tmp_path / "bench/c/seed1/runs"
    deadline = time.time() + 120
    while not list(checkpoints.glob("train_policy*/checkpoints/2")):
        assert time.time() < deadline
        time.sleep(0.005)
    children = psutil.Process(launched.process.pid).children()
    launched.process.kill()
    for child in children:
        child.kill()
    psutil.wait_procs(children, timeout=60)
    assert launch(LAUNCHER, *cut, folder=tmp_path).status == 0
    for kind in ("train_reward", "train_policy"):
        expected, given = (metrics_of(only(tmp_path / f"bench/{name}/seed1/runs", f"{kind}*")) for name in "wc")
        assert given == expected
    job = json.loads((tmp_path / "bench/c/seed1/job.json").read_text())
    assert job["starts"] == 2 and job["finished"]
