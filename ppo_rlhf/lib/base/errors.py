"""Errors, and how a script ends: one line that says what is wrong and what would do, and an exit status."""

import contextlib
import errno
import functools
import io
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from safetensors import SafetensorError


class InputError(ValueError):
    """Something that the user gave does not fit. The message is one line: what, what is wrong, what would do."""


class SharedError(InputError):
    """An InputError that every process raises at the same place, so that they can still do something together."""


class NumericalError(ValueError):
    """A number that the run depends on is impossible. The message is one line: which, where, what is kept."""


class Stopped(BaseException):
    """The run was told to stop by SIGTERM. The message is one line: where, and how to resume."""


TYPED_AS: ContextVar[dict[str, str]] = ContextVar("TYPED_AS")  # of arguments with another name than their own


def typed(name: str) -> str:
    """The name under which an argument is typed, for messages: its own, or the one that `typed_as` gives it."""
    return TYPED_AS.get({}).get(name, name)


def flag(name: str) -> str:
    """An argument as it is typed, for messages: --ppo.lr, or --policy.ppo.lr in the stage of a policy."""
    return f"--{typed(name)}"


@contextlib.contextmanager
def typed_as(names: dict[str, str]) -> Iterator[None]:
    """Within the block, messages name these arguments of a script as the script that runs it has them."""
    outside = TYPED_AS.set(names)
    try:
        yield
    finally:
        TYPED_AS.reset(outside)


@contextlib.contextmanager
def input_errors(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Within the block, errors of these kinds become an InputError: what is wrong, a colon, and what they say."""
    try:
        yield
    except kinds as error:
        raise InputError(f"{what}: {error}") from error


how_to_go_on = ""  # of the run that this process began last, for whoever stops it
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}  # of a write, which names no file


def run_script(main: Callable[[], Any]) -> None:
    """Run main(); turn a user error into one line and exit status 2."""
    if sys.stdout is None:  # it was closed; a file must not take its number, which libraries may write to
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what its encoding lacks must not end a run
    import transformers  # takes a second that a command without models need not wait for

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    threading.excepthook = thread_failed
    try:
        with handler_of(signal.SIGTERM, stop_now), handler_of(signal.SIGINT, interrupt_now):
            main()
    except (InputError, NumericalError) as error:
        exit_with(str(error))
    except BrokenPipeError:  # whoever read what this prints, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left to print
        if how_to_go_on:
            exit_with(with_how_to_go_on("nobody reads what this prints any more"))
        sys.exit(0)
    except OSError as error:
        if error.filename is None and error.errno not in DISK_ERRORS:
            raise
        exit_with(f"{error.filename or 'writing failed'}: {error.strerror}")
    except SafetensorError as error:  # of a write; what cannot be read is an InputError
        exit_with(f"writing failed: {error}")
    except (MemoryError, RuntimeError) as error:
        if "gloo/transport" in str(error):  # of a collective; what went wrong, the other process says
            exit_with(with_how_to_go_on("another process has ended"))
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        exit_with(
            "the memory does not suffice; a smaller local_micro_batch_size needs less in training, and a smaller "
            "local_rollout_batch_size where nothing is trained"
        )
    except Stopped as stopped:
        leave_at_the_next_signal(0)
        if is_first_process():
            print(visible(str(stopped)), flush=True)
    except KeyboardInterrupt:
        leave_at_the_next_signal(130)
        if not is_first_process():
            sys.exit(130)
        exit_with(with_how_to_go_on("interrupted"), status=130)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@contextlib.contextmanager
def handler_of(number: signal.Signals, handler: Callable[[int, Any], None]) -> Iterator[None]:
    """The effect of a signal on this process within the block, unless it is ignored; only the main thread can say."""
    previous = signal.getsignal(number) or signal.SIG_DFL
    if threading.current_thread() is not threading.main_thread() or previous is signal.SIG_IGN:
        yield
        return
    process = os.getpid()

    def handle(signal_number: int, frame: Any) -> None:
        if os.getpid() == process:
            handler(signal_number, frame)
        else:
            # Forks inherit the handler, but must end when they are told to: a Pool waits until its workers have.
            signal.signal(number, previous)
            os.kill(os.getpid(), number)

    signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, previous)


def stop_now(signal_number: int, frame: Any) -> None:
    line = with_how_to_go_on("stopped by SIGTERM")
    leave_at_the_next_signal(0, line)
    raise Stopped(line)


def interrupt_now(signal_number: int, frame: Any) -> None:
    leave_at_the_next_signal(130, with_how_to_go_on("error: interrupted"))
    raise KeyboardInterrupt


def with_how_to_go_on(line: str) -> str:
    return line + (f"; {how_to_go_on}" if how_to_go_on else "")


def leave_at_the_next_signal(status: int, line: str = "") -> None:
    """Let a further signal end the process at once, with a line and a status: tidying up may take seconds."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: leave(status, line))


def leave(status: int, line: str = "") -> None:
    """End the process at once."""
    os.write(2, f"{visible(line)}\n".encode() if line and is_first_process() else b"")
    os._exit(status)


def thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Say nothing of a full disk that TensorBoard's thread meets: the main thread meets it too, and tells."""
    if not (isinstance(failure.exc_value, OSError) and failure.exc_value.errno in DISK_ERRORS):
        threading.__excepthook__(failure)


def environment_number(name: str, default: int, least: int, most: int = 999_999) -> int:
    """A whole number among the environment's variables."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,6}", text) or not least <= int(text) <= most:
        raise InputError(f"{name} is {text!r}; it must be a number from {least} to {most}")
    return int(text)


def is_first_process() -> bool:
    """Whether this is the process that talks, also before accelerate has found the others."""
    return not re.fullmatch("0*[1-9][0-9]*", os.environ.get("RANK", "0"))


@functools.cache
def say_once(line: str) -> None:
    """Print a line, on the first process, the first time that this is called with it."""
    if is_first_process():
        print(line)


PATIENCE = 5.0  # seconds in which a launcher ends all processes after the first has failed


def exit_with(message: str, status: int = 2) -> None:
    """Print one line and exit. Another process than the first speaks only if the first has not failed as well."""
    message = visible(re.sub(r"(?<=://)[^/\s@]*@", "", " ".join(message.split())))  # an address may hold a password
    if is_first_process():
        print(f"error: {message}", file=sys.stderr)
    elif first_process_goes_on():
        print(f"error on process {os.environ['RANK']}: {message}", file=sys.stderr)
    sys.exit(status)


def first_process_goes_on() -> bool:
    """Whether the first process or its launcher, who listen where the processes meet, still do so after a while."""
    begun = time.monotonic()
    with contextlib.suppress(OSError, KeyError, ValueError):  # KeyError, ValueError: there is no such place
        while time.monotonic() - begun < PATIENCE:
            place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            socket.create_connection(place, timeout=PATIENCE).close()
            time.sleep(0.2)
        return True
    return False


def visible(text: str) -> str:
    """A text whose control characters, which could command a terminal, are shown as the signs for them.

    Line breaks and tabs stay.
    """
    signs = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    return text.translate(signs | dict.fromkeys(range(0x7F, 0xA0), 0xFFFD))
