"""The Hugging Face hub: files of data sets, and what its clients raise, as one line."""

import contextlib
import fnmatch
import functools
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ppo_rlhf.lib.errors import InputError

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


@dataclass(frozen=True, kw_only=True)
class HubFiles:
    """Files of a data set on the hub. Plain data, because `datasets` 4 and later run no loading scripts."""

    repository: str
    names: tuple[str, ...]  # patterns, in which {split} is replaced by a split; there is a file for each
    revision: str | None = None

    def matching(self, files: Iterable[str], split: str = "") -> list[str]:
        """Which of all the repository's files they are, by name. Raises an OSError if one is not there."""
        found = []
        for name in (name.format(split=split) for name in self.names):
            if not (matches := fnmatch.filter(files, name)):
                raise FileNotFoundError(f"the hub's {self.repository} has no {name}")
            found += sorted(matches)
        return found

    def download(self, split: str = "") -> tuple[str, ...]:
        """Their paths on disk. A process that wants a file which another one downloads waits for it at a lock."""
        from huggingface_hub import snapshot_download

        names = [name.format(split=split) for name in self.names]
        folder = snapshot_download(self.repository, repo_type="dataset", revision=self.revision, allow_patterns=names)
        there = [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*")]
        return tuple(f"{folder}/{name}" for name in self.matching(there, split))


@contextlib.contextmanager
def hub_data_errors(what: str, remedy: str) -> Iterator[None]:
    """As hub_errors, for the time in which a data set is downloaded and read."""
    from datasets.exceptions import DatasetGenerationError

    with hub_errors(what, remedy):
        try:
            yield
        except DatasetGenerationError as error:
            reason = " ".join(f"{type(error.__cause__).__name__}: {error.__cause__}".split())[:200]
            raise InputError(f"{what}: its files from the hub cannot be read, or not be copied: {reason}") from error
