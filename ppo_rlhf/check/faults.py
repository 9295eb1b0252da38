"""Known faults of functions in forms.py: what is wrong, whom it happened to, and the line that makes it.

A fault is a small function. It returns pairs of texts: a part of the correct function, and what the faulty one has
in its place. So two faults of one function can be combined, and an exercise is the faulty text. The docstring says
what is wrong. `mark` names the entry of docs/details; `source` is a published report, or the project and release in
which it was read. A fault with choice=True is not one: it is another project's convention, with other numbers.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from ppo_rlhf.check import forms

GITHUB = "https://github.com/"
Edits = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Fault:
    function: str
    """of forms.py, of which it is a fault"""
    name: str
    says: str
    mark: str
    source: str
    choice: bool
    edits: Edits

    @cached_property
    def page(self) -> str:
        """Where the register explains the mark."""
        letter = {"X": "T"}.get(self.mark[0], self.mark[0])  # X20 and later are chapter 2's
        return f"docs/details/chapter{'DTV'.index(letter) + 1}.md#{self.mark}"

    @cached_property
    def text(self) -> str:
        """The faulty function."""
        return edited(self.function, self.edits)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return compiled(self.function, self.edits)(*args, **kwargs)


FAULTS: list[Fault] = []


def fault(function: str, mark: str, source: str = "", *, choice: bool = False) -> Callable:
    """Adds what a small function returns, two texts or several pairs of them, to the list of faults."""

    def add(small: Callable[[], tuple]) -> Callable:
        edits = small()
        edits = (edits,) if isinstance(edits[0], str) else edits
        name = small.__name__.removeprefix(f"{function}_").replace("1e_", "1e-").replace("_", " ")
        says = " ".join(small.__doc__.split())
        FAULTS.append(Fault(function, name, says, mark, source, choice, edits))
        return small

    return add


@cache
def text_of(function: str) -> str:
    return inspect.getsource(getattr(forms, function))


def edited(function: str, edits: Edits) -> str:
    """The text of a form with parts of it replaced, each of which it must have exactly once."""
    text = text_of(function)
    for right, wrong in edits:
        if text.count(right) != 1:
            raise ValueError(f"{function} has {text.count(right)} times {right!r}")
        text = text.replace(right, wrong)
    return text


@cache
def compiled(function: str, edits: Edits) -> Callable:
    namespace = dict(vars(forms))
    exec(compile(edited(function, edits), f"<{function} with a fault>", "exec"), namespace)
    return namespace[function]


def of(function: str) -> list[Fault]:
    return [fault for fault in FAULTS if fault.function == function]


def together(some: Iterable[Fault]) -> Callable | None:
    """The function with several faults; None if they change the same part of it."""
    some = list(some)
    try:
        return compiled(some[0].function, sum((fault.edits for fault in some), ()))
    except (ValueError, SyntaxError):
        return None


# ---- Tokens ----------------------------------------------------------------------------------------------------


@fault("truncate", "D48")
def truncate_stop_id_removed():
    """The stop id becomes padding too, so a response that ended looks like one that was cut off."""
    return "stops.cumsum(1) - stops.long()", "stops.cumsum(1)"


@fault("truncate", "D48")
def truncate_after_ignored():
    """Stop ids before index `after` count too."""
    return " & (torch.arange(responses.shape[1]) >= after)", ""


@fault("truncate", "D48")
def truncate_after_off_by_one():
    """A stop id exactly at index `after` does not count."""
    return ">= after", "> after"


@fault("truncate", "D48")
def truncate_at_the_last_stop():
    """The text up to the last stop id stays, not up to the first."""
    return (
        "stops_before = stops.cumsum(1) - stops.long()",
        "stops_before = stops.any(1, keepdim=True) & (stops.flip(1).cumsum(1).flip(1) == 0)",
    )


@fault("truncate", "D48")
def truncate_a_stop_at_0_is_none():
    """The first stop is found by argmax, whose 0 is taken for none, so a stop id at index 0 is not seen."""
    return (
        "stops_before = stops.cumsum(1) - stops.long()",
        "first = stops.long().argmax(1, keepdim=True)\n"
        "    stops_before = (torch.arange(responses.shape[1]) > first) & (first > 0)",
    )


@fault("truncate", "D48")
def truncate_none_is_a_stop_at_0():
    """The first stop is found by argmax, which is 0 if there is none: a response without a stop is cut to a token."""
    return (
        "stops_before = stops.cumsum(1) - stops.long()",
        "stops_before = torch.arange(responses.shape[1]) > stops.long().argmax(1, keepdim=True)",
    )


@fault("response_mask", "V10")
def response_mask_without_the_stop_id():
    """The stop id is masked, so the policy never learns to end."""
    return " - stops.long() == 0", " == 0"


@fault("response_mask", "V10", GITHUB + "NVIDIA-NeMo/Automodel/issues/1336")
def response_mask_by_the_padding_id():
    """Every token that equals the padding id is masked. Where that is the stop id, the policy never learns to end."""
    return "stops.cumsum(1) - stops.long() == 0", "~stops"


@fault("response_mask", "V10")
def response_mask_one_token_too_many():
    """The mask includes the token after the stop id."""
    return (
        "stops.cumsum(1) - stops.long() == 0",
        "torch.nn.functional.pad(stops.cumsum(1) - stops.long(), (1, -1)) == 0",
    )


@fault("response_mask", "V10")
def response_mask_none_is_a_stop_at_0():
    """The first stop is found by argmax, which is 0 if there is none: a response without a stop has one token."""
    return (
        "stops.cumsum(1) - stops.long() == 0",
        "torch.arange(responses.shape[1]) <= stops.long().argmax(1, keepdim=True)",
    )


@fault("response_mask", "V10")
def response_mask_up_to_the_last_stop():
    """The mask ends at the last stop id, so padding with the same id counts."""
    return (
        "stops.cumsum(1) - stops.long() == 0",
        "(stops.flip(1).cumsum(1).flip(1) > 0) | ~stops.any(1, keepdim=True)",
    )


@fault("response_mask", "V10", "verl's and others' option for truncated responses", choice=True)
def response_mask_without_responses_that_were_cut_off():
    """A response without a stop id is masked entirely."""
    return "return stops.cumsum(1) - stops.long() == 0", (
        "return (stops.cumsum(1) - stops.long() == 0) & stops.any(1, keepdim=True)"
    )


@fault("has_stop", "V10", "TRL 1.16")
def has_stop_in_the_last_column():
    """A response counts as ended if its last column is the stop id, so a shorter one counts as cut off."""
    return "(responses[:, after:] == stop_id).any(1)", "responses[:, -1] == stop_id"


@fault("has_stop", "V24", GITHUB + "areal-project/AReaL/pull/1637")
def has_stop_by_the_padded_width():
    """A response counts as ended if it is shorter than the padded width. Padding is taken to be 0."""
    return "(responses[:, after:] == stop_id).any(1)", "(responses[:, -1] == 0) | (responses[:, -1] == stop_id)"


@fault("has_stop", "D50")
def has_stop_before_after():
    """Stop ids before index `after` count too."""
    return "responses[:, after:]", "responses"


@fault("has_stop", "D50")
def has_stop_at_0_is_none():
    """The stop is found by argmax, whose 0 is taken for none."""
    return "(responses[:, after:] == stop_id).any(1)", "(responses[:, after:] == stop_id).long().argmax(1) > 0"


@fault("token_logprobs", "V13", GITHUB + "huggingface/trl/issues/4159")
def token_logprobs_without_temperature():
    """Logits are not divided by the temperature, so the ratio of an update does not start at 1."""
    return "logits / temperature", "logits"


@fault("token_logprobs", "D23")
def token_logprobs_times_temperature():
    """Logits are multiplied by the temperature."""
    return "logits / temperature", "logits * temperature"


@fault("token_logprobs", "D47")
def token_logprobs_not_normalised():
    """The logit of the token is taken for its log-prob."""
    return "torch.log_softmax(logits / temperature, dim=2)", "logits / temperature"


@fault("token_logprobs", "V13", GITHUB + "huggingface/trl/issues/6789")
def token_logprobs_of_the_top_p():
    """Log-probs are those of the sampler's nucleus (here top_p = 0.9), which the training pass does not have."""
    return (
        "all_logprobs = torch.log_softmax(logits / temperature, dim=2)",
        "p = torch.softmax(logits / temperature, dim=2)\n"
        "    order = p.argsort(2, descending=True)\n"
        "    kept = p.gather(2, order).cumsum(2) - p.gather(2, order) < 0.9\n"
        "    kept = torch.zeros_like(kept).scatter(2, order, kept)\n"
        "    all_logprobs = torch.log_softmax((logits / temperature).masked_fill(~kept, -1e9), dim=2)",
    )


@fault("token_logprobs", "D47")
def token_logprobs_without_a_gradient():
    """The result has no gradient, so nothing that is made of it trains. For a rollout, return an array."""
    return ".squeeze(2)", ".squeeze(2).detach()"


@fault("token_logprobs", "D47")
def token_logprobs_normalised_without_a_gradient():
    """The normaliser has no gradient: a logit is raised whatever the others are."""
    return (
        "torch.log_softmax(logits / temperature, dim=2)",
        "logits / temperature - (logits / temperature).logsumexp(2, keepdim=True).detach()",
    )


