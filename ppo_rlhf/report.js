// The page of report.py. Texts of the run reach the page as text, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const find = id => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// The cells of a table as a file; where a cell shows less than it stands for, its data-value.
function saveTable(id) {
  const quoted = text => /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  const rows = [...find(id).rows].map(row => [...row.cells].map(cell => quoted(cell.dataset.value ?? cell.textContent.trim())));
  const file = new Blob([rows.map(row => `${row.join(",")}\n`).join("")], {type: "text/csv"});
  make("a", {href: URL.createObjectURL(file), download: `${data.name}-${id}.csv`}).click();
}
document.querySelectorAll("button.csv").forEach(button => { button.onclick = () => saveTable(button.dataset.table); });

// ---- Learning curves ----

function drawCurves() {
  data.figures.forEach((figure, i) => chart(find(`plot-${i}`), figure, step => `update ${step}`, buttonTo));
}

// A button that shows the episodes of the traced update that is nearest to a point of a curve.
function buttonTo(step) {
  if (!traced.length) return null;
  const nearest = run => closest(data.runs[run].traces.map(update => update.update), step), wanted = nearest(panes[0].run);
  const button = make("button", {className: "jump", textContent: wanted === step ? `episodes of update ${wanted}` : `nearest episodes: update ${wanted}`});
  button.onclick = () => {
    for (const pane of panes[0].run === panes[1].run ? panes.slice(0, 1) : panes)
      show(pane, updatesOf(pane).findIndex(update => update.update === nearest(pane.run)), 0);
    find("tokens").scrollIntoView();
    find("left-update").focus({preventScroll: true});
  };
  return button;
}

// ---- Token view: what two panes show ----

const traced = data.runs.flatMap((run, i) => run.traces.length ? [i] : []);
const panes = [0, 1].map(number => ({number, run: traced[number] ?? traced[0], index: 0, episode: 0, follow: number === 1}));
const updatesOf = pane => data.runs[pane.run].traces;
const updateOf = pane => updatesOf(pane)[pane.index];
const episodeOf = pane => updateOf(pane).episodes[pane.episode];
const sideOf = pane => pane.number ? "right" : "left";
const picked = () => find("quantity").value;
const shownPanes = () => find("beside").checked ? panes : panes.slice(0, 1);
// For tables: at most four digits and four decimals.
const shown = value => value === null || value === undefined || Number.isNaN(value) ? "–" : decimal(Number(value.toFixed(4)), 4);

// 0 without colour, 1 above and -1 below with all of it.
function strengthOf(run, value) {
  const middle = data.quantities[picked()][2], [low, high] = data.runs[run].scales[picked()] || [middle, middle];
  return value === null || value === undefined ? 0 : clip((value - middle) / (Math.max(high - middle, middle - low) || 1), -1, 1);
}
const colorOf = strength => `rgb(${strength < 0 ? "213 94 0" : "0 114 178"} / ${(0.75 * Math.abs(strength)).toFixed(3)})`;

function follow() {  // the second pane shows the query of the first, where that update has it
  const [left, right] = panes;
  right.lost = false;
  if (!right.follow) return;
  const wanted = episodeOf(left).query;
  const found = updateOf(right).episodes.findIndex((e, i) => e.query === wanted && !(sameUpdate() && i === left.episode));
  const itself = updateOf(right).episodes.findIndex(e => e.query === wanted);
  right.lost = found < 0 && itself < 0;
  if (!right.lost) right.episode = found < 0 ? itself : found;
}
function show(pane, index, episode) {
  Object.assign(pane, {index, episode: Math.min(episode, updatesOf(pane)[index].episodes.length - 1)});
  draw();
}
const sameUpdate = () => panes[0].run === panes[1].run && panes[0].index === panes[1].index;

// ---- Token view: drawing ----

