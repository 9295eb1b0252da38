"""How a world gets into the cache: built once, by one process, whole or not at all."""

from pathlib import Path

import pytest

from ppo_rlhf.worlds import building


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PPO_RLHF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def build(place: Path) -> None:
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
    def fail(place):
        (place / "stories.txt").touch()
        raise error

    with pytest.raises(error):
        building.find("x", [], fail)
    assert list(cache.iterdir()) == []


def test_two_runs_may_build_the_same_world(cache):
    """The first to have it ready gives it its name."""

    def build_while_another_does(place: Path) -> None:
        (place / "second").touch()
        folder = place.with_name(place.name.split(".")[0])
        folder.mkdir()
        (folder / "first").touch()

    assert [path.name for path in building.find("x", [], build_while_another_does).iterdir()] == ["first"]
    assert len(list(cache.iterdir())) == 1