@fault("token_logprobs", "V13")
def token_logprobs_divided_after_the_softmax():
    """Log-probs are divided by the temperature, not logits, so probabilities don't add up to 1."""
    return "torch.log_softmax(logits / temperature, dim=2)", "torch.log_softmax(logits, dim=2) / temperature"


@fault("token_logprobs", "D47")
def token_logprobs_of_the_token_before():
    """The log-prob at a token is that of the token before it."""
    return "tokens.long()", "tokens.long().roll(1, 1)"


@fault("entropy", "V68")
def entropy_without_temperature():
    """Logits are not divided by the temperature."""
    return "logits / temperature", "logits"


@fault("entropy", "V68")
def entropy_in_bits():
    """The logarithm is that of base 2."""
    return "return -(all_logprobs.exp() * all_logprobs)", "return -(all_logprobs.exp() * all_logprobs / math.log(2))"


@fault("entropy", "V68")
def entropy_negative():
    """The sign is missing, so a bonus becomes a penalty."""
    return "-(all_logprobs.exp()", "(all_logprobs.exp()"


@fault("entropy", "V68")
def entropy_mean_over_the_vocabulary():
    """The mean over the vocabulary, not the sum."""
    return ".sum(2)", ".mean(2)"


@fault("entropy", "V68", GITHUB + "huggingface/trl/pull/5595")
def entropy_without_a_gradient():
    """The result has no gradient, so a bonus trains nothing. If it is only logged, return an array."""
    return ".sum(2)", ".sum(2).detach()"


@fault("entropy", "V68")
def entropy_of_detached_probabilities():
    """The probabilities have no gradient: it is that of the mean log-prob, whose expectation is 0."""
    return "all_logprobs.exp() *", "all_logprobs.exp().detach() *"


@fault("entropy", "V68")
def entropy_divided_after_the_softmax():
    """The entropy at temperature 1 is divided by the temperature."""
    return (("logits / temperature", "logits"), (".sum(2)", ".sum(2) / temperature"))


@fault("entropy", "V68")
def entropy_relative_to_the_greatest():
    """It is divided by the log of the vocabulary's size, so that the greatest is 1."""
    return ".sum(2)", ".sum(2) / math.log(logits.shape[2])"


@fault("response_logprobs", "D47")
def response_logprobs_not_shifted():
    """The logits at a token are read for that token; those at the position before it predict it."""
    return "context_length - 1 : -1", "context_length:"


@fault("response_logprobs", "T16")
def response_logprobs_without_positions():
    """Positions count padding, which is wrong for models with learned positions and contexts padded on the left."""
    return "position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)", "position_ids = None"


@fault("response_logprobs", "D15")
def response_logprobs_that_see_padding():
    """Without an attention mask, tokens see the padding on their left."""
    return "attention_mask=attention_mask.long(), ", ""


@fault("response_logprobs", "D23", GITHUB + "huggingface/trl/issues/4159")
def response_logprobs_without_temperature():
    """Logits are not divided by the temperature, so the ratio of an update does not start at 1."""
    return "[:, context_length - 1 : -1] / temperature", "[:, context_length - 1 : -1]"


# ---- Rewards ---------------------------------------------------------------------------------------------------


@fault("kl_estimate", "V48", GITHUB + "natolambert/rlhf-book/issues/489")
def kl_estimate_of_the_wrong_sign():
    """Yours has d = log p(reference) - log p(policy); d is the opposite. So k1 rewards what it should punish."""
    return "d = logprobs - ref_logprobs", "d = ref_logprobs - logprobs"


@fault("kl_estimate", "V52", GITHUB + "natolambert/rlhf-book/issues/489")
def kl_estimate_k3_upside_down():
    """Yours is exp(d) - 1 - d with d = log p(policy) - log p(reference); k3 is exp(-d) - 1 + d.

    As a loss, yours has half of the gradient of the chi-squared divergence.
    """
    return "torch.exp(-d) - 1 + d", "torch.exp(d) - 1 - d"


@fault("kl_estimate", "V48", GITHUB + "natolambert/rlhf-book/issues/489")
def kl_estimate_k1_of_the_wrong_sign():
    """Yours is log p(reference) - log p(policy); k1 is log p(policy) - log p(reference)."""
    return '"k1": d,', '"k1": -d,'


@fault("kl_estimate", "V48", GITHUB + "areal-project/AReaL/pull/408")
def kl_estimate_always_k3():
    """`if` where `elif` belongs: k3 is computed whatever name is asked for."""
    return '[name.removesuffix("+")]', '["k3"]'


@fault("kl_estimate", "V48")
def kl_estimate_k2_without_its_half():
    """k2 is d^2, with twice the gradient."""
    return '"k2": d**2 / 2', '"k2": d**2'


@fault("kl_estimate", "V48")
def kl_estimate_k1_is_absolute():
    """k1 is |d|, which is never negative, and whose mean is not the divergence."""
    return '"k1": d,', '"k1": d.abs(),'


@fault("kl_estimate", "V50", "verl b178a3c; until 7e80ab0")
def kl_estimate_the_plus_does_nothing():
    """k1+ and k3+ have the gradients of k1 and k3, not that of k2."""
    return 'if name.endswith("+"):', "if False:"


@fault("kl_estimate", "V52", "OpenRLHF 0.11.2; verl 0.9.1 (k3)")
def kl_estimate_clamped():
    """Estimates are clamped to 10, beyond which they have no gradient: what is far away is not pulled back."""
    return "    return value", "    return value.clamp(-10, 10)"


@fault("kl_estimate", "V52", "verl 0.9.1")
def kl_estimate_k3_clamped():
    """k3 is clamped to 10, beyond which it has no gradient: what is far away is not pulled back."""
    return "torch.exp(-d) - 1 + d", "(torch.exp(-d) - 1 + d).clamp(-10, 10)"


@fault("token_rewards", "D52")
def token_rewards_penalty_is_a_reward():
    """The sign of the KL penalty is missing."""
    return "-kl_coef * d", "kl_coef * d"


@fault("token_rewards", "V27")
def token_rewards_score_in_the_last_column():
    """The score is in the last column, which is padding unless the response is the longest one."""
    return "last = torch.where(mask, columns, -1).amax(1)", "last = torch.full(mask.shape[:1], mask.shape[1] - 1)"


@fault("token_rewards", "V27")
def token_rewards_score_at_the_number_of_tokens():
    """The score is at index mask.sum(1) - 1, which is not the last token if the mask has holes."""
    return "last = torch.where(mask, columns, -1).amax(1)", "last = mask.sum(1) - 1"


@fault("token_rewards", "T43", "chapter 2", choice=True)
def token_rewards_score_after_the_last_token():
    """The score is the reward of the step after the last token, where there is one."""
    return 'last if score_at == "last" else (last + 1)', "(last + 1)"


@fault("token_rewards", "T43")
def token_rewards_score_never_after_the_last_token():
    """score_at is ignored: the score is on the last token."""
    return 'last if score_at == "last" else (last + 1).clamp(max=mask.shape[1] - 1)', "last"


@fault("token_rewards", "D52")
def token_rewards_score_on_every_token():
    """Each token has the whole score, so a return counts it as often as tokens follow."""
    return "torch.where(is_last, scores.unsqueeze(1), 0)", "scores.unsqueeze(1) * mask"


@fault("token_rewards", "D52", GITHUB + "huggingface/trl/pull/6095")
def token_rewards_score_broadcast_along_the_tokens():
    """(batch,) + (batch, tokens): token t gets the score of row t. It raises an error unless the sizes are equal."""
    return "torch.where(is_last, scores.unsqueeze(1), 0)", "scores * mask"


@fault("token_rewards", "T42", GITHUB + "THUDM/slime/pull/1372")
def token_rewards_penalty_of_masked_tokens():
    """Masked tokens pay the KL penalty, which leaks into the returns of those before them."""
    return "(logprobs - ref_logprobs).masked_fill(~mask, 0)", "logprobs - ref_logprobs"


@fault("token_rewards", "V48", "open-instruct 745bf58, TRL 1.12")
def token_rewards_k3_in_the_reward():
    """The penalty is k3, whose gradient as a reward is not that of the divergence and can point away from it."""
    return "-kl_coef * d", "-kl_coef * (torch.exp(-d) - 1 + d)"


@fault("token_rewards", "V48", "open-instruct 745bf58")
def token_rewards_k2_in_the_reward():
    """The penalty is k2, whose gradient as a reward is not that of the divergence."""
    return "-kl_coef * d", "-kl_coef * d**2 / 2"


@fault("token_rewards", "D51")
def token_rewards_absolute_penalty():
    """The penalty is |d|, which punishes a token also for being less likely than in the reference."""
    return "-kl_coef * d", "-kl_coef * d.abs()"


@fault("token_rewards", "D52", "TRL 1.16, RLOO; OpenRLHF 0.11", choice=True)
def token_rewards_penalty_of_the_response_at_its_end():
    """The last token pays for the whole response, as in outcome rewards."""
    return (
        "return rewards + torch",
        "rewards = torch.where(is_last, rewards.sum(1, keepdim=True), 0)\n    return rewards + torch",
    )


