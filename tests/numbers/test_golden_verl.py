"""Chapter 3 against numbers that verl computed (check/golden/verl): those to match, and those that differ on purpose.

NeMo-RL computed those of the newer lambdas, prime-rl those of ipo and dppo, the authors of MaxRL and of GDPO those of
their estimators, and TRL 1.16 and verl 0.9.1 those of a teacher (golden/nemo_rl, golden/prime_rl, golden/maxrl,
golden/gdpo, golden/distillation).

As in test_golden.py each check is a plain function that reads ours from its module when it runs: a negative control
puts a wrong one there.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import mistakes
import numpy as np
import pytest
import torch
from golden_models import close, golden, load_json
from rollouts import StandIn, read_tables, rollout_of, updated_stand_in
from torch import Tensor

from ppo_rlhf.rlvr import algebra, asynchronous as rlvr_async, policy as rlvr_policy
from ppo_rlhf.rlvr.arguments import PpoArgs, RewardsArgs

CASES = {case["name"]: case for case in load_json("verl/cases")["cases"]}
EXACT, AVERAGE = 1e-9, 1e-7  # verl adds 1e-8 to the counts that it divides by


def case(name: str) -> tuple[dict[str, Tensor], dict]:
    """Inputs, masks as bool; verl's results under out/, those asked for instead under spec/; the arguments."""
    with np.load(golden(f"verl/{name}.npz")) as file:
        stored = {key.removeprefix("in/"): file[key] for key in file.files}
    groups = np.unique(stored.pop("index", []), return_inverse=True)[1]
    arrays = {"groups": torch.from_numpy(groups)} | {key: torch.from_numpy(x) for key, x in stored.items()}
    arrays = {key: x.double() if x.is_floating_point() else x for key, x in arrays.items()}
    masks = {key: x.bool() for key, x in arrays.items() if key in ("response_mask", "loss_mask", "mask")}
    return arrays | masks, CASES[name]["kwargs"]


def same(actual: Tensor, expected: Tensor, tolerance: float = EXACT) -> None:
    close(actual, expected, atol=tolerance * max(1.0, float(expected.abs().max())))


def real(numbers: list) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def estimated(name: str, x: dict[str, Tensor], **more: Tensor) -> tuple[Tensor, Tensor | None]:
    """Advantages and returns by an estimator."""
    return algebra.ESTIMATORS[name](x["token_level_rewards"], x["response_mask"], x["groups"], **more)


def score_at_the_end(scores: Tensor, mask: Tensor) -> Tensor:
    """Rewards without a penalty."""
    zeros = torch.zeros(mask.shape, dtype=torch.float64)
    return algebra.compute_rewards(scores, zeros, zeros, mask, 0.0, "k1")[0]


def same_loss(losses: Tensor, mask: Tensor, mode: str, read: Tensor, loss: Tensor, gradient: Tensor) -> None:
    """read: what the gradient is that of."""
    total = algebra.aggregate(losses, mask, mode)
    same(total.detach(), loss, AVERAGE)
    same(torch.autograd.grad(total, read)[0], gradient, AVERAGE)


# ---- To be matched: advantages ---------------------------------------------------------------------------------


def check_whitened(advantages: Tensor, mask: Tensor, x: dict[str, Tensor], tolerance: float = AVERAGE) -> None:
    """Whitened with n, as the specification has it, and times sqrt((n - 1) / n), as verl has it."""
    whitened, tokens = algebra.whiten(advantages, mask, keep_mean=False), mask.sum()
    same(whitened, x["spec/advantages"], tolerance)
    same(whitened * ((tokens - 1) / tokens).sqrt(), x["out/advantages"], tolerance)


GROUP_CASES = {"grpo_std": "grpo", "grpo_no_std": "dr_grpo", "rloo": "rloo", "opo": "opo"}


def check_groups(name: str) -> None:
    x, _ = case(name)
    advantages, returns = estimated(GROUP_CASES[name], x)
    assert returns is None
    same(advantages, x["spec/advantages"], AVERAGE)
    rows = range(len(advantages))
    several = [row for row in rows if row not in CASES[name].get("rows_of_single_groups", [])]
    same(advantages[several], x["out/advantages"][several], AVERAGE)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))  # [V08] wherever the rows stand
    shuffled, _ = estimated(GROUP_CASES[name], {key: rows[order] for key, rows in x.items()})
    same(shuffled, advantages[order], 1e-12)


