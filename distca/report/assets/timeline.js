"use strict";
// The timeline: what is in sight is painted as a picture of at most 256 by 900 cells, so 512 ranks cost as much as 8.
// Zooming paints again from the spans themselves; pointing looks the span up.
(() => {
  const {data, palette, colors, drawers, tables, byId, bytes, seconds, timeUnit, axis, draw, table, range, style} =
    Report;
  if (!data.timeline) return;

  const {grid, cells, numColumns} = Report.raster;
  const maxListed = 500; // spans of a rank in the table
  const lanes = data.timeline.lanes;
  const usual = {
    linear: colors.blue,
    attention: colors.orange,
    network: colors.green,
    wait: colors.red,
    pipeline: colors.purple,
    optimizer: colors.sky,
    host: colors.grey,
  };
  const spare = palette.filter(color => !lanes.some(lane => usual[lane] === color));
  const laneColor = lanes.map(lane => usual[lane] ?? spare.shift() ?? colors.grey);
  const lines = data.timeline.timelines.map((line, number) => open(line, number));
  const longest = Math.max(...lines.map(line => line.stop)) || 1;
  const [scale, unit] = timeUnit(longest);
  let shownLanes = range(lanes.length),
    window_ = [0, longest];

  function open(line, number) {
    const column = (name, type) => {
      const text = atob(line.columns[name]);
      const raw = new Uint8Array(text.length);
      for (let i = 0; i < text.length; i++) raw[i] = text.charCodeAt(i);
      return new type(raw.buffer);
    };
    const opened = {
      ...line,
      key: `timeline-${number}`,
      start: column("start", Float32Array),
      seconds: column("seconds", Float32Array),
      bytes: column("bytes", Float32Array),
      name: column("name", Uint16Array),
      laneOf: Uint8Array.from(line.names, ([lane]) => lanes.indexOf(line.lanes[lane])), // of each name, on the page
      shown: range(line.ranks.length),
      rows: [0, line.ranks.length],
    };
    const joined = column("joined", Uint32Array);
    const busy = column("joinedBusy", Float32Array);
    const count = column("joinedCount", Uint32Array);
    opened.busy = Float32Array.from(opened.seconds);
    opened.count = new Uint32Array(opened.start.length).fill(1);
    joined.forEach((span, i) => {
      opened.busy[span] = busy[i];
      opened.count[span] = count[i];
    });
    return opened;
  }

  function paint(line) {
    const shape = grid(line, shownLanes);
    const width = ((window_[1] - window_[0]) / numColumns) * scale;
    const z = shape.height && shownLanes.length ? cells(line, shape, shownLanes, lanes.length, window_) : [[null]];
    const every = Math.max(1, Math.ceil(shape.ranks / 16));
    const ticks = range(shape.ranks)
      .map(i => shape.first + i)
      .filter(i => i % every === 0);
    const steps = laneColor.flatMap((color, lane) => [
      [lane / lanes.length, color],
      [(lane + 1) / lanes.length, color],
    ]);
    draw(
      line.key,
      [
        {
          type: "heatmap",
          z,
          x0: window_[0] * scale + width / 2,
          dx: width,
          y0: shape.first - 0.5 + shape.dy / 2,
          dy: shape.dy,
          zmin: -0.5,
          zmax: lanes.length - 0.5,
          colorscale: steps,
          showscale: false,
          hoverinfo: "none",
          zsmooth: false,
        },
      ],
      {
        margin: {l: 70, r: 8, t: 8, b: 40},
        xaxis: axis(`time in the step, ${unit}`, {
          range: window_.map(moment => moment * scale),
          showgrid: false,
          zeroline: false,
        }),
        yaxis: axis("", {
          range: [line.rows[1] - 0.5, line.rows[0] - 0.5],
          tickvals: ticks,
          ticktext: ticks.map(i => `rank ${line.ranks[line.shown[i]]}`),
          showgrid: false,
          zeroline: false,
        }),
      },
    );
    line.shape = shape;
  }

  function paintAll() {
    lines.forEach(paint);
  }

  function onZoom(line, change) {
    if ("xaxis.autorange" in change || "yaxis.autorange" in change) return whole();
    if (!("xaxis.range[0]" in change || "yaxis.range[0]" in change)) return;
    if ("xaxis.range[0]" in change) setWindow(change["xaxis.range[0]"] / scale, change["xaxis.range[1]"] / scale);
    if ("yaxis.range[0]" in change) {
      const edges = [change["yaxis.range[0]"] + 0.5, change["yaxis.range[1]"] + 0.5].sort((a, b) => a - b);
      line.rows = [
        Math.max(0, Math.floor(edges[0])),
        Math.min(line.shown.length, Math.max(Math.floor(edges[0]) + 1, Math.ceil(edges[1]))),
      ];
    }
    paintAll();
  }

  function setWindow(from, to) {
    const least = longest * 1e-6,
      width = Math.min(longest, Math.max(least, to - from));
    const start = Math.min(Math.max(0, from), longest - width);
    window_ = [start, start + width];
  }

  function whole() {
    window_ = [0, longest];
    for (const line of lines) line.rows = [0, line.shown.length];
    paintAll();
  }

  function zoomBy(button) {
    const [from, to] = window_,
      width = to - from,
      middle = (from + to) / 2;
    if (button === "all") return whole();
    if (button === "in") setWindow(middle - width / 4, middle + width / 4);
    if (button === "out") setWindow(middle - width, middle + width);
    if (button === "left") setWindow(from - width / 2, to - width / 2);
    if (button === "right") setWindow(from + width / 2, to + width / 2);
    paintAll();
    say();
  }

  // The span under a point of the chart, or the nearest within a cell.
  function spanAt(line, x, y) {
    const shape = line.shape,
      moment = x / scale,
      slack = (window_[1] - window_[0]) / numColumns;
    const row = Math.floor((y - (shape.first - 0.5)) / shape.dy + 1e-6);
    const first = shape.first + (shape.split ? Math.floor(row / shape.perRank) : row * shape.group);
    const wanted = shape.split ? [shownLanes[row % shape.perRank]] : shownLanes;
    let best = -1,
      least = slack,
      where = -1,
      lane = Infinity;
    for (let index = first; index < Math.min(first + shape.group, line.shown.length); index++) {
      const rank = line.shown[index];
      for (let i = line.offsets[rank]; i < line.offsets[rank + 1]; i++) {
        const its = line.laneOf[line.name[i]];
        if (!wanted.includes(its)) continue;
        const away = Math.max(0, line.start[i] - moment, moment - line.start[i] - line.seconds[i]);
        if (away < least || (away === least && its < lane)) [best, least, where, lane] = [i, away, rank, its];
      }
    }
    return best < 0 ? null : {span: best, rank: line.ranks[where]};
  }

  function describe(line, span, rank) {
    const [lane, name] = line.names[line.name[span]];
    const words = [
      `${name} (${line.lanes[lane]})`,
      `rank ${rank}`,
      `starts at ${seconds(line.start[span])}`,
      `lasts ${seconds(line.seconds[span])}`,
    ];
    if (line.bytes[span]) words.push(bytes(line.bytes[span]));
    if (line.count[span] > 1) words.push(`${line.count[span]} spans joined, busy ${seconds(line.busy[span])}`);
    return words;
  }

  function listen(line) {
    const chart = byId(`chart-${line.key}`),
      tip = byId("tip");
    chart.on("plotly_relayout", change => onZoom(line, change));
    chart.on("plotly_unhover", () => {
      tip.hidden = true;
    });
    chart.on("plotly_hover", ({points, event}) => {
      const found = spanAt(line, points[0].x, points[0].y);
      tip.hidden = found === null;
      if (found === null) return;
      tip.textContent = describe(line, found.span, found.rank).join("\n");
      tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
      tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
    });
  }

  function filterLanes() {
    const checked = [...document.querySelectorAll("#timeline-lanes input")]
      .filter(box => box.checked)
      .map(box => box.value);
    shownLanes = range(lanes.length).filter(lane => checked.includes(lanes[lane]));
    paintAll();
    say();
  }

  function filterRanks() {
    const field = byId("timeline-ranks"),
      wanted = parseRanks(field.value);
    field.setAttribute("aria-invalid", String(wanted === null));
    if (wanted === null) return say(`“${field.value}” names no ranks; write numbers and ranges such as 0-7, 12.`);
    const shown = lines.map(line => range(line.ranks.length).filter(i => wanted(line.ranks[i])));
    if (shown.every(some => some.length === 0)) {
      field.setAttribute("aria-invalid", "true");
      return say(
        `No rank is in “${field.value}”; the step has ranks ${lines[0].ranks[0]} to ${lines[0].ranks.at(-1)}.`,
      );
    }
    lines.forEach((line, i) => {
      line.shown = shown[i];
      line.rows = [0, shown[i].length];
    });
    paintAll();
    say();
  }

  function parseRanks(text) {
    if (["", "all"].includes(text.trim())) return () => true;
    const ranges = text.split(",").map(part => /^\s*(\d+)\s*(?:[-–]\s*(\d+)\s*)?$/.exec(part));
    if (ranges.some(found => !found)) return null;
    return rank => ranges.some(([, low, high]) => rank >= Number(low) && rank <= Number(high ?? low));
  }

  function say(problem) {
    const shape = lines[0].shape;
    const how = shape.split
      ? "one row per rank and lane"
      : shape.group > 1
        ? `one row per ${shape.group} ranks`
        : "one row per rank";
    const meaning = shape.split ? "" : "; a cell shows the lane that took most of it";
    byId("timeline-status").textContent =
      problem ??
      `Showing ${seconds(window_[0])} to ${seconds(window_[1])}, ` +
        `${lines[0].shown.length.toLocaleString("en")} of ${lines[0].ranks.length.toLocaleString("en")} ranks, ${how}${meaning}.`;
  }

  tables.timeline = place => {
    const rows = lines.flatMap(line =>
      line.ranks.map((rank, i) => [
        `${line.title}, rank ${rank}`,
        ...lanes.map(lane =>
          line.lanes.includes(lane) ? seconds(line.laneSeconds[i][line.lanes.indexOf(lane)]) : "–",
        ),
      ]),
    );
    table(place, ["rank", ...lanes], rows);
  };

  tables.spans = place => {
    const rank = Number(byId("span-rank").value);
    const rows = lines.flatMap(line => {
      const at = line.ranks.indexOf(rank);
      return at < 0
        ? []
        : range(line.offsets[at + 1] - line.offsets[at])
            .map(i => i + line.offsets[at])
            .filter(i => shownLanes.includes(line.laneOf[line.name[i]]))
            .slice(0, maxListed)
            .map(i => [
              `${line.names[line.name[i]][1]}${line.count[i] > 1 ? ` (${line.count[i]} joined)` : ""}`,
              lanes[line.laneOf[line.name[i]]],
              line.title,
              seconds(line.start[i]),
              seconds(line.seconds[i]),
              line.bytes[i] ? bytes(line.bytes[i]) : "–",
            ]);
    });
    table(place, ["span", "lane", "timeline", "start", "length", "bytes"], rows);
  };

  for (const swatch of document.querySelectorAll("#timeline .swatch"))
    swatch.style.background = laneColor[lanes.indexOf(swatch.dataset.lane)];
  let listening = false;
  drawers.push({
    key: "timeline",
    draw: () => {
      paintAll();
      if (!listening) lines.forEach(listen);
      listening = true;
      say();
    },
  });
  byId("timeline-lanes").addEventListener("change", filterLanes);
  byId("timeline-ranks").addEventListener("change", filterRanks);
  for (const button of document.querySelectorAll("#timeline [data-zoom]"))
    button.addEventListener("click", () => zoomBy(button.dataset.zoom));
  byId("span-rank").addEventListener("change", () => tables.spans(document.querySelector("[data-table=spans] .table")));
})();
