"""A process for functions that aren't ours and read what a model writes: math-verify, reasoning-gym, a user's tool.

`Worker` starts this file as a program, with which it exchanges lines of JSON over a socket. A function may compute
forever where no handler of Python's is called, so the kernel ends the process when a request takes too long; the next
request starts another. A confined process can't fill files, start processes (unless it is root's) or, where the
system lets it give that up, use the network; it could delete files. A tool is the user's own code, and not confined.
"""

import contextlib
import ctypes
import functools
import importlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
import weakref

MEMORY = {"confined": 4 * 2**30, "free": 16 * 2**30}  # bytes of address space
LONGEST = 2**20  # bytes of an answer
SLOW, LONG, NONSENSE = "it takes too long", "its result is too long", "its answer makes no sense"
ENDINGS = {-signal.SIGALRM: SLOW, -signal.SIGPROF: SLOW, None: NONSENSE}  # by the status of the process


class Worker:
    """Calls a function in a process of its own, which begins with the first request and again after it has ended."""

    def __init__(self, name: str, *, computing: float, seconds: float, confined: bool = True):
        """name: package.module:name, in the current folder too unless confined. computing: seconds of processor time
        that a request may take, 0 for any; seconds: that it may take in all.
        """
        kind = "confined" if confined else "free"
        self.program = [sys.executable, "-P", __file__, name, kind, str(computing), str(seconds)]
        self.seconds, self.process = seconds, None

    def start(self) -> None:
        """Raises an ImportError that says why the function can't be called."""
        ours, theirs = socket.socketpair()
        with ours, theirs:  # in a session of its own, where no Ctrl-C reaches it
            self.process = subprocess.Popen(self.program, stdin=theirs, start_new_session=True)
            theirs.close()  # so that its end of the channel ends with it
            self.channel = ours.makefile("rwb")
            self.end = weakref.finalize(self, end, self.process, self.channel)  # at the latest when the script ends
            problem = json.loads(self.channel.readline() or '"its process ends while it is imported"')
            ours.settimeout(self.seconds + 1)
        if problem:
            self.close()
            raise ImportError(problem)

    def ask(self, *request: object) -> tuple[object, str]:
        """Returns the result and an empty text, or None and why there is none.

        Raises an ImportError as `start` does.
        """
        if self.process is None:
            self.start()
        try:
            self.channel.write(json.dumps(request).encode() + b"\n")
            self.channel.flush()
            result, problem = json.loads(self.channel.readline(LONGEST))
            return result, str(problem)
        except TimeoutError:  # the process has changed its own timers
            problem = SLOW
        except (OSError, ValueError, TypeError, RecursionError):  # it has ended, or its answer makes no sense
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)  # it has closed its end, but may not have ended yet
            problem = ENDINGS.get(self.process.returncode, f"its process ended with status {self.process.returncode}")
        except BaseException:
            self.close()  # otherwise the next request would get this one's answer
            raise
        self.close()
        return None, problem

    def close(self) -> None:
        """End the process."""
        if self.process:
            self.end()
            self.process = None


def end(process: subprocess.Popen, channel: io.BufferedIOBase) -> None:
    with contextlib.suppress(OSError):  # it has ended
        channel.close()
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
    process.wait()


def limit(kind: str) -> None:
    import resource  # not on every system

    limits = {resource.RLIMIT_AS: MEMORY[kind]}
    if kind == "confined":
        with contextlib.suppress(AttributeError):  # only Linux has it
            ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # CLONE_NEWUSER, which allows the other: CLONE_NEWNET
        os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # a thread counts as a process
        limits |= {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NPROC: 0}
    for name, most in limits.items():
        with contextlib.suppress(ValueError):  # where there is no such limit
            resource.setrlimit(name, (most, most))


def main() -> None:
    name, kind, *seconds = sys.argv[1:]
    channel = socket.socket(fileno=os.dup(0)).makefile("rw")
    for stream in range(3):  # what is printed goes nowhere
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    try:
        limit(kind)
        sys.path += [os.path.abspath(f"{__file__}/../../..")] + [""] * (kind == "free")
        module, _, path = name.partition(":")
        function = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        if not callable(function):
            raise TypeError("that is no function")
    except BaseException as error:  # a module may raise anything
        print(json.dumps(f"{type(error).__name__}: {error}"), file=channel, flush=True)
        return
    print('""', file=channel, flush=True)
    timers = {signal.SIGPROF: signal.ITIMER_PROF, signal.SIGALRM: signal.ITIMER_REAL}
    for line in channel:
        for number, most in zip(timers, seconds, strict=True):
            signal.signal(number, signal.SIG_DFL)  # it ends the process
            signal.setitimer(timers[number], float(most))
        try:
            said = json.dumps([function(*json.loads(line)), ""])
            said = said if len(said) < LONGEST else json.dumps([None, LONG])
        except Exception as error:  # of any kind: the function is another's
            said = json.dumps([None, traceback.format_exception_only(error)[-1].strip()[:4_096]])
        for timer in timers.values():
            signal.setitimer(timer, 0)
        print(said, file=channel, flush=True)


if __name__ == "__main__":
    main()