def check_reinforce_pp_baseline() -> None:
    x, _ = case("reinforce_pp_baseline")
    advantages, _ = estimated("reinforce++-baseline", x)
    check_whitened(advantages, x["response_mask"], x)


def check_remax() -> None:
    x, _ = case("remax")
    each_alone = torch.arange(len(x["response_mask"]))
    advantages, _ = estimated("remax", x | {"groups": each_alone}, baselines=x["reward_baselines"])
    same(advantages, x["out/advantages"])


# ---- To be matched: KL, losses, masks --------------------------------------------------------------------------


def check_adaptive_kl() -> None:
    x, settings = case("adaptive_kl")
    controller = rlvr_policy.AdaptiveKLController(
        settings["init_kl_coef"], settings["target_kl"], settings["horizon"]
    )
    for kl, n, expected in zip(x["kl"].tolist(), x["n"].tolist(), x["out/coef"].tolist(), strict=True):
        controller.update(kl, n)
        assert controller.value == pytest.approx(expected, rel=1e-12)


# name: loss, aggregation, and the arguments of token_losses that are not verl's defaults
POLICY_CASES: dict[str, tuple[str, str, dict[str, float]]] = {
    "policy_vanilla": ("ppo", "token-mean", {}),
    "policy_dual_clip": ("ppo", "token-mean", {"dual_clip": 1.5}),
    "policy_seq_mean_token_sum": ("ppo", "seq-mean-token-sum", {}),
    "policy_empty_row": ("ppo", "seq-mean-token-mean", {}),
    "policy_gspo": ("gspo", "seq-mean-token-mean", {"low": 0.05, "high": 0.08}),
    "policy_cispo": ("cispo", "token-mean", {}),
}


def losses_of(
    x: dict[str, Tensor], logprobs: Tensor, loss: str, bounds: dict[str, float]
) -> tuple[Tensor, Tensor, Tensor]:
    bounds = {"low": 0.2, "high": 0.2} | ({"dual_clip": 3.0} if loss == "ppo" else {}) | bounds
    return algebra.token_losses(logprobs, x["old_log_prob"], x["advantages"], x["response_mask"], loss, **bounds)


def check_policy(name: str) -> None:
    (x, _), (loss, mode, bounds) = case(name), POLICY_CASES[name]
    logprobs, mask = x["log_prob"].clone().requires_grad_(True), x["response_mask"]
    losses, clipped, clipped_below = losses_of(x, logprobs, loss, bounds)
    same_loss(losses, mask, mode, logprobs, x["out/loss"], x["out/grad_log_prob"])
    if loss != "cispo":  # verl's is that of ppo there
        same(clipped.sum() / mask.sum(), x["out/metric/pg_clipfrac"], 1e-6)
        same(clipped_below.sum() / mask.sum(), x["out/metric/pg_clipfrac_lower"], 1e-6)