function drawTokens(pane, number, box) {  // number: of the episode in its update
  const episode = updateOf(pane).episodes[number], {tokens} = episode, values = tokens[picked()] || [];
  const last = (tokens.scored || tokens.mask || []).lastIndexOf(1), isChosen = chosen.pane === pane && number === pane.episode;
  episode.pieces.forEach((piece, i) => {
    const masked = tokens.mask && !tokens.mask[i], strength = strengthOf(pane.run, values[i]);
    const span = make("span", {className: "token", tabIndex: i === (isChosen ? chosen.token : 0) ? 0 : -1, textContent: piece.replaceAll("\n", "⏎\n")});
    if (!piece) span.textContent = masked ? "∎" : "◦";
    const classes = {masked, cut: tokens.scored && !tokens.scored[i], tool: tokens.tool && tokens.tool[i],
      stop: episode.numbers.stopped && i === last, up: strength > 0.05, down: strength < -0.05};
    span.classList.add(...Object.keys(classes).filter(name => classes[name]));
    if (values.length) span.style.backgroundColor = colorOf(strength);
    span.setAttribute("role", "button");
    span.setAttribute("aria-label", `${piece.trim() || "space"}, ${data.quantities[picked()][0]} ${shown(values[i])}`);
    span.onmouseenter = span.onfocus = () => drawNumbers(episode, i);
    span.onmouseleave = span.onblur = drawChosenNumbers;
    span.onclick = () => choose(pane, number, i);
    box.append(span);
  });
  box.onkeydown = event => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (event.key === "Enter" || event.key === " ") { event.target.click(); event.preventDefault(); }
    if (!step) return;
    const next = step > 0 ? event.target.nextElementSibling : event.target.previousElementSibling;
    if (next) { event.target.tabIndex = -1; next.tabIndex = 0; next.focus(); }
    event.preventDefault();
  };
}

function drawNumbers(episode, i) {
  const id = episode.tokens.ids ? `, id ${episode.tokens.ids[i]}` : "";
  find("numbers").replaceChildren(make("b", {textContent: `token ${episode.places[i] + 1}${id}: ${JSON.stringify(episode.pieces[i])}`}),
    ...Object.entries(data.quantities).filter(([name]) => episode.tokens[name]).map(([name, [title]]) => {
      const part = make("span", {className: name === picked() ? "picked" : ""}, `${title} `,
        make("span", {className: "number picked", textContent: shown(episode.tokens[name][i])}));
      part.dataset.name = name;
      return part;
    }));
}
function drawChosenNumbers() {
  if (isShown(chosen)) drawNumbers(episodeOf(chosen.pane), chosen.token); else find("numbers").replaceChildren();
}

// What the signs on the tokens mean, as far as there are any.
const SIGNS = {up: "Underlined: above MIDDLE.", down: "Underlined with dots: below MIDDLE.", stop: "A bar marks the stop token.",
  cut: "A struck token was cut away before the score.", masked: "One in italics is outside the loss, or marks the state after the end.",
  tool: "A wavy line marks what a tool wrote: the policy has read it, but it is not trained on."};
function drawSigns() {
  const seen = Object.keys(SIGNS).filter(name => document.querySelector(`#panes .token.${name}`));
  find("marks").textContent = [...seen.map(name => SIGNS[name].replace("MIDDLE", data.quantities[picked()][2])),
    "Click a token, or walk with the arrow keys and press Enter, to see where its numbers come from."].join(" ");
}

const spoken = (name, value) => name === "stopped" && value !== null ? value ? "yes" : "no" : shown(value);
const titleOfNumber = name => data.numbers[name] || name.replaceAll("_", " ");

function titleOf(pane, i) {
  const episodes = updateOf(pane).episodes, first = episodes.findIndex(episode => episode.again);
  return episodes[i].again ? `same query ${i - first + 1}` : `${i + 1}`;
}

function makePane(pane) {  // what the reader moves is made once, so that it keeps the mouse and the focus
  const name = sideOf(pane), controls = make("div", {className: "controls"});
  if (traced.length > 1) {
    const choice = make("select", {id: `${name}-run`});
    traced.forEach(i => choice.append(make("option", {value: i, textContent: data.runs[i].name, selected: i === pane.run})));
    choice.onchange = () => { pane.run = Number(choice.value); pane.index = pane.episode = 0; draw(); };
    controls.append(make("label", {}, "Run: ", choice));
  }
  pane.number_shown = make("output", {id: `${name}-number`});
  pane.slider = make("input", {type: "range", id: `${name}-update`, min: 0});
  pane.slider.oninput = () => { pane.index = Number(pane.slider.value); draw(); };
  pane.choice = make("select", {id: `${name}-episode`});
  pane.choice.onchange = () => { pane.episode = Number(pane.choice.value); draw(); };
  controls.append(make("label", {}, "Update ", pane.number_shown, " ", pane.slider), make("label", {}, "Episode: ", pane.choice));
  if (pane.number) {
    const same = make("input", {type: "checkbox", id: "follow", checked: pane.follow});
    same.onchange = () => { pane.follow = same.checked; draw(); };
    controls.append(make("label", {}, same, " the same query"));
  }
  pane.episode_shown = make("div");
  pane.box = make("article", {className: "card"}, controls, pane.episode_shown);
  find("panes").append(pane.box);
}

