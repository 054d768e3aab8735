"use strict";
// What is in sight of a timeline as cells, so that 512 ranks cost as much as 8: time is summed per row, lane and column.
Report.raster = (() => {
  const maxRows = 256;
  const numColumns = 900;
  const leastBusy = 0.2; // share of a cell below which a row of whole ranks stays blank

  // The rows in sight: one per rank and lane where they fit, else one per rank or per group of ranks.
  function grid(line, shownLanes) {
    const first = Math.max(0, Math.floor(line.rows[0]));
    const past = Math.min(line.shown.length, Math.ceil(line.rows[1]));
    const ranks = Math.max(0, past - first);
    const perRank = shownLanes.length + 1; // the last one is the gap to the next rank
    if (ranks * perRank <= maxRows)
      return {first, ranks, split: true, perRank, group: 1, height: ranks * perRank, dy: 1 / perRank};
    const group = Math.ceil(ranks / maxRows);
    return {first, ranks, split: false, perRank: 1, group, height: Math.ceil(ranks / group), dy: group};
  }

  // Lane numbers by row and column; null where nothing is.
  function cells(line, shape, shownLanes, numLanes, [from, to]) {
    const width = (to - from) / numColumns;
    const time = new Float32Array(numColumns * numLanes);
    const isShown = new Uint8Array(numLanes);
    for (const lane of shownLanes) isShown[lane] = 1;
    const rows = [];
    for (let index = shape.first; index < shape.first + shape.ranks; index += shape.group) {
      time.fill(0);
      const past = Math.min(index + shape.group, line.shown.length);
      for (let each = index; each < past; each++) addRank(line, line.shown[each], isShown, time, from, to, width);
      if (shape.split) rows.push(...shownLanes.map(lane => laneRow(time, lane)), blank());
      else rows.push(busiestRow(time, shownLanes, leastBusy * width * shape.group));
    }
    return rows;
  }

  function addRank(line, rank, isShown, time, from, to, width) {
    for (let i = line.offsets[rank]; i < line.offsets[rank + 1]; i++) {
      const lane = line.laneOf[line.name[i]];
      const begin = Math.max(line.start[i], from);
      const end = Math.min(line.start[i] + line.seconds[i], to);
      if (!isShown[lane] || begin >= end) continue;
      const share = line.busy[i] / line.seconds[i];
      let column = Math.min(numColumns - 1, Math.floor((begin - from) / width));
      for (let left = from + column * width; column < numColumns && left < end; left = from + ++column * width)
        time[lane * numColumns + column] += share * Math.max(0, Math.min(end, left + width) - Math.max(begin, left));
    }
  }

  const blank = () => new Array(numColumns).fill(null);

  function laneRow(time, lane) {
    return blank().map((_, column) => (time[lane * numColumns + column] > 0 ? lane : null));
  }

  function busiestRow(time, shownLanes, least) {
    return blank().map((_, column) => {
      let best = null;
      let most = 0;
      for (const lane of shownLanes) {
        const busy = time[lane * numColumns + column];
        if (busy > most) [best, most] = [lane, busy];
      }
      return most >= least ? best : null;
    });
  }

  return {grid, cells, numColumns};
})();
