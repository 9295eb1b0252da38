"""The Hugging Face hub: files of data sets, and what its clients raise, as one line."""

import contextlib
import functools
import re
import urllib.error
import urllib.request
from collections.abc import Iterator

from ppo_rlhf.lib.base.errors import InputError

OPENAI_REPOSITORY = "vwxyzjn/lm-human-preferences"  # a copy of OpenAI's labels and Reddit posts of 2019


HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@.+)?")  # anything else is meant to be a path


@functools.cache
def hub_is_reachable() -> bool:
    """Ask the hub once. If it does not answer, its clients use their caches at once and do not retry for a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        with urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=10):
            return True
    except urllib.error.HTTPError:
        return True  # an answer, if not a friendly one
    except OSError:
        constants.HF_HUB_OFFLINE = True
        return False


@contextlib.contextmanager
def hub_errors(what: str, remedy: str) -> Iterator[None]:
    """For the time of a download: turn what the hub's clients raise into one line that says what to do."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    reachable = hub_is_reachable()
    try:
        yield
    except InputError:
        raise
    except (OSError, HfHubHTTPError, HFValidationError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        reason = f"{said}; if it is not on the hub" if reachable else "the hub cannot be reached; without a network"
        raise InputError(f"{what}: no such local path, and {reason}, {remedy}") from error
