"""The golden cases of chapter 2 (tests/golden/tldr): stored weights in our models, and whole runs on stored data.

A run here is the script's own `train()`. Only what it would read or draw at random is replaced by what is stored, and
what differs on purpose by the original's way, where the case shows such a difference.
"""

import contextlib
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from golden_models import load_arrays, load_json, recorded, steering_uniforms, under
from runs import meta_of, metrics_of, only, rows_of
from tokenizers import Tokenizer, models as tokenizer_models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ppo_rlhf import train_policy, train_reward
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


def save_model(folder: Path, model: PreTrainedModel | train_reward.RewardModel) -> None:
    if isinstance(model, PreTrainedModel):
        model.save_pretrained(folder)
        golden_tokenizer().save_pretrained(folder)
    else:
        info = {"kind": "reward model", "base_model": "", "vocab_size": PAD, "task": {}}
        train_reward.save_reward_model(folder, model, golden_tokenizer(), info)


def saved_model(folder: Path) -> PreTrainedModel | train_reward.RewardModel:
    if folder.name in ("reward", "value"):
        return models.load_reward_model(folder, torch.float64)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


# ---- Whole runs ------------------------------------------------------------------------------------------------

RECORDED = ("policy_loss", "value_loss", "evaluate")


def run_of(
    script: ModuleType,
    args: Any,
    initial: dict[str, PreTrainedModel | train_reward.RewardModel],
    splits: dict[str, Posts],
    *replaced: Replaced,
) -> SimpleNamespace:
    """What train(args) of a script leaves in a folder that has some models; things are replaced while it runs.

    splits: the posts that it finds in place of those that it would read. In the result, `calls` has the arguments and
    results of each call of the functions above, and `first_gradient` that of the first optimiser step.
    """
    first_gradient: Arrays = {}
    right_average = script.average_gradients

    def average_gradients(model):
        right_average(model)
        if not first_gradient:
            named = model.named_parameters()
            first_gradient.update({name: p.grad.clone() for name, p in named if p.grad is not None})

    replaced = (
        (posts, "read_posts", lambda task, tokenizer, split, limit=0: splits[split]),
        (script, "average_gradients", average_gradients),
        *replaced,
    )
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(contextlib.chdir(folder))
        for where, name, value in replaced:
            stack.enter_context(patch.object(where, name, value))
        calls = {name: stack.enter_context(recorded(script, name)) for name in RECORDED if hasattr(script, name)}
        for name, model in initial.items():
            save_model(folder / name, model)
        script.train(args)
        run = only(folder, "runs/*")
        return SimpleNamespace(
            calls=calls,
            first_gradient=first_gradient,
            metrics=metrics_of(run),
            results=meta_of(run)["results"],
            summaries=[row["response"] for table in run.glob("evaluation_test.jsonl") for row in rows_of(table)],
            **{path.name: saved_model(path) for path in folder.glob("models/*/*")},
        )


def in_drawn_order(stored: torch.Tensor, *key: int | str) -> torch.Tensor:
    """Rows placed so that a script's permutation, whose generator has this key, gives them as they are stored."""
    placed = torch.empty_like(stored)
    placed[torch.randperm(len(stored), generator=train_policy.keyed_generator(*key))] = stored
    return placed


def posts_of(queries: torch.Tensor, references: torch.Tensor) -> Posts:
    return Posts(queries=queries.long(), references=references.long(), too_long=0)


def sft_run(case: dict, arrays: Arrays) -> SimpleNamespace:
    """A run of tldr/sft.py with the stored learning rates [X32], over all rows of the output layer [T14]."""
    rates = arrays["step_lr"].tolist()
    texts = in_drawn_order(arrays["micro_tokens"].flatten(0, 1), SEED, "posts", 0)
    splits = {
        split: posts_of(arrays[f"{split}/query_token"], arrays[f"{split}/reference_response_token"])
        for split in ("validation", "test")
    }
    limits = {"query_length": QUERY, "response_length": REFERENCE, "eval_temperature": case["eval_temperature"]}
    return run_of(
        tldr_sft,
        tldr_sft.Args(
            base_model="base",
            dtype="float64",
            batch_size=case["micro"] * case["accumulation"],
            lr=case["lr"],
            local_micro_batch_size=case["micro"],
            task=TaskArgs(**limits),
        ),
        {"base": language_model(case, under(arrays, "initial/"))},
        splits | {"train": posts_of(texts[:, :QUERY], texts[:, QUERY:])},
        (tldr_sft, "cosine_lr", lambda lr, step, steps: rates[step]),
        (TaskIds, "vocab_size", case["output_rows"]),
    )


