// What lib/services/derivation.py computes, for the page of report.py: `derive` gives the same numbers under the same names.
// tests/test_explain.py compares the two, and both with the scripts. The formulas are explained there.
"use strict";

const sum = numbers => numbers.reduce((a, b) => a + b, 0);
const clip = (x, low, high) => Math.min(Math.max(x, low), high);
const range = n => [...Array(n).keys()];
const rowOf = (values, n) => values ? values.map(x => x ?? NaN) : Array(n).fill(NaN);

// ---- Steps ----

function klEstimate(d, name) {
  return {k1: d, abs: Math.abs(d), k2: d * d / 2, k3: Math.expm1(Math.min(-d, 20)) + d}[name.replace("+", "")];
}

function temporalDifferences(rewards, values, gamma) {
  return rewards.map((reward, t) => reward + gamma * (t + 1 < values.length ? values[t + 1] : 0) - values[t]);
}

function discountedSums(numbers, factor) {  // x_t + factor * x_(t+1) + factor^2 * x_(t+2) + ...
  const found = [...numbers];
  for (let t = found.length - 2; t >= 0; t--) found[t] += factor * found[t + 1];
  return found;
}

function leastMean(totals) {  // of maxrl: 0, but for rounding
  return 1e-5 * sum(totals.map(Math.abs)) / totals.length;
}

function groupDeviation(totals) {
  const mean = sum(totals) / totals.length;
  return Math.sqrt(sum(totals.map(x => (x - mean) ** 2)) / Math.max(totals.length - 1, 1));
}

function groupAdvantage(total, totals, lengths, estimator) {
  if (Math.max(...totals) <= Math.min(...totals)) return 0;
  const n = totals.length, mean = sum(totals) / n;
  if (estimator === "rloo") return n / (n - 1) * (total - mean);
  if (estimator === "grpo") return (total - mean) / (groupDeviation(totals) + 1e-6);
  if (estimator === "maxrl") return mean > leastMean(totals) ? (total - mean) / (mean + 1e-6) : 0;
  if (estimator === "opo") return total - sum(totals.map((x, i) => x * lengths[i])) / sum(lengths);
  return total - mean;
}

function policyLam(lam, alpha, length) {
  return alpha === null || alpha === undefined ? lam : 1 - 1 / Math.max(alpha * length, 1);
}

function isMasked(newLogprobs, samplerLogprobs, advantage, delta) {  // the rows are those of the response's tokens
  if (delta === null || delta === undefined || advantage >= 0) return false;
  return sum(newLogprobs.map((x, i) => samplerLogprobs[i] - x)) / Math.max(newLogprobs.length, 1) > delta;
}

const movedBy = (newLogprob, ratio) => Math.exp(newLogprob) * (1 - 1 / ratio);

function tokenLoss(newLogprob, ratio, advantage, s) {
  if (s.loss === "ipo" || s.loss === "dppo") {
    const change = movedBy(newLogprob, ratio), free = -advantage * ratio;
    const away = s.loss === "ipo" ? Math.abs(change) : advantage > 0 ? change : -change;
    return away > s.trust_region && advantage ? {loss: 0, gradient: 0, free, clipped: 0, branch: "clipped"}
      : {loss: free, gradient: free, free, clipped: 0, branch: "free"};
  }
  const inside = clip(ratio, 1 - s.low, 1 + s.high);
  if (s.loss === "reinforce" || s.loss === "cispo") {
    const slope = -(s.loss === "cispo" ? inside : 1) * advantage, loss = slope * newLogprob;
    return {loss, gradient: slope, free: loss, clipped: loss, branch: "free"};
  }
  const free = -advantage * ratio, clipped = -advantage * inside;
  if (s.dual_clip !== null && s.loss === "ppo" && advantage < 0 && Math.max(free, clipped) > -advantage * s.dual_clip)
    return {loss: -advantage * s.dual_clip, gradient: 0, free, clipped, branch: "dual"};
  return clipped > free ? {loss: clipped, gradient: 0, free, clipped, branch: "clipped"}
    : {loss: free, gradient: free, free, clipped, branch: "free"};
}

