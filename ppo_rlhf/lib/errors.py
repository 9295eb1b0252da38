"""What a script tells its user: lines, and how it ends, with one line that says what is wrong and what would do."""

import contextlib
import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError

from ppo_rlhf.train_policy import InputError


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


def run_script(main: Callable[[], Any]) -> None:
    """Run main(); turn a user error into one line and exit status 2."""
    import transformers  # takes a second that a command without models need not wait for

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with on_sigterm(stop_now):
            main()
    except (InputError, NumericalError) as error:
        exit_with(str(error))
    except (OSError, SafetensorError) as error:  # of a write; what cannot be read is an InputError
        exit_with(f"{type(error).__name__}: {error}")
    except (MemoryError, torch.OutOfMemoryError):
        exit_with(
            "the memory does not suffice; a smaller local_micro_batch_size needs less in training, and a smaller "
            "local_rollout_batch_size where nothing is trained"
        )
    except Stopped as stopped:
        say(str(stopped))
    except KeyboardInterrupt:
        exit_with(with_how_to_go_on("interrupted"), status=130)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@contextlib.contextmanager
def on_sigterm(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """What SIGTERM does to this process within the block."""
    previous = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def stop_now(signal_number: int, frame: Any) -> NoReturn:
    raise Stopped(with_how_to_go_on("stopped by SIGTERM"))


def with_how_to_go_on(line: str) -> str:
    return line + (f"; {how_to_go_on}" if how_to_go_on else "")


def is_first_process() -> bool:
    """Whether this is the process that talks, also before accelerate has found the others."""
    return os.environ.get("RANK", "0") == "0"


def say(line: str) -> None:
    """Print a line, once however many processes there are."""
    if is_first_process():
        print(visible(line), flush=True)


say_once = functools.cache(say)  # the first time that it is called with a line


def exit_with(message: str, status: int = 2) -> NoReturn:
    """Print one line and exit."""
    message = re.sub(r"(?<=://)[^/\s@]*@", "", " ".join(message.split()))  # an address may hold a password
    print(f"error: {visible(message)}", file=sys.stderr)
    sys.exit(status)


def visible(text: str) -> str:
    """A text whose control characters, which could command a terminal, are shown as the signs for them.

    Line breaks and tabs stay.
    """
    signs = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    return text.translate(signs | dict.fromkeys(range(0x7F, 0xA0), 0xFFFD))
