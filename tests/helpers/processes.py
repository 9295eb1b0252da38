"""Run a script in a process of its own, without the seconds that importing PyTorch takes.

The processes are forks of a server that has imported everything, but has run nothing. Each has the command line,
folder, environment, output and exit status of `python <script> <arguments>`. Where such a process starts Python for a
script of ours, that one is a fork of it in the same way; any other command is executed.
"""

import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from matplotlib.figure import Figure

SCRIPTS = Path(__file__).parents[2] / "ppo_rlhf"
HELPERS = Path(__file__).parent
OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}

server = multiprocessing.get_context("forkserver")
IMPORTED = [
    "ppo_rlhf.train_both",
    "ppo_rlhf.tldr.all",
    "ppo_rlhf.rlvr.policy",
    "torch.utils.tensorboard",
    "torch.distributed.run",
]
IMPORTED += ["matplotlib.figure", "matplotlib.backends.backend_agg", "PIL.PngImagePlugin", "rich.progress"]
IMPORTED += ["rich.table", "pandas", "scipy.stats", "tests.helpers.warm"]
server.set_forkserver_preload(IMPORTED)
save_picture = Figure.savefig


@dataclass(frozen=True)
class Result:
    status: int  # negative: the signal that ended the process
    stdout: str
    stderr: str


def _run_script(words: Sequence[str], environment: dict[str, str]) -> None:
    """What `python <words>` does, in this process: a script, -m and a module, or -c and code, with its arguments."""
    gc.freeze()  # else the first collection looks at everything that the server has imported
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    # Where the tests run in the background of a shell, they ignore Ctrl-C, and so would this process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    # huggingface_hub has read its variables when it was imported.
    huggingface_hub.hf_api.api.endpoint = importlib.reload(huggingface_hub.constants).ENDPOINT
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).parent))  # where a script finds its neighbours
        runpy.run_path(words[0], run_name="__main__")


def _run_instead(words: Sequence[str], environment: dict[str, str], kept: Collection[int]) -> None:
    """Run a script in a child process that was about to execute a command, and end the process."""
    status = 1
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", closefd=False) for stream in (1, 2))  # not those of pytest
    try:
        above = 3
        for descriptor in [*sorted(kept), 2**16]:
            os.closerange(above, descriptor)  # what a command that is executed does not get
            above = descriptor + 1
        _run_script(words, environment)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


class ForkingPopen(subprocess.Popen):
    """A child process as always, but the child does not execute Python for what it has imported already."""

    def __init__(self, args: Any, *more: Any, **options: Any):
        environment = dict(os.environ if options.get("env") is None else options["env"])
        words = [] if isinstance(args, str | bytes) else [str(word) for word in args]
        program = [word for word in words[1:] if word != "-u"]
        if program[:1] == ["-W"]:
            program = program[2:]
        python = bool(program) and shutil.which(words[0], path=environment.get("PATH")) == sys.executable
        if python and (program[0] in ("-m", "-c") or _is_ours(program[0])):
            start = functools.partial(_run_instead, program, environment)
            options["preexec_fn"] = functools.partial(start, tuple(options.get("pass_fds", ())))
            sys.stdout.flush()  # else the child would print it once more
            sys.stderr.flush()
        super().__init__(args, *more, **options)


def _is_ours(script: str) -> bool:
    return bool({SCRIPTS, SCRIPTS.parent / "benchmark"} & {*Path(script).parents})


def _save_first_panel(figure: Figure, *arguments: Any, **options: Any) -> None:
    for axes in figure.axes[1:]:
        axes.remove()
    save_picture(figure, *arguments, **options)


def _run(
    script: str, arguments: list[str], folder: str, environment: dict[str, str], outputs: list[str], pictures: bool
) -> None:
    os.chdir(folder)
    for stream, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    subprocess.Popen = ForkingPopen
    if not pictures:
        Figure.savefig = _save_first_panel
    _run_script([script, *arguments], {**os.environ, **environment})


class Launched:
    """A process that runs a script of ppo_rlhf/, or any other file.

    pictures: whether pictures are drawn whole. Else they have their first panel only.
    """

    def __init__(self, script: str | Path, *arguments: str, folder: Path, pictures: bool = False, **environment: str):
        self._outputs = tempfile.TemporaryDirectory()
        self._paths = [f"{self._outputs.name}/{name}" for name in ("stdout", "stderr")]
        where = (str(folder), OFFLINE | environment, self._paths)
        self.process = server.Process(target=_run, args=(str(SCRIPTS / script), list(arguments), *where, pictures))
        self.process.start()

    def wait(self, timeout: float = 300) -> Result:
        self.process.join(timeout)
        ended = self.process.exitcode is not None
        if not ended:
            self.process.kill()
        texts = [Path(path).read_text(errors="replace") if Path(path).exists() else "" for path in self._paths]
        if not ended:
            said = "".join(text[-1000:] for text in texts)
            raise TimeoutError(f"no end after {timeout} seconds; so far it said {said}")
        return Result(self.process.exitcode, *texts)


def launch(script: str | Path, *arguments: str, folder: Path, pictures: bool = False, **environment: str) -> Result:
    """Run a script to its end."""
    return Launched(script, *arguments, folder=folder, pictures=pictures, **environment).wait()


def launch_together(
    count: int, script: str | Path, *arguments: str, folder: Path, **environment: str
) -> list[Result]:
    """Run a script to its end as so many processes that find each other, with the environment of torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", **environment}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    launched = [Launched(script, *arguments, folder=folder, **shared, **rank) for rank in ranks]
    return [process.wait() for process in launched]


@contextlib.contextmanager
def read_by_nobody() -> Iterator[None]:
    """Within the block, standard output is a pipe whose reader has gone. At its end, what is left is flushed."""
    kept, (reader, writer) = os.dup(1), os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.close(writer)
    try:
        with open(1, "w", closefd=False) as stdout, contextlib.redirect_stdout(stdout):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