function divisorOf(aggregation, length, counts) {
  return Math.max(1, {"token-mean": counts.tokens, "seq-mean-token-sum": counts.sequences,
    "seq-mean-token-mean": counts.sequences * length,
    "seq-mean-token-sum-norm": counts.episodes * counts.length}[aggregation]);
}

// ---- One episode ----

function marksOf(tokens, n, chapter) {
  const told = name => tokens[name] ? tokens[name].map(Boolean) : Array(n).fill(true);
  const [pays, valued, learns] = [[null, null, null], ["mask", "value_mask", "mask"], ["scored", "scored", "mask"]][chapter - 1]
    .map(name => name ? told(name) : Array(n).fill(true));
  return {pays, valued, learns, value_learns: chapter === 3 ? learns : valued};
}

function statisticsOf(episode, epoch) {
  const told = episode.statistics || {}, found = {};
  for (const name of ["kl_coef", "reward_mean", "reward_deviation", "advantage_mean", "advantage_deviation", "tokens",
    "values", "sequences", "episodes", "length", "baselines", "right_tokens", "critic_lam"])
    found[name === "values" ? "value_count" : name] = (Array.isArray(told[name]) ? told[name][epoch] : told[name]) ?? NaN;
  return found;
}

function scaledSources(episode, group, weights) {
  const found = {};
  for (const [name, weight] of Object.entries(weights)) {
    const own = episode.numbers[name] ?? NaN, told = group.map(other => other.numbers[name] ?? NaN);
    const ofGroup = told.length ? told : [own];
    Object.assign(found, {[name]: own, [`weight_${name}`]: weight, [`deviation_${name}`]: groupDeviation(ofGroup),
      [`mean_${name}`]: sum(ofGroup) / ofGroup.length, [`scaled_${name}`]: groupAdvantage(own, ofGroup, [], "grpo")});
  }
  return found;
}

function totalOf(episode) {
  const counts = marksOf(episode.tokens, episode.places.length, 3).valued;
  return sum(rowOf(episode.tokens.rewards, counts.length).filter((_, t) => counts[t]));
}

function derive(episode, s, epoch, group = []) {
  const tokens = episode.tokens, n = episode.places.length, all = range(n), shared = statisticsOf(episode, epoch);
  const said = name => rowOf(episode.epochs && episode.epochs[name] && episode.epochs[name][epoch], n);
  const found = {...shared, ...marksOf(tokens, n, s.chapter)};
  for (const name of ["logprobs", "ref_logprobs", "values"]) found[name] = rowOf(tokens[name], n);
  const valued = all.filter(t => found.valued[t]), last = valued.length ? valued[valued.length - 1] : -1;

  // Steps 4 and 5: score and rewards.
  const exact = rowOf(tokens.exact_kl, n);
  found.kl = all.map(t => !s.reference || !found.pays[t] ? 0 : s.kl_estimator === "full" ? exact[t]
    : klEstimate(found.logprobs[t] - found.ref_logprobs[t], s.kl_estimator));
  found.score = episode.numbers.scores ?? NaN;
  found.rewards = found.kl.map((part, t) => -shared.kl_coef * part + (t === last ? found.score : 0));
  found.is_last = all.map(t => t === last);
  found.is_inner = all.map(t => found.valued[t] && t !== last);
  if (!((episode.statistics || {}).kept ?? 1)) {  // rejected whole, so it has no advantages
    found.valued = all.map(() => false);
    valued.length = 0;
  }
  found.used_rewards = found.rewards;
  if (s.whiten_rewards)
    found.used_rewards = found.whitened_rewards = found.rewards.map(
      reward => (reward - shared.reward_mean) / shared.reward_deviation + shared.reward_mean);

  // Step 6: advantages and returns.
  Object.assign(found, advantagesOf(episode, found, valued, s, group));
  found.advantages = found.raw_advantages;
  if (s.whiten_advantages)
    found.advantages = found.raw_advantages.map(x => (x - shared.advantage_mean) / shared.advantage_deviation);

  // Step 7: losses.
  found.is_right = found.learns.map(learns => learns && (episode.numbers.verifier ?? NaN) > 0);
  return Object.assign(found, lossesOf(found, said, tokens, shared, s));
}