def reward_run(case: dict, arrays: Arrays) -> SimpleNamespace:
    """A run of tldr/reward.py, which begins with the stored head in place of a random one."""

    def comparisons_of(split: str, groups: dict[str, list]) -> Comparisons:
        tokens = {name: arrays[f"{split}/{name}_token"].long() for name in ("query", "chosen", "rejected")}
        if split == "micro":
            tokens = {name: in_drawn_order(x.flatten(0, 1), SEED, "comparisons") for name, x in tokens.items()}
        groups = [dict(zip(groups, map(str, row), strict=True)) for row in zip(*groups.values(), strict=True)]
        queries = tokens.pop("query")
        return Comparisons(queries=queries, **tokens, groups=groups, cut=0, identical=0, ceiling=None)

    nowhere = dict.fromkeys(("split", "batch", "confidence"), [""] * case["rows"])
    comparisons = {
        ("train", False): comparisons_of("micro", nowhere),
        ("validation", False): comparisons_of("validation", case["groups"]["validation"]),
        ("validation", True): comparisons_of("validation_cnndm", case["groups"]["validation_cnndm"]),
    }
    initial = our_names(under(arrays, "initial/"), scalar_model=True)
    base, right = new_language_model(case), tldr_reward.RewardModel
    base.base_model.load_state_dict(under(initial, "lm_backbone."), strict=True)

    def with_stored_head(lm_backbone: PreTrainedModel) -> tldr_reward.RewardModel:
        model = right(lm_backbone)
        model.reward_head.load_state_dict(under(initial, "reward_head."))
        return model

    return run_of(
        tldr_reward,
        tldr_reward.Args(
            base_model="base",
            dtype="float64",
            batch_size=case["micro"] * case["accumulation"],
            lr=case["lr"],
            local_micro_batch_size=case["micro"],
            task=TaskArgs(query_length=QUERY, response_length=REFERENCE),
        ),
        {"base": base},
        {"train": posts_of(arrays["posts/query_token"], arrays["posts/reference_response_token"])},
        (posts, "read_comparisons", lambda _, __, split, limit=0, articles=False: comparisons[split, articles]),
        (tldr_reward, "RewardModel", with_stored_head),
    )


# ---- Runs of tldr/policy.py ------------------------------------------------------------------------------------


def steered(case: dict, steered_at: float, responses: list[torch.Tensor]) -> list[Replaced]:
    """At this temperature the sampler gets the uniform numbers with which it samples the stored responses."""
    generate, stored = tldr_responses.generate_until, iter(responses)

    def wrapper(lm_backbone, contexts, uniforms, pad_id, vocab_size, temperature, stop_ids):
        if temperature == steered_at:
            tokens = next(stored).long()
            query_responses, length = torch.cat([contexts, tokens], dim=1), tokens.shape[1]
            uniforms = steering_uniforms(
                lm_backbone, query_responses, length, pad_id, case["output_rows"], temperature
            )
        return generate(lm_backbone, contexts, uniforms, pad_id, case["output_rows"], temperature, stop_ids)

    return [(module, "generate_until", wrapper) for module in (posts, tldr_policy)]


def in_order(lengths: torch.Tensor, device: torch.device, rows: int = 0, *_, **__) -> list[packing.Pass]:
    """Passes as the original has them."""
    parts = torch.arange(len(lengths)).split(rows or len(lengths))
    return [packing.Pass(rows=part, longest=int(lengths.max())) for part in parts]


# Stored are rows in their order. test_packing.py shows that the order makes no difference.
AS_STORED: list[Replaced] = [(packing, "plan_passes", in_order)]


def all_output_rows(case: dict) -> list[Replaced]:
    """Logits of all rows of the output layer, not only of the tokenizer's ids [T14]."""
    right = train_policy.scaled_logits

    def scaled_logits(lm_backbone, hidden_states, vocab_size, temperature):
        return right(lm_backbone, hidden_states, case["output_rows"], temperature)

    return [(tldr_responses, "scaled_logits", scaled_logits)]


def whitened_once() -> list[Replaced]:
    """Advantages are whitened over the whole rollout, before minibatches are drawn [X25]."""
    right, update, rollouts = tldr_policy.compute_advantages, tldr_policy.ppo_update, []

    def ppo_update(actor_critic, optimizer, rollout, *arguments, **options):
        rollouts.append(rollout)
        return update(actor_critic, optimizer, rollout, *arguments, **options)

    def compute_advantages(rewards, values, mask, value_mask, ppo, reduce):
        whole = rollouts[-1]
        found = right(whole.rewards, whole.values, whole.mask, whole.value_mask, ppo, reduce)
        rows = (values.unsqueeze(1) == whole.values).all(2).int().argmax(1)  # of the minibatch in the rollout
        return tuple(tensor[rows] for tensor in found)

    return [(tldr_policy, "ppo_update", ppo_update), (tldr_policy, "compute_advantages", compute_advantages)]