@fault("token_rewards", "D52")
def token_rewards_without_a_penalty():
    """kl_coef is ignored."""
    return "-kl_coef * d", "0 * d"


@fault("token_rewards", "V11")
def token_rewards_NaN_times_the_mask():
    """Masked entries are multiplied by 0, and NaN times 0 is NaN. Replace them in the inputs, before computing."""
    return "(logprobs - ref_logprobs).masked_fill(~mask, 0)", "(logprobs - ref_logprobs) * mask"


@fault("token_rewards", "V27", "verl b178a3c and 1dda039")
def token_rewards_score_of_an_empty_response():
    """A response without a token has its score in the last column, outside of the mask."""
    return "(columns == at.unsqueeze(1)) & mask.any(1, keepdim=True)", "columns == (at % mask.shape[1]).unsqueeze(1)"


@fault("token_rewards", "D52")
def token_rewards_score_in_place_of_the_penalty():
    """The last token has the score alone and pays no penalty."""
    return (
        "rewards + torch.where(is_last, scores.unsqueeze(1), 0)",
        "torch.where(is_last, scores.unsqueeze(1), rewards)",
    )


@fault("token_rewards", "D52")
def token_rewards_penalty_per_length():
    """The penalty is divided by the length of the response, so long ones pay less for a token."""
    return "-kl_coef * d", "-kl_coef * d / mask.sum(1, keepdim=True).clamp(min=1)"


@fault("overlong_penalty", "V26")
def overlong_penalty_is_a_reward():
    """The sign is missing."""
    return "-factor", "factor"


@fault("overlong_penalty", "V26")
def overlong_penalty_without_a_buffer():
    """The penalty begins where it should be greatest."""
    return "(max_length - buffer)", "max_length"


@fault("overlong_penalty", "V26")
def overlong_penalty_rewards_short_responses():
    """Short responses gain what long ones lose: the clamp is missing."""
    return ".clamp(min=0)", ""


@fault("kl_controller", "D69")
def kl_controller_without_a_clip():
    """The relative error is not clipped, so one batch can change the coefficient a lot."""
    return "min(max(kl / target - 1, -0.2), 0.2)", "kl / target - 1"


@fault("kl_controller", "D69")
def kl_controller_of_the_wrong_sign():
    """The coefficient falls while the KL is too large."""
    return "(1 + error", "(1 - error"


@fault("kl_controller", "D69")
def kl_controller_per_batch():
    """The horizon is counted in batches, not in episodes."""
    return "error * episodes / horizon", "error / horizon"


@fault("kl_controller", "D69")
def kl_controller_adds():
    """The coefficient moves by the same amount whatever its size."""
    return "kl_coef * (1 + error * episodes / horizon)", "kl_coef + error * episodes / horizon"


@fault("kl_controller", "D69")
def kl_controller_clips_the_other_ratio():
    """The error is 1 - target / KL, which is another number outside of the target."""
    return "kl / target - 1", "1 - target / max(kl, 1e-9)"


@fault("kl_controller", "D69")
def kl_controller_clip_of_0_1():
    """The relative error is clipped to 0.1, not to 0.2."""
    return "min(max(kl / target - 1, -0.2), 0.2)", "min(max(kl / target - 1, -0.1), 0.1)"


@fault("kl_controller", "D69")
def kl_controller_by_the_log():
    """The error is the log of KL / target."""
    return "kl / target - 1", "math.log(max(kl, 1e-9) / target)"


@fault("best_of_n_loss", "D40")
def best_of_n_loss_over_the_batch():
    """The softmax is over the rows of the batch, not over the responses to one query."""
    return "dim=1", "dim=0"


@fault("best_of_n_loss", "D40")
def best_of_n_loss_of_the_worst():
    """The scores have the wrong sign, so the chosen response gets the lowest one."""
    return "log_softmax(scores", "log_softmax(-scores"


@fault("best_of_n_loss", "D40")
def best_of_n_loss_sum():
    """The sum over the batch, not the mean."""
    return "chosen.mean()", "chosen.sum()"


@fault("best_of_n_loss", "D40")
def best_of_n_loss_normalised_without_a_gradient():
    """The normaliser has no gradient: the best score rises without end, and the others don't fall."""
    return "torch.log_softmax(scores, dim=1)", "(scores - scores.logsumexp(1, keepdim=True).detach())"


# ---- Advantages ------------------------------------------------------------------------------------------------


@fault("whiten", "T52", "TRL 1.12 (PPO), verl b178a3c", choice=True)
def whiten_with_n_minus_1():
    """The variance is divided by n - 1. OpenAI's code divides by n."""
    return ".sum() / count\n    whitened", ".sum() / (count - 1)\n    whitened"


@fault("whiten", "D54")
def whiten_epsilon_at_the_deviation():
    """1e-8 is added to the standard deviation, not to the variance, so it does nothing where numbers are small."""
    return "torch.rsqrt(variance + 1e-8)", "(1 / (variance.sqrt() + 1e-8))"


@fault("whiten", "D54", "many implementations of PPO", choice=True)
def whiten_epsilon_1e_8_with_n_minus_1():
    """(x - mean) / (std + 1e-8) with n - 1, as PyTorch's std() has it."""
    return (
        (".sum() / count\n    whitened", ".sum() / (count - 1)\n    whitened"),
        ("torch.rsqrt(variance + 1e-8)", "(1 / (variance.sqrt() + 1e-8))"),
    )


@fault("whiten", "D54")
def whiten_epsilon_1e_5():
    """1e-5 is added to the variance."""
    return "1e-8", "1e-5"


@fault("whiten", "D55")
def whiten_always_without_the_mean():
    """keep_mean is ignored. A shift of all rewards changes what a long response is worth."""
    return "whitened + mean if keep_mean else whitened", "whitened"


@fault("whiten", "D55")
def whiten_always_with_the_mean():
    """The mean is never subtracted."""
    return "whitened + mean if keep_mean else whitened", "whitened + mean"


@fault("whiten", "D54")
def whiten_with_the_meaning_of_shift_mean():
    """keep_mean does the opposite. OpenAI's argument is called shift_mean and means the reverse."""
    return "if keep_mean", "if not keep_mean"


@fault("whiten", "V44")
def whiten_over_padding():
    """The statistics are over all entries, where masked ones count as 0."""
    return (
        ("mask.sum().clamp(min=1)", "mask.numel()"),
        ("((values - mean) ** 2).masked_fill(~mask, 0)", "((values - mean) ** 2)"),
    )


@fault("whiten", "V11")
def whiten_ignores_the_mask():
    """The statistics are over all entries, with whatever masked ones hold."""
    return (
        "torch.ones_like(values, dtype=torch.bool) if mask is None else mask",
        "torch.ones_like(values, dtype=torch.bool)",
    )


@fault("whiten", "D54")
def whiten_each_row():
    """Each response is whitened on its own, so every response has the mean advantage 0."""
    return (
        ("mask.sum().clamp(min=1)", "mask.sum(-1, keepdim=True).clamp(min=1)"),
        ("values.sum() / count", "values.sum(-1, keepdim=True) / count"),
        (".masked_fill(~mask, 0).sum() / count", ".masked_fill(~mask, 0).sum(-1, keepdim=True) / count"),
    )


@fault("whiten", "D54")
def whiten_not_scaled():
    """The mean is subtracted, but nothing is divided by the deviation."""
    return " * torch.rsqrt(variance + 1e-8)", ""


@fault("whiten", "D54")
def whiten_by_the_variance():
    """Divided by the variance, not by its root."""
    return "torch.rsqrt(variance + 1e-8)", "(1 / (variance + 1e-8))"


@fault("whiten", "V11", "verl b178a3c and 1dda039")
def whiten_NaN_times_the_mask():
    """Masked entries are multiplied by 0, and NaN times 0 is NaN. Replace them in the inputs, before computing."""
    return "values.masked_fill(~mask, 0)\n    count", "values * mask\n    count"


@fault("whiten", "D54", GITHUB + "OpenRLHF/OpenRLHF/pull/1250")
def whiten_by_rows_broadcast_along_the_tokens():
    """Statistics of each row (batch,) are spread along the tokens. It raises an error unless the sizes are equal."""
    return (
        ("mask.sum().clamp(min=1)", "mask.sum(-1).clamp(min=1)"),
        ("values.sum() / count", "values.sum(-1) / count"),
        (".masked_fill(~mask, 0).sum() / count", ".masked_fill(~mask, 0).sum(-1) / count"),
    )


@fault("whiten", "D54")
def whiten_each_column():
    """Each position is whitened on its own, over the rows."""
    return (
        ("mask.sum().clamp(min=1)", "mask.sum(0).clamp(min=1)"),
        ("values.sum() / count", "values.sum(0) / count"),
        (".masked_fill(~mask, 0).sum() / count", ".masked_fill(~mask, 0).sum(0) / count"),
    )


@fault("whiten", "V44")
def whiten_by_the_mean_of_row_means():
    """The mean is that of the rows' means, so a token of a short response counts for more."""
    return "mean = values.sum() / count", "mean = (values.sum(-1) / mask.sum(-1).clamp(min=1)).mean()"


