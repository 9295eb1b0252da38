// Lines and bars as SVG, for the page of report.py. Colours are those of the page, so dark mode needs no redrawing.
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
function span(numbers, base) {
  let low = base ?? Infinity, high = base ?? -Infinity;
  for (const x of numbers) { low = Math.min(low, x); high = Math.max(high, x); }
  if (low > high) return [0, 1];
  if (low === high) { low = Math.min(low, 0); high = Math.max(high, 0); }
  if (low === high) return [0, 1];
  const margin = 0.05 * (high - low);
  return [low === (base ?? 0) ? low : low - margin, high === (base ?? 0) ? high : high + margin];
}

const closest = (numbers, wanted) => numbers.reduce((best, x) => Math.abs(x - wanted) < Math.abs(best - wanted) ? x : best, numbers[0]);

// A chart in `box`. figure: `data`, a list of {name, x, y, color, dotted}, where y may hold null; `targets`, numbers
// with a dashed line; `base`, the number from which bars go up in `color` and down in `below`, without it lines are drawn;
// `labels`, a function x -> text below it. title: of an x, as text. action: gives a button for an x, or null.
// A drag zooms, a double click or Escape shows all again; a click or the arrow keys choose a point.
function chart(box, figure, title, action = () => null) {
  const state = box.chart ??= {zoom: null, cursor: null, pinned: false, width: 0};
  Object.assign(state, {figure, title, action, cursor: null, pinned: false, zoom: null});
  if (!state.svg) {
    state.svg = shape("svg", {tabindex: 0, role: "img", "aria-label": box.getAttribute("aria-label") || ""});
    state.readout = Object.assign(document.createElement("div"), {className: "readout"});
    state.readout.setAttribute("aria-live", "polite");
    box.append(state.svg, state.readout);
    listen(state);
    new ResizeObserver(() => { if (state.svg.clientWidth !== state.width) redraw(state); }).observe(box);
  }
  redraw(state);
}

function redraw(state) {
  const {svg, figure} = state, width = state.width = svg.clientWidth;
  svg.classList.toggle("tall", Boolean(figure.labels));
  const height = svg.clientHeight, area = {left: 46, right: width - 8, top: 8, bottom: height - (figure.labels ? 75 : 20)};
  state.places = [...new Set(figure.data.flatMap(series => series.x))].sort((a, b) => a - b);
  const {base} = figure, bars = base !== undefined, half = bars ? 0.5 : 0, places = state.places, last = places[places.length - 1];
  let [first, final] = state.zoom || [places[0] - half, last + half];
  if (!(first < final)) [first, final] = [first - 1, first + 1];
  const inside = (x, value) => value !== null && value !== undefined && x >= first && x <= final;
  const seen = figure.data.flatMap(series => series.y.filter((value, i) => inside(series.x[i], value)));
  const [low, high] = span([...seen, ...figure.targets || []], base);
  const across = x => area.left + (x - first) / (final - first) * (area.right - area.left);
  const up = y => area.bottom - (y - low) / (high - low) * (area.bottom - area.top);
  Object.assign(state, {area, across, backwards: pixel => first + (pixel - area.left) / (area.right - area.left) * (final - first)});
  svg.replaceChildren();
  for (const y of ticksOf(low, high, 4)) {
    svg.append(shape("line", {class: "grid", x1: area.left, x2: area.right, y1: up(y), y2: up(y)}),
      shape("text", {x: area.left - 4, y: up(y) + 4, "text-anchor": "end"}, tickText(y)));
  }
  if (figure.labels && across(1) - across(0) >= 11) {
    for (const x of places.filter(x => x >= first && x <= final)) {
      const place = {x: across(x) + 4, y: area.bottom + 8}, text = figure.labels(x).trim();
      svg.append(shape("text", {...place, "text-anchor": "end", transform: `rotate(-60 ${place.x} ${place.y})`}, text.length > 10 ? `${text.slice(0, 9)}…` : text));
    }
  } else for (const x of ticksOf(first, final, Math.max(2, width / 90)))
    if (Number.isInteger(x)) svg.append(shape("text", {x: across(x), y: height - 5, "text-anchor": "middle"}, tickText(x)));
  for (const [number, series] of [...figure.data.entries()].reverse()) {  // the first is in front
    if (bars) {
      const wide = 0.8 * (across(1) - across(0)) / figure.data.length;
      series.y.forEach((y, i) => {
        if (!inside(series.x[i], y)) return;
        const start = across(series.x[i]) + (number - figure.data.length / 2) * wide;
        svg.append(shape("rect", {x: start, width: Math.max(wide, 0.5), fill: y < base ? series.below : series.color,
          opacity: series.pale ? 0.45 : 1, y: Math.min(up(y), up(base)), height: Math.max(Math.abs(up(y) - up(base)), 0.5)}));
      });
      continue;
    }
    let path = "", drawn = false;
    series.y.forEach((y, i) => {
      const known = inside(series.x[i], y);
      if (known) path += `${drawn ? "L" : "M"}${across(series.x[i]).toFixed(1)} ${up(y).toFixed(1)}${drawn ? "" : "l0 0"}`;
      drawn = known;
    });
    svg.append(shape("path", {d: path, stroke: series.color, class: series.dotted ? "curve dotted" : "curve"}));
  }
  for (const y of figure.targets || [])
    svg.append(shape("line", {class: "target", x1: area.left, x2: area.right, y1: up(y), y2: up(y)}),
      shape("text", {class: "target", x: area.right, y: up(y) - 4, "text-anchor": "end"}, `target ${tickText(y)}`));
  state.marker = shape("line", {class: "marker", y1: area.top, y2: area.bottom, visibility: "hidden"});
  state.selection = shape("rect", {class: "selection", y: area.top, height: area.bottom - area.top, visibility: "hidden"});
  svg.append(state.marker, state.selection);
  read(state, state.cursor);
}

