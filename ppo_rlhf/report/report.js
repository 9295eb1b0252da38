// The page of a run. Texts of the run reach the page as text, never as HTML. Numbers are those of Python: derivation.py
// has computed and written every line of a derivation.
const data = JSON.parse(document.getElementById("data").textContent);
const find = id => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

data.figures.forEach((figure, i) => chart(find(`plot-${i}`), figure));
// On a phone, where plots are below each other, they are folded at first.
if (find("all-curves")) find("all-curves").open = matchMedia("(min-width: 64rem)").matches;

// ---- Token view: an update, an episode and a token are chosen ----

const chosen = {update: 0, episode: 0, token: 0};
const updateOf = () => data.updates[chosen.update];
const episodeOf = () => updateOf().episodes[chosen.episode];
const picked = () => find("quantity").value;
// At most four digits and four decimals.
const shown = value => value === null || value === undefined ? "–" : String(Number(Number(value.toFixed(4)).toPrecision(4)));

// 0 without colour, 1 above and -1 below with all of it.
function strengthOf(value) {
  const middle = data.quantities[picked()][1], [low, high] = data.scales[picked()];
  if (value === null || value === undefined) return 0;
  return Math.max(-1, Math.min(1, (value - middle) / (Math.max(high - middle, middle - low) || 1)));
}
const colorOf = strength => `rgb(${strength < 0 ? "213 94 0" : "0 114 178"} / ${(0.75 * Math.abs(strength)).toFixed(3)})`;

function groupOf(episode) {
  const {groups} = episode.numbers;
  if (groups === null || groups === undefined) return [episode];
  return updateOf().episodes.filter(other => other.numbers.groups === groups);
}

// ---- Token view: drawing ----

function tokensOf(episode) {
  const {tokens} = episode, values = tokens[picked()] || [], number = updateOf().episodes.indexOf(episode);
  const last = (tokens.scored || tokens.mask || []).lastIndexOf(1);
  const box = make("div", {className: "text response"});
  episode.pieces.forEach((piece, i) => {
    const masked = tokens.mask && !tokens.mask[i], strength = strengthOf(values[i]), isChosen = number === chosen.episode && i === chosen.token;
    // A space before a word is no part of its box, which a line break would else cut in two.
    const space = piece.trim() ? piece.match(/^ */)[0] : "", text = piece.slice(space.length).replaceAll("\n", "⏎\n");
    const span = make("span", {className: "token", tabIndex: 0, textContent: text || (masked ? "∎" : "◦")});
    const classes = {masked, cut: tokens.scored && !tokens.scored[i], tool: tokens.tool && tokens.tool[i],
      stop: episode.numbers.stopped && i === last, up: strength > 0.05, down: strength < -0.05, chosen: isChosen};
    span.classList.add(...Object.keys(classes).filter(name => classes[name]));
    if (values.length) span.style.backgroundColor = colorOf(strength);
    span.setAttribute("role", "button");
    span.setAttribute("aria-pressed", isChosen);
    span.setAttribute("aria-label", `${piece.trim() || "space"}, ${data.quantities[picked()][0]} ${shown(values[i])}`);
    span.onclick = () => { choose({episode: number, token: i}); document.querySelector(".token.chosen").focus(); };
    span.onkeydown = event => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); span.click(); }
    };
    box.append(space, span);
  });
  return box;
}

// Where the page opens: the scored token whose advantage, times 1 less its probability when it was sampled, is farthest
// from 0. The gradient of its log-prob is near 0 if it was nearly certain, however large the advantage. The first update
// counts only if there is no other, since its critic knows nothing yet, and so does a response that doesn't end. One that
// is right by luck never counts.
function opening() {
  const places = data.updates.flatMap(({episodes}, update) => episodes.flatMap((one, episode) => {
    const {advantages, logprobs, mask, scored} = one.tokens;
    if (one.luck || !advantages || !update && data.updates.length > 1) return [];
    const counts = token => (!mask || mask[token]) && (!scored || scored[token]);
    return advantages.map((advantage, token) => ({update, episode, token, advantage, probability: Math.exp(logprobs[token])}))
      .filter(({token}) => counts(token));
  }));
  const weight = ({advantage, probability}) => Math.abs(advantage) * (1 - probability);
  const ended = places.filter(({update, episode}) => data.updates[update].episodes[episode].numbers.stopped);
  return (ended.length ? ended : places).reduce((best, place) => best && weight(best) >= weight(place) ? best : place, undefined);
}

