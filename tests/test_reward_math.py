"""train_reward.py: loss, normalisation, the head, updates, and the saved model."""

import json
import math

import pytest
import torch
from accelerate import Accelerator
from oracles import gradients
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from ppo_rlhf.lib.errors import InputError, NumericalError
from ppo_rlhf.lib.label_files import Labels
from ppo_rlhf.lib.pretrained import load_tokenizer, vocabulary_size
from ppo_rlhf.lib.reward_model_files import save_reward_model
from ppo_rlhf.tldr.models import load_reward_model
from ppo_rlhf.train_policy import few_rows_at_a_time, load_pretrained
from ppo_rlhf.train_reward import (
    AdamTensorFlowStyle,
    RewardModel,
    gain_and_bias,
    reward_update,
    score_samples,
)

VOCAB = PAD = 29
ARCHITECTURES = {"gpt2": 29, "gpt_neox": 40, "llama": 29, "qwen2": 40}  # rows of the embedding; spare rows in two
QUERY, RESPONSE = 6, 5


def token_ids(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def tiny_reward_model(tiny_models, architecture: str = "gpt2", rows: int | None = None) -> RewardModel:
    reward_model = RewardModel(tiny_models(architecture, rows or ARCHITECTURES[architecture]))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        reward_model.reward_head.weight.copy_(torch.randn(1, 16, generator=generator))
        reward_model.reward_head.bias.fill_(0.3)
        reward_model.gain.fill_(1.7)
        reward_model.bias.fill_(-0.4)
    return reward_model


def make_labels(count: int, n: int = 4) -> Labels:
    queries, samples = token_ids(0, count, QUERY), token_ids(1, count, n, RESPONSE)
    queries[::3, 4:] = PAD
    samples[::2, :, 3:] = PAD
    best = torch.randint(0, n, (count,), generator=torch.Generator().manual_seed(2))
    return Labels(queries=queries, samples=samples, targets=best, ceiling=None)


# ---- Loss and normalisation by hand ----------------------------------------------------------------------------


@pytest.mark.parametrize("scores", [[0.7, 0.7, 0.7], [1.0], [1.0, math.nan], [1.0, math.inf]])
def test_scores_that_cannot_be_normalised(scores):
    with pytest.raises(NumericalError):
        gain_and_bias(torch.tensor(scores), 0.0, 1.0)


def test_a_few_rows_at_a_time_equal_one_call():
    rows = torch.arange(10.0).view(5, 2)
    doubled, sums = few_rows_at_a_time(lambda a, b: (a * 2, a.sum(1) + b), 2, rows, torch.arange(5.0))
    assert doubled.tolist() == (rows * 2).tolist()
    assert sums.tolist() == [1.0, 6.0, 11.0, 16.0, 21.0]


# ---- The model and its update ----------------------------------------------------------------------------------


def test_scores_of_samples_equal_single_scores(tiny_models):
    reward_model, labels = tiny_reward_model(tiny_models), make_labels(3)
    scores = score_samples(reward_model, labels, torch.arange(3), PAD)
    for i in range(3):
        for j in range(4):
            tokens = [t for t in [*labels.queries[i].tolist(), *labels.samples[i, j].tolist()] if t != PAD]
            assert_close(scores[i, j], reward_model(torch.tensor([tokens]), PAD)[0], atol=1e-5, rtol=0)


def test_a_pass_has_no_more_padding_than_its_longest_sample(tiny_models):
    labels, widths = make_labels(4), []
    labels.queries[:], labels.samples[:] = 4, 5
    for sample, length in zip(labels.samples, [4, 1, 3, 2], strict=True):
        sample[:, length:] = PAD
    reward_model = tiny_reward_model(tiny_models)
    reward_model.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[1]))
    optimizer, inds = AdamTensorFlowStyle(reward_model.parameters(), lr=1e-3), torch.arange(4)
    reward_update(reward_model, optimizer, labels, inds, PAD, Accelerator(cpu=True), micro_batch=2)
    assert widths == [QUERY + 2, QUERY + 4]  # samples of 1 and 2 together, and of 3 and 4


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_micro_batches_give_the_same_step(tiny_models, micro_batch):
    labels, inds, results = make_labels(12), torch.tensor([3, 1, 11, 7, 5, 0, 2, 9]), []
    for size in (8, micro_batch):
        reward_model = tiny_reward_model(tiny_models)
        optimizer = AdamTensorFlowStyle(reward_model.parameters(), lr=1e-3)
        stats = reward_update(reward_model, optimizer, labels, inds, PAD, Accelerator(cpu=True), micro_batch=size)
        results.append((gradients(reward_model), *stats.values()))
        results[-1] += (torch.nn.utils.parameters_to_vector(reward_model.parameters()).detach(),)
    for expected, actual in zip(*results, strict=True):
        assert_close(actual, expected, atol=1e-6, rtol=1e-5)


# ---- The saved model -------------------------------------------------------------------------------------------


