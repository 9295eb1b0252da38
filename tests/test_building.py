"""How a world gets into the cache: built once, by one process, whole or not at all."""

import os
import time
from pathlib import Path

import pytest

from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.worlds import building


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PPO_RLHF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def build(folder: Path) -> None:
    with building.new_world(folder, "world") as place:
        (place / "stories.txt").write_text("A story.\n")


def test_a_world_is_built_once_and_another_is_another(cache):
    built = [building.find("x", made_of, build) for made_of in (["a"], ["a"], ["b"])]
    assert built[0] == built[1] != built[2] and {folder.parent for folder in built} == {cache}
    first = built[0].stat().st_mtime_ns
    assert building.find("x", ["a"], lambda folder: pytest.fail("again")).stat().st_mtime_ns == first


def test_only_the_first_process_builds(cache, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    waits = []

    def first_process_builds(seconds):
        waits.append(seconds)
        monkeypatch.setenv("RANK", "0")
        building.find("x", [], build)
        monkeypatch.setenv("RANK", "1")

    monkeypatch.setattr(building.time, "sleep", first_process_builds)
    assert building.find("x", [], lambda folder: pytest.fail("the second builds")).exists() and len(waits) == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_nothing_half_built(cache, error):
    def fail(folder):
        with building.new_world(folder, "world") as place:
            (place / "stories.txt").touch()
            raise error

    with pytest.raises(error):
        building.find("x", [], fail)
    assert list(cache.iterdir()) == []


def test_two_runs_may_build_the_same_world(tmp_path):
    """The first to have it ready gives it its name."""
    with building.new_world(tmp_path / "world", "posts") as place:
        (place / "second").touch()
        (tmp_path / "world").mkdir()
        (tmp_path / "world" / "first").touch()
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")} == {"world", "world/first"}


def test_what_killed_builds_have_left_is_removed(tmp_path):
    """But not what may still be built, nor what belongs to another world."""
    for name in ("world.a.tmp", "world.b.tmp", "world", "world2.a.tmp", "my-world.a.tmp", "world.a"):
        (tmp_path / name / "model").mkdir(parents=True)
        os.utime(tmp_path / name, (0, time.time() - 3600 * (1 if ".b." in name else 25)))
    found = building.begin_building(tmp_path / "world")
    left = {"world.b.tmp", "world", "world2.a.tmp", "my-world.a.tmp", "world.a", found.name}
    assert {path.name for path in tmp_path.iterdir()} == left and list(found.iterdir()) == []


def test_a_world_that_has_lost_lines_is_found(cache):
    world = building.find("x", [], build)
    (world / "stories.txt").write_text("A")
    with pytest.raises(InputError, match=r"stories.txt is damaged or gone; remove .*, and it is built again"):
        building.find("x", [], build)


def test_no_home_is_said(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("PPO_RLHF_CACHE")
    with pytest.raises(InputError, match="PPO_RLHF_CACHE"):
        building.find("x", [], Path.mkdir)
