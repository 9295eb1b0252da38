"""Reward models and critics as ordinary sequence-classification models.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import contextlib
import copy
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.lib import files, pretrained

FINAL_NORM_BIASES = ("ln_f.bias", "final_layer_norm.bias", "norm.bias")  # GPT-2; GPT-NeoX; others


def save_reward_model(
    folder: Path,
    reward_model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    info: dict,
    trust_remote_code: bool = False,
    weights: bool = True,
) -> None:
    """Save as an ordinary sequence-classification model that gives the same scores, gain and bias included.

    The score of such a model is linear in the final hidden state and has no constant. So the gain goes into the
    weight w of the score, and the constant c into the bias of the final layer norm, along w: w (h + c w / |w|^2)
    = w h + c. Where that norm has no bias, c is in the configuration as `score_constant` and must be added.
    `reward_head.safetensors` keeps what this changed, so that `load_reward_model` restores our model bit for bit.

    weights: False saves all but the weights, which a rehearsal does not need.
    """
    backbone, pad_id = reward_model.lm_backbone.base_model, pretrained.vocabulary_size(tokenizer)
    # Some models refuse a padding id beyond their embedding, so it is set once the embedding has a row for it.
    config = type(backbone.config).from_dict(backbone.config.to_dict() | {"pad_token_id": None})
    config.num_labels, config.score_constant = 1, 0.0
    with contextlib.nullcontext() if weights else torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(
            config, dtype=reward_model.reward_head.weight.dtype, trust_remote_code=trust_remote_code
        )
    kept = fill(classifier, reward_model) if weights else {}
    with torch.no_grad():
        rows = classifier.get_input_embeddings().num_embeddings
        if rows <= pad_id:
            classifier.resize_token_embeddings(pad_id + 1, mean_resizing=False)
            classifier.get_input_embeddings().weight[rows:] = 0.0
    classifier.config.pad_token_id = pad_id
    classifier.save_pretrained(folder, state_dict=None if weights else {})
    with_padding(tokenizer, pad_id).save_pretrained(folder)
    save_file(kept, folder / "reward_head.safetensors")
    files.write_json(folder / "ppo_rlhf.json", info)


@torch.no_grad()
def fill(classifier: PreTrainedModel, reward_model: nn.Module) -> dict[str, torch.Tensor]:
    """Give a classifier the weights of a reward model. Returns those that reward_head.safetensors keeps."""
    # Gain and bias are kept, and the scores are the same bit for bit.   train_reward.py#L292-L329
    state = reward_model.lm_backbone.base_model.state_dict()
    kept = {name: tensor for name, tensor in reward_model.state_dict().items() if not name.startswith("lm_backbone.")}
    weight = reward_model.gain * reward_model.reward_head.weight  # (1, width)
    constant = (reward_model.gain * reward_model.reward_head.bias + reward_model.bias).item()
    classifier.to(weight.device).base_model.load_state_dict(state)
    classifier.score.weight.copy_(weight)
    if norm_bias := next((name for name in FINAL_NORM_BIASES if name in state), None):
        kept[f"lm_backbone.{norm_bias}"] = state[norm_bias].clone()
        classifier.base_model.state_dict()[norm_bias].add_(constant * weight[0] / (weight**2).sum())
    else:
        classifier.config.score_constant = constant
    return kept


def with_padding(tokenizer: PreTrainedTokenizerBase, pad_id: int) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer that pads texts on the right with our padding id, or refuses to pad.

    A sequence classifier reads the score at the last token that isn't the padding id of its configuration. If its
    tokenizer padded with another id, such as the end of text, the score would be that of a padding token.
    """
    padding = copy.deepcopy(tokenizer)
    padding.padding_side = "right"
    padding.add_special_tokens({"pad_token": pretrained.PAD_TOKEN})
    if padding.pad_token_id != pad_id:  # the ids have a hole, and the new token is in it
        padding = copy.deepcopy(tokenizer)
        padding.pad_token = None
    return padding