function drawPane(pane) {
  const name = sideOf(pane), update = updateOf(pane), box = pane.episode_shown;
  Object.assign(pane.slider, {max: updatesOf(pane).length - 1, value: pane.index});
  pane.slider.setAttribute("aria-valuetext", `update ${update.update}`);
  pane.number_shown.textContent = update.update;
  pane.choice.disabled = pane.number === 1 && pane.follow;
  pane.choice.replaceChildren(...update.episodes.map((episode, i) => make("option",
    {value: i, textContent: `${titleOf(pane, i)}, score ${shown(episode.numbers.scores)}`, selected: i === pane.episode})));
  box.replaceChildren();
  if (pane.lost) {
    box.append(make("p", {textContent: "No episode of that query was kept of this update. Some queries are answered again each time; they come last."}));
    return;
  }
  const episode = episodeOf(pane), group = groupOf(update, episode), inGroup = group.length > 1;
  if (!episode.tokens[picked()])
    box.append(make("p", {className: "unknown", textContent: episode.again
      ? "Not known of an episode that is not trained on: choose one of the batch." : "Not kept of this episode."}));
  const responses = group.map(other => {
    const number = update.episodes.indexOf(other), mine = other === episode;
    const response = make("div", {className: "text response", ...mine ? {id: `${name}-response`} : {}});
    drawTokens(pane, number, response);
    if (!inGroup) return response;
    const advantage = meanOf(those(other.tokens.advantages, other.tokens.mask)), {scores} = other.numbers;
    const head = `response ${group.indexOf(other) + 1}: score ${shown(scores)}` + (advantage === null ? "" : `, advantage ${shown(advantage)}`);
    return make("div", {className: `response-card${mine ? " current" : ""}`}, make("b", {className: "small", textContent: head}), response);
  });
  box.append(make("h3", {textContent: "Query"}), make("div", {className: "text query", id: `${name}-query`, textContent: episode.query}),
    make("h3", {textContent: inGroup ? `The ${group.length} responses of its group` : "Response"}),
    make("div", {className: inGroup ? "group" : ""}, ...responses));
  for (const [title, text] of Object.entries(episode.texts))
    box.append(make("h3", {textContent: title}), make("div", {className: "text", textContent: text}));
  const numbers = Object.entries(episode.numbers).filter(([name]) => inGroup || name !== "groups").map(([name, value]) => make("tr", {},
    make("th", {textContent: titleOfNumber(name), scope: "row"}), make("td", {className: "number", textContent: spoken(name, value)})));
  box.append(make("div", {className: "scroll"}, make("table", {}, ...numbers)));
}

// ---- Token view: the derivation of a token's numbers ----

const chosen = {pane: null, token: 0, epoch: null};
const settingsOf = pane => data.runs[pane.run].settings;
const groupOf = (update, episode) => (episode.numbers.groups ?? null) === null ? [episode]
  : update.episodes.filter(other => other.again === episode.again && other.numbers.groups === episode.numbers.groups);
const isShown = ({pane, token}) => pane !== null && !pane.lost && shownPanes().includes(pane) && token < episodeOf(pane).pieces.length;

function choose(pane, episode, token) {
  const other = episode !== pane.episode;
  Object.assign(chosen, {pane, token});
  find("derivation").open = true;
  pane.episode = episode;
  if (other) draw(); else { drawDerivation(); drawChosenNumbers(); }
  const span = find(`${sideOf(pane)}-response`).children[token];
  span.focus({preventScroll: true});
  span.scrollIntoView({block: "nearest"});  // on a phone, above the panel
}

function lineOf({step, value, result, told, difference, wrong, numbers}) {
  const formula = make("code", {textContent: step.formula}), isRead = /^({\w+}|0)$/.test(step.numbers);
  const filled = make("code", {className: "filled", textContent: isRead ? result : `${numbers} = ${result}`});
  if (difference !== null) filled.append(" ", make("span", wrong
    ? {className: "wrong", textContent: `✗ recorded: ${written(told)}, a difference of ${written(difference)}`}
    : {className: "same", textContent: "✓", title: `recorded: ${told}`}));
  const link = step.href ? make("a", {href: step.href, textContent: step.place}) : make("span", {textContent: step.place});
  return make("div", {className: "line"}, make("b", {textContent: step.title}), " ", formula, filled,
    make("p", {textContent: step.sentence}), make("p", {className: "place"}, link));
}