@fault("gae", "V29", GITHUB + "radixark/miles/pull/1827")
def gae_steps_over_masked_tokens():
    """Tokens of the environment are steps like any other, with the rewards and values that they happen to have."""
    return (
        "torch.ones_like(values, dtype=torch.bool) if mask is None else mask\n",
        "torch.ones_like(values, dtype=torch.bool)\n",
    )


@fault("gae", "V29")
def gae_zeros_in_holes():
    """Values and rewards of masked tokens are 0, and gamma and lambda act there. Without holes, it is correct."""
    return (
        (
            "    advantages = torch.zeros_like(values)",
            "    rewards, values = (x.masked_fill(~mask, 0) for x in (rewards, values))\n"
            "    advantages = torch.zeros_like(values)",
        ),
        ("torch.where(mask[:, t], advantage, next_advantage)", "advantage"),
        ("torch.where(mask[:, t], values[:, t], next_value)", "values[:, t]"),
    )


@fault("gae", "V29", "OpenRLHF 0.11.2")
def gae_multiplied_by_the_mask():
    """Values and rewards are multiplied by the mask: gamma and lambda act in holes, and NaN times 0 is NaN."""
    return (
        (
            "    advantages = torch.zeros_like(values)",
            "    rewards, values = rewards * mask, values * mask\n    advantages = torch.zeros_like(values)",
        ),
        ("torch.where(mask[:, t], advantage, next_advantage)", "advantage"),
        ("torch.where(mask[:, t], values[:, t], next_value)", "values[:, t]"),
    )


@fault("gae", "V39", "verl b178a3c (REINFORCE++); until 8a1bf6d")
def gae_erased_by_a_hole():
    """The advantage is multiplied by the mask, so rewards after a hole don't reach the tokens before it."""
    return "torch.where(mask[:, t], advantage, next_advantage)", "advantage.masked_fill(~mask[:, t], 0)"


@fault("gae", "D56")
def gae_next_value_0():
    """V(t+1) is missing from delta."""
    return "gamma * next_value - values[:, t]", "- values[:, t]"


@fault("gae", "D56")
def gae_without_values():
    """Delta is the reward alone: neither value is in it."""
    return " + gamma * next_value - values[:, t]", ""


@fault("gae", "V31")
def gae_bootstraps_from_the_last_value():
    """The value after the last token is that of the last token, not 0."""
    return (
        "next_advantage = next_value = torch.zeros_like(values[:, 0])",
        "next_advantage, next_value = torch.zeros_like(values[:, 0]), values[:, -1]",
    )


@fault("gae", "V31")
def gae_bootstraps_full_rows():
    """A response that fills the width gets its last value as the next one, and masked tokens end an episode.

    So it is where an environment goes on after the rollout.
    """
    return (
        (
            "next_advantage = next_value = torch.zeros_like(values[:, 0])",
            "next_advantage, next_value = torch.zeros_like(values[:, 0]), values[:, -1]",
        ),
        ("        delta =", "        lives = mask[:, t + 1] if t + 1 < mask.shape[1] else True\n        delta ="),
        ("gamma * next_value - values[:, t]", "gamma * next_value * lives - values[:, t]"),
        ("gamma * lam * next_advantage", "gamma * lam * next_advantage * lives"),
        ("torch.where(mask[:, t], advantage, next_advantage)", "advantage"),
        ("torch.where(mask[:, t], values[:, t], next_value)", "values[:, t]"),
    )


@fault("gae", "D56")
def gae_value_of_the_same_token_as_the_next():
    """V(t) is in place of V(t+1), except at the last token."""
    return "gamma * next_value - values[:, t]", "gamma * values[:, t] * mask[:, t + 1 :].any(1) - values[:, t]"


@fault("gae", "D56")
def gae_list_not_reversed():
    """Advantages are collected from the last token to the first, and not put in order."""
    return (
        "    returns = advantages + values",
        "    advantages = advantages.flip(1)\n    returns = advantages + values",
    )


@fault("gae", "D56")
def gae_without_the_last_token():
    """The recursion starts at the token before the last column, whose advantage stays 0."""
    return (
        (
            "next_advantage = next_value = torch.zeros_like(values[:, 0])",
            "next_advantage, next_value = torch.zeros_like(values[:, 0]), values[:, -1].masked_fill(~mask[:, -1], 0)",
        ),
        ("reversed(range(values.shape[1]))", "reversed(range(values.shape[1] - 1))"),
    )


@fault("gae", "D57", "docs/differences.md")
def gae_whitened_before_the_values_are_added():
    """Advantages are whitened (with n - 1 and 1e-8), then values added, with targets of a wrong scale."""
    return (
        "    returns = advantages + values",
        "    some = advantages[mask]\n"
        "    advantages = (advantages - some.mean()) / (some.std() + 1e-8)\n"
        "    returns = advantages + values",
    )


@fault("gae", "D57", GITHUB + "natolambert/rlhf-book/pull/216")
def gae_returns_are_rewards():
    """The critic's targets are the rewards of single tokens, not the returns."""
    return "returns = advantages + values", "returns = rewards"


@fault("gae", "D57")
def gae_returns_without_values():
    """The critic's targets are the advantages: the old values are not added."""
    return "returns = advantages + values", "returns = advantages"


@fault("gae", "D57")
def gae_returns_are_rewards_to_go():
    """The critic's targets are discounted sums of rewards, as with lambda = 1."""
    return "returns = advantages + values", "returns = reward_to_go(rewards, mask, gamma)"


@fault("gae", "D57", "docs/differences.md")
def gae_returns_of_whitened_advantages():
    """Advantages are whitened before the values are added, so the critic learns targets of the wrong scale."""
    return "returns = advantages + values", "returns = whiten(advantages, mask) + values"


@fault("gae", "D58", "verl b178a3c", choice=True)
def gae_whitened_advantages():
    """The advantages come back whitened. Here whitening is a function of its own."""
    return "return advantages.masked_fill(~mask, 0)", "return whiten(advantages, mask)"


@fault("gae", "D58", "verl b178a3c", choice=True)
def gae_whitened_advantages_with_n_minus_1():
    """The advantages come back whitened, with n - 1. Here whitening is a function of its own."""
    return (
        "return advantages.masked_fill(~mask, 0)",
        "return whiten(advantages, mask) * ((mask.sum() - 1) / mask.sum()).sqrt()",
    )


@fault("gae", "D56")
def gae_without_lambda():
    """Lambda is missing from the recursion, as if it were 1."""
    return "gamma * lam * next_advantage", "gamma * next_advantage"


@fault("gae", "D56")
def gae_without_gamma_in_delta():
    """Gamma is missing from delta."""
    return "gamma * next_value", "next_value"


@fault("gae", "D56")
def gae_without_gamma_in_the_recursion():
    """Gamma is missing from the recursion."""
    return "gamma * lam * next_advantage", "lam * next_advantage"


@fault("gae", "D56")
def gae_forwards():
    """The recursion runs from the first token to the last."""
    return "reversed(range(values.shape[1]))", "range(values.shape[1])"


@fault("gae", "D56")
def gae_one_step():
    """The advantage is delta alone, as with lambda = 0."""
    return "delta + gamma * lam * next_advantage", "delta"


@fault("gae", "V11", "verl b178a3c and 1dda039")
def gae_NaN_times_the_mask():
    """Masked entries are multiplied by 0, and NaN times 0 is NaN, which reaches all tokens of the row."""
    return (
        (
            "torch.where(mask[:, t], advantage, next_advantage)",
            "advantage * mask[:, t] + next_advantage * ~mask[:, t]",
        ),
        ("torch.where(mask[:, t], values[:, t], next_value)", "values[:, t] * mask[:, t] + next_value * ~mask[:, t]"),
    )


@fault("gae", "D56")
def gae_one_step_of_gamma_too_many():
    """A token's own delta is discounted too."""
    return "delta + gamma * lam * next_advantage", "gamma * (delta + lam * next_advantage)"


@fault("gae", "D56")
def gae_reward_of_the_next_token():
    """Delta has the reward of the next token, and the last token keeps its own."""
    return "rewards[:, t] +", "rewards[:, min(t + 1, values.shape[1] - 1)] +"


@fault("reward_to_go", "V39", "verl b178a3c; until 8a1bf6d")
def reward_to_go_erased_by_a_hole():
    """The running sum is multiplied by the mask, so a hole erases the rewards after it."""
    return "rewards[:, t] + gamma * later, later)", "rewards[:, t] + gamma * later, 0)"


@fault("reward_to_go", "V29", GITHUB + "radixark/miles/pull/1827")
def reward_to_go_steps_over_masked_tokens():
    """Masked tokens are steps like any other, with the rewards that they happen to have."""
    return "torch.where(mask[:, t], rewards[:, t] + gamma * later, later)", "rewards[:, t] + gamma * later"


@fault("reward_to_go", "V29")
def reward_to_go_discounts_in_holes():
    """A masked token costs a step of gamma."""
    return "gamma * later, later)", "gamma * later, gamma * later)"


