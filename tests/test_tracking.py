"""Where a run is shown: TensorBoard, Weights & Biases, Trackio, and the card of the model that it uploads."""

import csv
import importlib.util
import json
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import wandb
from accelerate import Accelerator
from test_run import FakeArgs, read_events
from wandb.proto import wandb_internal_pb2

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


def tracked_run(monkeypatch, tracker: str, address: str = "") -> run_module.Run:
    """A run of two steps with samples, a table, results and an uploaded model."""
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    args = FakeArgs(track=True, tracker=tracker, upload_model=True)
    run = run_module.Run(args, Accelerator(cpu=True), {"batch": 8})
    run.start_logging(0)
    if address:
        tracked = run.accelerator.get_tracker("wandb", unwrap=True)
        monkeypatch.setattr(type(tracked), "url", address)
    for step in range(2):
        run.log(step, {"objective/kl": step + 0.5, "time": float(step)})
    run.log_samples(1, SAMPLES)
    run.write_table("lengths", LENGTHS)
    (run.model_folder / "policy").mkdir(parents=True)
    run.finish("policy", **RESULTS)
    return run


def records(folder: Path) -> list[wandb_internal_pb2.Record]:
    """What Weights & Biases would send, from its file: LevelDB's log format, after 7 bytes of its own.

    Its service may write the last of them a little after the run has ended.
    """
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    for _ in range(600):
        data, place, found, parts = path.read_bytes(), 7, [], b""
        while place < len(data):
            if (left := 32_768 - place % 32_768) < 7:  # no record begins in what is left of a block
                place += left
                continue
            length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
            parts += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4) and place <= len(data):  # a whole record, or its last part
                found.append(wandb_internal_pb2.Record.FromString(parts))
                parts = b""
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        time.sleep(0.1)
    raise AssertionError(f"{path} has no end: {found[-1:]}")


def test_results_tables_and_the_models_address_reach_weights_and_biases(monkeypatch):
    wandb.teardown()  # an earlier test of this process may have begun with another WANDB_MODE, which it remembers
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tracked_run(monkeypatch, "wandb", address="https://wandb.test/run")
    summary, tables = {}, {}
    for record in records(run.folder):
        for item in record.summary.update:
            summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        for item in record.history.item:
            if item.nested_key[-1:] == ["nrows"]:
                tables[item.nested_key[0]] = json.loads(item.value_json)
    expected = {"test_accuracy": 0.75, "validation/rouge1": 0.25, "test_labels": 40}
    expected["model/policy"] = f"https://hub.test/owner/{run.folder.name}"
    assert {name: summary.get(name) for name in expected} == expected
    assert tables == {"samples": 1, "lengths": 2}
    (card,) = Hub.cards.values()
    assert "(https://wandb.test/run)" in card


def test_results_are_the_last_points_of_tensorboard(monkeypatch):
    run = run_module.Run(FakeArgs(), Accelerator(cpu=True), {"batch": 8})
    run.start_logging(0)
    run.log(0, {"objective/kl": 0.5})
    run.write_table("lengths", LENGTHS)
    run.finish(**RESULTS)
    results = {"test_accuracy": [(1, 0.75)], "validation/rouge1": [(1, 0.25)], "test_labels": [(1, 40.0)]}
    assert read_events(run.folder) == {"objective/kl": [(0, 0.5)]} | results
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


def test_trackio_gets_what_weights_and_biases_gets(monkeypatch, tmp_path):
    """With the package; its folder is set before it is imported."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    run = tracked_run(monkeypatch, "trackio")
    (shown,) = trackio.Api().runs("project")
    assert shown.name == run.folder.name and shown.config["seed"] == 3
    rows = trackio.SQLiteStorage.get_logs("project", run.folder.name)
    merged = {name: value for row in rows for name, value in row.items() if name not in ("timestamp", "step")}
    assert [row["objective/kl"] for row in rows if "objective/kl" in row] == [0.5, 1.5]
    assert [row["__time"] for row in rows if "__time" in row] == [0.0, 1.0]  # it keeps `time` for itself
    assert {name: merged[name] for name in ("test_accuracy", "validation/rouge1")} == {
        "test_accuracy": 0.75,
        "validation/rouge1": 0.25,
    }
    assert merged["model/policy"] == f"https://hub.test/owner/{run.folder.name}"
    assert {name for name, value in merged.items() if isinstance(value, dict)} == {"samples", "lengths"}