function advantagesOf(episode, found, valued, s, group) {
  const spread = values => {
    const row = Array(episode.places.length).fill(0);
    valued.forEach((t, i) => { row[t] = values[i]; });
    return row;
  };
  const rewards = valued.map(t => found.used_rewards[t]), values = valued.map(t => found.values[t]);
  if (s.estimator === "gae") {
    const lam = policyLam(s.lam, s.lam_alpha, valued.length), recorded = found.critic_lam;
    const criticLam = Number.isNaN(recorded) ? s.critic_lam ?? s.lam : recorded;
    const deltas = temporalDifferences(rewards, values, s.gamma);
    const [raw, targets] = [lam, criticLam].map(x => discountedSums(deltas, s.gamma * x));
    return {deltas: spread(deltas), raw_advantages: spread(raw), of_targets: spread(targets), policy_lam: lam,
      critic_lam: criticLam, valued_tokens: valued.length, returns: spread(targets.map((x, i) => x + values[i]))};
  }
  if (s.estimator === "reinforce++" || s.estimator === "remax") {
    const sums = discountedSums(rewards, s.estimator === "remax" ? 1 : s.gamma);
    const less = s.estimator === "remax" ? found.baselines : 0;
    return {sums: spread(sums), raw_advantages: spread(sums.map(x => x - less))};
  }
  const kept = group.filter(other => (other.statistics || {}).kept ?? 1);
  if (s.estimator === "gdpo") {
    const scaled = scaledSources(episode, kept, s.sources);
    const total = sum(Object.entries(s.sources).map(([name, weight]) => weight * scaled[`scaled_${name}`]));
    return {...scaled, raw_advantages: spread(valued.map(() => total))};
  }
  const totals = kept.length ? kept.map(totalOf) : [NaN];
  const lengths = kept.map(other => marksOf(other.tokens, other.places.length, 3).valued.filter(Boolean).length);
  const total = sum(rewards), advantage = groupAdvantage(total, totals, lengths, s.estimator);
  return {total, totals, group_size: totals.length, group_mean: sum(totals) / totals.length,
    group_weighted_mean: sum(lengths.map((k, i) => k * totals[i])) / Math.max(sum(lengths), 1),
    group_deviation: groupDeviation(totals),
    equal: Math.max(...totals) <= Math.min(...totals) || (s.estimator === "maxrl" && sum(totals) / totals.length <= leastMean(totals)),
    raw_advantages: spread(valued.map(() => advantage))};
}