@fault("reward_to_go", "V29", "OpenRLHF 0.11.2")
def reward_to_go_multiplied_by_the_mask():
    """Rewards are multiplied by the mask: gamma acts in holes, and NaN times 0 is NaN."""
    return (
        "torch.where(mask[:, t], rewards[:, t] + gamma * later, later)",
        "rewards[:, t] * mask[:, t] + gamma * later",
    )


@fault("reward_to_go", "V39")
def reward_to_go_forwards():
    """The sum runs over the tokens before, not over those after."""
    return "reversed(range(rewards.shape[1]))", "range(rewards.shape[1])"


@fault("reward_to_go", "V39")
def reward_to_go_without_gamma():
    """Gamma is ignored."""
    return "gamma * later, later)", "later, later)"


@fault("reward_to_go", "V11")
def reward_to_go_NaN_times_the_mask():
    """Masked rewards are multiplied by 0, and NaN times 0 is NaN."""
    return (
        "torch.where(mask[:, t], rewards[:, t] + gamma * later, later)",
        "(rewards[:, t] + gamma * later) * mask[:, t] + later * ~mask[:, t]",
    )


@fault("reward_to_go", "V39")
def reward_to_go_one_step_of_gamma_too_many():
    """A token's own reward is discounted too."""
    return "returns[:, t] = later", "returns[:, t] = gamma * later"


@fault("reward_to_go", "V39")
def reward_to_go_without_its_own_reward():
    """The sum begins at the next token."""
    return "returns[:, t] = later", "returns[:, t] = later - rewards[:, t]"


@fault("reward_to_go", "V39")
def reward_to_go_mean():
    """The sum is divided by the number of tokens that are left."""
    return "returns[:, t] = later", "returns[:, t] = later / mask[:, t:].sum(1).clamp(min=1)"


@fault("group_advantages", "V33", "DAPO's and others' code", choice=True)
def group_advantages_std_with_n():
    """The standard deviation of a group is divided by n, not by n - 1."""
    return "/ (n - 1)).sqrt()", "/ n).sqrt()"


@fault("group_advantages", "V33", "TRL 1.16", choice=True)
def group_advantages_epsilon_1e_4():
    """1e-4 is added to the standard deviation, where verl and this project add 1e-6."""
    return "1e-6", "1e-4"


@fault("group_advantages", "V35", "verl b178a3c and 1dda039")
def group_advantages_raw_score_of_a_group_of_one():
    """A group of one passes its raw score on, though it says nothing about the prompt."""
    return "advantages[members] = 0\n", "advantages[members] = x\n"


@fault("group_advantages", "V35")
def group_advantages_NaN_of_a_group_of_one():
    """A group of one divides 0 by 0."""
    return "if n == 1:", "if False:"


@fault("group_advantages", "V38")
def group_advantages_rloo_with_itself():
    """RLOO's baseline includes the response itself, which makes it Dr. GRPO's."""
    return "centred * n / (n - 1) if name", "centred if name"


@fault("group_advantages", "V08")
def group_advantages_by_position():
    """Groups are taken to be consecutive and equally large, whatever `groups` says."""
    return (
        "if groups is None else groups",
        "if group_size else torch.arange(len(scores)) // max((groups == groups[0]).sum(), 1)",
    )


@fault("group_advantages", "V08")
def group_advantages_interleaved():
    """A response's group is its index modulo the number of prompts: the batch is reshaped along the wrong axis."""
    return "if groups is None else groups", "if False else torch.arange(len(scores)) % len(groups.unique())"


@fault("group_advantages", "V33")
def group_advantages_over_the_batch():
    """Mean and deviation are those of the batch, not of the group."""
    return "if groups is None else groups", "if False else torch.zeros(len(scores), dtype=torch.long)"


@fault("group_advantages", "V33", "TRL 1.16 with scale_rewards='batch'", choice=True)
def group_advantages_deviation_of_the_batch():
    """GRPO divides by the standard deviation of the whole batch."""
    return "std = (centred.square().sum() / (n - 1)).sqrt()", "std = scores.std()"


@fault("group_advantages", "V33")
def group_advantages_not_centred():
    """The group's mean is not subtracted."""
    return "centred = x - x.mean()", "centred = x"


@fault("group_advantages", "V36", "verl b178a3c and 1dda039")
def group_advantages_always_divided():
    """Dr. GRPO is asked for, and the option that switches the division off is ignored."""
    return 'elif name == "grpo":', 'elif name in ("grpo", "dr_grpo"):'


@fault("group_advantages", "V36")
def group_advantages_never_divided():
    """GRPO is asked for, and its scores are not divided by the deviation."""
    return "/ (std + 1e-6)", ""


@fault("group_advantages", "V33")
def group_advantages_divided_by_the_variance():
    """The root is missing: scores are divided by the variance."""
    return "/ (n - 1)).sqrt()", "/ (n - 1))"


# ---- Losses ----------------------------------------------------------------------------------------------------


@fault("policy_loss", "V60", GITHUB + "PrimeIntellect-ai/prime-rl/pull/583")
def policy_loss_mean_of_each_part():
    """A part is divided by its own tokens, so the sum over micro-batches or processes depends on how they are cut."""
    return "mask.sum() if tokens is None else tokens", "mask.sum()"


@fault("policy_loss", "T45")
def policy_loss_mean_over_padding():
    """The sum is divided by batch x width, so padding makes the step smaller."""
    return "mask.sum() if tokens is None else tokens", "mask.numel() if tokens is None else tokens"


@fault("policy_loss", "V60", "TRL 1.16 (loss_type grpo), verl (seq-mean-token-mean)", choice=True)
def policy_loss_mean_of_row_means():
    """The mean over responses of the mean over their tokens; the token mean is asked for."""
    return (
        ("mask.sum() if tokens is None else tokens", "mask.any(1).sum()"),
        (
            "losses.masked_fill(~mask, 0).sum() / count",
            "(losses.masked_fill(~mask, 0).sum(1) / mask.sum(1).clamp(min=1)).sum() / count",
        ),
    )


@fault("policy_loss", "V60")
def policy_loss_sum():
    """Nothing is divided, so the step grows with the batch."""
    return ".sum() / count", ".sum()"


@fault("policy_loss", "D60")
def policy_loss_the_smaller_loss():
    """The minimum of the two losses, so the clip has no effect where it should, and acts where it should not."""
    return "torch.maximum(-advantages", "torch.minimum(-advantages"


@fault("policy_loss", "D60")
def policy_loss_without_a_clip():
    """The ratio is not clipped."""
    return "ratio.clamp(1 - cliprange, 1 + high)", "ratio"


@fault("policy_loss", "D60")
def policy_loss_only_the_clipped():
    """Only the clipped loss counts: no gradient brings a ratio back that has left the bounds."""
    return (
        "torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + high))",
        "-advantages * ratio.clamp(1 - cliprange, 1 + high)",
    )


@fault("policy_loss", "D60")
def policy_loss_of_the_wrong_sign():
    """The sign is missing: the loss raises what has a negative advantage."""
    return (
        "torch.maximum(-advantages * ratio, -advantages * ratio.clamp",
        "torch.maximum(advantages * ratio, advantages * ratio.clamp",
    )


@fault("policy_loss", "D60")
def policy_loss_ratio_upside_down():
    """The ratio is old / new."""
    return "(new_logprobs - logprobs)", "(logprobs - new_logprobs)"


@fault("policy_loss", "D60")
def policy_loss_ratio_without_the_old():
    """The ratio is the probability of the token: the old log-prob is not subtracted."""
    return "(new_logprobs - logprobs)", "new_logprobs"


@fault("policy_loss", "D60")
def policy_loss_difference_for_ratio():
    """The log ratio is taken for the ratio: the exponential is missing."""
    return (
        "torch.exp((new_logprobs - logprobs).masked_fill(~mask, 0))",
        "(new_logprobs - logprobs).masked_fill(~mask, 0)",
    )


@fault("policy_loss", "D60")
def policy_loss_clips_the_log_ratio():
    """The bounds are on the log ratio."""
    return "ratio.clamp(1 - cliprange, 1 + high)", "ratio.log().clamp(-cliprange, high).exp()"


@fault("policy_loss", "V63")
def policy_loss_one_bound():
    """cliprange_high is ignored."""
    return "cliprange if cliprange_high is None else cliprange_high", "cliprange"


@fault("policy_loss", "V59")
def policy_loss_without_the_dual_clip():
    """dual_clip is ignored."""
    return "if dual_clip is not None:", "if False:"


@fault("policy_loss", "V59")
def policy_loss_dual_clip_of_good_tokens():
    """The dual clip also acts where the advantage is positive."""
    return (
        "torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)",
        "torch.minimum(losses, -advantages * dual_clip)",
    )


@fault("policy_loss", "D58")
def policy_loss_whitens():
    """The loss whitens the advantages once more, micro-batch by micro-batch."""
    return "advantages = advantages.masked_fill(~mask, 0)", "advantages = whiten(advantages, mask)"


@fault("policy_loss", "V11")
def policy_loss_of_masked_tokens():
    """The mask divides, but masked tokens are in the sum."""
    return (
        ("advantages = advantages.masked_fill(~mask, 0)", "advantages = advantages"),
        ("(new_logprobs - logprobs).masked_fill(~mask, 0)", "new_logprobs - logprobs"),
        ("losses.masked_fill(~mask, 0)", "losses"),
    )


