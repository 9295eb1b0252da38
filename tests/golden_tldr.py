"""The golden cases of chapter 2 (tests/golden/tldr): stored weights in our models, and whole runs on stored data.

A run here is the script's own `train()`. Only what it would read or draw at random is replaced by what is stored, and
what differs on purpose by the original's way, where the case shows such a difference.
"""

import contextlib
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from golden_models import load_arrays, load_json, recorded, under
from runs import metrics_of, only
from tokenizers import Tokenizer, models as tokenizer_models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Model, PreTrainedModel, PreTrainedTokenizerFast

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.lib import learning_curves, processes, reward_model_files
from ppo_rlhf.tldr import (
    models,
    packing,
    policy as tldr_policy,
    posts,
    responses as tldr_responses,
    reward as tldr_reward,
    sft as tldr_sft,
)
from ppo_rlhf.tldr.posts import Comparisons, Posts, TaskArgs, TaskIds

CASES = load_json("tldr/cases") | load_json("tldr/cases_trl")
EOS, PAD = 0, 40
QUERY, RESPONSE, REFERENCE = 9, 7, 6  # tokens of the queries, of the sampled summaries, and of the references
SEED = 44413  # of all three scripts

Arrays = dict[str, torch.Tensor]
Replaced = tuple[object, str, Any]  # module or class, name, what stands there instead


def case_and_arrays(name: str) -> tuple[dict, Arrays]:
    return CASES[name], load_arrays(f"tldr/{name}")


def names_of(kind: str) -> list[str]:
    return sorted(name for name, case in CASES.items() if case["kind"] == kind)


# ---- Tokenizers ------------------------------------------------------------------------------------------------


