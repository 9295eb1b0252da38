"""Where a run is shown: TensorBoard, Weights & Biases, Trackio, and the card of the model that it uploads."""

import csv
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import wandb
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_run import FakeArgs

from ppo_rlhf.lib import run as run_module, tracking
from ppo_rlhf.lib.errors import InputError

pytestmark = pytest.mark.usefixtures("in_a_fresh_folder")
RESULTS = {"test_accuracy": 0.75, "validation/rouge1": 0.25, "test_labels": 40, "ceiling": None}
SAMPLES = [{"query": "q", "score": 1.5}]
LENGTHS = [{"text": "query", "mean": 3.5}, {"text": "sample", "mean": 2.0}]


class Hub:
    """What a run sees of the hub."""

    cards: dict[str, str] = {}  # noqa: RUF012

    def create_repo(self, name: str, exist_ok: bool) -> huggingface_hub.RepoUrl:
        return huggingface_hub.RepoUrl(
            f"https://user:word@hub.test/owner/{name}", endpoint="https://user:word@hub.test"
        )

    def upload_folder(self, repo_id: str, folder_path: str) -> None:
        self.cards[repo_id] = (Path(folder_path) / "README.md").read_text()


def test_results_tables_and_the_models_address_reach_the_trackers(monkeypatch):
    """Weights & Biases; what a real run leaves in a file is looked at in test_safety.py. And TensorBoard, where
    results are the last points.
    """
    wandb.teardown()  # an earlier test of this process may have begun with another WANDB_MODE, which it remembers
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logged: dict[str, object] = {}
    monkeypatch.setattr(tracking.WandBTracker, "log", lambda tracker, values, **_: logged.update(values))
    shown = SimpleNamespace(url="https://wandb.test/run")
    monkeypatch.setattr(Accelerator, "get_tracker", lambda *_, **__: shown)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    run = run_module.Run(FakeArgs(track=True, upload_model=True), Accelerator(cpu=True), {"batch": 8})
    run.start_logging(0)
    for step in range(2):
        run.log(step, {"objective/kl": step + 0.5, "time": float(step)})
    run.log_samples(1, SAMPLES)
    run.write_table("lengths", LENGTHS)
    (run.model_folder / "policy").mkdir(parents=True)
    run.finish("policy", **RESULTS)
    tables = {name: len(logged.pop(name).data) for name in ("samples", "lengths")}
    assert tables == {"samples": 1, "lengths": 2}
    expected = {"test_accuracy": 0.75, "validation/rouge1": 0.25, "test_labels": 40}
    expected |= {"model/policy": f"https://hub.test/owner/{run.folder.name}", "objective/kl": 1.5, "time": 1.0}
    assert logged == expected
    (card,) = Hub.cards.values()
    assert "(https://wandb.test/run)" in card

    events = EventAccumulator(str(run.folder)).Reload()
    points = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert points.pop("objective/kl") == [(0, 0.5), (1, 1.5)] and points.pop("time")
    assert points == {"test_accuracy": [(2, 0.75)], "validation/rouge1": [(2, 0.25)], "test_labels": [(2, 40.0)]}
    with (run.folder / "lengths.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [{name: str(value) for name, value in row.items()} for row in LENGTHS]


def test_a_model_without_a_tracked_run_has_a_card_without_a_link(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert tracking.upload_model(tmp_path, "", "name") == "https://hub.test/owner/name"
    assert "http" not in Hub.cards["owner/name"] and "ppo_rlhf.json" in Hub.cards["owner/name"]


def test_trackio_must_be_installed(monkeypatch):
    args = SimpleNamespace(track=True, tracker="trackio", upload_model=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"^--tracker trackio is not installed: pip install 'trackio>=0\.43,<0\.44'$"
    ):
        tracking.check(args, "run")


def test_trackio_gets_the_name_and_the_arguments_of_a_run(monkeypatch):
    monkeypatch.setattr(tracking, "TrackioTracker", lambda *project, **named: (*project, named))
    run = SimpleNamespace(meta={"name": "a run"}, args=FakeArgs(tracker="trackio"))
    expected = ("project", {"name": "a run", "config": {"seed": 3}, "resume": "allow"})
    assert tracking.tracker_of(run, {"seed": 3}) == expected