function lossesOf(found, said, tokens, shared, s) {
  const n = found.logprobs.length, all = range(n), learning = all.filter(t => found.learns[t]);
  const fresh = said("new_logprobs"), freshValues = said("new_values"), exact = said("exact_kl");
  const old = s.correction === "bypass" ? rowOf(tokens.sampler_logprobs, n) : found.logprobs;
  const gaps = all.map(t => fresh[t] - old[t]), total = sum(learning.map(t => gaps[t]));
  const mean = total / Math.max(learning.length, 1), whole = s.loss === "gspo";
  const ratio = gaps.map(gap => whole ? Math.exp(Math.min(mean, 10)) : Math.exp(clip(gap, -20, 20)));
  const terms = all.map(t => tokenLoss(fresh[t], ratio[t], found.advantages[t], s));
  let weights = tokens.weights ? rowOf(tokens.weights, n) : Array(n).fill(1);
  if (s.correction === "bypass" && s.loss === "reinforce")
    weights = gaps.map(gap => Math.min(Math.exp(clip(s.level === "token" ? gap : total, -20, 20)), s.cap));
  const ofResponse = [fresh, rowOf(tokens.sampler_logprobs, n)].map(row => learning.map(t => row[t]));
  const masked = found.advantages.map(advantage => isMasked(...ofResponse, advantage, s.off_policy_mask));
  const divisor = divisorOf(s.aggregation, Math.max(learning.length, 1), shared);
  const valueDivisor = s.chapter < 3 ? shared.value_count : divisor, form = s.kl_loss_estimator;
  const klLoss = all.map(t => form === "full" ? exact[t] : klEstimate(fresh[t] - found.ref_logprobs[t], form)
    * (form.endsWith("+") ? Math.exp(clip(gaps[t], -20, 20)) : 1));
  const targets = found.returns || Array(n).fill(NaN), bound = s.cliprange_value ?? Infinity;
  const valueFree = all.map(t => (freshValues[t] - targets[t]) ** 2);
  const valueClipped = all.map(t =>
    (clip(freshValues[t], found.values[t] - bound, found.values[t] + bound) - targets[t]) ** 2);
  const valueLoss = all.map(t => Math.max(valueFree[t], valueClipped[t]) / 2);
  const flags = {};
  for (const branch of ["free", "clipped", "dual"])
    flags[`is_${branch}`] = all.map(t => found.learns[t] && terms[t].branch === branch);
  for (const name of ["loss", "free", "clipped", "gradient"]) flags[name] = terms.map(term => term[name]);
  return {...flags, old_logprobs: old, new_logprobs: fresh, new_values: freshValues, ratio, weights,
    moved: fresh.map((x, t) => movedBy(x, ratio[t])), log_ratio: whole ? Array(n).fill(mean) : gaps, clipped_ratio: ratio.map(x => clip(x, 1 - s.low, 1 + s.high)),
    is_kept: all.map(t => found.learns[t] && !masked[t]), is_masked: all.map(t => found.learns[t] && masked[t]),
    divisor, share: terms.map((term, t) => (masked[t] ? 0 : weights[t]) * term.loss / divisor), kl_loss: klLoss,
    nll_share: fresh.map(x => -s.nll_coef * x / Math.max(shared.right_tokens, 1)),
    kl_share: klLoss.map((part, t) => s.kl_loss_coef * (form === "full" ? 1 : weights[t]) * part / divisor),
    value_free: valueFree, value_clipped: valueClipped, value_loss: valueLoss,
    value_is_free: all.map(t => found.value_learns[t] && !(valueClipped[t] > valueFree[t])),
    value_is_clipped: all.map(t => found.value_learns[t] && valueClipped[t] > valueFree[t]),
    value_divisor: valueDivisor, value_share: valueLoss.map(x => x / valueDivisor)};
}

// ---- The same episodes with other settings ----

function momentsOf(rows, marks) {  // as `whiten` of the scripts has them
  const numbers = rows.flatMap((row, i) => row.filter((_, t) => marks[i][t])), mean = sum(numbers) / numbers.length;
  return [mean, Math.sqrt(sum(numbers.map(x => (x - mean) ** 2)) / numbers.length + 1e-8)];
}

function deriveAll(episodes, s, epoch, before = {}) {
  // Numbers are whitened with the mean and deviation of these episodes. before: mean and deviation of the same
  // episodes with the settings of the run. Where it is known, each episode has the recorded mean and deviation of its
  // minibatch, changed as much as those of these episodes change.
  let copies = episodes.map(episode => ({...episode, statistics: {...episode.statistics,
    kl_coef: s.kl_coef ?? (episode.statistics || {}).kl_coef}}));
  const all = () => copies.map(episode => derive(episode, s, epoch,
    copies.filter(other => other.numbers.groups === episode.numbers.groups)));
  const whiten = (name, [mean, deviation]) => {
    copies = copies.map(episode => {
      const told = statisticsOf(episode, epoch), known = before[name] && told[`${name}_deviation`] > 0;
      return {...episode, statistics: {...episode.statistics,
        [`${name}_mean`]: known ? told[`${name}_mean`] + mean - before[name][0] : mean,
        [`${name}_deviation`]: known ? told[`${name}_deviation`] * deviation / before[name][1] : deviation}};
    });
  };
  const first = all();
  copies = copies.map((episode, i) => ({...episode, tokens: {...episode.tokens, rewards: first[i].rewards}}));
  if (s.whiten_rewards) whiten("reward", momentsOfRewards(first));
  if (s.whiten_advantages) whiten("advantage", momentsOfAdvantages(all(), s));
  return all();
}

const momentsOfRewards = found => momentsOf(found.map(x => x.rewards), found.map(x => x.valued));
const momentsOfAdvantages = (found, s) =>
  momentsOf(found.map(x => x.raw_advantages), found.map(x => s.chapter === 2 ? x.learns : x.valued));

