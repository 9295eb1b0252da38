"""Where a run is shown beyond its folder: Weights & Biases or Trackio, and the Hugging Face hub, if it asks for them.

`run` is a Run of run.py.
"""

import importlib.util
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, TrackioTracker, WandBTracker

from ppo_rlhf.lib.errors import InputError, flag


def tracker_of(run: Any, config: dict[str, Any]) -> GeneralTracker:
    """The tracker that a run's arguments ask for. config: what is known of the run."""
    name, project = run.meta["name"], run.args.wandb_project_name
    if run.args.tracker == "trackio":  # needs no account: files on this machine, unless its own variables differ
        return TrackioTracker(project, name=name, config=config, resume="allow")
    import wandb

    return WandBTracker(
        project,
        entity=run.args.wandb_entity,
        name=name,
        id=run.meta["wandb_id"],
        resume="allow",
        config=config,
        dir=str(run.folder),
        # A remote's address may hold a token. WANDB_SAVE_CODE would save code all the same.
        settings=wandb.Settings(disable_code=True, disable_git=True, save_code=False),
    )


def check(args: Any, name: str) -> None:
    """Refuse, before the training, what a tracker or the hub would refuse. name: of the run."""
    if args.track and args.tracker == "trackio" and importlib.util.find_spec("trackio") is None:
        raise InputError(f"{flag('tracker')} trackio is not installed: pip install 'trackio>=0.43,<0.44'")
    if args.upload_model:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        try:
            validate_repo_id(f"{args.hf_entity or 'owner'}/{name}-policy")  # the longest
        except HFValidationError as error:
            raise InputError(
                f"{flag('upload_model')}: {error} {flag('exp_name')} and {flag('hf_entity')} say what it is called"
            ) from error


def upload_models(run: Any, parts: Collection[str]) -> dict[str, str]:
    """Push models/<run>/<part> to the hub, as <run> or <run>-<part> if there are several. Their addresses."""
    address = ""
    if run.args.track and run.args.tracker == "wandb":
        address = run.accelerator.get_tracker("wandb", unwrap=True).url or ""  # none if it is offline
    addresses = {}
    for part in parts:
        name = run.meta["name"] if len(parts) == 1 else f"{run.meta['name']}-{part}"
        addresses[f"model/{part}"] = upload_model(run.model_folder / part, run.args.hf_entity, name, address)
    return addresses


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
