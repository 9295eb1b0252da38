// Lines as SVG, for the page of a run. Colours are those of the page, so dark mode needs no redrawing.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function shape(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// About `count` round numbers between low and high.
function ticksOf(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= raw);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
}

function tickText(value) {
  const size = Math.abs(value);
  if (!size || size >= 1e-3 && size < 1e5) return String(value);
  return value.toExponential(2).replace(/\.?0+e/, "e");
}

// Lowest and highest of some numbers, with a margin. Numbers that are all equal get an axis that reaches 0.
function span(numbers) {
  let low = Infinity, high = -Infinity;
  for (const x of numbers) { low = Math.min(low, x); high = Math.max(high, x); }
  if (low === high) { low = Math.min(low, 0); high = Math.max(high, 0); }
  if (low >= high) return [0, 1];
  const margin = 0.05 * (high - low);
  return [low === 0 ? low : low - margin, high === 0 ? high : high + margin];
}

const closest = (numbers, wanted) => numbers.reduce((best, x) => Math.abs(x - wanted) < Math.abs(best - wanted) ? x : best, numbers[0]);

// A chart in `box`. figure: `data`, a list of {name, x, y, color}, where y may hold null; `targets`, numbers with a
// dashed line. Below the chart are the numbers at the update that the pointer or the arrow keys choose.
function chart(box, figure) {
  const svg = shape("svg", {tabindex: 0, role: "img", "aria-label": box.getAttribute("aria-label") || ""});
  const readout = Object.assign(document.createElement("div"), {className: "readout"});
  readout.setAttribute("aria-live", "polite");
  box.append(svg, readout);
  const state = {svg, readout, figure, cursor: null, width: 0};
  state.places = [...new Set(figure.data.flatMap(series => series.x))].sort((a, b) => a - b);
  listen(state);
  new ResizeObserver(() => { if (svg.clientWidth !== state.width) draw(state); }).observe(box);
  draw(state);

  function draw(state) {
    const width = state.width = svg.clientWidth, height = svg.clientHeight;
    const area = {left: 46, right: width - 8, top: 8, bottom: height - 20}, places = state.places;
    let [first, final] = [places[0], places[places.length - 1]];
    if (!(first < final)) [first, final] = [first - 1, first + 1];
    const seen = figure.data.flatMap(series => series.y.filter(value => value !== null));
    const [low, high] = span([...seen, ...figure.targets]);
    const across = x => area.left + (x - first) / (final - first) * (area.right - area.left);
    const up = y => area.bottom - (y - low) / (high - low) * (area.bottom - area.top);
    Object.assign(state, {across, backwards: pixel => first + (pixel - area.left) / (area.right - area.left) * (final - first)});
    svg.replaceChildren();
    for (const y of ticksOf(low, high, 4)) {
      svg.append(shape("line", {class: "grid", x1: area.left, x2: area.right, y1: up(y), y2: up(y)}),
        shape("text", {x: area.left - 4, y: up(y) + 4, "text-anchor": "end"}, tickText(y)));
    }
    for (const x of ticksOf(first, final, Math.max(2, width / 90)))
      if (Number.isInteger(x)) svg.append(shape("text", {x: across(x), y: height - 5, "text-anchor": "middle"}, tickText(x)));
    for (const series of [...figure.data].reverse()) {  // the first is in front
      let path = "", drawn = false;
      series.y.forEach((y, i) => {
        if (y !== null) path += `${drawn ? "L" : "M"}${across(series.x[i]).toFixed(1)} ${up(y).toFixed(1)}${drawn ? "" : "l0 0"}`;
        drawn = y !== null;
      });
      svg.append(shape("path", {d: path, stroke: series.color, class: "curve"}));
    }
    for (const y of figure.targets)
      svg.append(shape("line", {class: "target", x1: area.left, x2: area.right, y1: up(y), y2: up(y)}),
        shape("text", {class: "target", x: area.right, y: up(y) - 4, "text-anchor": "end"}, `target ${tickText(y)}`));
    state.marker = shape("line", {class: "marker", y1: area.top, y2: area.bottom, visibility: "hidden"});
    svg.append(state.marker);
    read(state, state.cursor);
  }
}

// Below the chart: what the colours are, and the numbers at the cursor.
function read(state, x) {
  const {figure, readout, marker} = state;
  state.cursor = x;
  const parts = figure.data.map(series => {
    const value = series.y[series.x.indexOf(x)] ?? null;
    const swatch = Object.assign(document.createElement("i"), {className: "swatch"});
    swatch.style.borderColor = series.color;
    const part = document.createElement("span");
    part.append(swatch, ` ${series.name}`, x === null ? "" : ` ${value === null ? "–" : Number(value.toPrecision(6))}`);
    return part;
  });
  const head = Object.assign(document.createElement("span"), {className: "place", textContent: x === null ? "" : `update ${x}`});
  readout.replaceChildren(head, ...parts);
  marker.setAttribute("visibility", x === null ? "hidden" : "visible");
  if (x !== null) { marker.setAttribute("x1", state.across(x)); marker.setAttribute("x2", state.across(x)); }
}

function listen(state) {
  const {svg, places} = state;
  if (!places.length) return;
  svg.onpointermove = event => read(state, closest(places, state.backwards(event.clientX - svg.getBoundingClientRect().left)));
  svg.onpointerleave = () => read(state, null);
  svg.onkeydown = event => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key], last = places.length - 1;
    if (!step) return;
    const i = state.cursor === null ? (step > 0 ? -1 : last + 1) : places.indexOf(state.cursor);
    read(state, places[Math.max(0, Math.min(last, i + step))]);
    event.preventDefault();
  };
}
