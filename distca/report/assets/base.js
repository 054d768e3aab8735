"use strict";
// What all charts share: the numbers, colours that colour-blind readers can tell apart, axes, and tables.
const Report = (() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const blue = "#0072B2",
    orange = "#E69F00",
    green = "#009E73",
    red = "#D55E00",
    purple = "#CC79A7",
    sky = "#56B4E9",
    yellow = "#F0E442",
    grey = "#999999";
  const palette = [blue, orange, green, purple, sky, red, yellow, grey];
  const fewBars = 64; // more columns than this are drawn as outlines
  const legend = {orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal"};
  const drawers = [],
    tables = {};

  const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const byId = id => document.getElementById(id);
  // The charting library reads markup, links too, in what it draws: names from files stay the letters they are.
  const label = text => String(text).replace(/[&<>]/g, sign => ({"&": "&amp;", "<": "&lt;", ">": "&gt;"})[sign]);
  const digits = number => Number(number.toPrecision(3)).toLocaleString("en");

  function bytes(number) {
    for (const [unit, name] of [
      [1e12, "TB"],
      [1e9, "GB"],
      [1e6, "MB"],
      [1e3, "kB"],
    ])
      if (number >= unit) return `${digits(number / unit)} ${name}`;
    return `${digits(number)} B`;
  }

  function timeUnit(seconds) {
    return seconds >= 1 || seconds === 0 ? [1, "s"] : seconds >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  }

  function seconds(number) {
    const [scale, name] = timeUnit(Math.abs(number));
    return `${digits(number * scale)} ${name}`;
  }

  function axis(title, more) {
    return {
      title: {text: title},
      gridcolor: style("--line"),
      zerolinecolor: style("--line"),
      linecolor: style("--line"),
      automargin: true,
      ...more,
    };
  }

  function layout(more) {
    return {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: {l: 64, r: 16, t: 30, b: 44},
      font: {family: "system-ui, sans-serif", size: 13, color: style("--text")},
      dragmode: "zoom",
      legend,
      hoverlabel: {align: "left"},
      ...more,
    };
  }

  function draw(key, traces, shape) {
    const config = {responsive: true, displayModeBar: false, doubleClick: "reset"};
    return Plotly.react(byId(`chart-${key}`), traces, layout(shape), config);
  }

  function table(place, heads, rows) {
    const made = document.createElement("table");
    const head = made.createTHead().insertRow();
    for (const text of heads) head.append(cell("th", text, "col"));
    const body = made.createTBody();
    for (const row of rows) {
      const line = body.insertRow();
      row.forEach((text, column) => line.append(column ? cell("td", text) : cell("th", text, "row")));
    }
    place.replaceChildren(made);
  }

  function cell(tag, text, scope) {
    const made = document.createElement(tag);
    made.textContent = text;
    if (scope) made.scope = scope;
    return made;
  }

  // Tables are made when they are opened: hundreds of rows would slow the page down for those who do not ask.
  function fillTables() {
    for (const details of document.querySelectorAll("details[data-table]")) {
      const fill = () => details.open && tables[details.dataset.table](details.querySelector(".table"));
      details.addEventListener("toggle", fill);
    }
  }

  function range(count, step = 1) {
    return Array.from({length: count}, (_, index) => index * step);
  }

  function onChange(id, redraw) {
    byId(id).addEventListener("change", redraw);
  }

  return {
    data,
    dark,
    palette,
    colors: {blue, orange, green, red, purple, sky, yellow, grey},
    fewBars,
    drawers,
    tables,
    style,
    byId,
    bytes,
    seconds,
    timeUnit,
    axis,
    draw,
    table,
    fillTables,
    range,
    onChange,
    digits,
    label,
  };
})();