@fault("policy_loss", "V11")
def policy_loss_ignores_the_mask():
    """All tokens count, padding too."""
    return (
        "torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask",
        "torch.ones_like(logprobs, dtype=torch.bool)",
    )


@fault("policy_loss", "V11", "verl b178a3c and 1dda039")
def policy_loss_NaN_times_the_mask():
    """Masked entries are multiplied by 0, and NaN times 0 is NaN. Replace them in the inputs, before computing."""
    return (
        ("advantages = advantages.masked_fill(~mask, 0)", "advantages = advantages * mask"),
        ("(new_logprobs - logprobs).masked_fill(~mask, 0)", "(new_logprobs - logprobs) * mask"),
        ("losses.masked_fill(~mask, 0)", "(losses * mask)"),
    )


@fault("policy_loss", "V11")
def policy_loss_masked_after_computing():
    """Losses are masked, but NaN in an input still reaches the gradient. Mask the inputs instead."""
    return (
        ("advantages = advantages.masked_fill(~mask, 0)", "advantages = advantages"),
        ("(new_logprobs - logprobs).masked_fill(~mask, 0)", "new_logprobs - logprobs"),
    )


@fault("policy_loss", "D60", GITHUB + "meta-pytorch/torchforge/pull/571")
def policy_loss_ratio_of_the_new_to_itself():
    """The ratio is exp(new - new.detach()), always 1: nothing is clipped, and the old policy counts for nothing."""
    return "(new_logprobs - logprobs)", "(new_logprobs - new_logprobs.detach())"


@fault("gspo_loss", "V65")
def gspo_loss_sum_of_log_ratios():
    """The ratio is that of the whole response: the log ratio is not divided by the length."""
    return "torch.exp(log_ratio.sum(1) / lengths)", "torch.exp(log_ratio.sum(1))"


@fault("gspo_loss", "V65", GITHUB + "areal-project/AReaL/pull/1346")
def gspo_loss_mean_over_padding():
    """The log ratio is divided by the padded width."""
    return "torch.exp(log_ratio.sum(1) / lengths)", "torch.exp(log_ratio.sum(1) / mask.shape[1])"


@fault("gspo_loss", "V65", GITHUB + "huggingface/trl/pull/6095")
def gspo_loss_ratio_broadcast_along_the_tokens():
    """(batch,) x (batch, tokens): token t gets the ratio of row t. It raises an error unless the sizes are equal."""
    return ".unsqueeze(1)\n", "\n"


@fault("gspo_loss", "V65")
def gspo_loss_ratio_of_each_token():
    """Each token has its own ratio, as in PPO."""
    return "torch.exp(log_ratio.sum(1) / lengths).unsqueeze(1)", "torch.exp(log_ratio)"


@fault("gspo_loss", "V65")
def gspo_loss_token_mean():
    """The mean over all tokens, so long responses count for more."""
    return "(losses.sum(1) / lengths).sum() / mask.any(1).sum()", "losses.sum() / mask.sum()"


@fault("gspo_loss", "V63")
def gspo_loss_one_bound():
    """cliprange_high is ignored."""
    return "cliprange if cliprange_high is None else cliprange_high", "cliprange"


@fault("gspo_loss", "D60")
def gspo_loss_without_a_clip():
    """The ratio is not clipped."""
    return "ratio.clamp(1 - cliprange, 1 + high)", "ratio"


@fault("gspo_loss", "V11")
def gspo_loss_NaN_times_the_mask():
    """Masked entries are multiplied by 0, and NaN times 0 is NaN. Replace them in the inputs, before computing."""
    return "(new_logprobs - logprobs).masked_fill(~mask, 0)", "(new_logprobs - logprobs) * mask"


@fault("gspo_loss", "V65")
def gspo_loss_arithmetic_mean():
    """The ratio of a response is the arithmetic mean of its tokens' ratios, not the geometric."""
    return (
        "torch.exp(log_ratio.sum(1) / lengths)",
        "(torch.exp(log_ratio).masked_fill(~mask, 0).sum(1) / lengths)",
    )


@fault("cispo_loss", "V66")
def cispo_loss_gradient_through_the_ratio():
    """The ratio is not detached: a second gradient is added to that of log p."""
    return ".detach()", ""


@fault("cispo_loss", "V66", "TRL 1.16", choice=True)
def cispo_loss_bound_is_the_ratio():
    """The upper bound is cliprange_high itself, not its distance from 1, and there is no lower one."""
    return "ratio.clamp(1 - cliprange, 1 + high)", "ratio.clamp(max=high)"


@fault("cispo_loss", "V66", "MiniMax-M1, ScaleRL", choice=True)
def cispo_loss_only_an_upper_bound():
    """The ratio is bounded only from above."""
    return "ratio.clamp(1 - cliprange, 1 + high)", "ratio.clamp(max=1 + high)"


@fault("cispo_loss", "V66")
def cispo_loss_is_ppo():
    """Tokens outside of the bounds have no gradient: this is PPO's clip."""
    return (
        "-(weights * advantages * new_logprobs).sum()",
        "torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + high)).sum()",
    )


@fault("cispo_loss", "V66")
def cispo_loss_without_weights():
    """The ratio is missing: this is REINFORCE."""
    return "-(weights * advantages", "-(advantages"


@fault("cispo_loss", "V60")
def cispo_loss_mean_over_padding():
    """The sum is divided by batch x width."""
    return "/ mask.sum()", "/ mask.numel()"


@fault("cispo_loss", "V11")
def cispo_loss_NaN_times_the_mask():
    """Masked entries are multiplied by 0, and NaN times 0 is NaN. Replace them in the inputs, before computing."""
    return (
        (
            "new_logprobs, advantages = new_logprobs.masked_fill(~mask, 0), advantages.masked_fill(~mask, 0)",
            "advantages = advantages * mask",
        ),
        ("logprobs.masked_fill(~mask, 0))", "logprobs)"),
    )


@fault("cispo_loss", "V60")
def cispo_loss_mean_of_row_means():
    """The mean over responses of the mean over their tokens."""
    return (
        "-(weights * advantages * new_logprobs).sum() / mask.sum()",
        "-((weights * advantages * new_logprobs).sum(1) / mask.sum(1).clamp(min=1)).sum() / mask.any(1).sum()",
    )


@fault("value_loss", "D59")
def value_loss_without_its_half():
    """The factor 0.5 is missing, so vf_coef means twice as much."""
    return "0.5 * torch.maximum", "torch.maximum"


@fault("value_loss", "D59")
def value_loss_without_a_clip():
    """Values are not clipped."""
    return "torch.clamp(new_values, values - cliprange, values + cliprange)", "new_values"


@fault("value_loss", "D59")
def value_loss_the_smaller_error():
    """The smaller of the two errors counts."""
    return "torch.maximum", "torch.minimum"


@fault("value_loss", "D59")
def value_loss_only_the_clipped():
    """Only the clipped error counts."""
    return (
        "torch.maximum((new_values - returns) ** 2, (clipped_values - returns) ** 2)",
        "(clipped_values - returns) ** 2",
    )


@fault("value_loss", "T45")
def value_loss_mean_over_padding():
    """The sum is divided by batch x width."""
    return "mask.sum() if tokens is None else tokens", "mask.numel() if tokens is None else tokens"


@fault("value_loss", "V60", "verl b178a3c; until 2eb020a")
def value_loss_mean_of_each_part():
    """A part is divided by its own tokens, so the sum over micro-batches depends on how they are cut."""
    return "mask.sum() if tokens is None else tokens", "mask.sum()"


@fault("value_loss", "V11")
def value_loss_ignores_the_mask():
    """All tokens count, padding too."""
    return (
        "torch.ones_like(values, dtype=torch.bool) if mask is None else mask",
        "torch.ones_like(values, dtype=torch.bool)",
    )


@fault("value_loss", "V11", "verl b178a3c and 1dda039")
def value_loss_NaN_times_the_mask():
    """Masked entries are multiplied by 0, and NaN times 0 is NaN. Replace them in the inputs, before computing."""
    return "(x.masked_fill(~mask, 0) for x", "(x * mask for x"


@fault("value_loss", "V11")
def value_loss_masked_after_computing():
    """Losses are masked, but NaN in an input still reaches the gradient. Mask the inputs instead."""
    return (
        ("(x.masked_fill(~mask, 0) for x", "(x for x"),
        ("losses.sum() / count", "losses.masked_fill(~mask, 0).sum() / count"),
    )


@fault("value_loss", "D59")
def value_loss_relative_clip():
    """The bounds are a fraction of the old value, which is none where it is near 0."""
    return (
        "values - cliprange, values + cliprange",
        "values - cliprange * values.abs(), values + cliprange * values.abs()",
    )


@fault("value_loss", "D59")
def value_loss_absolute_error():
    """The error is not squared."""
    return (
        "(new_values - returns) ** 2, (clipped_values - returns) ** 2",
        "(new_values - returns).abs(), (clipped_values - returns).abs()",
    )