def policy_run(
    case: dict,
    updates: list[Arrays],
    held_out: Posts,
    minibatches: torch.Tensor,
    initial: dict[str, PreTrainedModel | train_reward.RewardModel],
    *replaced: Replaced,
    eval_interval: int,
    temperature: float,
    rewards: dict[str, Any],
    ppo: dict[str, Any],
) -> SimpleNamespace:
    """minibatches: rows in each, (passes, minibatches, rows)."""
    queries = in_drawn_order(torch.cat([update["queries"] for update in updates]), SEED, "posts", 0)
    splits = {
        "train": posts_of(queries, torch.full((len(queries), 1), EOS)),
        "validation": held_out,
        "test": held_out,
    }
    args = tldr_policy.Args(
        base_model="base",
        dtype="float64",
        eval_interval=eval_interval,
        task=TaskArgs(query_length=QUERY, response_length=RESPONSE, temperature=temperature),
        rewards=tldr_policy.RewardsArgs(trained_model="reward", **rewards),
        ppo=tldr_policy.PpoArgs(total_episodes=len(queries), batch_size=16, **ppo),
    )
    of_updates = iter(minibatches.split(args.ppo.noptepochs))
    return run_of(
        tldr_policy,
        args,
        initial,
        splits,
        (tldr_policy, "draw_minibatches", lambda *_: next(of_updates)),
        *steered(case, temperature, [update["responses"] for update in updates]),
        *all_output_rows(case),
        *replaced,
    )


def original_policy_run(case: dict, arrays: Arrays) -> SimpleNamespace:
    """A run of the paper's ppo.py; the reference's log-probs are given, its weights are not stored."""
    updates = [under(arrays, f"update{i}/") for i in range(case["updates"])]
    ref_logprobs = iter([update["ref_logprobs"] for update in updates])
    replaced = [(tldr_policy, "reference_logprobs", lambda *_, **__: next(ref_logprobs))]
    if "X25" in case["differs"]:
        replaced += whitened_once()
    held_out, ppo = under(arrays, "evaluation0/"), dict(case["ppo"])
    rewards = {
        "kl_coef": ppo.pop("kl_coef"),
        "missing_eos": "replace" if case["non_eos_penalty"] else "none",
        "missing_eos_penalty": -case["penalty"],
    }
    return policy_run(
        case,
        updates,
        posts_of(held_out["query_token"], held_out["reference_response_token"]),
        arrays["micro/micro_batch_inds"].long().view(4 * len(updates), case["nminibatches"], -1),
        {
            "base": language_model(case, under(arrays, "initial/policy/")),
            "reward": scalar_model(case, under(arrays, "initial/critic/"), -case["config_bias"]),
        },
        *replaced,
        eval_interval=1,
        temperature=case["temperature"],
        rewards=rewards,
        ppo=ppo | {"nminibatches": case["nminibatches"], "lr": case["lr"], "local_micro_batch_size": case["micro"]},
    )


def trl_policy_run(case: dict, arrays: Arrays) -> SimpleNamespace:
    """A run of TRL's PPOTrainer, with its variance of whitening [T52] and its head without a bias."""
    settings, updates = case["settings"], [under(arrays, f"update{i}/") for i in range(case["updates"])]
    whiten, load_critic = tldr_policy.whiten, models.load_critic
    reference, make_reference = language_model(case, under(arrays, "reference/")), models.Reference.__init__

    def unbiased_whiten(values, mask, *, keep_mean, reduce):
        count = mask.sum()
        return whiten(values, mask, keep_mean=keep_mean, reduce=reduce) * ((count - 1) / count).sqrt()

    def load_critic_without_bias(*arguments):
        critic = load_critic(*arguments)
        critic.reward_head.bias.requires_grad_(False)
        return critic

    def same(*names: str) -> dict[str, Any]:
        return {name: settings[name] for name in names}

    return policy_run(
        case,
        updates,
        posts_of(updates[0]["queries"][:2], torch.full((2, 1), EOS)),
        arrays["permutations"].long().unsqueeze(1),
        {
            "base": language_model(case, under(arrays, "initial/policy/")),
            "reward": scalar_model(case, under(arrays, "reward/")),
            "value": scalar_model(case, under(arrays, "initial/value/")),
        },
        (tldr_policy, "whiten", unbiased_whiten),
        (models, "load_critic", load_critic_without_bias),
        (models.Reference, "__init__", lambda self, _, adapters: make_reference(self, reference, adapters)),
        eval_interval=0,
        temperature=settings["temperature"],
        rewards=same("kl_coef", "kl_estimator", "missing_eos_penalty")
        | {"value_model": "value", "missing_eos": "subtract"},
        ppo=same("cliprange", "cliprange_value", "gamma", "lam", "vf_coef", "whiten_rewards")
        | {
            "lr": settings["learning_rate"],
            "adam_eps": case["optimizer"]["eps"],
            "weight_decay": case["optimizer"]["weight_decay"],
            "local_micro_batch_size": 16,  # each minibatch in one pass
        },
    )
