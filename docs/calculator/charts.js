/* Inline SVG: work of ranks before and after, and memory beside what a GPU has. */
"use strict";

const MOST_BARS = 48;
const svgElement = (name, attributes = {}, text = "") => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
};
const legendList = (names) => {
  const list = document.createElement("ul");
  list.className = "legend";
  for (const [kind, text] of names) {
    const item = document.createElement("li");
    item.className = kind;
    item.append(document.createElement("i"), text);
    list.append(item);
  }
  return list;
};

/** Draw paired bars per rank; of more ranks than fit, each pair has the largest of some neighbours. Return how many. */
function drawWork(figure, before, after) {
  const group = Math.ceil(before.length / MOST_BARS), bars = Math.ceil(before.length / group);
  const grouped = (values) => Array.from({length: bars}, (_, at) => Math.max(...values.slice(at * group, (at + 1) * group)));
  const [width, height, left, bottom, top] = [Math.max(figure.clientWidth, 300), 220, 34, 24, 8];
  const pairs = [["before", grouped(before)], ["after", after.length ? grouped(after) : []]];
  const most = 1.05 * Math.max(1.2, ...pairs.flatMap(([, values]) => values));
  const y = (value) => top + (height - top - bottom) * (1 - value / most);
  const svg = svgElement("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label":
    `Work of ${before.length} ranks over the mean: at most ${Math.max(...before).toFixed(2)} before` +
    (after.length ? ` and ${Math.max(...after).toFixed(2)} after` : "")});
  const step = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100].find((one) => most / one <= 6) ?? most / 5;
  for (let value = 0; value <= most; value += step) {
    svg.append(svgElement("line", {class: "axis", x1: left, x2: width, y1: y(value), y2: y(value)}));
    svg.append(svgElement("text", {x: left - 6, y: y(value) + 4, "text-anchor": "end"}, `${+value.toFixed(1)}×`));
  }
  const slot = (width - left) / bars, bar = Math.max(1, Math.min(30, slot * 0.4));
  pairs.forEach(([kind, values], side) => values.forEach((value, at) => {
    const x = left + slot * (at + 0.5) + (side - (after.length ? 1 : 0.5)) * bar;
    svg.append(svgElement("rect", {class: kind, x, y: y(value), width: bar * 0.94, height: Math.max(0, y(0) - y(value))}));
  }));
  const every = Math.ceil(bars / Math.floor((width - left) / 34));
  for (let at = 0; at < bars; at += every)
    svg.append(svgElement("text", {x: left + slot * (at + 0.5), y: height - 7, "text-anchor": "middle"}, `${at * group}`));
  svg.append(svgElement("line", {class: "mean", x1: left, x2: width, y1: y(1), y2: y(1)}));
  figure.replaceChildren(legendList([["before", "before"], ...(after.length ? [["after", "after"]] : [])]), svg);
  return group;
}

/** Draw one bar of parts per entry [{name, parts: [[kind, bytes]], note}], with a line where the GPU's memory ends. */
function drawMemory(figure, entries, capacity) {
  const [width, line, left] = [Math.max(figure.clientWidth, 300), 44, 4];
  const totals = entries.map(({parts}) => parts.reduce((sum, [, bytes]) => sum + bytes, 0));
  const most = 1.04 * Math.max(capacity, ...totals), x = (bytes) => left + (width - 2 * left) * bytes / most;
  const height = line * entries.length + 22;
  const svg = svgElement("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": entries.map(({name}, at) =>
    `${name}: ${bytesText(totals[at])} of ${bytesText(capacity)}`).join("; ")});
  entries.forEach(({name, parts, note}, at) => {
    const top = at * line;
    let sum = 0;
    svg.append(svgElement("text", {x: left, y: top + 14, class: "strong"}, `${name}: ${bytesText(totals[at])}${note}`));
    for (const [kind, bytes] of parts) {
      svg.append(svgElement("rect", {class: kind, x: x(sum), y: top + 20, width: Math.max(0, x(sum + bytes) - x(sum)), height: 14}));
      sum += bytes;
    }
    svg.append(svgElement("line", {class: "limit", x1: x(capacity), x2: x(capacity), y1: top + 18, y2: top + 36}));
  });
  svg.append(svgElement("text", {x: x(capacity), y: height - 6, "text-anchor": x(capacity) < 120 ? "start" : "end"}, `a GPU has ${bytesText(capacity)}`));
  const kinds = {states: "weights, gradients, optimizer", activations: "activations", gathered: "gathered keys", buffers: "buffers"};
  const shown = new Set(entries.flatMap(({parts}) => parts.filter(([, bytes]) => bytes > 0).map(([kind]) => kind)));
  figure.replaceChildren(legendList(Object.entries(kinds).filter(([kind]) => shown.has(kind))), svg);
}

const bytesText = (bytes) => {
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (bytes >= size) return `${(bytes / size).toFixed(bytes >= 100 * size ? 0 : bytes >= 10 * size ? 1 : 2)} ${unit}`;
  return `${Math.round(bytes)} B`;
};