@fault("aggregate", "V60", GITHUB + "PrimeIntellect-ai/prime-rl/pull/583")
def aggregate_mean_of_each_part():
    """The counts that are given are ignored: a mean of means of micro-batches, which depends on how they are cut."""
    return (
        ("max(lengths.sum(), 1) if tokens is None else tokens", "max(lengths.sum(), 1)"),
        ("max((lengths > 0).sum(), 1) if sequences is None else sequences", "max((lengths > 0).sum(), 1)"),
    )


@fault("aggregate", "V60")
def aggregate_token_mean_over_padding():
    """The token mean divides by batch x width."""
    return "max(lengths.sum(), 1) if tokens is None else tokens", "mask.numel() if tokens is None else tokens"


@fault("aggregate", "V60", GITHUB + "verl-project/verl/issues/3741")
def aggregate_norm_without_the_sequences():
    """seq-mean-token-sum-norm is divided by the length alone, so the step grows with the batch."""
    return "return losses.sum() / (sequences * length)", "return losses.sum() / length"


@fault("aggregate", "V55")
def aggregate_empty_rows_count():
    """The mean over responses includes rows that have no token."""
    return (
        "max((lengths > 0).sum(), 1) if sequences is None else sequences",
        "len(mask) if sequences is None else sequences",
    )


@fault("aggregate", "V60")
def aggregate_lengths_that_do_not_divide():
    """seq-mean-token-mean does not divide by the lengths: it is seq-mean-token-sum."""
    return "(losses.sum(1) / lengths.clamp(min=1)).sum()", "losses.sum()"


@fault("aggregate", "V60")
def aggregate_width_for_lengths():
    """seq-mean-token-mean divides by the padded width, not by a response's own length."""
    return "losses.sum(1) / lengths.clamp(min=1)", "losses.sum(1) / mask.shape[1]"


@fault("aggregate", "V60", "TRL 1.16 (loss_type grpo)", choice=True)
def aggregate_token_mean_by_rows():
    """The token mean is the mean over responses of the mean over their tokens."""
    return (
        'if mode == "token-mean":\n        return losses.sum() / tokens',
        'if mode == "token-mean":\n        return (losses.sum(1) / lengths.clamp(min=1)).sum() / sequences',
    )


@fault("aggregate", "V46", "verl b178a3c")
def aggregate_divides_by_no_token():
    """Without a token, it divides 0 by 0."""
    return (
        ("max(lengths.sum(), 1) if", "lengths.sum() if"),
        ("max((lengths > 0).sum(), 1) if", "(lengths > 0).sum() if"),
    )


@fault("aggregate", "V11")
def aggregate_ignores_the_mask():
    """All tokens count, padding too."""
    return (
        "torch.ones_like(losses, dtype=torch.bool) if mask is None else mask",
        "torch.ones_like(losses, dtype=torch.bool)",
    )


@fault("aggregate", "V11", "TRL 1.16; OpenRLHF 0.11.2")
def aggregate_NaN_times_the_mask():
    """Masked entries are multiplied by 0, and NaN times 0 is NaN. Replace them in the inputs, before computing."""
    return "losses.masked_fill(~mask, 0), mask.sum(1)", "losses * mask, mask.sum(1)"


@fault("aggregate", "V11", "verl b178a3c, 1dda039 and 0.9.1")
def aggregate_NaN_times_the_mask_by_rows():
    """Except in the token mean, masked entries are multiplied by 0, and NaN times 0 is NaN."""
    masked = 'losses.masked_fill(~mask, 0) if mode == "token-mean" else losses * mask'
    return "losses.masked_fill(~mask, 0), mask.sum(1)", f"({masked}), mask.sum(1)"


@fault("aggregate", "V60")
def aggregate_width_for_the_greatest_length():
    """`length` is ignored: Dr. GRPO's divisor is the width of the batch, so it changes with the longest response."""
    return "mask.shape[1] if length is None else length", "mask.shape[1]"


@fault("accumulate", "V61", GITHUB + "PrimeIntellect-ai/prime-rl/pull/583")
def accumulate_mean_of_means():
    """The mean of the means of micro-batches: a token in a short micro-batch counts for more."""
    return ".sum() / tokens", ".sum() / mask.sum() / len(losses)"


@fault("accumulate", "V61")
def accumulate_sum_of_means():
    """The sum of the means of micro-batches: more micro-batches make a larger step."""
    return ".sum() / tokens", ".sum() / mask.sum()"


@fault("accumulate", "V61", GITHUB + "modelscope/ms-swift/issues/10117")
def accumulate_divided_once_more():
    """Losses that are already divided by all tokens are divided by the number of micro-batches as well."""
    return ".sum() / tokens", ".sum() / tokens / len(losses)"


@fault("accumulate", "V61", GITHUB + "deepspeedai/DeepSpeed/pull/7967")
def accumulate_the_last_part_only():
    """Only the last micro-batch's gradient is left."""
    return "total + part", "part"


@fault("accumulate", "V60", GITHUB + "huggingface/trl/pull/6024")
def accumulate_tokens_of_the_generation_batch():
    """The divisor is the tokens of all responses that were generated together, of which the step has only a part."""
    return "sum(mask.sum() for mask in masks)", "generation_tokens or sum(mask.sum() for mask in masks)"


@fault("accumulate", "V60")
def accumulate_over_padding():
    """The divisor counts padding."""
    return "sum(mask.sum() for mask in masks)", "sum(mask.numel() for mask in masks)"


@fault("accumulate", "V61", GITHUB + "allenai/open-instruct/pull/1161")
def accumulate_weighted_by_rows():
    """The means of micro-batches are weighted by their rows, not by their tokens."""
    return ".sum() / tokens", ".sum() / mask.sum() * len(part) / sum(len(each) for each in losses)"


@fault("accumulate", "V61")
def accumulate_gradient_of_the_last_part():
    """The value is correct, but only the last micro-batch has a gradient."""
    return "total + part", "torch.as_tensor(total).detach() + part"


@fault("accumulate", "V61")
def accumulate_gradient_as_often_as_parts():
    """The value is correct, but its gradient is multiplied by the number of micro-batches or processes."""
    return "part.masked_fill(~mask, 0).sum() / tokens", (
        "(len(losses) * part - (len(losses) - 1) * part.detach()).masked_fill(~mask, 0).sum() / tokens"
    )


@fault("accumulate", "V61")
def accumulate_short_parts_dropped():
    """A micro-batch with fewer rows than the first is left out, as by a loader with drop_last."""
    return "part.masked_fill(~mask, 0).sum() / tokens", (
        "part.masked_fill(~mask, 0).sum() / tokens * (len(part) >= len(losses[0]))"
    )


@fault("kl_loss", "V50", "TRL 1.16 without use_bias_correction_kl")
def kl_loss_not_weighted():
    """The loss is not weighted by the ratio, though another policy has sampled."""
    return "ratio * d**2 / 2", "d**2 / 2"


@fault("kl_loss", "V49", "https://arxiv.org/abs/2512.21852")
def kl_loss_k3():
    """k3 as a loss has the gradient of the other direction, KL(reference || policy)."""
    return "ratio * d**2 / 2", "torch.exp(-d) - 1 + d"


@fault("kl_loss", "V49", "https://arxiv.org/abs/2512.21852")
def kl_loss_k1():
    """k1 as a loss has the expected gradient 0 on-policy: it moves nothing."""
    return "ratio * d**2 / 2", "d"


@fault("kl_loss", "V50")
def kl_loss_k3_times_the_detached_ratio():
    """k3, weighted by the detached ratio."""
    return "ratio * d**2 / 2", "ratio * (torch.exp(-d) - 1 + d)"


@fault("kl_loss", "V50")
def kl_loss_k1_times_the_detached_ratio():
    """k1, weighted by the detached ratio: it moves nothing."""
    return "ratio * d**2 / 2", "ratio * d"


@fault("kl_loss", "V52", GITHUB + "natolambert/rlhf-book/issues/489")
def kl_loss_k3_upside_down():
    """Yours is exp(d) - 1 - d, with half of the gradient of the chi-squared divergence. k3 is exp(-d) - 1 + d."""
    return "ratio * d**2 / 2", "torch.exp(d) - 1 - d"


@fault("kl_loss", "V11")
def kl_loss_ignores_the_mask():
    """All tokens count, padding too."""
    return "if mask is None else losses.masked_fill(~mask, 0)", ""


@fault("kl_loss", "V50")
def kl_loss_with_a_gradient_of_the_ratio():
    """The ratio is not detached, so k2 has a second gradient."""
    return ".detach()", ""


@fault("kl_loss", "V50")
def kl_loss_ratio_upside_down():
    """The weight is sampler / policy."""
    return "(logprobs - sampler_logprobs)", "(sampler_logprobs - logprobs)"


@fault("kl_loss", "V50")
def kl_loss_ratio_capped_at_1():
    """The weight is at most 1, so tokens that the policy has come to like count for too little."""
    return ".detach()", ".detach().clamp(max=1)"


# ---- Corrections for another sampler ---------------------------------------------------------------------------


@fault("importance_weights", "V85")
def importance_weights_without_a_cap():
    """cap is ignored."""
    return ".clamp(max=cap)", ""


@fault("importance_weights", "V85")
def importance_weights_upside_down():
    """q / p in place of p / q."""
    return "(logprobs - sampler_logprobs)", "(sampler_logprobs - logprobs)"