def golden_tokenizer() -> PreTrainedTokenizerFast:
    """The 40 words of the golden models: w1 to w39, and the end of text, 0."""
    words = {"<eos>": EOS} | {f"w{i}": i for i in range(1, PAD)}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(words, unk_token="w39"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def gpt2_tokenizer() -> PreTrainedTokenizerFast:
    """GPT-2's tokenizer, with the tokens and merges that the golden texts need; other ids have a name only."""
    part = load_json("tldr/gpt2_part")
    names = {f"<{i}>": i for i in set(range(50_257)) - set(part["vocab"].values())}
    merges = [tuple(merge.split(" ")) for merge in part["merges"]]
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=names | part["vocab"], merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


# ---- Models ----------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
SIZES_OF = {
    "gpt_neox": {"intermediate_size": 24, "rotary_pct": 0.34},
    "gpt2": {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
}


def new_language_model(case: dict) -> PreTrainedModel:
    ids = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": None}
    config = AutoConfig.for_model(
        case["arch"], vocab_size=case["output_rows"], **SIZES, **SIZES_OF[case["arch"]], **ids
    )
    return AutoModelForCausalLM.from_config(config).double()


def our_names(weights: Arrays, scalar_model: bool = False) -> Arrays:
    """Stored weights under the names that they have in our models."""
    names = {"embed_out.weight": "lm_head.weight", "score.weight": "reward_head.weight"}
    found = {}
    for stored, weight in weights.items():
        name = names.get(stored, stored.replace("scalar_head.", "reward_head."))
        if scalar_model:
            name = name.replace("gpt_neox.", "lm_backbone.").replace("transformer.", "lm_backbone.")
        found[name] = weight
    return found


def load_weights(model: torch.nn.Module, weights: Arrays, without: set[str] = frozenset()) -> None:
    """Every parameter gets a stored array, but for those that the case does not have, which stay as they are."""
    assert {name for name, _ in model.named_parameters()} - without == weights.keys()
    model.load_state_dict(weights, strict=False)


def language_model(case: dict, weights: Arrays) -> PreTrainedModel:
    model = new_language_model(case)
    load_weights(model, our_names(weights))
    return model


def scalar_model(case: dict, weights: Arrays, constant: float = 0.0, kind: type = train_reward.RewardModel):
    """A reward model or critic; constant: what is added to the numbers of its head."""
    model = kind(new_language_model(case).base_model).double()
    weights = our_names(weights, scalar_model=True)
    weights.setdefault("reward_head.bias", torch.zeros(1))  # TRL's head has none
    load_weights(model, weights, without={"gain", "bias"})
    with torch.no_grad():
        model.bias.fill_(constant)
    return model


def save_language_model(folder: Path, model: PreTrainedModel) -> None:
    model.save_pretrained(folder)
    golden_tokenizer().save_pretrained(folder)


def save_scalar_model(folder: Path, model: train_reward.RewardModel) -> None:
    info = {"kind": "reward model", "base_model": "", "vocab_size": PAD, "task": {}}
    reward_model_files.save_reward_model(folder, model, golden_tokenizer(), info)


# ---- Whole runs ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def in_new_folder(*replaced: Replaced) -> Iterator[Path]:
    """A new current folder for a run, without pictures; things are replaced within the block."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.chdir(folder))
        for where, name, value in ((learning_curves, "draw_learning_curves", lambda *_: None), *replaced):
            stack.enter_context(patch.object(where, name, value))
        yield Path(folder)


def metrics_and_results(folder: Path) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Of the only run in a folder: the rows of metrics.csv, and the results in meta.json."""
    found = only(folder, "runs/*")
    return metrics_of(found), json.loads((found / "meta.json").read_text())["results"]


def saved_language_model(folder: Path, kind: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(only(folder, f"models/*/{kind}"), dtype=torch.float64)


def saved_scalar_model(folder: Path, kind: str) -> train_reward.RewardModel:
    return models.load_reward_model(only(folder, f"models/*/{kind}"), torch.float64)


def in_drawn_order(stored: torch.Tensor, *key: int | str) -> torch.Tensor:
    """Rows placed so that a script's permutation, whose generator has this key, gives them as they are stored."""
    placed = torch.empty_like(stored)
    placed[torch.randperm(len(stored), generator=train_policy.keyed_generator(*key))] = stored
    return placed


def posts_of(queries: torch.Tensor, references: torch.Tensor) -> Posts:
    return Posts(queries=queries.long(), references=references.long(), too_long=0)


def instead_of_reading(splits: dict[str, Posts]) -> Replaced:
    return posts, "read_posts", lambda task, tokenizer, split, limit=0: splits[split]


def first_gradient_into(found: Arrays) -> Replaced:
    """At the first optimiser step the gradients are put into a dictionary, by the parameters' names."""
    right = processes.gradient_norm

    def gradient_norm(model):
        if not found:
            found.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        return right(model)

    return processes, "gradient_norm", gradient_norm


# ---- Runs of tldr/sft.py ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SftRun:
    metrics: list[dict[str, float]]
    results: dict[str, Any]
    responses: list[str]  # to the posts of the test split
    first_gradient: Arrays
    weights: Arrays


def means_of_micro_batches(counts: torch.Tensor) -> Replaced:
    """A step's loss is the mean of its micro-batches' means [X21]. counts: of tokens, (steps, micro-batches)."""
    right, factors = tldr_sft.LanguageModel.forward, iter((counts.mean(1, keepdim=True) / counts).flatten().tolist())

    def forward(self, tokens, pad_id):
        return right(self, tokens, pad_id) * (next(factors) if torch.is_grad_enabled() else 1)

    return tldr_sft.LanguageModel, "forward", forward


def sft_run(case: dict, arrays: Arrays) -> SftRun:
    """With the stored learning rates [X32], over all rows of the output layer [T14]."""
    rates, batch = arrays["step_lr"].tolist(), case["micro"] * case["accumulation"]
    texts = in_drawn_order(arrays["micro_tokens"].flatten(0, 1), SEED, "posts", 0)
    splits = {
        split: (arrays[f"{split}/query_token"], arrays[f"{split}/reference_response_token"])
        for split in ("validation", "test")
    }
    splits["train"] = (texts[:, :QUERY], texts[:, QUERY:])
    counts = (arrays["micro_tokens"] != PAD).sum(2).double() - 1  # tokens that are predicted, (micro-batches, rows)
    gradient: Arrays = {}
    replaced = (
        instead_of_reading({split: posts_of(*tokens) for split, tokens in splits.items()}),
        first_gradient_into(gradient),
        means_of_micro_batches(counts.sum(1).view(len(rates), -1)),
        (models, "cosine_lr", lambda lr, step, steps: rates[step]),
        (TaskIds, "vocab_size", case["output_rows"]),
    )
    with in_new_folder(*replaced) as folder:
        save_language_model(folder / "base", language_model(case, under(arrays, "initial/")))
        tldr_sft.train(
            tldr_sft.Args(
                base_model="base",
                dtype="float64",
                batch_size=batch,
                lr=case["lr"],
                local_micro_batch_size=case["micro"],
                task=TaskArgs(
                    query_length=QUERY, response_length=REFERENCE, eval_temperature=case["eval_temperature"]
                ),
            )
        )
        (table,) = folder.glob("runs/*/evaluation_test.jsonl")
        responses = [json.loads(line)["response"] for line in table.read_text().splitlines()]
        weights = saved_language_model(folder, "sft").state_dict()
        return SftRun(*metrics_and_results(folder), responses, gradient, weights)


# ---- Runs of tldr/reward.py ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardRun:
    metrics: list[dict[str, float]]
    results: dict[str, Any]
    chosen: torch.Tensor  # scores of the training pairs, as they were trained on
    rejected: torch.Tensor
    references: torch.Tensor  # scores that the saved model gives the posts' references
    first_gradient: Arrays
    weights: Arrays


def comparisons_of(tokens: list[torch.Tensor], groups: dict[str, list]) -> Comparisons:
    rows = [dict(zip(groups, map(str, row), strict=True)) for row in zip(*groups.values(), strict=True)]
    sides = dict(zip(("queries", "chosen", "rejected"), (t.long() for t in tokens), strict=True))
    return Comparisons(**sides, groups=rows, cut=0, identical=0, ceiling=None)


def reward_run(case: dict, arrays: Arrays) -> RewardRun:
    def tokens(split: str) -> list[torch.Tensor]:
        return [arrays[f"{split}/{name}_token"] for name in ("query", "chosen", "rejected")]

    trained = [in_drawn_order(t.flatten(0, 1), SEED, "comparisons") for t in tokens("micro")]
    nowhere = dict.fromkeys(("split", "batch", "confidence"), [""] * case["rows"])
    comparisons = {
        ("train", False): comparisons_of(trained, nowhere),
        ("validation", False): comparisons_of(tokens("validation"), case["groups"]["validation"]),
        ("validation", True): comparisons_of(tokens("validation_cnndm"), case["groups"]["validation_cnndm"]),
    }
    train_posts = posts_of(arrays["posts/query_token"], arrays["posts/reference_response_token"])
    initial = our_names(under(arrays, "initial/"), scalar_model=True)

    class StoredHead(tldr_reward.RewardModel):
        """Begins with the stored head in place of a random one."""

        def __init__(self, lm_backbone: PreTrainedModel, **options: bool):
            super().__init__(lm_backbone, **options)
            self.reward_head.load_state_dict(under(initial, "reward_head."))

    gradient: Arrays = {}
    replaced = (
        instead_of_reading({"train": train_posts}),
        (posts, "read_comparisons", lambda _, __, split, limit=0, articles=False: comparisons[split, articles]),
        (tldr_reward, "RewardModel", StoredHead),
        first_gradient_into(gradient),
    )
    with in_new_folder(*replaced) as folder, recorded(tldr_reward, "score_pairs") as calls:
        base = new_language_model(case)
        base.base_model.load_state_dict(under(initial, "lm_backbone."), strict=True)
        save_language_model(folder / "base", base)
        tldr_reward.train(
            tldr_reward.Args(
                base_model="base",
                dtype="float64",
                batch_size=case["micro"] * case["accumulation"],
                lr=case["lr"],
                local_micro_batch_size=case["micro"],
                task=TaskArgs(query_length=QUERY, response_length=REFERENCE),
            )
        )
        model = saved_scalar_model(folder, "reward")
        scores = [torch.stack(scores).detach() for _, scores in calls[: len(arrays["micro/loss"])]]
        references = model(torch.cat([train_posts.queries, train_posts.references], dim=1), PAD).detach()
        return RewardRun(
            *metrics_and_results(folder),
            *torch.stack(scores, dim=1),  # chosen and rejected: (micro-batches, rows)
            references,
            gradient,
            model.state_dict(),
        )


# ---- Runs of tldr/policy.py ------------------------------------------------------------------------------------

RECORDED = (
    *("respond", "punish_missing_eos", "compute_rewards", "compute_advantages", "policy_loss"),
    *("value_loss", "token_statistics", "evaluate_policy"),
)


@dataclass(frozen=True)
class PolicyRun:
    calls: dict[str, list[tuple[tuple, Any]]]  # of the functions above: arguments and results, in order
    metrics: list[dict[str, float]]
    results: dict[str, Any]
    first_gradient: Arrays
    policy: PreTrainedModel
    critic: train_reward.RewardModel


def everywhere(name: str, function: Any) -> list[Replaced]:
    """A function that several modules import, in each of them."""
    users = (train_policy, train_reward, tldr_responses, posts, tldr_sft, tldr_reward, tldr_policy)
    return [(module, name, function) for module in users if hasattr(module, name)]


def steered(case: dict, steered_at: float, responses: list[torch.Tensor]) -> list[Replaced]:
    """At this temperature the sampler gets the uniform numbers with which it samples the stored responses."""
    generate, read, stored = tldr_responses.generate_until, train_policy.read_tokens, iter(responses)

    def wrapper(lm_backbone, contexts, uniforms, pad_id, vocab_size, temperature, stop_ids):
        if temperature == steered_at:
            tokens = next(stored).long()
            query_responses = torch.cat([contexts, tokens], dim=1)
            hidden = read(lm_backbone, query_responses, pad_id, slice(contexts.shape[1] - 1, -1))
            probs = train_policy.scaled_logits(lm_backbone, hidden, vocab_size, temperature).softmax(2)
            uniforms = (probs.cumsum(2) - probs / 2).gather(2, tokens.unsqueeze(2)).squeeze(2)
        return generate(lm_backbone, contexts, uniforms, pad_id, case["output_rows"], temperature, stop_ids)

    return everywhere("generate_until", wrapper)


def in_order(lengths: torch.Tensor, device: torch.device, rows: int = 0, *_, **__) -> list[packing.Pass]:
    """Passes as the original has them."""
    parts = torch.arange(len(lengths)).split(rows or len(lengths))
    return [packing.Pass(rows=part, longest=int(lengths.max())) for part in parts]


def read_as_stored(lm_backbone, tokens, responses, pad_id):
    return train_policy.read_tokens(lm_backbone, tokens, pad_id, slice(-responses.shape[1] - 1, -1))


# Stored are rows in their order, with the padding of the longest. test_packing.py shows that it makes no difference.
AS_STORED: list[Replaced] = [
    (packing, "plan_passes", in_order),
    (packing, "pack", lambda tokens, pad_id, longest: tokens),
    *everywhere("read_before_responses", read_as_stored),
]


def all_output_rows(case: dict) -> list[Replaced]:
    """Logits of all rows of the output layer, not only of the tokenizer's ids [T14]."""
    right = train_policy.scaled_logits

    def scaled_logits(lm_backbone, hidden_states, vocab_size, temperature):
        return right(lm_backbone, hidden_states, case["output_rows"], temperature)

    return everywhere("scaled_logits", scaled_logits)


def means_of_micro_batches_in_ppo(accumulation: int) -> list[Replaced]:
    """A minibatch's losses are the means of its micro-batches' means [X21]."""
    right = {name: getattr(tldr_policy, name) for name in ("policy_loss", "value_loss", "token_statistics")}

    def policy_loss(new_logprobs, *, mask, count, **options):
        return right["policy_loss"](new_logprobs, mask=mask, count=accumulation * mask.sum(), **options)

    def value_loss(new_values, *, mask, count, **options):
        return right["value_loss"](new_values, mask=mask, count=accumulation * mask.sum(), **options)

    def token_statistics(new_logprobs, *, mask, value_mask, **options):
        counts = {"count": accumulation * mask.sum(), "value_count": accumulation * value_mask.sum()}
        return right["token_statistics"](new_logprobs, mask=mask, value_mask=value_mask, **options | counts)

    functions = (policy_loss, value_loss, token_statistics)
    return [(tldr_policy, function.__name__, function) for function in functions]


def whitened_once() -> list[Replaced]:
    """Advantages are whitened over the whole rollout, before minibatches are drawn [X25]."""
    right, make, rollouts = tldr_policy.compute_advantages, tldr_policy.make_rollout, []

    def make_rollout(*arguments, **options):
        rollouts.append(make(*arguments, **options))
        return rollouts[-1]

    def compute_advantages(rewards, values, mask, value_mask, ppo, reduce):
        whole = rollouts[-1]
        found = right(whole.rewards, whole.values, whole.mask, whole.value_mask, ppo, reduce)
        rows = (values.unsqueeze(1) == whole.values).all(2).int().argmax(1)  # of the minibatch in the rollout
        return tuple(tensor[rows] for tensor in found)

    return [(tldr_policy, "make_rollout", make_rollout), (tldr_policy, "compute_advantages", compute_advantages)]


def without_positions(logprobs: list[torch.Tensor]) -> list[Replaced]:
    """The sampler has positions that count real tokens, every other pass has those of the columns [T16].

    So the sampler's log-probs, which the original keeps, are not those of the training pass: they are given.
    """
    read, forward, respond, stored = (
        *(train_policy.read_tokens, GPT2Model.forward, tldr_policy.respond),
        iter(logprobs),
    )

    def by_columns(self, *args, **inputs):
        return forward(self, *args, **(inputs | {"position_ids": None}))

    def read_tokens(*arguments):
        with patch.object(GPT2Model, "forward", by_columns):
            return read(*arguments)

    def with_stored_logprobs(*arguments, **settings):
        responses, _, values, sampler_gap = respond(*arguments, **settings)
        return responses, next(stored), values, sampler_gap

    return [
        *everywhere("read_tokens", read_tokens),
        (posts, "trim_padding", lambda *tokens, pad_id: torch.cat(tokens, dim=1)),
        (tldr_policy, "respond", with_stored_logprobs),
        (processes, "FIRST_RATIO_TOLERANCE", {"float64": math.inf}),
        (models, "check_model", lambda *arguments: None),  # it refuses a model that padding matters to
    ]


def policy_run(
    args: tldr_policy.Args,
    queries: list[torch.Tensor],
    held_out: Posts,
    minibatches: torch.Tensor,
    language_models: dict[str, PreTrainedModel],
    scalar_models: dict[str, train_reward.RewardModel],
    *replaced: Replaced,
) -> PolicyRun:
    """queries: of each update; minibatches: rows in each, (passes, minibatches, rows); models: by their folders."""
    stored, references = torch.cat(queries), torch.full((sum(map(len, queries)), 1), EOS)
    splits = {"train": posts_of(in_drawn_order(stored, SEED, "posts", 0), references)}
    splits |= dict.fromkeys(("validation", "test"), held_out)
    updates, gradient = iter(minibatches.split(args.ppo.noptepochs)), {}
    replaced = (
        instead_of_reading(splits),
        (tldr_policy, "draw_minibatches", lambda *_: next(updates)),
        first_gradient_into(gradient),
        *replaced,
    )
    with in_new_folder(*replaced) as folder, contextlib.ExitStack() as stack:
        calls = {name: stack.enter_context(recorded(tldr_policy, name)) for name in RECORDED}
        for name, model in language_models.items():
            save_language_model(folder / name, model)
        for name, model in scalar_models.items():
            save_scalar_model(folder / name, model)
        tldr_policy.train(args)
        policy, critic = saved_language_model(folder, "policy"), saved_scalar_model(folder, "value")
        return PolicyRun(calls, *metrics_and_results(folder), gradient, policy, critic)


def original_policy_run(case: dict, arrays: Arrays) -> PolicyRun:
    """A run of the paper's ppo.py; the reference's log-probs are given, its weights are not stored."""
    updates = [under(arrays, f"update{i}/") for i in range(case["updates"])]
    ref_logprobs = iter([update["ref_logprobs"] for update in updates])
    ppo = {name: value for name, value in case["ppo"].items() if name != "kl_coef"}
    args = tldr_policy.Args(
        base_model="base",
        dtype="float64",
        eval_interval=1,
        task=TaskArgs(query_length=QUERY, response_length=RESPONSE, temperature=case["temperature"]),
        rewards=tldr_policy.RewardsArgs(
            trained_model="reward",
            kl_coef=case["ppo"]["kl_coef"],
            missing_eos="replace" if case["non_eos_penalty"] else "none",
            missing_eos_penalty=-case["penalty"],
        ),
        ppo=tldr_policy.PpoArgs(
            **ppo | {"nminibatches": case["nminibatches"]},
            total_episodes=16 * len(updates),
            batch_size=16,
            lr=case["lr"],
            local_micro_batch_size=case["micro"],
        ),
    )
    replaced = [
        *steered(case, case["temperature"], [update["responses"] for update in updates]),
        *all_output_rows(case),
        (tldr_policy, "reference_logprobs", lambda *_, **__: next(ref_logprobs)),
    ]
    if "X21" in case["differs"]:
        replaced += means_of_micro_batches_in_ppo(case["accumulation"])
    if "X25" in case["differs"]:
        replaced += whitened_once()
    if "T16" in case["differs"]:
        replaced += without_positions([update["logprobs"] for update in updates])
    held_out = under(arrays, "evaluation0/")
    return policy_run(
        args,
        [update["queries"] for update in updates],
        posts_of(held_out["query_token"], held_out["reference_response_token"]),
        arrays["micro/micro_batch_inds"].long().view(4 * len(updates), case["nminibatches"], -1),
        {"base": language_model(case, under(arrays, "initial/policy/"))},
        {"reward": scalar_model(case, under(arrays, "initial/critic/"), -case["config_bias"])},
        *replaced,
    )


def trl_policy_run(case: dict, arrays: Arrays) -> PolicyRun:
    """A run of TRL's PPOTrainer, with its variance of whitening [T52] and its head without a bias."""
    settings, updates = case["settings"], [under(arrays, f"update{i}/") for i in range(case["updates"])]
    names = ("cliprange", "cliprange_value", "gamma", "lam", "vf_coef", "whiten_rewards")
    args = tldr_policy.Args(
        base_model="base",
        dtype="float64",
        eval_interval=0,
        task=TaskArgs(query_length=QUERY, response_length=RESPONSE, temperature=settings["temperature"]),
        rewards=tldr_policy.RewardsArgs(
            trained_model="reward",
            value_model="value",
            kl_coef=settings["kl_coef"],
            kl_estimator=settings["kl_estimator"],
            missing_eos="subtract",
            missing_eos_penalty=settings["missing_eos_penalty"],
        ),
        ppo=tldr_policy.PpoArgs(
            **{name: settings[name] for name in names},
            total_episodes=16 * len(updates),
            batch_size=16,
            lr=settings["learning_rate"],
            adam_eps=case["optimizer"]["eps"],
            weight_decay=case["optimizer"]["weight_decay"],
            local_micro_batch_size=16,  # each minibatch in one pass
        ),
    )
    whiten, load_critic = tldr_policy.whiten, models.load_critic
    reference, make_reference = language_model(case, under(arrays, "reference/")), models.Reference.__init__

    def unbiased_whiten(values, mask, *, keep_mean, reduce):
        count = mask.sum()
        return whiten(values, mask, keep_mean=keep_mean, reduce=reduce) * ((count - 1) / count).sqrt()

    def load_critic_without_bias(*arguments):
        critic = load_critic(*arguments)
        critic.reward_head.bias.requires_grad_(False)
        return critic

    queries = [update["queries"] for update in updates]
    return policy_run(
        args,
        queries,
        posts_of(queries[0][:2], torch.full((2, 1), EOS)),
        arrays["permutations"].long().unsqueeze(1),
        {"base": language_model(case, under(arrays, "initial/policy/"))},
        {
            "reward": scalar_model(case, under(arrays, "reward/")),
            "value": scalar_model(case, under(arrays, "initial/value/")),
        },
        *steered(case, settings["temperature"], [update["responses"] for update in updates]),
        *all_output_rows(case),
        (tldr_policy, "whiten", unbiased_whiten),
        (models, "load_critic", load_critic_without_bias),
        (models.Reference, "__init__", lambda self, _, adapters: make_reference(self, reference, adapters)),
    )
