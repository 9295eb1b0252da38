"""Run a script in a process of its own, without the seconds that importing PyTorch takes.

The processes are forks of a server that has imported everything, but has run nothing. Each has the command line,
folder, environment, output and exit status of `python <script> <arguments>`.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent.parent / "ppo_rlhf"
OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "PPO_RLHF_THREADS": "1"}

server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["ppo_rlhf.train_both", "torch.utils.tensorboard", "matplotlib.figure", "rich.table"])


@dataclass(frozen=True)
class Result:
    status: int  # negative: the signal that ended the process
    stdout: str
    stderr: str


def _run(script: str, arguments: list[str], folder: str, environment: dict[str, str], outputs: list[str]) -> None:
    gc.freeze()  # else the first collection looks at everything that the server has imported
    # Where the tests run in the background of a shell, they ignore Ctrl-C, and so would this process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.update(environment)
    for stream, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


class Launched:
    """A process that runs a script of ppo_rlhf/, or any other file."""

    def __init__(self, script: str | Path, *arguments: str, folder: Path, **environment: str):
        self._outputs = tempfile.TemporaryDirectory()
        self._paths = [f"{self._outputs.name}/{name}" for name in ("stdout", "stderr")]
        arguments_of_run = (str(SCRIPTS / script), list(arguments), str(folder), OFFLINE | environment, self._paths)
        self.process = server.Process(target=_run, args=arguments_of_run)
        self.process.start()

    def stdout(self) -> str:
        """What it has printed so far."""
        return Path(self._paths[0]).read_text(errors="replace") if Path(self._paths[0]).exists() else ""

    def wait(self, timeout: float = 300) -> Result:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            said = self.stdout()[-1000:] + Path(self._paths[1]).read_text(errors="replace")[-1000:]
            raise TimeoutError(f"no end after {timeout} seconds; so far it said {said}")
        texts = [Path(path).read_text(errors="replace") if Path(path).exists() else "" for path in self._paths]
        return Result(self.process.exitcode, *texts)


def launch(script: str | Path, *arguments: str, folder: Path, **environment: str) -> Result:
    """Run a script to its end."""
    return Launched(script, *arguments, folder=folder, **environment).wait()


def start_together(
    count: int, script: str | Path, *arguments: str, folder: Path, **environment: str
) -> list[Launched]:
    """Run a script as so many processes that find each other, with the environment that torchrun gives them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), **environment}
    return [
        Launched(script, *arguments, folder=folder, **shared, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(count)
    ]


def launch_together(
    count: int, script: str | Path, *arguments: str, folder: Path, **environment: str
) -> list[Result]:
    """Run a script as so many processes to their end."""
    return [launched.wait() for launched in start_together(count, script, *arguments, folder=folder, **environment)]
