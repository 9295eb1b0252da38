"""Checks of the arguments of chapter 3: refused values, and values that are probably a mistake.

Marks like [V56] name an implementation detail. The original is verl-project/verl at commit b178a3c; files and lines
next to marks are the original's. See docs/reference.
"""

from collections.abc import Iterator
from operator import attrgetter

from ppo_rlhf.lib.base import errors
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.nets import foreign
from ppo_rlhf.lib.services import cli
from ppo_rlhf.rlvr import algebra, arguments as rlvr_arguments, problem_rows, problems


def check_arguments(args: rlvr_arguments.Args) -> None:
    """Raise an InputError for arguments that cannot be meant."""
    ppo, shaping = args.ppo, args.rewards
    cli.check_run(args)
    cli.check_controller(shaping.adaptive_kl, ppo.batch_size)
    for problem in (*impossible(args), *without_effect(args)):
        raise InputError(problem)


def evaluated(args: rlvr_arguments.Args) -> list[str]:
    """The arguments that name a task whose scorer evaluates an answer as Python, if that scorer is the verifier."""
    by_scorer = "reasoning_gym" in (args.rewards.verifier, args.rewards.format)
    names = ("task.problems", "task.test_problems")
    return [name for name in names if by_scorer and problem_rows.evaluates_text(attrgetter(name)(args))]


def impossible(args: rlvr_arguments.Args) -> Iterator[str]:
    """Arguments that do not go together."""
    ppo, shaping, flag = args.ppo, args.rewards, errors.flag
    for name in evaluated(args) if not shaping.evaluate_text else ():
        yield (
            f"{flag(name)} {attrgetter(name)(args)}: its scorer evaluates what the policy writes as Python, with "
            f"your rights, though only arithmetic, in a process with limits and, where the system offers it, no "
            f"network; if you accept the risk that is left, add {flag('rewards.evaluate_text')}"
        )
    n, full_in_loss = ppo.samples_per_prompt, shaping.kl_loss_coef and shaping.kl_loss_estimator == "full"
    of_prompt = flag("ppo.samples_per_prompt")
    # [V35] verl would train on raw rewards.   core_algos.py#L309-L311
    if ppo.advantage in algebra.IN_GROUPS and n < 2:
        yield (
            f"{flag('ppo.advantage')} {ppo.advantage} compares the responses to a prompt; "
            f"{of_prompt} {n} must be at least 2"
        )
    # [V112] Nothing but the sources enters these advantages. Where there is only one, GDPO's code does plain GRPO.
    if ppo.advantage == "gdpo":
        if not (shaping.format or shaping.trained_model):
            yield (
                f"{flag('ppo.advantage')} gdpo scales each of several sources of the score alone; there is only the "
                f"verifier. Add {flag('rewards.format')} or {flag('rewards.trained_model')}, or take grpo"
            )
        in_score = ("rewards.kl_coef", shaping.kl_coef), ("rewards.overlong_buffer", shaping.overlong_buffer)
        for name, value in (*in_score, ("rewards.missing_stop", shaping.missing_stop != "none")):
            if value:
                yield (
                    f"{flag(name)} {attrgetter(name)(args)} does nothing with {flag('ppo.advantage')} gdpo, which "
                    f"compares what each source says; {flag('rewards.kl_loss_coef')} penalises the KL in the loss"
                )
        if ppo.filter_groups:
            yield (
                f"{flag('ppo.filter_groups')} leaves out groups whose sums are all equal, but their sources may "
                f"differ, from which {flag('ppo.advantage')} gdpo learns; leave one of the two out"
            )
    if ppo.filter_groups and n < 2:
        yield f"{flag('ppo.filter_groups')} needs {of_prompt} 2 or more"
    # [V51] The exact KL in reward and loss, with equal coefficients and advantages that nothing rescales, has the
    #       gradient of the KL of whole responses. In the reward alone, its gradient points away from the reference.
    unequal = shaping.kl_loss_coef != shaping.kl_coef or shaping.adaptive_kl.target is not None
    full_in_reward = shaping.kl_coef and shaping.kl_estimator == "full"
    if full_in_reward and (not full_in_loss or unequal):
        yield (
            f"{flag('rewards.kl_estimator')} full goes with {flag('rewards.kl_loss_estimator')} full and a "
            f"{flag('rewards.kl_loss_coef')} that is {flag('rewards.kl_coef')}, and no "
            f"{flag('rewards.adaptive_kl.target')}: in the reward alone its gradient points away from the reference"
        )
    if full_in_reward and (ppo.whitens or ppo.advantage == "grpo"):
        yield (
            f"{flag('rewards.kl_estimator')} full needs advantages that nothing rescales, since the loss has the "
            f"rest of its gradient: {flag('ppo.whiten_advantages')} False, and {flag('ppo.advantage')} rloo, not grpo"
        )
    # [V56] A coefficient that cannot have an effect is an error.   verl/utils/config.py#L181
    if shaping.adaptive_kl.target is not None and not shaping.kl_coef:
        yield f"{flag('rewards.adaptive_kl.target')} moves {flag('rewards.kl_coef')}, which is 0 and stays so"
    if ppo.critic_warmup and ppo.advantage != "gae":
        in_groups = f"{args.preset}-grpo"
        yield (
            f"{flag('ppo.critic_warmup')} {ppo.critic_warmup} is for a critic, which {flag('ppo.advantage')} "
            f"{ppo.advantage} has none of; 0 switches it off"
            + (f", as {flag('preset')} {in_groups} does" if in_groups in rlvr_arguments.PRESETS else "")
        )
    if ppo.critic_explains is not None and not ppo.critic_warmup:
        yield (
            f"{flag('ppo.critic_explains')} {ppo.critic_explains} ends the updates of {flag('ppo.critic_warmup')} "
            f"early, so they must be more than 0; None switches it off"
        )
    if ppo.dual_clip is not None and (ppo.loss != "ppo" or ppo.dual_clip <= 1 + ppo.cliprange_high):
        yield (
            f"{flag('ppo.dual_clip')} {ppo.dual_clip} is for {flag('ppo.loss')} ppo, and above 1 + "
            f"{flag('ppo.cliprange_high')}; None switches it off"
        )
    if ppo.loss == "gspo" and ppo.loss_aggregation != "seq-mean-token-mean":
        yield f"{flag('ppo.loss')} gspo goes with {flag('ppo.loss_aggregation')} seq-mean-token-mean alone"
    # [V78] Scores that contain a reward model's score are never equal.
    if ppo.filter_groups and shaping.trained_model:
        yield (
            f"{flag('ppo.filter_groups')} leaves out groups whose scores are all equal, which they never are with "
            f"{flag('rewards.trained_model')}; leave one of the two out"
        )
    if shaping.overlong_buffer > args.task.response_length:
        yield (
            f"{flag('rewards.overlong_buffer')} {shaping.overlong_buffer} is more than "
            f"{flag('task.response_length')} {args.task.response_length}"
        )