function whatIf(episodes, s, changes, epoch) {
  // What the same episodes would have taught. Without changes, these are the recorded numbers. A lambda of the critic's
  // targets that was recorded is only kept if it is not the run's usual one, as in value pretraining.
  const usual = s.critic_lam ?? s.lam, isUsual = x => Math.abs((x.statistics || {}).critic_lam - usual) < 1e-6;
  episodes = episodes.map(x => isUsual(x) ? {...x, statistics: {...x.statistics, critic_lam: null}} : x);
  const found = episodes.map(episode => derive(episode, s, epoch,
    episodes.filter(other => other.numbers.groups === episode.numbers.groups)));
  const moments = {reward: momentsOfRewards(found), advantage: momentsOfAdvantages(found, s)};
  const known = Object.entries(moments).filter(([, numbers]) => !numbers.some(Number.isNaN));
  return deriveAll(episodes, {...s, ...changes}, epoch, Object.fromEntries(known));
}

// ---- The lines of one token ----

const ROUNDING = 2e-5;  // of the largest number in a line, and of 0.1 at least

function decimals(value, digits) {
  return Math.abs(value) > 1e-12 ? Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value)))) : 0;
}

function decimal(value, digits, places = 0) {
  const text = value.toFixed(Math.min(Math.max(decimals(value, digits), places), decimals(value, 8)));
  return String(text.includes(".") ? text.replace(/\.?0+$/, "") : text).replace(/^-0$/, "0");
}

function written(value, places = 0) {
  if (Array.isArray(value)) return value.map(one => written(one, places)).join(" + ");
  const text = decimal(value, 5, places);
  return text.startsWith("-") ? `(${text})` : text;
}

function digitsOf(value, used, adds, divisor) {
  if (adds && Math.abs(value) < 1e-6 * Math.max(...used.map(Math.abs))) return ["0", 0];
  return [decimal(value, 4), adds ? decimals(value, 5) + decimals(Math.min(Math.abs(divisor), 1), 1) : 0];
}

function numbersOf(found, s, t) {
  const numbers = {gamma: s.gamma, lam: s.lam, lam_alpha: s.lam_alpha, dual_clip: s.dual_clip,
    kl_loss_coef: s.kl_loss_coef, nll_coef: s.nll_coef};
  const following = found.valued.findIndex((valued, later) => later > t && valued);  // -1: the token is the last
  for (const [name, value] of Object.entries(found)) {
    const row = Array.isArray(value) && name !== "totals";
    numbers[name] = row ? value[t] : value;
    if (row) numbers[`next_${name}`] = following < 0 ? 0 : value[following];
  }
  return {...numbers, equal: numbers.equal && numbers.valued, differ: !numbers.equal && numbers.valued};
}

function explainToken(steps, episode, s, epoch, t, group, found = derive(episode, s, epoch, group)) {
  const numbers = numbersOf(found, s, t), lines = [], missing = new Set();
  for (const step of steps) {
    if (step.only && !numbers[step.only]) continue;
    const used = [...step.numbers.matchAll(/{(\w+)}/g)].flatMap(match => numbers[match[1]]), value = numbers[step.result];
    if ([...used, value].some(x => x === null || x === undefined || Number.isNaN(x))) { missing.add(step.title); continue; }
    const row = (episode.epochs && episode.epochs[step.recorded] || [])[epoch] || episode.tokens[step.recorded];
    const told = row ? row[t] : null;
    const size = Math.max(...used.map(Math.abs), Math.abs(value), 0.1) / Math.min(numbers[step.divisor] ?? 1, 1);
    const difference = told === null || told === undefined ? null : value - told;
    const [, divisor] = step.numbers.match(/\/ \(?{(\w+)}/) || [];
    const [result, places] = digitsOf(value, used, / [−+] /.test(step.numbers), divisor ? numbers[divisor] : 1);
    lines.push({step, value, result, difference, told,
      wrong: difference !== null && !(Math.abs(difference) <= ROUNDING * size),
      numbers: step.numbers.replace(/{(\w+)}/g, (_, name) => written(numbers[name], places))});
  }
  return {lines, missing: [...missing]};
}
