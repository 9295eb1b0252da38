"""Weights & Biases, and the upload of a model to the Hugging Face hub: for runs that ask for them."""

import shutil
from pathlib import Path
from typing import Any

from ppo_rlhf.lib.errors import InputError, flag


def open_wandb(run: Any, config: dict[str, Any]) -> None:
    """Log a run to Weights & Biases as well. config: in addition to its arguments."""
    import wandb

    try:
        tracked = wandb.init(
            project=run.args.wandb_project_name,
            entity=run.args.wandb_entity,
            name=run.meta["name"],
            id=run.meta["wandb_id"],
            resume="allow",
            config=run.meta["args"] | config | {"commit": run.meta["commit"]},
            dir=str(run.folder),
            settings=wandb.Settings(disable_code=True, disable_git=True),  # a remote's address may hold a token
        )
    except wandb.errors.Error as error:
        if not run.args.resume:
            shutil.rmtree(run.folder)
        raise InputError(f"{flag('track')}: {error}; run `wandb login`, or set WANDB_MODE=offline") from error
    run.save_meta(wandb_id=tracked.id)

    def write_samples(step: int, samples: list[dict[str, Any]]) -> None:
        rows = [list(sample.values()) for sample in samples]
        tracked.log({"samples": wandb.Table(columns=list(samples[0]), data=rows)}, step=step)

    def close() -> None:
        if (picture := run.folder / "learning_curves.png").exists():
            tracked.summary["learning_curves"] = wandb.Image(str(picture))
        tracked.finish()

    run.writers.append(lambda step, metrics: tracked.log(metrics, step=step))
    run.sample_writers.append(write_samples)
    run.closers.append(close)


def upload_model(folder: Path, entity: str, name: str) -> None:
    """Push a model's folder to the Hugging Face hub, with a model card."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    repository = f"{entity}/{name}" if entity else name
    card = f"# {name}\n\nTrained by ppo_rlhf. `ppo_rlhf.json` next to the weights names base model and task.\n"
    (folder / "README.md").write_text(f"---\nlibrary_name: transformers\ntags: [ppo_rlhf]\n---\n\n{card}")
    try:
        api = HfApi()
        repository = api.create_repo(repository, exist_ok=True).repo_id
        api.upload_folder(repo_id=repository, folder_path=str(folder))
    except (OSError, HfHubHTTPError, ValueError) as error:
        raise InputError(f"{folder} is saved, but could not be pushed to {repository}: {error}") from error
