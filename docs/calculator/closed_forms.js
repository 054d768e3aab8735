/* What can be said without a planner: work before balancing, and memory. The planner's figures for the same are equal. */
"use strict";

const UNITS = {k: 2 ** 10, m: 2 ** 20, g: 2 ** 30};
const SHOWN_MODES = ["none", "selective", "full", "offload"];

/** Parse a whole number as people type it: 128k, 64_000. */
function parsedCount(field, text) {
  const found = /^(\d+(?:_\d+)*)((?:\.\d+[kmg])|[kmg]?)$/i.exec(text);
  const [, whole, rest] = found ?? [], unit = rest?.match(/[kmg]/i)?.[0].toLowerCase();
  const value = found && +`${whole.replaceAll("_", "")}${rest.replace(/[kmg]/i, "")}` * (UNITS[unit] ?? 1);
  if (!value || !Number.isInteger(value)) throw new Error(`${field} is '${text}'; give a whole number of at least 1`);
  return value;
}

/** Causal pairs of each rank, documents in order and equal tokens per rank; the last document is cut. */
function pairsInOrder(lengths, ranks, tokensPerRank) {
  const pairs = new Array(ranks).fill(0), upTo = (stop) => 0.5 * stop * (stop + 1);
  let at = 0;
  for (const length of lengths) {
    for (let start = 0; start < length && at < ranks * tokensPerRank;) {
      const rank = Math.floor(at / tokensPerRank), stop = Math.min(length, start + (rank + 1) * tokensPerRank - at);
      pairs[rank] += upTo(stop) - upTo(start);
      at += stop - start;
      start = stop;
    }
  }
  return pairs;
}

/** Memory of a GPU, as `distca simulate` counts it for equal tokens per rank and 1F1B, without exchange buffers. */
function memoryModes({layer, end, kept}, layers, stages, data, microBatches, tokens, modes) {
  const each = Math.floor(layers / stages), left = layers % stages;
  return modes.map((recompute) => {
    const found = {recompute, states: 0, activations: 0, total: 0};
    for (let stage = 0; stage < stages; stage++) {
      const here = each + (stages - 1 - left <= stage && stage < stages - 1 ? 1 : 0);
      const parameters = here * layer + (stage === 0 ? end : 0) + (stage === stages - 1 ? end : 0);
      const states = parameters * (2 + 4 / (microBatches === 1 ? data : 1)) + parameters * 12 / data;
      const live = Math.min(stages - stage, microBatches);
      const activations = recompute === "offload" ? tokens * (2 * kept.offload + kept.none)
        : kept[recompute] * here * tokens * live + tokens * (kept.none - kept[recompute]);
      if (states + activations > found.total) Object.assign(found, {states, activations, total: states + activations});
    }
    return found;
  });
}

const gcd = (a, b) => (b ? gcd(b, a % b) : a);

/** Sequences of a step by default: each data rank gets about 64K tokens of a micro-batch, and halves divide evenly. */
function defaultSequences(context, data, microBatches) {
  const half = 2 * data, unit = microBatches * half / gcd(context, half);
  const rounded = Math.round(data * 65536 / context);
  return Math.ceil(Math.max(1, microBatches * rounded) / unit) * unit;
}

function closedForms(question, {models, memory}) {
  try {
    const [gpus, tp, stages, ep] = ["gpus", "tp", "pp", "ep"].map((name) => parsedCount(name, question[name]));
    if (gpus % (tp * stages)) throw new Error(`gpus is ${gpus}, not a multiple of tp ${tp} times pp ${stages}`);
    const model = models[question.model], costs = model.tp[tp], capacity = memory[question.cluster];
    if (!costs) throw new Error(`tp is ${tp}, which does not divide the heads of ${question.model}`);
    if (ep > 1) throw new Error("ep needs the planner; run the commands below");
    if (!/^[\d_,.kmg]+$/i.test(question.source)) throw new Error("A file or a sampler needs the planner; run the commands below, or type lengths.");
    const lengths = question.source.split(",").map((text) => parsedCount("a length", text));
    const data = gpus / (tp * stages), total = lengths.reduce((sum, one) => sum + one, 0);
    const row = question.tokens_per_rank ? parsedCount("tokens_per_rank", question.tokens_per_rank) : Math.floor(total / data);
    if (!row || row * data > total) throw new Error(`${total} tokens do not fill ${data} ranks${row ? ` of ${row}` : ""}`);
    const pairs = pairsInOrder(lengths, data, row), mean = pairs.reduce((sum, one) => sum + one, 0) / data;
    const longest = Math.max(...lengths), rounded = Math.floor(longest / 128) * 128 || longest;
    const context = question.context ? parsedCount("context", question.context) : Math.min(131072, rounded);
    const microBatches = stages === 1 ? 1 : 2 * stages, sequences = defaultSequences(context, data, microBatches);
    const tokens = context * (sequences / microBatches) / data, work = Math.max(...pairs) / mean;
    const modes = memoryModes(costs, model.layers, stages, data, microBatches, tokens,
      question.recompute === "auto" ? SHOWN_MODES : [question.recompute]);
    return {
      verdict: `The slowest rank does ${work.toFixed(2)}× the mean attention work. What balancing makes of it, its bytes and `
        + "its gain need the planner, which this page was built without: run the commands below.",
      ranks: data, work_max_over_mean_before: work, work_max_over_mean: null, bytes_total: null, bytes_between_nodes: null, limit: null,
      source: "closed forms", pool: `${data} ranks of ${row.toLocaleString("en")} tokens, ${lengths.length} documents`,
      placement: "given", note: "", batches: null, work_before: pairs.map((one) => one / mean), work_after: [],
      fit: {capacity, gpu: question.cluster, modes, refusal: null, context, sequences, micro_batches: microBatches},
    };
  } catch (error) {
    return {error: error.message};
  }
}