def without_effect(args: rlvr_arguments.Args) -> Iterator[str]:
    """Arguments that were given although nothing reads them: their value is not that of the preset."""
    ppo, shaping, flag = args.ppo, args.rewards, errors.flag
    usual = rlvr_arguments.PRESETS.get(args.preset, rlvr_arguments.Args())
    of_critic = "ppo.lam ppo.cliprange_value rewards.value_model ppo.critic_lam ppo.lam_alpha ppo.critic_explains"
    clips = ("ppo", "gspo", "cispo")
    lam_is_read = ppo.lam_alpha is None or ppo.critic_lam is None or ppo.advantage != "gae"
    # [V56] Each row has arguments, whether something reads them, and what would.
    readers = [
        (of_critic, ppo.advantage == "gae", f"{flag('ppo.advantage')} gae"),
        ("ppo.lam", lam_is_read, f"{flag('ppo.lam_alpha')} None or {flag('ppo.critic_lam')} None"),
        ("ppo.gamma", ppo.advantage in ("gae", "reinforce++"), f"{flag('ppo.advantage')} gae or reinforce++"),
        ("ppo.cliprange_low ppo.cliprange_high", ppo.loss in clips, f"{flag('ppo.loss')} ppo, gspo or cispo"),
        ("ppo.trust_region", ppo.loss in ("ipo", "dppo"), f"{flag('ppo.loss')} ipo or dppo"),
        ("ppo.prompts_per_round", ppo.filter_groups, flag("ppo.filter_groups")),
        ("rewards.evaluate_text", evaluated(args), "a task of reasoning-gym whose scorer evaluates text"),
        ("rewards.format_weight", shaping.format, flag("rewards.format")),
        ("rewards.label", foreign.is_foreign(shaping.trained_model), "a reward model from elsewhere"),
        ("rewards.trained_weight", shaping.trained_model, flag("rewards.trained_model")),
        ("rewards.missing_stop_penalty", shaping.missing_stop != "none", flag("rewards.missing_stop")),
        ("rewards.kl_estimator", shaping.has_penalty, flag("rewards.kl_coef")),
        ("rewards.kl_loss_estimator", shaping.kl_loss_coef, flag("rewards.kl_loss_coef")),
        ("rewards.adaptive_kl.horizon", shaping.adaptive_kl.target, flag("rewards.adaptive_kl.target")),
    ]
    for names, is_read, reader in readers:
        for name in names.split():
            value, default = (attrgetter(name)(one) for one in (args, usual))
            if not is_read and value != default:
                yield f"{flag(name)} {value} does nothing without {reader}; leave it at {default!r}"


