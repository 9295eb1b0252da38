"""train_reward.py: updates in parts, and the saved model. Golden numbers (test_golden.py) prove the rest."""

import json
import math

import pytest
import torch
from accelerate import Accelerator
from oracles import gradients
from small_models import ARCHITECTURES, PAD, VOCAB, scalar_model, token_ids
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForSequenceClassification

from ppo_rlhf.tldr.models import load_reward_model, load_tokenizer
from ppo_rlhf.train_policy import InputError
from ppo_rlhf.train_reward import (
    AdamTensorFlowStyle,
    Labels,
    RewardModel,
    gain_and_bias,
    load_pretrained,
    reward_update,
    save_reward_model,
    vocabulary_size,
)

QUERY, RESPONSE = 6, 5


@pytest.mark.parametrize("scores", [[0.7, 0.7, 0.7], [1.0], [1.0, math.nan], [1.0, math.inf]])
def test_scores_that_cannot_be_normalised(scores):
    with pytest.raises(ValueError, match="cannot be normalised"):
        gain_and_bias(torch.tensor(scores), 0.0, 1.0)


def test_micro_batches_give_the_same_step_and_read_no_padding_beyond_their_longest_sample(tiny_models):
    """Also those of 3 and 1 rows, of which the last is smaller."""
    samples = token_ids(1, 8, 4, RESPONSE)
    for row, length in zip(samples, [4, 1, 3, 2, 4, 4, 3, 1], strict=True):
        row[:, length:] = PAD
    labels = Labels(queries=token_ids(0, 8, QUERY), samples=samples, targets=torch.arange(8) % 4)
    inds, widths = torch.tensor([3, 1, 7, 5, 0, 2, 4, 6]), []

    def updated(micro_batch: int) -> tuple[torch.Tensor, ...]:
        model = scalar_model(tiny_models("gpt2").base_model)
        model.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[1] - QUERY))
        optimizer = AdamTensorFlowStyle(model.parameters(), lr=1e-3)
        stats = reward_update(model, optimizer, labels, inds, PAD, Accelerator(cpu=True), micro_batch=micro_batch)
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        return gradients(model), weights, *stats.values()

    expected = updated(8)
    for micro_batch in (3, 1):
        assert_close(updated(micro_batch), expected, atol=1e-9, rtol=1e-7)
    assert widths == [4, 2, 4, 4, 1, 1, 2, 3, 3, 4, 4, 4]


# ---- The saved model -------------------------------------------------------------------------------------------


def right_padded(pad_id: int = PAD) -> torch.Tensor:
    tokens = token_ids(3, 6, QUERY + RESPONSE)
    for row in range(6):
        tokens[row, QUERY + RESPONSE - row :] = pad_id
    return tokens


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_a_saved_model_is_loaded_bit_for_bit_and_is_an_ordinary_classifier(
    tiny_models, tiny_tokenizer, tmp_path, architecture
):
    """Of a backbone without an output layer, as training has it."""
    rows = ARCHITECTURES[architecture]
    tiny_models(architecture, rows).double().save_pretrained(tmp_path / "base")
    backbone = load_pretrained(str(tmp_path / "base"), torch.float64, auto_class=AutoModel)
    reward_model, folder = scalar_model(backbone), tmp_path / "reward"
    before = {name: tensor.clone() for name, tensor in reward_model.state_dict().items()}
    save_reward_model(folder, reward_model, tiny_tokenizer, {"vocab_size": VOCAB})
    assert_close(reward_model.state_dict(), before, atol=0, rtol=0)
    tokens = right_padded()
    expected, loaded = reward_model(tokens, PAD), load_reward_model(folder, torch.float64)
    assert torch.equal(loaded(tokens, PAD), expected) and not any(p.requires_grad for p in loaded.parameters())
    assert json.loads((folder / "ppo_rlhf.json").read_text()) == {"vocab_size": VOCAB}

    classifier = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    constant, embedding = classifier.config.score_constant, classifier.get_input_embeddings().weight
    assert constant == (0 if architecture in ("gpt2", "gpt_neox") else pytest.approx(1.7 * 0.3 - 0.4))
    assert classifier.config.pad_token_id == PAD and len(embedding) == max(VOCAB + 1, rows)
    assert rows > VOCAB or embedding[PAD].eq(0).all()
    found = classifier(input_ids=tokens, attention_mask=tokens != PAD).logits.squeeze(1)
    assert_close(found + constant, expected, atol=1e-9, rtol=0)


def test_saved_model_of_a_tokenizer_with_a_hole(tiny_models, tokenizer_with_a_hole, tmp_path):
    """Its largest id is 29, so 30 is padding and gets the row of zeros; 29 keeps its own."""
    reward_model, tokens = scalar_model(tiny_models("gpt2", 30).base_model), right_padded(30)
    tokens[:, 1] = 29
    save_reward_model(tmp_path, reward_model, tokenizer_with_a_hole, {})
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    rows = classifier.get_input_embeddings().weight
    assert len(rows) == 31 and rows[30].eq(0).all() and rows[29].ne(0).any()
    found = classifier(input_ids=tokens, attention_mask=tokens != 30).logits.squeeze(1)
    assert_close(found, reward_model(tokens, 30), atol=1e-9, rtol=0)
    with pytest.raises(ValueError, match="pad"):  # a new token would be in the hole
        load_tokenizer(str(tmp_path))(["a", "ab"], padding=True)


def test_saved_tokenizer_is_unchanged_but_for_its_padding(tiny_models, tiny_tokenizer, tmp_path):
    """Saved twice, as with a critic that starts from a reward model, too."""
    tokenizer = tiny_tokenizer
    for name in ("reward", "value"):
        save_reward_model(tmp_path / name, RewardModel(tiny_models("gpt2").base_model), tokenizer, {})
        tokenizer = load_tokenizer(str(tmp_path / name))
        assert (tokenizer.pad_token_id, vocabulary_size(tokenizer)) == (PAD, VOCAB)
        assert tokenizer.encode("ab. c") == tiny_tokenizer.encode("ab. c")
    assert len(tiny_tokenizer) == VOCAB


def test_folder_without_a_reward_head(tiny_models, tmp_path):
    tiny_models("gpt2").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="reward_head"):
        load_reward_model(tmp_path, torch.float32)