function drawDerivation() {
  const box = find("lines"), {pane} = chosen;
  document.querySelectorAll(".token.chosen").forEach(token => { token.classList.remove("chosen"); token.removeAttribute("aria-pressed"); });
  find("panel").hidden = !isShown(chosen);
  if (find("panel").hidden) return;
  const update = updateOf(pane), episode = episodeOf(pane), t = chosen.token, token = find(`${sideOf(pane)}-response`).children[t];
  token.classList.add("chosen");
  token.setAttribute("aria-pressed", "true");
  const epochs = episode.epochs && episode.epochs.new_logprobs ? episode.epochs.new_logprobs.length : 0;
  const epoch = Math.min(chosen.epoch ?? epochs - 1, epochs - 1), settings = settingsOf(pane);
  const group = groupOf(update, episode), steps = data.runs[pane.run].steps;
  const {lines, missing} = explainToken(steps, episode, settings, Math.max(epoch, 0), t, group);
  find("derivation").querySelector("summary").textContent = `Where the numbers of token ${episode.places[t] + 1} come from`;
  box.replaceChildren(make("p", {className: "small", textContent: `${JSON.stringify(episode.pieces[t])} of update ${update.update}, ${episode.again ? "" : "episode "}${titleOf(pane, pane.episode)}. Every result is computed here, from the lines above it. A tick says that the run recorded the same number.`}));
  if (epochs > 1) {
    const choice = make("select", {id: "epoch"}, ...range(epochs).map(e => make("option", {value: e, textContent: `${e + 1} of ${epochs}`, selected: e === epoch})));
    choice.onchange = () => { chosen.epoch = Number(choice.value); drawDerivation(); find("epoch").focus(); };
    box.append(make("label", {}, "Epoch: ", choice));
  }
  for (const line of lines) {
    const element = lineOf(line);
    if (["raw_advantages", "sums"].includes(line.step.result) && line.step.numbers.includes("next_"))
      element.append(...unfolded(line.step, episode, settings, Math.max(epoch, 0), t, group));
    box.append(element);
  }
  if (epochs) box.append(make("div", {className: "line"}, make("b", {textContent: "all epochs"}), branches(episode, settings, epochs, t, group)));
  if (missing.length) box.append(make("p", {className: "missing", textContent: episode.again
    ? `This episode is not trained on. So these are not known: ${missing.join(", ")}.`
    : `The trace does not hold what these need, so they are left out: ${missing.join(", ")}. Traces of older versions hold less.`}));
}

function unfolded(step, episode, settings, epoch, t, group) {  // the next two terms of a recursion
  return range(episode.places.length).slice(t + 1).map(later => [later, explainToken([step], episode, settings, epoch, later, group).lines[0]])
    .filter(([, line]) => line).slice(0, 2).map(([later, line]) => make("details", {},
      make("summary", {textContent: `the term of token ${episode.places[later] + 1}, ${JSON.stringify(episode.pieces[later])}`}),
      make("code", {textContent: `${line.numbers} = ${line.result}`})));
}

function branches(episode, settings, epochs, t, group) {
  const rows = range(epochs).map(epoch => {
    const found = derive(episode, settings, epoch, group);
    const branch = ["free", "clipped", "dual"].find(name => found[`is_${name}`][t]);
    return [epoch + 1, found.ratio[t], {free: "not clipped", clipped: "clipped", dual: "dual clip"}[branch] || "not in the loss", found.gradient[t]];
  });
  const cells = (tag, row) => make("tr", {}, ...row.map(x => make(tag, {textContent: typeof x === "number" ? written(x) : x})));
  return make("div", {className: "scroll"}, make("table", {}, cells("th", ["epoch", "ratio", "branch", "gradient"]), ...rows.map(row => cells("td", row))));
}

// ---- Token view: what if? ----

const whatIfSettings = {run: null, changes: {}};
const FORMS = {estimator: ["gae", "grpo", "dr_grpo", "maxrl", "gdpo", "rloo", "opo", "reinforce++", "reinforce++-baseline", "remax"],
  loss: ["ppo", "gspo", "cispo", "ipo", "dppo", "reinforce"], kl_estimator: ["k1", "abs", "k2", "k3"]};
const WHITENED = ["gae", "gdpo", "reinforce++", "reinforce++-baseline"];