def doubts(args: rlvr_arguments.Args) -> Iterator[str]:
    """Warnings about settings that may be a mistake."""
    ppo, shaping, flag = args.ppo, args.rewards, errors.flag
    estimator = f"{flag('rewards.kl_estimator')} {shaping.kl_estimator}"
    # [V48] verl and TRL 1.16 offer these without a warning.   ray_trainer.py#L86-L108
    if shaping.kl_coef and shaping.kl_estimator in ("abs", "k2", "k3"):
        yield (
            f"{estimator}: in the reward, its gradient vanishes near the reference and can point away from it "
            f"further out; that of k1 is the gradient of the KL divergence"
        )
    # [V34] In a group whose scores are all equal, only the penalties differ, and they are divided by how much they
    #       differ. verl does the same.   core_algos.py#L267-L330
    if shaping.kl_coef and ppo.advantage == "grpo" and not ppo.filter_groups:
        yield (
            f"{flag('ppo.advantage')} grpo divides by the group's standard deviation. Where all scores are equal, "
            f"that of the KL penalty is left, and however small {flag('rewards.kl_coef')} {shaping.kl_coef:g} is, "
            f"advantages are about 1; {flag('rewards.kl_loss_coef')} or {flag('ppo.advantage')} dr_grpo avoids that"
        )
    # [V56] Both penalties at once are allowed, with a warning.   verl/utils/config.py#L181
    if shaping.kl_coef and shaping.kl_loss_coef and shaping.kl_estimator != "full":
        yield f"{flag('rewards.kl_coef')} and {flag('rewards.kl_loss_coef')} both penalise the KL"
    if shaping.adaptive_kl.target is not None and shaping.kl_estimator in ("abs", "k2"):
        yield f"{flag('rewards.adaptive_kl.target')} is in nats of KL, which {estimator} does not estimate"
    if ppo.loss == "gspo" and max(algebra.lower_clip_range(ppo.loss, ppo.cliprange_low), ppo.cliprange_high) > 0.01:
        yield (
            f"{flag('ppo.loss')} gspo: the ratio of a whole response hardly leaves 1, so a clip range above 0.01 "
            f"never acts; its authors take {flag('ppo.cliprange_low')} 3e-4 and {flag('ppo.cliprange_high')} 4e-4"
        )
    # [V36] Half of Dr. GRPO is in the aggregation of the loss.
    # [V109] Below 0, a mean would turn advantages around, so such groups are left out.
    if ppo.advantage == "maxrl" and (shaping.kl_coef or shaping.missing_stop != "none" or shaping.overlong_buffer):
        yield (
            f"{flag('ppo.advantage')} maxrl divides by the mean of the scores, which ought to be the share of right "
            f"responses. Penalties in the score change it, and groups in which it is not above 0 teach nothing; "
            f"{flag('rewards.kl_loss_coef')} penalises the KL without that"
        )
    if ppo.advantage == "dr_grpo" and ppo.loss_aggregation != "seq-mean-token-sum-norm":
        yield (
            f"{flag('ppo.advantage')} dr_grpo is Dr. GRPO only with {flag('ppo.loss_aggregation')} "
            f"seq-mean-token-sum-norm"
        )


def check_problems(source: problems.Problems, sizes: rlvr_arguments.PpoSizes) -> None:
    """Raise an InputError if there are fewer problems than a round of generation draws."""
    if len(source) < sizes.round_prompts:
        raise InputError(
            f"{errors.flag('task.problems')} has {len(source)} problems, fewer than the {sizes.round_prompts} that "
            f"are drawn at a time ({errors.flag('ppo.batch_size')} / {errors.flag('ppo.samples_per_prompt')}, or "
            f"{errors.flag('ppo.prompts_per_round')})"
        )
