"""Where a run is shown: TensorBoard, Weights & Biases, Trackio, and the card of the model that it uploads.

By `Run` of train_policy.py, whose text is that of train_reward.py, and which later chapters use.
"""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import wandb
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ppo_rlhf import train_policy

pytestmark = pytest.mark.usefixtures("in_a_fresh_folder")
RESULTS = {"test_accuracy": 0.75, "validation/rouge1": 0.25, "test_labels": 40, "ceiling": None}
NUMBERS = {name: value for name, value in RESULTS.items() if value is not None}
SAMPLES = [{"query": "q", "score": 1.5}]
RUN_ADDRESS = "https://tracker.test/run"


def start(**arguments: Any) -> train_policy.Run:
    args = train_policy.Args(seed=3, wandb_project_name="project", **arguments)
    run = train_policy.Run(args, Accelerator(cpu=True), {"batch": 8})
    run.open_logs(0, {"added": 1})
    return run


class Tracker:
    """What a run sees of the library of a tracker: it keeps what it gets."""

    url = RUN_ADDRESS

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []  # the options of each start
        self.logged: dict[str, Any] = {}
        self.is_open = False

    def init(self, **options: Any) -> "Tracker":
        self.started.append(options)
        self.is_open = True
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        assert self.is_open
        self.logged |= values

    def finish(self) -> None:
        self.is_open = False


@pytest.fixture
def weights_and_biases(monkeypatch) -> Tracker:
    tracker = Tracker()
    monkeypatch.setattr(wandb, "init", tracker.init)
    return tracker


@pytest.fixture
def trackio(monkeypatch) -> Tracker:
    tracker = Tracker()
    library = SimpleNamespace(init=tracker.init, Table=lambda columns, data: SimpleNamespace(data=data))
    monkeypatch.setitem(sys.modules, "trackio", library)
    return tracker


class Hub:
    """What a run sees of the hub, which is a mirror whose address holds a password."""

    cards: dict[str, str] = {}  # noqa: RUF012
    private: dict[str, bool | None] = {}  # noqa: RUF012

    def create_repo(self, repo_id: str, exist_ok: bool, private: bool | None = None) -> huggingface_hub.RepoUrl:
        name = repo_id if "/" in repo_id else f"owner/{repo_id}"
        self.private[name] = private
        return huggingface_hub.RepoUrl(f"https://user:word@hub.test/{name}", endpoint="https://user:word@hub.test")

    def upload_folder(self, repo_id: str, folder_path: str) -> None:
        self.cards[repo_id] = (Path(folder_path) / "README.md").read_text()


@pytest.fixture
def hub(monkeypatch) -> type[Hub]:
    monkeypatch.setattr(Hub, "cards", {})
    monkeypatch.setattr(Hub, "private", {})
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(train_policy, "HfApi", Hub)
    return Hub


def log_two_steps(run: Any) -> None:
    for step in range(2):
        run.log(step, {"objective/kl": step + 0.5, "time": float(step)})
    run.log_samples(1, SAMPLES)


def finish(run: Any) -> None:
    Path("models", run.folder.name, "policy").mkdir(parents=True)
    run.finish("policy", **RESULTS)


def points_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_results_samples_and_the_models_address_reach_the_trackers(name, weights_and_biases, trackio, hub, capsys):
    """And TensorBoard, where results are the last points. What W&B itself writes is looked at in test_safety.py."""
    tracker = {"wandb": weights_and_biases, "trackio": trackio}[name]
    run = start(track=True, tracker=name, upload_model=True)
    log_two_steps(run)
    finish(run)
    assert tracker.logged.pop("samples").data == [["q", 1.5]]
    address = f"https://hub.test/owner/{run.folder.name}"
    assert tracker.logged == NUMBERS | {"model/policy": address, "objective/kl": 1.5, "time": 1.0}
    assert not tracker.is_open
    assert (f"({RUN_ADDRESS})" in hub.cards[f"owner/{run.folder.name}"]) == (name == "wandb")
    assert "word" not in capsys.readouterr().out
    points = points_of(run.folder)
    assert points.pop("objective/kl") == [(0, 0.5), (1, 1.5)] and points.pop("time")
    assert points == {name: [(2, value)] for name, value in NUMBERS.items()}


# ---- What a tracker is told when it starts ---------------------------------------------------------------------


def test_weights_and_biases_gets_the_arguments_and_no_code_and_a_resumed_run_keeps_its_id(weights_and_biases):
    run = start(track=True, wandb_entity="team")
    start(track=True, wandb_entity="team", resume=str(run.folder))
    first, resumed = weights_and_biases.started
    assert first["id"] == resumed["id"] == run.meta["wandb_id"] != start().meta["wandb_id"]
    for options in (first, resumed):
        named = {"project": "project", "entity": "team", "name": run.folder.name, "resume": "allow"}
        assert options.items() >= (named | {"dir": str(run.folder)}).items()
        expected = {"seed": 3, "added": 1, "commit": run.meta["commit"]}
        assert options["config"].items() >= expected.items()
        settings = dict(options["settings"])
        assert settings["disable_code"] and settings["disable_git"] and settings["save_code"] is False


def test_trackio_gets_the_name_and_the_arguments_of_a_run(trackio):
    run = start(track=True, tracker="trackio")
    (options,) = trackio.started
    assert options.pop("config").items() >= {"seed": 3, "added": 1}.items()
    assert options == {"project": "project", "name": run.folder.name, "resume": "allow"}


def test_no_tracker_is_started_unless_the_arguments_say_so(weights_and_biases, trackio, hub):
    run = start()
    log_two_steps(run)
    finish(run)
    assert not (weights_and_biases.started or trackio.started or hub.cards)


def test_the_configuration_of_a_policy_run_names_the_labels_of_its_reward_model():
    """In addition to the arguments of `rewards`. Plots of lm-human-preference-details select runs by it."""
    Path("reward").mkdir()
    Path("reward/ppo_rlhf.json").write_text(json.dumps({"label_dataset": "labels.json"}))
    args = train_policy.Args(rewards=dataclasses.replace(train_policy.Args().rewards, trained_model="reward"))
    rewards = train_policy.config_for_plots(args)["rewards"]
    assert rewards.pop("label_dataset") == "labels.json"
    assert rewards == dataclasses.asdict(args.rewards)


def test_trackio_must_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)  # as if it weren't installed
    with pytest.raises(train_policy.InputError, match=r"^--track: the tracker does not start: .*trackio"):
        start(track=True, tracker="trackio")


# ---- The hub ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("private", [False, True])
def test_an_upload_is_private_and_has_an_owner_if_the_arguments_say_so(private, hub):
    """If they don't, the hub decides, and a repository that is there stays private."""
    run = start(upload_model=True, hf_entity="team", hf_private=private)
    log_two_steps(run)
    finish(run)
    assert hub.private == {f"team/{run.folder.name}": private or None}
    assert hub.cards.keys() == hub.private.keys()


@pytest.mark.parametrize("url", ["", None])
def test_a_model_without_an_address_of_its_run_has_a_card_without_a_link(url, hub, weights_and_biases):
    """As of an offline run."""
    weights_and_biases.url = url
    run = start(track=True, upload_model=True)
    log_two_steps(run)
    finish(run)
    card = hub.cards[f"owner/{run.folder.name}"]
    assert "http" not in card and "How it was trained" not in card and "ppo_rlhf.json" in card