function makeWhatIf(pane, settings, coefficient) {
  const {changes} = whatIfSettings, box = find("settings");
  const control = (name, title, input, show = () => "") => {
    const output = make("output", {textContent: show()});
    input.id = `what-${name}`;
    input.oninput = () => {
      const value = input.type === "checkbox" ? input.checked : input.type === "range" ? Number(input.value) : input.value;
      if (name === "cliprange") changes.low = changes.high = value; else changes[name] = value;
      if (name === "estimator") changes.whiten_advantages = find("what-whiten_advantages").checked = WHITENED.includes(value);
      output.textContent = input.type === "range" ? shown(value) : "";
      drawWhatIf();
    };
    box.append(make("label", {}, `${title} `, input, " ", output));
  };
  const slider = (name, title, value, max) => control(name, title,
    Object.assign(make("input", {type: "range", min: 0, max, step: "any"}), {value}), () => shown(value));
  box.replaceChildren();
  if (settings.reference) slider("kl_coef", "β", coefficient, Math.max(1, 2 * coefficient));
  slider("gamma", "γ", settings.gamma, 1);
  if (settings.lam_alpha === null || settings.critic_lam === null) slider("lam", "λ", settings.lam, 1);  // else unused
  if (settings.lam_alpha !== null) slider("lam_alpha", "α of λ", settings.lam_alpha, Math.max(1, 2 * settings.lam_alpha));
  if (settings.critic_lam !== null) slider("critic_lam", "λ of the critic's targets", settings.critic_lam, 1);
  slider("cliprange", "ε", settings.high, Math.max(1, 2 * settings.high));
  control("whiten_advantages", "whiten advantages", make("input", {type: "checkbox", checked: settings.whiten_advantages}));
  if (settings.chapter < 3) control("whiten_rewards", "whiten rewards", make("input", {type: "checkbox", checked: settings.whiten_rewards}));
  else for (const [name, title] of [["estimator", "estimator"], ["loss", "loss"], ...settings.reference ? [["kl_estimator", "KL in the reward"]] : []])
    control(name, title, make("select", {}, ...FORMS[name].map(value => make("option", {value, textContent: value, selected: value === settings[name]}))));
  const reset = make("button", {textContent: "as in the run"});
  reset.onclick = () => { whatIfSettings.run = null; drawWhatIf(); };
  box.append(reset);
}

function drawWhatIf() {
  const pane = panes[0], update = updateOf(pane), episode = episodeOf(pane), settings = settingsOf(pane);
  if (!find("what-if").open) return;
  const coefficient = statisticsOf(episode, 0).kl_coef;
  if (whatIfSettings.run !== pane.run) {
    Object.assign(whatIfSettings, {run: pane.run, changes: {}});
    makeWhatIf(pane, settings, Number.isNaN(coefficient) ? 0 : coefficient);
  }
  const episodes = update.episodes.filter(other => other.again === episode.again), {changes} = whatIfSettings;
  const epoch = Math.max(0, (episode.epochs && episode.epochs.new_logprobs || []).length - 1);
  const i = episodes.indexOf(episode), before = whatIf(episodes, settings, {}, epoch), after = whatIf(episodes, settings, changes, epoch);
  const both = [before[i], after[i]];
  const branch = (found, t) => found.is_clipped[t] || found.is_dual[t] ? "clipped" : found.is_free[t] && !Number.isNaN(found.ratio[t]) ? "not clipped" : "–";
  const texts = name => both.map(found => episode.places.map((_, t) => name === "loss" ? branch(found, t) : shown((found[name] || [])[t])));
  const columns = [["reward", "rewards"], ["advantage", "advantages"], ["return", "returns"], ["gradient", "gradient"], ["loss", "loss"]]
    .map(([title, name]) => [title, ...texts(name)]).filter(([, told, other]) => told.some((text, t) => text !== other[t]));
  const cell = (told, other) => make("td", told === other ? {className: "number", textContent: told}
    : {className: "number changed", textContent: `${told} → ${other}`});
  find("compared").replaceChildren(...columns.length ? [make("tr", {}, ...["token", ...columns.map(([title]) => title)].map(textContent => make("th", {textContent})))] : [],
    ...columns.length ? episode.pieces.map((piece, t) => make("tr", {}, make("td", {textContent: JSON.stringify(piece)}), ...columns.map(([, told, other]) => cell(told[t], other[t])))) : []);
  if (!columns.length) {
    find("summary").textContent = "With these settings, no number of this episode differs from the run's.";
    return;
  }
  const spread = found => { const x = found.flatMap(one => one.advantages.filter((_, t) => one.learns[t])); return momentsOf([x], [x.map(() => true)])[1]; };
  const held = found => sum(found.map(one => one.is_clipped.filter(Boolean).length));
  const [a, b] = [before, after].map(spread), [c, d] = [before, after].map(held), counted = sum(before.map(one => one.learns.filter(Boolean).length));
  find("summary").textContent = Number.isNaN(b) ? "The advantages cannot be computed: the run lacks what this estimator needs, such as a critic or greedy responses."
    : `All ${episodes.length} episodes: the advantages have a deviation of ${shown(a)} in the run and of ${shown(b)} with these settings; of ${counted} tokens, ${c} were clipped in the last epoch, and ${d} would be.`
      + (b < 1e-3 ? " With equal scores, or nearly so, these episodes teach nothing." : "");
}