def check_bypass_reinforce() -> None:
    """An update of rlvr/asynchronous.py. Rewards that are discounted by 0 are the advantages."""
    x, _ = case("policy_bypass_reinforce")
    mask, sampler, advantages = x["response_mask"], x["rollout_log_prob"], x["advantages"]
    # verl's bounds hold for the inverse ratio; .4 and 2.5 are each other's.
    args = rlvr_async.Args(
        correction="bypass",
        rejection="token",
        rejection_low=0.4,
        rejection_high=2.5,
        ppo=rlvr_policy.PpoArgs(advantage="reinforce++", gamma=0.0, whiten_advantages=False, loss="reinforce"),
    )
    tokens = torch.arange(len(mask)).unsqueeze(1).expand(len(mask), 1 + mask.shape[1])
    given = {"logprobs": x["log_prob"], "sampler_logprobs": sampler, "query_responses": tokens}
    seen = []

    def read(table: Tensor, tokens: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(kept)
        return table, torch.zeros_like(table)

    network = StandIn(x["log_prob"], read)
    steps = updated_stand_in(network, rollout_of(mask, **given), advantages, args)
    same(seen[0].double(), x["out/kept_mask"])
    same(steps["loss/policy_avg"][0], x["out/loss"], AVERAGE)
    same(network.table.grad, x["out/grad_log_prob"], AVERAGE)


def check_entropy() -> None:
    x, _ = case("entropy")
    _, entropies = algebra.read_logits(x["logits"], torch.zeros(x["response_mask"].shape), entropy_learns=False)
    for mode in ("token-mean", "seq-mean-token-mean"):
        same(algebra.aggregate(entropies, x["response_mask"], mode), x[f"out/{mode}"], AVERAGE)


def check_value_loss() -> None:
    x, settings = case("value_loss")
    values, mask = x["vpreds"].clone().requires_grad_(True), x["response_mask"]
    losses, clipped = algebra.value_losses(values, x["values"], x["returns"], mask, settings["cliprange_value"])
    same_loss(losses, mask, "token-mean", values, x["out/loss"], x["out/grad_vpreds"])
    same(clipped.sum() / mask.sum(), x["out/clipfrac"], 1e-6)


NAMES_OF_METRICS = {"kl": "kl", "k3": "k3_kl", "perplexity": "training_ppl", "sampler_perplexity": "rollout_ppl"}
NAMES_OF_METRICS |= {"chi2_token": "chi2_token", "chi2_sequence": "chi2_seq", "log_perplexity_gap": "log_ppl_diff"}


def check_mismatch() -> None:
    x, _ = case("offpolicy_metrics")
    arrays = (x[key] for key in ("train_log_prob", "sampler_log_prob", "response_mask"))
    found = algebra.mismatch(*arrays)
    for ours, theirs in NAMES_OF_METRICS.items():
        same(found[ours], x[f"out/{theirs}"], AVERAGE)


MATCHED: dict[str, Callable[[], None]] = {
    **{name: partial(check_groups, name) for name in GROUP_CASES},
    "reinforce_pp_baseline": check_reinforce_pp_baseline,
    "remax": check_remax,
    "adaptive_kl": check_adaptive_kl,
    **{name: partial(check_policy, name) for name in POLICY_CASES},
    "policy_bypass_reinforce": check_bypass_reinforce,
    "entropy": check_entropy,
    "value_loss": check_value_loss,
    "offpolicy_metrics": check_mismatch,
}


@pytest.mark.parametrize("name", MATCHED)
def test_numbers_of_verl(name):
    MATCHED[name]()


# ---- To be matched: lambdas of NeMo-RL, MaxRL, GDPO, and prime-rl's losses --------------------------------------

OF_NEMO_RL = {"gae_lambda_value": "critic_lam", "gae_gamma": "gamma", "length_adaptive_alpha": "lam_alpha"}


@pytest.mark.parametrize(
    "name",
    [
        *("standard", "critic_lambda_1", "critic_lambda_below", "length_adaptive", "length_adaptive_short"),
        *("vapo", "vapo_discounted"),
    ],
)
def test_numbers_of_nemo_rl(name):
    stored = load_json("nemo_rl/gae")
    (found,) = [found for found in stored["cases"] if found["name"] == name]
    mask, values, scores = (real(stored[key]) for key in ("mask", "values", "scores"))
    mask = mask.bool()
    settings = {"lam": 0.95} | {OF_NEMO_RL[key]: value for key, value in found["settings"].items()}
    told = {"values": values.masked_fill(~mask, math.nan)} | settings
    result = algebra.ESTIMATORS["gae"](score_at_the_end(scores, mask), mask, torch.arange(len(mask)), **told)
    tolerance = 1e-6 if "lam_alpha" in settings else 1e-9  # whose lambda it computes in float32
    for ours, theirs in zip(result, ("advantages", "returns"), strict=True):
        same(ours, real(found[theirs]), tolerance)


def test_numbers_of_maxrl():
    x = {key: real(numbers) for key, numbers in load_json("maxrl/advantages").items()}
    mask = x["mask"].bool()
    advantages, returns = algebra.ESTIMATORS["maxrl"](score_at_the_end(x["scores"], mask), mask, x["groups"])
    assert returns is None
    same(advantages, x["advantages"])


def test_numbers_of_gdpo():
    x = load_json("gdpo/advantages")
    mask, groups, said = torch.tensor(x["mask"]).bool(), torch.tensor(x["groups"]), x["sources"]
    zeros, tokens = torch.zeros(mask.shape, dtype=torch.float64), mask.sum()

    def estimate(names: list[str], weights: list[float]) -> Tensor:
        parts = real([said[name] for name in names]).T
        return algebra.ESTIMATORS["gdpo"](zeros, mask, groups, parts=parts, weights=weights)[0]

    for names, expected in x["verl"].items():
        whitened = algebra.whiten(estimate(names.split(", "), [1.0, 1.0]), mask, keep_mean=False)
        same(whitened * ((tokens - 1) / tokens).sqrt(), real(expected), AVERAGE)
    before = x["trl"]["before the whitening"]
    same(estimate([*said], x["weights"])[:, 0], real(before), 1e-3)  # TRL adds 1e-4 to the deviation


def test_numbers_of_trl_and_verl_for_a_teacher():
    """TRL's exact KL per token, with its gradient, and verl's sampled one as the advantage of its own token."""
    x = load_json("distillation/numbers")
    logits, ref_logits = real(x["student_logits"]), real(x["teacher_logits"])
    mask, tokens, temperature = torch.tensor(x["mask"]).bool(), torch.tensor(x["tokens"]), x["temperature"]
    logits.requires_grad_()
    logprobs, ref_logprobs, exact_kl = read_tables(logits, ref_logits, tokens, temperature)
    exact, sampled = (RewardsArgs(teacher="a model", kl_estimator=name) for name in ("full", "k1"))
    mb = rollout_of(mask, logprobs=logprobs.detach(), ref_logprobs=ref_logprobs, exact_kl=exact_kl.detach())
    coef, _ = exact.loss_kl
    loss = coef * algebra.aggregate(rlvr_policy.kl_in_loss(logprobs, mb, exact_kl, exact), mask, "token-mean")
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    same(loss, real(x["trl"]["loss"]), 1e-6)  # which TRL computes in float32
    same(gradient, real(x["trl"]["gradient"]), 1e-6)

    ppo = PpoArgs(advantage="reinforce++", whiten_advantages=False, gamma=0.0)
    rewards, _, _ = rlvr_policy.token_rewards(mb, sampled.reward_kl, sampled.kl_estimator)
    advantages, _ = rlvr_policy.compute_advantages(dataclasses.replace(mb, rewards=rewards), ppo)
    losses, _, _ = algebra.token_losses(logprobs, mb.logprobs, advantages, mask, ppo.loss, low=0.2, high=0.2)
    same_loss(losses, mask, "token-mean", logprobs, real(x["verl"]["loss"]), real(x["verl"]["gradient"]))


@pytest.mark.parametrize("loss", ["ipo", "dppo"])
def test_numbers_of_prime_rl(loss):
    stored = load_json("prime_rl/losses")
    names = ("new_logprobs", "logprobs", "advantages", "mask")
    new, *rest, mask = (real(stored[name]) for name in names)
    for bound in (0.3, 0.1):
        expected, new, mask = stored["results"][f"{loss} {bound}"], new.detach().requires_grad_(), mask.bool()
        losses, left_out, _ = algebra.token_losses(new, *rest, mask, loss, low=0.2, high=0.2, trust_region=bound)
        same_loss(losses, mask, "token-mean", new, real(expected["loss"]), real(expected["gradient"]))
        neither = int(loss == "dppo")  # one token of the advantage 0, which prime-rl counts as left out by dppo
        same((left_out.sum() + neither) / mask.sum(), torch.tensor(expected["is_masked"]), 1e-6)


# ---- Different on purpose --------------------------------------------------------------------------------------


def check_differing_whiten_few(name: str) -> None:
    """0 instead of an exception."""
    x, _ = case(name)
    assert "ValueError" in CASES[name]["result"]
    same(algebra.whiten(x["values"], x["mask"], keep_mean=False), x["spec/whitened"])


def check_differing_grpo_vectorized() -> None:
    """One implementation, in the precision of the rewards."""
    x, _ = case("grpo_vectorized")
    advantages, _ = estimated("grpo", x)
    same(advantages, x["spec/advantages"], AVERAGE)
    assert (advantages - x["out/advantages"]).abs().max() > 1e-8
    tiny = torch.tensor([[0.0], [1e-4]], dtype=torch.float64)  # a std of 7e-5, which verl takes for 1e-3
    found, _ = algebra.ESTIMATORS["grpo"](tiny, torch.ones(2, 1, dtype=torch.bool), torch.zeros(2))
    assert found[1].item() == pytest.approx(5e-5 / (1e-4 / math.sqrt(2) + 1e-6))


def check_differing_rloo_single() -> None:
    """A group of one always gives 0 here; verl's other version gives the raw reward."""
    x, _ = case("rloo_vectorized_single")
    advantages, _ = estimated("rloo", x)
    same(advantages, x["spec/advantages"], 1e-6)
    assert (advantages[CASES["rloo_vectorized_single"]["rows_of_single_groups"]] == 0).all()


def check_differing_seq_mean_token_sum_norm() -> None:
    """Also divided by the number of sequences."""
    x, _ = case("policy_seq_mean_token_sum_norm")
    logprobs = x["log_prob"].clone().requires_grad_(True)
    losses, _, _ = losses_of(x, logprobs, "ppo", {})
    expected = x["out/loss"] / 3, x["out/grad_log_prob"] / 3
    same_loss(losses, x["response_mask"], "seq-mean-token-sum-norm", logprobs, *expected)


def check_differing_mismatch_of_an_empty_row() -> None:
    """An empty row is left out of the means over sequences."""
    x, _ = case("offpolicy_metrics_empty_row")
    arrays = [x[key] for key in ("train_log_prob", "sampler_log_prob", "response_mask")]
    found, without = algebra.mismatch(*arrays), algebra.mismatch(*(a[[0, 2, 3]] for a in arrays))
    assert found == without
    for ours, theirs in NAMES_OF_METRICS.items():  # an empty row has perplexity and ratio 1 there
        per_row = {"perplexity": 1, "sampler_perplexity": 1, "chi2_sequence": 0, "log_perplexity_gap": 0}
        expected = (3 * found[ours] + per_row[ours]) / 4 if ours in per_row else found[ours]
        same(expected, x[f"out/{theirs}"], AVERAGE)


def check_differing_grpo_reward_on_masked_slot() -> None:
    """A number after the last token is no reward, so it does not move the group's mean either."""
    x, _ = case("grpo_reward_on_masked_slot")
    found, _ = estimated("grpo", x)
    kept = x["token_level_rewards"].masked_fill(~x["response_mask"], 0)
    expected, _ = estimated("grpo", x | {"token_level_rewards": kept})
    same(found, expected)
    assert (found - x["out/advantages"]).abs().max() > 0.1


DIFFERENT: dict[str, Callable[[], None]] = {
    **{name: partial(check_differing_whiten_few, name) for name in ("whiten_one_token", "whiten_no_token")},
    "grpo_vectorized": check_differing_grpo_vectorized,
    "rloo_vectorized_single": check_differing_rloo_single,
    "policy_seq_mean_token_sum_norm": check_differing_seq_mean_token_sum_norm,
    "offpolicy_metrics_empty_row": check_differing_mismatch_of_an_empty_row,
    "grpo_reward_on_masked_slot": check_differing_grpo_reward_on_masked_slot,
}


NOT_OFFERED = {"grpo_passk", "gpg", "policy_geo_mean"}
# Where `python -m ppo_rlhf.check` holds ours to these numbers, or to the property that they are about.
OF_CHECK = {
    *("gae_ragged", "gae_gamma1_lam1", "reinforce_pp", "kl_values_and_gradients", "agg_modes", "is_token"),
    *("is_sequence", "reject_token_k1", "reject_seq_mean_k1", "response_mask_one_eos", "overlong_punishment"),
    *("whiten_shift", "whiten_keep_mean", "kl_extreme", "agg_all_masked", "reject_token_k1_asymmetric"),
    *("reinforce_pp_interior_mask", "kl_names", "agg_micro_batches", "agg_nan_under_mask", "policy_two_processes"),
    *("gae_nan_under_mask", "gae_reward_on_masked_slot"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_differs_from_verl_on_purpose(name):
    DIFFERENT[name]()


def test_every_case_is_matched_or_differs():
    verdicts = {name: case["verdict"] == "match" for name, case in CASES.items() if name not in OF_CHECK}
    assert verdicts == dict.fromkeys(MATCHED, True) | dict.fromkeys([*DIFFERENT, *NOT_OFFERED], False)
    assert CASES.keys() > OF_CHECK and sum(case["verdict"] == "match" for case in CASES.values()) == 28


# ---- Negative controls: mistakes that these tests reject -------------------------------------------------------

test_mistake_is_detected, test_rebuilt_functions_pass = mistakes.tests_of(globals())