// Below the chart: what the colours are, and the numbers at the cursor.
function read(state, x) {
  const {figure, readout, marker} = state;
  state.cursor = x;
  const parts = figure.data.map(series => {
    const value = x === null ? null : series.y[series.x.indexOf(x)];
    const swatch = Object.assign(document.createElement("i"), {className: series.dotted ? "swatch dotted" : "swatch"});
    Object.assign(swatch.style, {borderColor: series.below ? "currentColor" : series.color, opacity: series.pale ? 0.45 : 1});
    const text = x === null ? series.name : `${series.name} ${value === null || value === undefined ? "–" : Number(value.toPrecision(6))}`;
    const part = document.createElement("span");
    part.append(swatch, ` ${text}`);
    return part;
  });
  if (x === null && parts.length === 1) parts.length = 0;
  const head = document.createElement("span");
  head.className = "place";
  head.textContent = x === null ? "" : state.title(x);
  const button = x === null ? null : state.action(x);
  readout.replaceChildren(head, ...parts, ...button ? [button] : []);
  if (state.zoom) {
    const whole = Object.assign(document.createElement("button"), {textContent: "show all"});
    whole.onclick = () => { state.zoom = null; redraw(state); };
    readout.append(whole);
  }
  marker.setAttribute("visibility", x === null ? "hidden" : "visible");
  if (x !== null) { marker.setAttribute("x1", state.across(x)); marker.setAttribute("x2", state.across(x)); }
}

function listen(state) {
  const {svg} = state, pixel = event => event.clientX - svg.getBoundingClientRect().left;
  const under = event => closest(state.places, state.backwards(pixel(event)));
  let start = null;
  svg.onpointerdown = event => { start = pixel(event); };
  svg.onpointermove = event => {
    if (!state.places.length) return;
    if (start !== null && event.buttons && Math.abs(pixel(event) - start) > 6) {
      const [a, b] = [start, pixel(event)].map(x => Math.max(state.area.left, Math.min(state.area.right, x))).sort((p, q) => p - q);
      state.selection.setAttribute("x", a);
      state.selection.setAttribute("width", b - a);
      state.selection.setAttribute("visibility", "visible");
      if (!svg.hasPointerCapture(event.pointerId)) svg.setPointerCapture(event.pointerId);
    } else if (!state.pinned) read(state, under(event));
  };
  svg.onpointerup = event => {
    if (start === null || !state.places.length) return;
    const ends = [start, pixel(event)].sort((a, b) => a - b).map(state.backwards);
    const dragged = Math.abs(pixel(event) - start) > 6;
    start = null;
    if (dragged && state.places.filter(x => x >= ends[0] && x <= ends[1]).length > 1) {
      Object.assign(state, {zoom: ends, cursor: null, pinned: false});
      redraw(state);
    } else {
      state.selection.setAttribute("visibility", "hidden");
      state.pinned = true;
      read(state, under(event));
    }
  };
  svg.onpointercancel = () => { start = null; state.selection.setAttribute("visibility", "hidden"); };
  svg.onpointerleave = () => { if (!state.pinned && start === null) read(state, null); };
  svg.ondblclick = () => { Object.assign(state, {zoom: null, cursor: null, pinned: false}); redraw(state); };
  svg.onkeydown = event => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key], places = state.places;
    if (event.key === "Escape") svg.ondblclick();
    if (event.key === "Enter") state.readout.querySelector("button")?.click();
    if (!step || !places.length) return;
    const last = places.length - 1, i = state.cursor === null ? (step > 0 ? -1 : last + 1) : places.indexOf(state.cursor);
    state.pinned = true;
    read(state, places[Math.max(0, Math.min(last, i + step))]);
    event.preventDefault();
  };
}
