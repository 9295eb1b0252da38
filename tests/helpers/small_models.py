"""Token ids, heads and classifiers for tests of models with random weights."""

from pathlib import Path

import torch
from oracles import numbers
from transformers import AutoConfig, AutoModelForSequenceClassification

from ppo_rlhf.train_reward import RewardModel

VOCAB = PAD = 29
ARCHITECTURES = {"gpt2": 29, "gpt_neox": 40, "llama": 29, "qwen2": 40}  # rows of the embedding; spare rows in two


def token_ids(seed: int, *shape: int) -> torch.Tensor:
    """Random tokens 1..28: token 0 is free to stand for padding."""
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def scalar_model(lm_backbone, kind: type = RewardModel) -> RewardModel:
    """A reward model, with a head, gain and bias that are not those of the start."""
    model = kind(lm_backbone)
    with torch.no_grad():
        model.reward_head.weight.copy_(numbers(1, 1, 16))
        model.reward_head.bias.fill_(0.3)
        model.gain.fill_(1.7)
        model.bias.fill_(-0.4)
    return model.double()


LEFT_OUT = -1  # of a setting
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def classifier(
    architecture: str,
    folder: Path,
    tokenizer,
    labels: list[str],
    pad_id: int | None,
    rows: int = 29,
    **settings: int | None,
) -> str:
    """The folder of a sequence classifier with random weights that differ from text to text."""
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    ids = {"pad_token_id": pad_id, "bos_token_id": None, "eos_token_id": 28}
    settings = SMALL | {"max_position_embeddings": 300} | ids | settings
    settings = {name: value for name, value in settings.items() if value != LEFT_OUT}
    config = AutoConfig.for_model(architecture, vocab_size=rows, **settings, **names)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
        for parameter in model.parameters():
            parameter.data.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