@fault("importance_weights", "V85")
def importance_weights_of_tokens_for_sequences():
    """`kind` is ignored: each token has its own weight."""
    return 'if kind == "sequence":', "if False:"


@fault("importance_weights", "V85")
def importance_weights_geometric_mean():
    """The weight of a response is the geometric mean over its tokens, not the product."""
    return "log_ratio.sum(1, keepdim=True)", "log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)"


@fault("importance_weights", "V85", "TRL 1.16 (MIS), IcePop", choice=True)
def importance_weights_zero_above_the_cap():
    """A weight above the cap becomes 0, not the cap."""
    return "log_ratio.exp().clamp(max=cap)", "log_ratio.exp().masked_fill(log_ratio.exp() > cap, 0)"


@fault("importance_weights", "V85")
def importance_weights_bounded_on_both_sides():
    """Weights below 1 / cap are raised."""
    return ".clamp(max=cap)", ".clamp(1 / cap, cap)"


@fault("importance_weights", "V85")
def importance_weights_capped_before_the_product():
    """The cap is on each token's ratio, before the product over the response."""
    return "0).detach()", "0).detach().clamp(max=math.log(cap))"


@fault("importance_weights", "V85", GITHUB + "huggingface/trl/pull/6095")
def importance_weights_broadcast_along_the_tokens():
    """A response's weight (batch,) is spread along the tokens. It raises an error unless the sizes are equal."""
    return "log_ratio.sum(1, keepdim=True).expand(mask.shape)", "log_ratio.sum(1).expand(mask.shape)"


@fault("importance_weights", "V11")
def importance_weights_of_masked_tokens():
    """Masked tokens are in the product of a response."""
    return "(logprobs - sampler_logprobs).masked_fill(~mask, 0)", "(logprobs - sampler_logprobs)"


@fault("importance_weights", "V11")
def importance_weights_NaN_times_the_mask():
    """Masked entries are multiplied by 0, and NaN times 0 is NaN. Replace them in the inputs, before computing."""
    return "(logprobs - sampler_logprobs).masked_fill(~mask, 0)", "((logprobs - sampler_logprobs) * mask)"


@fault("importance_weights", "V85")
def importance_weights_with_a_gradient():
    """The weights are not detached: a second gradient is added to that of the loss."""
    return ".detach()", ""


@fault("importance_weights", "V85")
def importance_weights_normalised():
    """The weights are divided by their mean, so they depend on the rest of the batch."""
    return (
        "return log_ratio.exp().clamp(max=cap).masked_fill(~mask, 0)",
        "weights = log_ratio.exp().clamp(max=cap).masked_fill(~mask, 0)\n"
        "    return weights / weights.sum() * mask.sum()",
    )


@fault("importance_weights", "V85")
def importance_weights_of_the_tokens_so_far():
    """The weight of a response's token is the product up to it, not over the whole response."""
    return "log_ratio.sum(1, keepdim=True).expand(mask.shape)", "log_ratio.cumsum(1)"


@fault("rejection_mask", "V87", "verl b178a3c", choice=True)
def rejection_mask_bounds_of_the_inverse():
    """The bounds are on q / p, so unequal ones reject other tokens."""
    return "(logprobs - sampler_logprobs)", "(sampler_logprobs - logprobs)"


@fault("rejection_mask", "V87")
def rejection_mask_by_the_product():
    """The bounds are on the product over the response, not on its geometric mean."""
    return " / mask.sum(1, keepdim=True).clamp(min=1)", ""


@fault("rejection_mask", "V87")
def rejection_mask_mean_over_padding():
    """The mean over a response divides by the padded width."""
    return "mask.sum(1, keepdim=True).clamp(min=1)", "mask.shape[1]"


@fault("rejection_mask", "V87")
def rejection_mask_of_tokens_for_sequences():
    """`kind` is ignored: each token is judged on its own."""
    return 'if kind == "sequence":', "if False:"


@fault("rejection_mask", "V87")
def rejection_mask_only_above():
    """The lower bound is ignored."""
    return "(ratio >= low) & ", ""


@fault("rejection_mask", "V11")
def rejection_mask_keeps_masked_tokens():
    """Masked tokens are kept."""
    return "mask & (ratio >= low)", "(ratio >= low)"


@fault("rejection_mask", "V87")
def rejection_mask_arithmetic_mean():
    """The bounds are on the arithmetic mean of a response's ratios, not on the geometric."""
    return (
        "log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)",
        "(log_ratio.exp().masked_fill(~mask, 0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).log()",
    )


@fault("rejection_mask", "V87")
def rejection_mask_of_any_token():
    """A response is rejected if one of its tokens is outside of the bounds."""
    return "log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)", (
        "inside = (log_ratio.exp() >= low) & (log_ratio.exp() <= high) | ~mask\n"
        "        return mask & inside.all(1, keepdim=True)"
    )


# ---- Optimiser and statistics ----------------------------------------------------------------------------------


@fault("adam_step", "D64", "PyTorch", choice=True)
def adam_step_always_as_in_pytorch():
    """eps is added to the corrected root, as in PyTorch, though TensorFlow's form is asked for."""
    return 'eps * root if style == "torch" else eps', "eps * root"


@fault("adam_step", "D64", "TensorFlow 1", choice=True)
def adam_step_always_as_in_tensorflow():
    """eps is added to the root of v, as in TensorFlow 1, though PyTorch's form is asked for."""
    return 'eps * root if style == "torch" else eps', "eps"


@fault("adam_step", "D64")
def adam_step_without_bias_correction():
    """m and v are not corrected, so the first steps are too large."""
    return "lr * root / (1 - beta1**step) * m", "lr * m"


@fault("adam_step", "D64")
def adam_step_counts_from_0():
    """The bias correction is that of the step after: the counter is one too high."""
    return (("(1 - beta2**step)", "(1 - beta2 ** (step + 1))"), ("(1 - beta1**step)", "(1 - beta1 ** (step + 1))"))


@fault("adam_step", "D64")
def adam_step_epsilon_1e_8():
    """eps is 1e-8 whatever is asked for."""
    return "root = (1 - beta2**step) ** 0.5", "root, eps = (1 - beta2**step) ** 0.5, 1e-8"


@fault("adam_step", "D64")
def adam_step_epsilon_in_the_root():
    """eps is added to v, inside of the root."""
    return "(v.sqrt() + eps)", "(v + eps).sqrt()"


@fault("adam_step", "D64")
def adam_step_decays_the_weights():
    """It is AdamW with its default decay of 0.01."""
    return "return parameter - lr", "return parameter * (1 - 0.01 * lr) - lr"


@fault("adam_step", "D64")
def adam_step_betas_ignored():
    """beta1 and beta2 are 0.9 and 0.999 whatever is asked for."""
    return "m = beta1 * m", "beta1, beta2 = 0.9, 0.999\n    m = beta1 * m"


@fault("adam_step", "D64")
def adam_step_gradient_clipped():
    """The gradient is scaled to the norm 1 if it is longer."""
    return "m = beta1 * m", "gradient = gradient / gradient.norm().clamp(min=1)\n    m = beta1 * m"


@fault("explained_variance", "X34", GITHUB + "RLinf/RLinf/pull/1297")
def explained_variance_mean_over_parts():
    """The mean of the micro-batches' explained variances, each with a variance of its own."""
    return (
        ("r = torch.cat([x[mask] for x, mask in zip(returns, masks, strict=True)])", "parts = []"),
        (
            "error = r - torch.cat([x[mask] for x, mask in zip(values, masks, strict=True)])",
            "for v, r, mask in zip(values, returns, masks, strict=True):\n"
            "        parts.append(1 - ((r - v)[mask] ** 2).mean() / r[mask].var(correction=0))",
        ),
        ("return 1 - error.square().mean() / r.var(correction=0)", "return sum(parts) / len(parts)"),
    )


@fault("explained_variance", "X34", "Stable Baselines 3", choice=True)
def explained_variance_without_the_mean_error():
    """The variance of the error is taken, so a constant offset of the critic counts for nothing."""
    return "error.square().mean()", "error.var(correction=0)"


@fault("explained_variance", "V11")
def explained_variance_over_padding():
    """Masked entries are in both means."""
    return (
        (
            "torch.cat([x[mask] for x, mask in zip(returns, masks, strict=True)])",
            "torch.cat([x.flatten() for x in returns])",
        ),
        (
            "torch.cat([x[mask] for x, mask in zip(values, masks, strict=True)])",
            "torch.cat([x.flatten() for x in values])",
        ),
    )


@fault("explained_variance", "X34")
def explained_variance_not_below_0():
    """It is clipped, so a critic that is worse than a constant looks like one."""
    return "return 1 - error.square().mean() / r.var(correction=0)", (
        "return (1 - error.square().mean() / r.var(correction=0)).clamp(min=0)"
    )


@fault("explained_variance", "X34")
def explained_variance_is_a_correlation():
    """The squared correlation, for which neither the scale nor the mean of the values counts."""
    return "return 1 - error.square().mean() / r.var(correction=0)", (
        "return torch.corrcoef(torch.stack([r, r - error]))[0, 1] ** 2"
    )