@pytest.fixture(params=ARCHITECTURES)
def saved(request, tiny_models, tiny_tokenizer, tmp_path):
    """A trained model as training has it, on a backbone without an output layer, and the folder it was saved in."""
    tiny_models(request.param, ARCHITECTURES[request.param]).save_pretrained(tmp_path / "base")
    reward_model = tiny_reward_model(
        lambda *_: load_pretrained(str(tmp_path / "base"), torch.float32, auto_class=AutoModel)
    )
    save_reward_model(tmp_path / "reward", reward_model, tiny_tokenizer, {"vocab_size": VOCAB})
    return request.param, reward_model, tmp_path / "reward"


def right_padded(rows: int = 6, length: int = QUERY + RESPONSE) -> torch.Tensor:
    tokens = token_ids(3, rows, length)
    for i in range(rows):
        tokens[i, length - i :] = PAD
    return tokens


def test_sequence_classifier_gives_our_scores(saved):
    architecture, reward_model, folder = saved
    tokens = right_padded()
    classifier = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        expected = reward_model(tokens, PAD)
        actual = classifier(input_ids=tokens, attention_mask=tokens != PAD).logits.squeeze(1)
    constant = classifier.config.score_constant
    if architecture in ("gpt2", "gpt_neox"):
        assert constant == 0
    else:
        assert constant == pytest.approx(1.7 * 0.3 - 0.4)
    assert_close(actual + constant, expected, atol=1e-5, rtol=0)
    assert classifier.config.pad_token_id == PAD


def test_a_batch_of_texts_gets_the_scores_of_each_text(saved):
    """As people use a classifier, with its tokenizer's padding; that of the base model pads with the end of text."""
    _, reward_model, folder = saved
    tokenizer = AutoTokenizer.from_pretrained(folder)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder)
    texts = ["a", "the end of a text.", "an end<eos>"]
    with torch.no_grad():
        theirs = classifier(**tokenizer(texts, padding=True, return_tensors="pt")).logits.squeeze(1)
        ours = torch.cat([reward_model(torch.tensor([tokenizer.encode(text)]), PAD) for text in texts])
    assert_close(theirs + classifier.config.score_constant, ours, atol=1e-5, rtol=0)


def test_embedding_of_padding_is_zero(saved):
    architecture, _, folder = saved
    rows = AutoModelForSequenceClassification.from_pretrained(folder).get_input_embeddings().weight
    assert len(rows) == max(VOCAB + 1, ARCHITECTURES[architecture])
    if ARCHITECTURES[architecture] == VOCAB:
        assert rows[PAD].eq(0).all()


def test_reward_model_is_loaded_bit_for_bit(saved):
    _, reward_model, folder = saved
    loaded, tokens = load_reward_model(folder, torch.float32), right_padded()
    assert torch.equal(loaded(tokens, PAD), reward_model(tokens, PAD))
    assert not any(p.requires_grad for p in loaded.parameters())
    assert json.loads((folder / "ppo_rlhf.json").read_text()) == {"vocab_size": VOCAB}


def test_saving_leaves_the_model_as_it_was(tiny_models, tiny_tokenizer, tmp_path):
    reward_model = tiny_reward_model(tiny_models)
    before = {name: tensor.clone() for name, tensor in reward_model.state_dict().items()}
    save_reward_model(tmp_path, reward_model, tiny_tokenizer, {})
    assert all(torch.equal(tensor, before[name]) for name, tensor in reward_model.state_dict().items())
    head = load_file(tmp_path / "reward_head.safetensors")
    assert {"gain", "bias", "reward_head.weight", "reward_head.bias"} <= set(head)


def test_saved_model_of_a_tokenizer_with_a_hole(tiny_models, tokenizer_with_a_hole, tmp_path):
    """Its largest id is 29, so 30 is padding and gets the row of zeros; 29 keeps its own."""
    reward_model, tokens = tiny_reward_model(lambda *_: tiny_models("gpt2", 30)), right_padded()
    tokens[tokens == PAD] = 30
    tokens[:, 1] = 29
    save_reward_model(tmp_path, reward_model, tokenizer_with_a_hole, {})
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    rows = classifier.get_input_embeddings().weight
    assert len(rows) == 31 and rows[30].eq(0).all() and rows[29].ne(0).any()
    with torch.no_grad():
        theirs = classifier(input_ids=tokens, attention_mask=tokens != 30).logits.squeeze(1)
        assert_close(theirs, reward_model(tokens, 30), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="pad"):  # a new token would be in the hole
        load_tokenizer(str(tmp_path))(["a", "ab"], padding=True)


def test_saved_tokenizer_is_unchanged_but_for_its_padding(tiny_models, tiny_tokenizer, tmp_path):
    """Saved twice, as with a critic that starts from a reward model, too."""
    tokenizer = tiny_tokenizer
    for name in ("reward", "value"):
        save_reward_model(tmp_path / name, tiny_reward_model(tiny_models), tokenizer, {})
        tokenizer = load_tokenizer(str(tmp_path / name))
        assert (tokenizer.pad_token_id, vocabulary_size(tokenizer)) == (PAD, VOCAB)
        assert tokenizer.encode("ab. c") == tiny_tokenizer.encode("ab. c")
    assert len(tiny_tokenizer) == VOCAB


def test_folder_without_a_reward_head(tiny_models, tmp_path):
    tiny_models("gpt2").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="reward_head"):
        load_reward_model(tmp_path, torch.float32)