// Every number of every token that differs from the recorded one. The tests call this.
function differences() {
  const found = {lines: 0, checked: 0, wrong: []};
  data.runs.forEach(run => run.traces.forEach(update => update.episodes.forEach((episode, i) => {
    const epochs = Math.max(1, (episode.epochs && episode.epochs.new_logprobs || []).length), group = groupOf(update, episode);
    range(epochs).forEach(epoch => {
      const derived = derive(episode, run.settings, epoch, group);
      episode.places.forEach((_, t) => explainToken(run.steps, episode, run.settings, epoch, t, group, derived).lines.forEach(line => {
        found.lines += 1;
        found.checked += line.difference !== null;
        if (line.wrong) found.wrong.push([update.update, i, epoch, t, line.step.result, line.told, line.value]);
      }));
    });
  })));
  return found;
}

// ---- Token view: all episodes, sorted and filtered ----

const MOST_ROWS = 200;
const withValue = (cell, value) => { cell.dataset.value = value ?? ""; return cell; };
const finder = {text: "", which: "update", stopped: "", right: "", column: "", from: null, to: null, sort: null, down: false};
const meanOf = values => values.length ? sum(values) / values.length : null;
const those = (values, mask) => (values || []).filter((_, i) => !mask || mask[i]);
const countedOf = episode => episode.tokens.mask || episode.tokens.scored;

const hasGroups = data.runs.some(run => run.traces.some(update => update.episodes.some(episode => groupOf(update, episode).length > 1)));

function numbersOfEpisode(episode) {  // name: value, under the titles of the table
  const counted = countedOf(episode), found = {};
  for (const [name, value] of Object.entries(episode.numbers)) if (hasGroups || name !== "groups") found[titleOfNumber(name)] = value;
  found.tokens = those(episode.pieces, counted).length;
  if (episode.tokens.kl) {
    found.KL = sum(those(episode.tokens.kl, counted).map(x => x ?? NaN));
    if (Number.isNaN(found.KL)) found.KL = null;
  }
  found["mean advantage"] = meanOf(those(episode.tokens.advantages, episode.tokens.mask));
  return found;
}

// Every episode that the table may show, and what it is found by.
function candidates() {
  const pane = panes[0], indices = finder.which === "all" ? range(updatesOf(pane).length) : [pane.index];
  return indices.flatMap(index => updatesOf(pane)[index].episodes.map((episode, i) => {
    const words = [episode.query, episode.pieces.join(""), ...Object.values(episode.texts)];
    return {index, i, episode, update: updatesOf(pane)[index].update, numbers: numbersOfEpisode(episode), words: words.join("\n").toLowerCase()};
  }));
}

function isWanted({episode, numbers, words}) {
  const {text, stopped, right, column, from, to} = finder, value = numbers[column];
  if (text && !words.includes(text.toLowerCase())) return false;
  if (stopped && String(Number(episode.numbers.stopped)) !== stopped) return false;
  if (right && (episode.numbers.verifier === null || String(Number(episode.numbers.verifier > 0)) !== right)) return false;
  if (column && (from !== null || to !== null))
    return value !== null && value !== undefined && value >= (from ?? -Infinity) && value <= (to ?? Infinity);
  return true;
}

