"""Where a run is shown: TensorBoard; Weights & Biases or Trackio, and the Hugging Face hub, if it asks for them.

`run` is a Run of run.py. Results at the end come to the step after the last. Files and lines next to marks are those
of openai/lm-human-preferences at commit cbfd210.
"""

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppo_rlhf.lib.base.errors import InputError, flag


def open_tensorboard(run: Any) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter

    for event_file in run.folder.glob("events.out.tfevents.*"):
        event_file.unlink()
    # Every step, 0-based, under the names of metrics.csv.   utils/core.py#L596-L618
    board = SummaryWriter(str(run.folder))
    board.add_text("arguments", "```json\n" + json.dumps(run.meta["args"], indent=2) + "\n```")

    def write(step: int, metrics: dict[str, float]) -> None:
        # One event for a step is ten times as fast as one for each metric, which a long run's resume shows.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        board.file_writer.add_summary(Summary(value=values), step)

    def write_results(results: dict[str, Any]) -> None:
        if found := numbers(results):
            write(len(run.rows), found)

    for row in run.rows:
        write(int(row["step"]), {name: value for name, value in row.items() if name != "step"})
    run.writers.append(write)
    run.result_writers.append(write_results)
    run.closers.append(board.close)


def numbers(results: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in results.items() if isinstance(value, int | float)}


def open_wandb(run: Any, config: dict[str, Any]) -> None:
    """Log a run to Weights & Biases as well. config: what is known of it."""
    import wandb

    try:
        tracked = wandb.init(
            project=run.args.wandb_project_name,
            entity=run.args.wandb_entity,
            name=run.meta["name"],
            id=run.meta["wandb_id"],
            resume="allow",
            config=config,
            dir=str(run.folder),
            settings=wandb.Settings(disable_code=True, disable_git=True),  # a remote's address may hold a token
        )
    except wandb.errors.Error as error:
        if not run.args.resume:
            run.close_logs()  # TensorBoard's thread still writes into the folder
            shutil.rmtree(run.folder)
        raise InputError(f"{flag('track')}: {error}; run `wandb login`, or set WANDB_MODE=offline") from error
    run.save_meta(wandb_id=tracked.id)
    run.address = tracked.url or ""  # none if it is offline

    def write_table(name: str, rows: list[dict[str, Any]], step: int) -> None:
        data = [list(row.values()) for row in rows[: wandb.Table.MAX_ROWS]]
        tracked.log({name: wandb.Table(columns=list(rows[0]), data=data)}, step=step)

    def close() -> None:
        if (picture := run.folder / "learning_curves.png").exists():
            tracked.summary["learning_curves"] = wandb.Image(str(picture))
        tracked.finish()

    run.writers.append(lambda step, metrics: tracked.log(metrics, step=step))
    run.table_writers.append(write_table)
    run.result_writers.append(tracked.summary.update)
    run.closers.append(close)


def open_trackio(run: Any, config: dict[str, Any]) -> None:
    """Log a run to Trackio, which needs no account: files on this machine, unless its own variables say otherwise."""
    import trackio

    tracked = trackio.init(run.args.wandb_project_name, name=run.meta["name"], config=config, resume="allow")

    def write(step: int, metrics: dict[str, Any]) -> None:
        # Trackio keeps `time` for itself.
        tracked.log({"seconds" if name == "time" else name: value for name, value in metrics.items()}, step=step)

    def write_table(name: str, rows: list[dict[str, Any]], step: int) -> None:
        data = [list(row.values()) for row in rows]
        write(step, {name: trackio.Table(columns=list(rows[0]), data=data)})

    def write_results(results: dict[str, Any]) -> None:
        texts = {name: trackio.Markdown(value) for name, value in results.items() if isinstance(value, str)}
        write(len(run.rows), numbers(results) | texts)

    run.writers.append(write)
    run.table_writers.append(write_table)
    run.result_writers.append(write_results)
    run.closers.append(tracked.finish)


OPEN: dict[str, Callable[[Any, dict[str, Any]], None]] = {"wandb": open_wandb, "trackio": open_trackio}


WANDB_MODES = ("online", "offline", "shared", "disabled")


def check(args: Any, name: str) -> None:
    """Refuse, before the training, what a tracker or the hub would refuse. name: of the run."""
    if args.track and args.tracker == "trackio" and importlib.util.find_spec("trackio") is None:
        raise InputError(f"{flag('tracker')} trackio is not installed: pip install 'trackio>=0.43,<0.44'")
    mode = os.environ.get("WANDB_MODE", "online")
    if args.track and args.tracker == "wandb" and mode not in WANDB_MODES:
        raise InputError(f"{flag('track')}: WANDB_MODE is {mode!r}; it must be one of {', '.join(WANDB_MODES)}")
    if args.upload_model:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        try:
            validate_repo_id(f"{args.hf_entity or 'owner'}/{name}-policy")  # the longest
        except HFValidationError as error:
            raise InputError(
                f"{flag('upload_model')}: {error} {flag('exp_name')} and {flag('hf_entity')} say what it is called"
            ) from error


def upload_model(folder: Path, entity: str, name: str, run_address: str = "") -> str:
    """Push a model's folder to the Hugging Face hub, with a model card. Returns its address.

    run_address: of the run that trained it, for the card. A repository that is there stays private if it is.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    repository = f"{entity}/{name}" if entity else name
    card = f"# {name}\n\nTrained by ppo_rlhf. `ppo_rlhf.json` next to the weights names base model and task.\n"
    card += f"\n[How it was trained]({run_address})\n" if run_address else ""
    (folder / "README.md").write_text(f"---\nlibrary_name: transformers\ntags: [ppo_rlhf]\n---\n\n{card}")
    try:
        api = HfApi()
        address = api.create_repo(repository, exist_ok=True)
        repository = address.repo_id
        api.upload_folder(repo_id=repository, folder_path=str(folder))
        return re.sub(r"(?<=://)[^/@]*@", "", str(address))  # a mirror's may hold a password
    except (OSError, HfHubHTTPError, ValueError) as error:
        raise InputError(f"{folder} is saved, but could not be pushed to {repository}: {error}") from error