function reasonOf({update, episode, token, advantage, probability}) {
  const one = data.updates[update].episodes[episode], {values} = one.tokens;
  const expected = values ? `the critic expected (a sum of rewards of ${shown(values[token])} from there on)` : "expected";
  const others = (data.updates.length > 1 ? " after the first update" : "") +
    (one.numbers.stopped ? " in responses that end" : "") +
    (data.updates.some(({episodes}) => episodes.some(({luck}) => luck)) ? ", but for those that are right by luck" : "");
  return `The page opens on update ${data.updates[update].update}, episode ${episode + 1}, token ${one.places[token] + 1}. Of all scored tokens ` +
    `that were traced${others}, its advantage, ${shown(advantage)}, times 1 less its probability, ${shown(probability)}, is farthest from 0: ` +
    `things went ${advantage > 0 ? "better" : "worse"} than ${expected}, and the policy had room to change. ` +
    "Where the advantage is near 0, or the token was nearly certain, the loss hardly changes the policy.";
}

const titleOf = episode => updateOf().episodes.indexOf(episode) + 1;

function drawEpisode() {
  const episode = episodeOf(), group = groupOf(episode), inGroup = group.length > 1, box = find("episode-box");
  const responses = group.map(other => inGroup
    ? make("div", {className: `response-card${other === episode ? " current" : ""}`},
      make("b", {className: "small", textContent: `response ${group.indexOf(other) + 1}: score ${shown(other.numbers.scores)}`}), tokensOf(other))
    : tokensOf(other));
  box.replaceChildren(make("h3", {textContent: "Query"}), make("div", {className: "text query", textContent: episode.query}),
    make("h3", {textContent: inGroup ? `The ${group.length} responses of its group` : "Response"}),
    make("div", {className: inGroup ? "group" : ""}, ...responses));
  if (!episode.tokens[picked()]) box.append(make("p", {className: "unknown", textContent: "This number is not known of this episode."}));
  if (episode.luck) box.append(make("p", {className: "luck", textContent: `Right by luck: the verifier accepts the answer, but ${episode.luck} is wrong.`}));
  for (const [title, text] of Object.entries(episode.texts))
    box.append(make("h3", {textContent: title}), make("div", {className: "text", textContent: text}));
  const {raw_scores: raw, scores} = episode.numbers;
  const isShown = name => name === "groups" ? inGroup : name !== "raw_scores" || raw !== scores;
  const numbers = Object.entries(episode.numbers).filter(([name]) => isShown(name)).map(([name, value]) => make("tr", {},
    make("th", {textContent: data.numbers[name] || name.replaceAll("_", " "), scope: "row"}),
    make("td", {className: "number", textContent: name === "stopped" ? (value ? "yes" : "no") : shown(value)})));
  box.append(make("table", {}, ...numbers));
}

// What the signs on the tokens mean, as far as there are any.
const SIGNS = {up: "Underlined: above MIDDLE.", down: "Underlined with dots: below MIDDLE.", stop: "A bar marks the stop token.",
  cut: "A struck token was cut away before the score.", masked: "One in italics is outside the loss, or marks the state after the end.",
  tool: "A wavy line marks what a tool wrote: the policy has read it, but it is not trained on."};

function drawLegend() {
  const [title, middle, meaning] = data.quantities[picked()], [low, high] = data.scales[picked()];
  document.querySelector(".bar").style.background = `linear-gradient(to right, ${colorOf(low < middle ? -1 : 0)}, transparent, ${colorOf(high > middle ? 1 : 0)})`;
  find("low").textContent = shown(low);
  find("high").textContent = shown(high);
  find("meaning").textContent = `${title[0].toUpperCase()}${title.slice(1)}. ${meaning}`;
  const seen = Object.keys(SIGNS).filter(name => document.querySelector(`#episode-box .token.${name}`));
  find("marks").textContent = [...seen.map(name => SIGNS[name].replace("MIDDLE", middle)),
    "Click a token, or press Enter on it, to see where its numbers come from."].join(" ");
}