function makeFinder() {
  const episode = updatesOf(panes[0])[0].episodes[0], box = find("finder");
  const control = (title, input, name, read = value => value) => {
    input.id = `find-${name}`;
    input.oninput = () => { finder[name] = read(input.value); drawOthers(); };
    box.append(make("label", {}, `${title} `, input));
  };
  const choice = (...options) => make("select", {}, ...options.map(([value, textContent]) => make("option", {value, textContent})));
  const number = value => value === "" || Number.isNaN(Number(value)) ? null : Number(value);
  control("Search:", make("input", {type: "search", placeholder: "text of query or response"}), "text");
  control("Episodes of", choice(["update", "this update"], ["all", "all updates"]), "which");
  if ("stopped" in episode.numbers) control("that", choice(["", "end or not"], ["1", "end"], ["0", "do not end"]), "stopped");
  if ("verifier" in episode.numbers) control("and are", choice(["", "correct or wrong"], ["1", "correct"], ["0", "wrong"]), "right");
  control("with", choice(["", "any number"], ...Object.keys(numbersOfEpisode(episode)).map(name => [name, name])), "column");
  control("from", make("input", {type: "number", step: "any", className: "bound"}), "from", number);
  control("to", make("input", {type: "number", step: "any", className: "bound"}), "to", number);
  const reset = make("button", {id: "find-all", textContent: "show all"});
  reset.onclick = () => {
    Object.assign(finder, {text: "", stopped: "", right: "", column: "", from: null, to: null, sort: null});
    box.querySelectorAll("input, select").forEach(input => { if (input.id !== "find-which") input.value = ""; });
    drawOthers();
  };
  box.append(reset);
}

function drawOthers() {
  const pane = panes[0], all = candidates(), rows = all.filter(isWanted), {sort, down} = finder, unsorted = sort === null;
  const nameOfGroup = row => `${row.index} ${row.episode.again} ${row.episode.numbers.groups}`;
  const inGroups = new Set(all.map(nameOfGroup)).size < all.length;  // and not each a group of its own
  const keyOf = row => sort === "update" ? row.update : sort === "response" ? row.words : row.numbers[sort];
  if (!unsorted) rows.sort((one, other) => {  // what is not known comes last
    const [a, b] = [keyOf(one), keyOf(other)], known = [a, b].map(x => x !== null && x !== undefined);
    if (!known[0] || !known[1]) return known[1] - known[0];
    return (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1);
  });
  const several = finder.which === "all", names = Object.keys(all[0].numbers);
  const shownRows = rows.slice(0, MOST_ROWS).map((row, i) => {
    const title = (row.episode.again ? "same query " : "") + (row.i + 1 - (row.episode.again ? updatesOf(pane)[row.index].episodes.findIndex(one => one.again) : 0));
    const button = make("button", {textContent: title});
    button.setAttribute("aria-label", `Show episode ${title}${several ? ` of update ${row.update}` : ""}`);
    button.onclick = () => { show(pane, row.index, row.i); find("panes").scrollIntoView({block: "nearest"}); };
    const mine = row.index === pane.index && row.i === pane.episode;
    const text = those(row.episode.pieces, countedOf(row.episode)).join("").trim();
    const line = make("tr", {className: mine ? "current" : ""}, make("td", {}, button),
      ...[...several ? [["update", row.update]] : [], ...names.map(name => [name, row.numbers[name]])].map(([name, value]) =>
        withValue(make("td", {className: "number", textContent: spoken(name === "ends" ? "stopped" : name, value)}), value)),
      withValue(make("td", {textContent: text.length > 80 ? `${text.slice(0, text.lastIndexOf(" ", 79))} …` : text}), text));
    const before = rows[i - 1];
    if (i && unsorted && (inGroups ? nameOfGroup(row) !== nameOfGroup(before) : row.episode.again !== before.episode.again || row.index !== before.index))
      line.classList.add("first");
    return line;
  });
  const heads = ["", ...several ? ["update"] : [], ...names, "response"].map(title => {
    const head = make("th", {scope: "col"});
    if (!title) return head;
    const button = make("button", {className: "sort", textContent: title + (sort === title ? down ? " ↓" : " ↑" : "")});
    button.onclick = () => {
      Object.assign(finder, {sort: title, down: sort === title ? !down : title !== "response" && title !== "update"});
      drawOthers();
      [...document.querySelectorAll("#others .sort")].find(one => one.textContent.startsWith(title))?.focus();
    };
    if (sort === title) head.setAttribute("aria-sort", down ? "descending" : "ascending");
    head.append(button);
    return head;
  });
  find("others").replaceChildren(make("tr", {}, ...heads), ...shownRows);
  find("found").textContent = `${rows.length} of ${all.length} episodes`
    + (rows.length > MOST_ROWS ? `; the first ${MOST_ROWS} are in the table.` : ".");
}

