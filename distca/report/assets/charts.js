"use strict";
// Every chart but the timeline: one function that draws, one that fills the table with the same numbers.
(() => {
  const {data, palette, colors, fewBars, drawers, tables, byId, range, onChange, axis, draw, table} = Report;
  const {style, bytes, seconds, digits, label} = Report;

  // One value per rank: bars where they are few, outlines where they are many.
  function columns(name, x, y, color, hover, filled) {
    const base = {name, x, y, customdata: hover, hovertemplate: "%{customdata}<extra></extra>"};
    if (x.length <= fewBars) return {...base, type: "bar", marker: {color}};
    return {
      ...base,
      type: "scatter",
      mode: "lines",
      line: {color, width: filled ? 1 : 2, shape: "hvh"},
      fill: filled ? "tozeroy" : "none",
    };
  }

  function level(name, y, color, dash) {
    return {
      name,
      type: "scatter",
      mode: "lines",
      x: [0, 1],
      y: [y, y],
      xaxis: "x2",
      line: {color, dash, width: 1.5},
      hoverinfo: "skip",
    };
  }
  const wholeTicks = count => (count <= 16 ? {dtick: 1, tick0: 0} : {}); // no half ranks between few ranks
  const levels = {xaxis2: {overlaying: "x", range: [0, 1], visible: false, fixedrange: true}};

  function comparison(figures) {
    const low = figures.mean.map((mean, i) => mean - figures.low[i]),
      high = figures.mean.map((mean, i) => figures.high[i] - mean);
    draw(
      "comparison",
      [
        {
          type: "bar",
          orientation: "h",
          y: figures.names.map(label),
          x: figures.mean,
          marker: {
            color: figures.kinds.map(kind => ({ours: colors.blue, best: colors.orange})[kind] ?? colors.grey),
            opacity: figures.kinds.map(kind => (kind === "bound" ? 0.4 : 1)),
          },
          error_x: {type: "data", symmetric: false, array: high, arrayminus: low, color: style("--text")},
          hovertemplate: "%{y}: %{x:,.0f} tokens/s<extra></extra>",
        },
      ],
      {
        xaxis: axis("tokens/s", {rangemode: "tozero"}),
        yaxis: axis("", {autorange: "reversed", type: "category"}),
        margin: {l: 64, r: 16, t: 8, b: 44},
      },
    );
  }

  const amount = (value, unit) => (unit === "seconds" ? seconds(value) : `${value.toPrecision(4)} ${unit}`);
  const rankName = (index, group) =>
    group > 1 ? `busiest of ranks ${index * group}–${(index + 1) * group - 1}` : `rank ${index}`;

  function work(figures) {
    const {before, after, unit, group, mean, tolerance} = figures;
    const bySize = byId("work-order").value === "size";
    const side = (values, name, color, filled) => {
      const order = range(values.length);
      if (bySize) order.sort((a, b) => values[b] - values[a]);
      const hover = order.map(i => `${name}, ${rankName(i, group)}: ${amount(values[i], unit)}`);
      return columns(
        name,
        bySize ? range(values.length) : range(values.length, group),
        order.map(i => values[i] / (mean[0] || 1)),
        color,
        hover,
        filled,
      );
    };
    const traces = [side(before, "before", colors.orange, true), side(after, "after", colors.blue, false)];
    const mark = (name, height, dash) => traces.push(level(name, height / (mean[0] || 1), style("--text"), dash));
    if (after.length <= fewBars) mark("mean after", mean[1], "solid");
    if (tolerance !== null) mark(`mean + ${digits(tolerance * 100)} % tolerance`, mean[1] * (1 + tolerance), "dash");
    draw("work", traces, {
      ...levels,
      bargap: 0.25,
      xaxis: axis(bySize ? "servers, largest first" : "server", wholeTicks(after.length)),
      yaxis: axis("attention work, × mean before", {rangemode: "tozero"}),
    });
  }
  tables.work = place => {
    const {before, after, unit, group} = data.work;
    table(
      place,
      ["server", `before, ${unit}`, `after, ${unit}`],
      after.map((value, i) => [
        rankName(i, group),
        i < before.length ? before[i].toPrecision(4) : "–",
        value.toPrecision(4),
      ]),
    );
  };

  function transfers(figures) {
    if (byId("transfers-view").value === "ranks") return transfersByRank(figures);
    const {matrix, group, size} = figures;
    const name = index =>
      group > 1 ? `ranks ${index * group}–${Math.min((index + 1) * group, size) - 1}` : `rank ${index}`;
    const z = matrix.map(row => row.map(value => (value > 0 ? Math.log10(value) : null)));
    const text = matrix.map((row, from) => row.map((value, to) => `${name(from)} → ${name(to)}: ${bytes(value)}`));
    const known = matrix
      .flat()
      .filter(value => value > 0)
      .map(Math.log10);
    const low = known.reduce((a, b) => Math.min(a, b), Infinity),
      high = known.reduce((a, b) => Math.max(a, b), -Infinity);
    const ticks = known.length ? range(7).map(i => low + ((high - low) * i) / 6) : [];
    square(true);
    draw(
      "transfers",
      [
        {
          type: "heatmap",
          x0: (group - 1) / 2,
          dx: group,
          y0: (group - 1) / 2,
          dy: group,
          z,
          customdata: text,
          hoverongaps: false,
          hovertemplate: "%{customdata}<extra></extra>",
          colorscale: "Cividis",
          reversescale: !Report.dark.matches,
          colorbar: {
            title: {text: "bytes"},
            tickvals: ticks,
            ticktext: ticks.map(tick => bytes(10 ** tick)),
            thickness: 14,
          },
        },
      ],
      {
        xaxis: axis("to rank", {...wholeTicks(size), showgrid: false, zeroline: false}),
        margin: {l: 64, r: 16, t: 10, b: 44},
        yaxis: axis("from rank", {...wholeTicks(size), autorange: "reversed", showgrid: false, zeroline: false}),
      },
    );
  }

  function square(wanted) {
    const chart = byId("chart-transfers"),
      width = wanted ? "620px" : "";
    if (chart.style.maxWidth === width) return;
    chart.style.maxWidth = width;
    if (chart.classList.contains("js-plotly-plot")) Plotly.Plots.resize(chart);
  }

  function transfersByRank({sent, received, columnGroup}) {
    square(false);
    const side = (name, values, color, filled) =>
      columns(
        name,
        range(values.length, columnGroup),
        values,
        color,
        values.map((value, i) => `${rankName(i, columnGroup)} ${name} ${bytes(value)}`),
        filled,
      );
    draw("transfers", [side("sent", sent, colors.blue, true), side("received", received, colors.orange, false)], {
      xaxis: axis("rank", wholeTicks(sent.length)),
      yaxis: axis("bytes", {rangemode: "tozero", tickformat: "~s"}),
    });
  }
  tables.transfers = place => {
    const {sent, received, columnGroup} = data.transfers;
    table(
      place,
      ["rank", "sent", "received"],
      sent.map((value, i) => [rankName(i, columnGroup), bytes(value), bytes(received[i])]),
    );
  };

  function documents(figures) {
    const {row, start, stop, home, server, level: depth, levels: depths} = figures;
    const way = byId("documents-color").value;
    const hover = row.map(
      (which, i) =>
        `document ${figures.documents[which]}, tokens ${start[i].toLocaleString("en")}–${stop[i].toLocaleString("en")}` +
        `<br>home ${home[i]}, server ${server[i]}${home[i] === server[i] ? "" : " (moved)"}`,
    );
    const bars = pick => ({
      type: "bar",
      orientation: "h",
      customdata: pick.map(i => hover[i]),
      hovertemplate: "%{customdata}<extra></extra>",
      base: pick.map(i => start[i]),
      x: pick.map(i => stop[i] - start[i]),
      width: pick.map(i => 0.8 / depths[i]),
      y: pick.map(i => row[i] - 0.4 + ((depth[i] + 0.5) * 0.8) / depths[i]),
    });
    const outline = {color: style("--back"), width: 0.7};
    const all = range(row.length);
    let traces;
    if (way === "moved") {
      traces = [
        ["computed at home", colors.blue, i => home[i] === server[i]],
        ["moved to another server", colors.orange, i => home[i] !== server[i]],
      ].map(([name, color, test]) => ({...bars(all.filter(test)), name, marker: {color, line: outline}}));
    } else {
      const value = way === "server" ? server : home;
      const distinct = [...new Set(value)].sort((a, b) => a - b);
      traces =
        distinct.length <= palette.length
          ? distinct.map((rank, k) => ({
              ...bars(all.filter(i => value[i] === rank)),
              name: `rank ${rank}`,
              marker: {color: palette[k], line: outline},
            }))
          : [
              {
                ...bars(all),
                name: way,
                marker: {
                  color: value,
                  colorscale: "Cividis",
                  line: outline,
                  showscale: true,
                  colorbar: {title: {text: `${way} rank`}, thickness: 14},
                },
              },
            ];
    }
    draw("documents", traces, {
      barmode: "overlay",
      showlegend: traces.length > 1,
      xaxis: axis("position in the document, tokens", {rangemode: "tozero"}),
      yaxis: axis("document", {
        autorange: "reversed",
        tickvals: range(figures.documents.length),
        ticktext: figures.documents.map(String),
        tickfont: {size: 11},
        showgrid: false,
        zeroline: false,
      }),
    });
  }
  tables.documents = place => {
    const {documents: names, row, start, stop, home, server} = data.documents;
    table(
      place,
      ["document", "first token", "past the last", "home", "server"],
      row.map((which, i) => [
        String(names[which]),
        start[i].toLocaleString("en"),
        stop[i].toLocaleString("en"),
        home[i],
        server[i],
      ]),
    );
  };

  function memory({kinds, bytes: amounts, ranks, capacity}) {
    const few = ranks.length <= fewBars;
    const traces = kinds.map((name, kind) => {
      const color = palette[kind % palette.length];
      const base = {
        name,
        x: ranks,
        y: amounts[kind].map(value => value / 1e9),
        customdata: amounts[kind].map((value, i) => `rank ${ranks[i]}, ${name}: ${bytes(value)}`),
        hovertemplate: "%{customdata}<extra></extra>",
      };
      return few
        ? {...base, type: "bar", marker: {color}}
        : {
            ...base,
            type: "scatter",
            mode: "lines",
            stackgroup: "memory",
            line: {width: 0, shape: "hvh"},
            fillcolor: color,
          };
    });
    if (capacity !== null) traces.push(level("capacity", capacity / 1e9, style("--text"), "dash"));
    draw("memory", traces, {
      ...levels,
      barmode: "stack",
      bargap: 0.25,
      xaxis: axis("rank", wholeTicks(ranks.length)),
      yaxis: axis("GB", {rangemode: "tozero"}),
    });
  }
  tables.memory = place => {
    const {kinds, bytes: amounts, ranks} = data.memory;
    table(
      place,
      ["rank", ...kinds, "in all"],
      ranks.map((rank, i) => [
        rank,
        ...amounts.map(row => bytes(row[i])),
        bytes(amounts.reduce((sum, row) => sum + row[i], 0)),
      ]),
    );
  };

  // Exponential mean over about `width` steps; gaps stay gaps, and the first values are not pulled towards zero.
  function smoothed(values, width) {
    const keep = 1 - 2 / (width + 1);
    let mean = 0,
      weight = 0;
    return values.map(value => {
      if (value === null) return null;
      mean = keep * mean + (1 - keep) * value;
      weight = keep * weight + 1 - keep;
      return mean / weight;
    });
  }

  function run({labels, runs}) {
    const series = Number(byId("run-series").value),
      width = Number(byId("run-smoothing").value);
    const traces = runs.flatMap(({name, step, values, heldOut}, number) => {
      const color = [colors.blue, colors.orange][number];
      const line = (y, more) => ({
        type: "scatter",
        mode: step.length > 1 ? "lines" : "markers",
        x: step,
        y,
        name: label(name),
        line: {color, width: 2},
        hovertemplate: `${label(name)}, step %{x}: %{y}<extra></extra>`,
        ...more,
      });
      const found = width
        ? [
            line(values[series], {opacity: 0.3, line: {color, width: 1}, showlegend: false}),
            line(smoothed(values[series], width), {name: `${label(name)}, smoothed`}),
          ]
        : [line(values[series])];
      if (heldOut.label === series && heldOut.step.length)
        found.push(
          line(heldOut.values, {
            mode: "lines+markers",
            x: heldOut.step,
            name: `${label(name)}, held out`,
            line: {color, width: 1, dash: "dot"},
            marker: {color, symbol: "diamond", size: 8},
          }),
        );
      return found;
    });
    draw("run", traces, {
      showlegend: traces.length > 1,
      xaxis: axis("step"),
      yaxis: axis(label(labels[series])),
    });
  }
  tables.run = place => {
    const {labels, runs} = data.run;
    table(
      place,
      ["step", ...labels],
      runs.flatMap(({name, step, values}) =>
        step.map((number, i) => [
          runs.length > 1 ? `${name}, ${number}` : number,
          ...values.map(row => (row[i] === null ? "–" : String(row[i]))),
        ]),
      ),
    );
  };

  function batches({before, after, shown}) {
    const numbers = range(before.length).map(i => i + 1);
    const side = (name, values, color) =>
      columns(
        name,
        numbers,
        values,
        color,
        values.map((value, i) => `batch ${numbers[i]}, ${name}: ${value.toFixed(2)} × the mean`),
        true,
      );
    draw("batches", [side("before", before, colors.orange), side("after", after, colors.blue)], {
      bargap: 0.25,
      xaxis: axis("batch", wholeTicks(numbers.length)),
      yaxis: axis("slowest rank, × mean", {rangemode: "tozero"}),
      shapes: [
        {type: "rect", x0: shown - 0.5, x1: shown + 0.5, yref: "paper", y0: 0, y1: 1, line: {width: 0},
          fillcolor: style("--line"), opacity: 0.5, layer: "below"},
      ],
    });
  }

  function lanes({lanes: lanes_, names, seconds: amounts}) {
    const bars = (number, color, width) => ({
      type: "bar",
      orientation: "h",
      name: label(names[number]),
      x: amounts[number],
      y: lanes_,
      width,
      marker: {color},
      hovertemplate: `${label(names[number])}, %{y}: %{x:.4g} s<extra></extra>`,
    });
    draw("lanes", [bars(0, colors.sky, 0.8), bars(1, colors.blue, 0.3)], {
      barmode: "overlay",
      xaxis: axis("seconds of a rank", {rangemode: "tozero"}),
      yaxis: axis("", {autorange: "reversed", type: "category"}),
    });
  }

  const charts = {comparison, batches, work, lanes, transfers, documents, memory, run};
  const choices = {
    work: ["work-order"],
    transfers: ["transfers-view"],
    documents: ["documents-color"],
    run: ["run-series", "run-smoothing"],
  };
  for (const [key, chart] of Object.entries(charts)) {
    if (!(key in data)) continue;
    drawers.push({key, draw: () => chart(data[key])});
    for (const id of choices[key] ?? []) onChange(id, () => chart(data[key]));
  }
})();