// ---- Token view: where the numbers of the chosen token come from ----

// A row of a derivation has a text for each token, or one for all of them.
const textAt = (row, t) => row.includes(";") ? row.split(";")[t] : row;

function lineOf(step, result, numbers, t) {
  const filled = step.filled.replace(/{(\w+)}/g, (_, name) => textAt(numbers[name], t));
  const [value, check = "", ...recorded] = result.split(" "), isRead = /^({\w+}|0)$/.test(step.filled);
  return make("div", {className: "line"}, make("b", {textContent: step.title}), " ", make("code", {textContent: step.formula}),
    make("code", {className: "filled"}, isRead ? value : `${filled} = ${value}`, " ",
      make("span", {className: check === "✗" ? "wrong" : "same", textContent: [check, ...recorded].join(" ")})),
    make("p", {textContent: step.sentence}), placeOf(step));
}

// Where the code is, and the code of the commit that ran, if it is known.
function placeOf({place, source}) {
  if (!source) return make("p", {className: "place", textContent: place});
  return make("details", {className: "place"}, make("summary", {textContent: place}),
    make("p", {textContent: `At commit ${data.commit}:`}), make("pre", {textContent: source}));
}

function drawDerivation() {
  const episode = episodeOf(), t = chosen.token, results = episode.results.map(row => row.split(";")[t]);
  const lines = data.steps.map((step, i) => [step, results[i]]).filter(([, result]) => result);
  const missing = new Set(lines.filter(([, result]) => result === "?").map(([step]) => step.title));
  const id = episode.tokens.ids ? ` (id ${episode.tokens.ids[t]})` : "";
  find("token-title").textContent = `Where the numbers of token ${episode.places[t] + 1} come from`;
  find("lines").replaceChildren(
    make("p", {className: "small", textContent: `${JSON.stringify(episode.pieces[t])}${id} of update ${updateOf().update}, episode ${titleOf(episode)}. Losses are those of the last epoch. A tick says that the run recorded the same number.`}),
    ...lines.filter(([, result]) => result !== "?").map(([step, result]) => lineOf(step, result, episode.numbers_of_lines, t)),
    ...missing.size ? [make("p", {className: "missing", textContent: `The trace does not hold what these need, so these are not known: ${[...missing].join(", ")}.`})] : []);
}

function choose(change) {
  Object.assign(chosen, change);
  chosen.episode = Math.min(chosen.episode, updateOf().episodes.length - 1);
  chosen.token = Math.min(chosen.token, episodeOf().pieces.length - 1);
  find("update-number").textContent = updateOf().update;
  find("update").setAttribute("aria-valuetext", `update ${updateOf().update}`);
  find("episode").replaceChildren(...updateOf().episodes.map((episode, i) => make("option",
    {value: i, textContent: `${titleOf(episode)}, score ${shown(episode.numbers.scores)}`, selected: i === chosen.episode})));
  drawEpisode();
  drawLegend();
  drawDerivation();
}

if (data.updates.length) {
  for (const [name, [title]] of Object.entries(data.quantities))
    if (name in data.scales) find("quantity").append(make("option", {value: name, textContent: title}));
  // At first, the first quantity that is not the same everywhere.
  const telling = [...find("quantity").options].find(({value}) => data.scales[value][1] > data.scales[value][0]);
  if (telling) find("quantity").value = telling.value;
  const first = opening();
  if (first) find("reason").textContent = reasonOf(first);
  Object.assign(find("update"), {max: data.updates.length - 1, value: first ? first.update : 0});
  find("update").oninput = () => choose({update: Number(find("update").value)});
  find("episode").onchange = () => choose({episode: Number(find("episode").value), token: 0});
  find("quantity").onchange = () => choose({});
  const {update = 0, episode = 0, token = 0} = first || {};
  choose({update, episode, token});
}