function drawAlong() {  // in the colours of the tokens; bars of the second pane are pale
  const drawn = shownPanes().filter(pane => !pane.lost), placesOf = pane => episodeOf(pane).places;
  const [title, unit, base] = data.quantities[picked()], several = drawn.length > 1;
  const series = drawn.map(pane => ({name: several ? `${pane.number ? "second" : "first"} episode` : title,
    color: "var(--up)", below: "var(--down)", pale: pane.number === 1, x: placesOf(pane).map(place => place + 1), y: episodeOf(pane).tokens[picked()] || placesOf(pane).map(() => null)}));
  const pieceAt = (pane, x) => episodeOf(pane).pieces[placesOf(pane).indexOf(x - 1)];
  const pieces = x => `token ${x}: ` + drawn.map(pane => pieceAt(pane, x)).filter(piece => piece !== undefined).map(piece => JSON.stringify(piece)).join(", ");
  find("along-title").textContent = `Token by token: ${title}${unit ? `, in ${unit}` : ""}`;
  chart(find("along"), {data: series, base, labels: several ? null : x => pieceAt(drawn[0], x)}, pieces);
}

function drawTable() {  // every number of the first pane's episode
  const {tokens, pieces, places} = episodeOf(panes[0]), names = Object.keys(data.quantities).filter(name => tokens[name]);
  find("episode").replaceChildren(make("tr", {}, ...["", "token", ...names.map(name => data.quantities[name][0])].map(textContent => make("th", {textContent}))),
    ...pieces.map((piece, t) => make("tr", {}, make("td", {textContent: places[t] + 1}), withValue(make("td", {textContent: JSON.stringify(piece)}), piece),
      ...names.map(name => withValue(make("td", {className: "number", textContent: shown(tokens[name][t])}), tokens[name][t])))));
}

function draw() {
  follow();
  panes[1].box.hidden = !find("beside").checked;
  shownPanes().forEach(drawPane);
  const [title, , middle, meaning] = data.quantities[picked()], [low, high] = data.runs[panes[0].run].scales[picked()] || [middle, middle];
  const colors = [low < middle ? colorOf(-1) : "", "transparent", high > middle ? colorOf(1) : ""].filter(Boolean);
  document.querySelector(".bar").style.background = `linear-gradient(to right, ${colors.length > 1 ? colors.join(", ") : "transparent, transparent"})`;
  find("low").textContent = shown(low);
  find("high").textContent = shown(high);
  find("meaning").textContent = `${title}. ${meaning}`;
  drawSigns();
  drawDerivation();
  drawChosenNumbers();
  drawWhatIf();
  drawTable();
  drawOthers();
  drawAlong();
}

// In the middle of the traced updates, the token before the last one whose logit was pushed hardest: a token of which
// the policy was sure can be pushed, but hardly moves.
function start() {
  const [left, right] = panes, sizes = [];
  for (const pane of panes) pane.index = Math.floor(updatesOf(pane).length / 2);
  if (traced.length === 1) right.index = updatesOf(right).length - 1;
  updateOf(left).episodes.forEach((episode, number) => {
    const counted = those(range(episode.pieces.length), countedOf(episode)).slice(0, -1), push = episode.tokens.push || [];
    const sure = t => Math.exp((episode.tokens.logprobs || [])[t] ?? -Infinity);
    counted.forEach(t => sizes.push([Math.abs(push[t] ?? 0) * (1 - sure(t)), number, t]));
  });
  const [, number, token] = sizes.reduce((best, one) => one[0] > best[0] ? one : best, [0, 0, 0]);
  left.episode = number;
  Object.assign(chosen, {pane: left, token});
}

if (traced.length) {
  find("view").hidden = false;
  const held = new Set(traced.flatMap(i => Object.keys(data.runs[i].scales)));
  for (const [name, [title]] of Object.entries(data.quantities))
    if (held.has(name)) find("quantity").append(make("option", {value: name, textContent: title}));
  const tells = name => traced.some(i => { const [low, high] = data.runs[i].scales[name] || [0, 0]; return high > low; });
  const telling = [...find("quantity").options].find(option => tells(option.value));
  if (telling) find("quantity").value = telling.value;  // the first that is not the same everywhere
  start();
  find("beside").checked = traced.length > 1;
  find("derivation").open = innerWidth >= 1024;
  find("what-if").ontoggle = drawWhatIf;
  find("quantity").onchange = find("beside").onchange = () => draw();
  panes.forEach(makePane);
  makeFinder();
  draw();
}
drawCurves();
