/* The page: a form, kept in the address after #, and its answers.

   One worker plans while one types. A second one predicts steps, which takes longer; it starts when the first has
   answered. Each of them works on the latest question only. Without a planner, closed_forms.js answers what it can. */
"use strict";

const byId = (id) => document.getElementById(id);
const form = byId("question");
const FIELDS = ["kind", "lengths", "sampler", "model", "cluster", "gpus", "tp", "pp", "ep", "context", "tokens_per_rank",
  "tolerance", "recompute"];
const OPTIONS = ["model", "cluster", "gpus", "tp", "pp", "ep", "context", "tokens_per_rank", "tolerance", "recompute"];
const MOST_TYPED = 200_000;  // documents, once 4k*96 is written out
const MOST_SHOWN = 60;       // lengths in a command
const PAUSE = 60;            // milliseconds without a key before a question is asked
const REST = 300;            // milliseconds without an edit before a step is predicted
let built, file = null, worker = null, predictor = null, number = 0, timer = 0;

/* ---- workers ---- */

class Latest {
  /** A worker that is given one part of a question at a time; a newer question replaces what waits. */
  constructor(parts, show) {
    Object.assign(this, {parts, show, waiting: null, doing: null, isReady: false});
    this.worker = new Worker("worker.js");
    this.worker.onmessage = ({data}) => this.receive(data);
    this.worker.onerror = (event) => { event.preventDefault(); fail(event.message || "the worker did not start"); };
    if (file) this.give(file);
  }
  give(opened) { this.worker.postMessage({file: opened}); }
  ask(id, question) { this.waiting = {id, question: JSON.stringify(question), left: [...this.parts]}; this.next(); }
  next() {
    if (!this.isReady || this.doing || !this.waiting) return;
    const {id, question, left} = this.waiting, part = left.shift();
    if (!left.length) this.waiting = null;
    this.doing = id;
    this.worker.postMessage({id, question, part});
  }
  receive(data) {
    if (data.failed) return fail(data.failed);
    if (data.ready) { this.isReady = true; return this.next(); }
    const id = this.doing;
    this.doing = null;
    if (id === number) this.show(data.part, data.answer, data.milliseconds);
    this.next();
  }
}

function fail(why) {
  built.planner = null;
  built.why = why.trim().split("\n").at(-1);
  console.error(why);
  worker = predictor = null;
  ask();
}

/* ---- the question ---- */

/** Write out repeats: 4k*3 is 4k,4k,4k. */
function expanded(text) {
  const words = text.replace(/\s*[*×]\s*/g, "*").split(/[\s,;[\]]+/).filter(Boolean);
  const found = [];
  for (const word of words) {
    const [length, times = "1", rest] = word.split("*");
    if (rest !== undefined || !/^\d+$/.test(times)) return words.join(",");  // the planner says what is wrong
    if (found.length + +times > MOST_TYPED) throw new Error(`There are more than ${MOST_TYPED} lengths; give a file of them.`);
    for (let at = 0; at < +times; at++) found.push(length);
  }
  return found.join(",");
}

const values = () => Object.fromEntries(FIELDS.map((name) => [name, form.elements[name].value]));

function currentQuestion() {
  const now = values();
  const source = now.kind === "typed" ? expanded(now.lengths) : now.kind === "sampler" ? now.sampler : file?.name;
  if (!source) return null;
  return {source, ...Object.fromEntries(OPTIONS.map((name) => [name, now[name].trim()])), batches: "1"};
}

function showMaker() {
  set("made-by", built.planner ? `distca ${built.version}, the planner itself, through ${built.planner}. The figures are the commands'.`
    : `distca ${built.version}, closed forms only (${built.why ?? "built without a Python for browsers"}): work before balancing and memory. `
      + "The commands above know the rest.");
}

function ask() {
  clearTimeout(timer);
  showMaker();
  number += 1;
  keepInAddress();
  let question;
  try {
    question = currentQuestion();
  } catch (error) {
    found = {};
    return show("plan", {error: error.message});
  }
  if (!question) {
    found = {};
    refuse(true, "");
    return say(values().kind === "file" ? "Choose a file of lengths." : "Type or paste the lengths of your documents.");
  }
  found = {question};
  byId("found").classList.add("stale");
  if (!built.planner) {
    say("Answered by closed forms: the planner is not here.");
    return show("closed", closedForms(question, built.coefficients));
  }
  worker ??= new Latest(["plan", "fit"], show);
  if (!worker.isReady) showMeanwhile(question);
  say(worker.isReady ? "Planning…" : "Starting the planner…");
  worker.ask(number, question);
}

/** Show what needs no planner while it starts: the answer that came with the page, or the closed forms. */
function showMeanwhile(question) {
  if (JSON.stringify(question) === JSON.stringify(built.first.question)) {
    for (const part of ["plan", "fit"]) show(part, built.first[part]);
    return;
  }
  const closed = closedForms(question, built.coefficients);
  if (!closed.error) show("closed", {...closed, verdict: closed.verdict.split(". ")[0] + ". The planner is starting."});
}

/* ---- answers ---- */

let found = {};
const missing = () => (built.planner ? "the planner is starting" : "needs the planner");
const say = (text) => { byId("status").textContent = text; };
const set = (id, text, className) => {
  byId(id).textContent = text;
  if (className !== undefined) byId(id).className = className;
};
const times = (value) => `${value.toFixed(2)}×`;
const seconds = (value) => (value < 1 ? `${(1e3 * value).toPrecision(3)} ms` : `${value.toPrecision(3)} s`);

function show(part, answer, milliseconds) {
  const wrong = answer.error ?? (answer.fault && `This is a mistake in distca, not in what you gave: ${answer.fault}`);
  const isPlan = part === "plan" || part === "closed";
  byId("error").hidden = !wrong;
  byId("found").classList.remove("stale");
  document.documentElement.dataset.shown = `${part} ${number}`;
  if (wrong) return refuse(isPlan, wrong);
  found[part] = answer;
  if (isPlan) {
    byId("found").hidden = byId("commands").hidden = false;
    showPlan(answer);
    clearStep(part === "plan" ? "being predicted" : missing());
    showCommands(found.question, answer.ranks);
  }
  if (part === "fit" || part === "closed") showFit(part === "closed" ? answer.fit : answer);
  if (part === "predict") showStep(answer);
  if (milliseconds === undefined) return;
  if (part === "predict") say(`Planned and predicted in this page; the prediction took ${seconds(milliseconds / 1e3)}.`);
  if (part === "fit") {
    say("Planned. Predicting a training step…");
    timer = setTimeout(() => (predictor ??= new Latest(["predict"], show)).ask(number, found.question), REST);
  }
}

/** Show what is wrong; without a plan there is nothing else to show, without the rest there is the plan. */
function refuse(isPlan, wrong) {
  set("error", wrong);
  byId("error").hidden = !wrong;
  if (worker) worker.waiting = null;
  if (!isPlan) clearStep("cannot be predicted");
  byId("found").hidden = byId("commands").hidden = isPlan;
  say(isPlan ? "No plan." : "The plan is made; its step cannot be predicted.");
}

function showPlan(plan) {
  set("verdict", plan.verdict);
  set("card-work", plan.work_max_over_mean === null ? times(plan.work_max_over_mean_before)
    : `${times(plan.work_max_over_mean_before)} → ${times(plan.work_max_over_mean)}`);
  set("card-work-note", plan.limit ?? `tolerance ${found.question.tolerance}: at most ${times(1 + +found.question.tolerance)}`);
  set("card-bytes", plan.bytes_total === null ? "–" : bytesText(plan.bytes_total));
  set("card-bytes-note", plan.bytes_total === null ? missing()
    : `at most ${bytesText(plan.bytes_sent_max)} from one rank` + (plan.bytes_between_nodes === null ? ""
      : `; ${bytesText(plan.bytes_between_nodes)} between nodes`));
  set("work-note", [`${plan.source}. ${plan.pool}, ${plan.placement} placement.`, plan.note, plan.batches
    ? `Shown is batch ${plan.batches.shown} of ${plan.batches.count}, the worst before planning.` : ""].filter(Boolean).join(" "));
  const group = drawWork(byId("work-chart"), plan.work_before, plan.work_after);
  if (group > 1) byId("work-note").append(` Each bar is the busiest of ${group} ranks.`);
  const rows = plan.work_before.map((before, rank) => [`rank ${rank}`, times(before),
    ...(plan.work_after.length ? [times(plan.work_after[rank]), bytesText(plan.sent[rank]), bytesText(plan.received[rank])] : [])]);
  fillTable(byId("work-table"), ["", "before", ...(plan.work_after.length ? ["after", "sent", "received"] : [])], rows);
}

function showFit(fit) {
  const best = fit.modes.find(({total}) => total <= fit.capacity);
  set("card-memory", best ? `${bytesText(best.total)}` : "does not fit", best ? "good" : "bad");
  set("card-memory-note", best ? `of ${bytesText(fit.capacity)}, recompute ${best.recompute}` : `${fit.gpu} has ${bytesText(fit.capacity)}`);
  set("memory-note", fit.refusal ?? `What backward may recompute, and what each GPU then holds, without exchange buffers: `
    + stepText(fit),
    fit.refusal ? "hint bad" : "hint");
  drawMemory(byId("memory-chart"), fit.modes.map(({recompute, states, activations, total}) => ({
    name: `recompute ${recompute}`, parts: [["states", states], ["activations", activations]],
    note: total <= fit.capacity ? "" : ", too much"})), fit.capacity);
}

const stepText = (fit) => `${count(fit.sequences, "sequence")} of ${fit.context.toLocaleString("en")} tokens in `
  + `${count(fit.micro_batches, "micro-batch", "micro-batches")}, with equal tokens on every rank.`;

function clearStep(why) {
  set("card-gain", why === "being predicted" ? "…" : "–", "");
  set("card-gain-note", why);
  set("step-note", `${why[0].toUpperCase()}${why.slice(1)}.`);
  byId("step-table").replaceChildren();
}

function showStep(step) {
  const names = Object.keys(step.strategies), ours = step.strategies.distca;
  const [base, baseline] = Object.entries(step.strategies).find(([name]) => name !== "distca") ?? [];
  if (step.verdict) set("verdict", step.verdict);
  if (ours && baseline) {
    const gain = ours.speedup_over[base];
    set("card-gain", times(gain), gain >= 1.005 ? "good" : "");
    set("card-gain-note", `${seconds(ours.step_seconds)} instead of ${seconds(baseline.step_seconds)} with ${base}`);
  } else {
    set("card-gain", "–", "");
    set("card-gain-note", `does not fit: ${step.too_large.join(", ")}`);
  }
  set("step-note", `${step.batches === 1 ? "One batch" : `${step.batches} batches`} drawn from these lengths with seed 0: `
    + `${step.tokens_per_step.toLocaleString("en")} tokens a step. ${base ? `${base} is the best baseline.` : ""} ${step.remarks.replace(/^distca: /, "Note: ")}`);
  fillTable(byId("step-table"), ["", "step", "tokens/s", "idle", "memory of a GPU", "choice"], names.map((name) => {
    const one = step.strategies[name];
    return [name, seconds(one.step_seconds), Math.round(one.tokens_per_second).toLocaleString("en"),
      `${Math.round(100 * one.idle_share)} %`, bytesText(1e9 * one.peak_memory_gb), one.choice];
  }), "distca");
  const parts = (one) => [["states", "states"], ["activations", "activations"], ["gathered", "gathered_kv"], ["buffers", "buffers"]]
    .map(([kind, key]) => [kind, 1e9 * one.memory_gb[key]]);
  const capacity = found.fit.capacity;
  drawMemory(byId("memory-chart"), names.map((name) => ({name, parts: parts(step.strategies[name]), note: ", predicted"})), capacity);
  set("memory-note", `The most that a GPU holds during the predicted step: ${stepText(found.fit)}`, "hint");
  if (ours) {
    set("card-memory", bytesText(1e9 * ours.peak_memory_gb), "good");
    set("card-memory-note", `of ${bytesText(capacity)}` + (baseline ? `; ${bytesText(1e9 * baseline.peak_memory_gb)} with ${base}` : ""));
  }
}

const count = (value, one, several = `${one}s`) => `${value.toLocaleString("en")} ${value === 1 ? one : several}`;

function fillTable(table, head, rows, ours) {
  const row = (cells, tag) => {
    const line = document.createElement("tr");
    cells.forEach((text, at) => {
      const cell = document.createElement(at === 0 && text ? "th" : tag);
      if (cell.tagName === "TH") cell.scope = tag === "th" ? "col" : "row";
      cell.textContent = text;
      line.append(cell);
    });
    if (cells[0] === ours) line.className = "ours";
    return line;
  };
  const top = document.createElement("thead"), body = document.createElement("tbody"), first = row(head, "th");
  first.firstChild.replaceWith(document.createElement("td"));
  top.append(first);
  body.append(...rows.map((cells) => row(cells, "td")));
  table.replaceChildren(top, body);
}

/* ---- commands ---- */

const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

function showCommands({source, ...options}, ranks) {
  const isLong = values().kind === "typed" && source.split(",").length > MOST_SHOWN;
  const data = isLong ? "$(cat lengths.txt)" : quoted(source);
  byId("save").hidden = !isLong;
  if (isLong) byId("save-link").href = `data:text/plain,${source.replaceAll(",", "%0A")}%0A`;
  const flags = (names) => names.filter((name) => options[name] !== "").map((name) => ` --${name.replaceAll("_", "-")} ${quoted(options[name])}`).join("");
  set("command-plan", `distca plan ${data} --ranks ${ranks}${flags(["model", "tp", "cluster", "tokens_per_rank", "tolerance"])}`);
  set("command-simulate", `distca simulate --data ${isLong ? `"$(tr '\\n' , < lengths.txt)"` : data}`
    + `${flags(["model", "gpus", "tp", "pp", "ep", "context", "cluster", "recompute", "tolerance", "batches"])} --strategies wlb_ideal,distca`);
}

async function copy(text, button) {
  const label = button.firstChild, before = label.textContent;
  try {
    await navigator.clipboard.writeText(text);
    label.textContent = "Copied";
  } catch {
    label.textContent = "Select and copy it";
  }
  setTimeout(() => { label.textContent = before; }, 1500);
}

/* ---- the form ---- */

function keepInAddress() {
  const kept = new URLSearchParams(Object.entries(values()).filter(([name, value]) => value !== built.first.form[name]));
  history.replaceState(null, "", kept.size ? `#${kept}` : location.pathname + location.search);
}

function fill(wanted) {
  for (const name of FIELDS) form.elements[name].value = wanted[name] ?? built.first.form[name];
  showKind();
}

function showKind() {
  for (const part of document.querySelectorAll("[data-kind]")) part.hidden = part.dataset.kind !== values().kind;
}

async function open(chosen) {
  if (!chosen) return;
  const name = chosen.name.replace(/[^\w.-]/g, "_").replace(/^[-.]+/, "");
  file = {name: name.includes(".") ? name : `${name}.txt`, bytes: new Uint8Array(await chosen.arrayBuffer())};
  for (const one of [worker, predictor]) one?.give(file);
  form.elements.kind.value = "file";
  showKind();
  ask();
}

function listen() {
  form.addEventListener("input", ({target}) => {
    if (target.id === "file") return open(target.files[0]);
    showKind();
    clearTimeout(timer);
    timer = setTimeout(ask, PAUSE);
  });
  form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  form.addEventListener("reset", (event) => { event.preventDefault(); file = null; byId("file").value = ""; fill({}); ask(); });
  addEventListener("hashchange", () => { fill(fromAddress()); ask(); });
  for (const type of ["dragover", "dragleave", "drop"]) addEventListener(type, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dropping", type === "dragover");
    if (type === "drop") open(event.dataTransfer.files[0]);
  });
  byId("link").addEventListener("click", ({target}) => copy(location.href, target));
  for (const button of document.querySelectorAll("[data-copy]"))
    button.addEventListener("click", () => copy(byId(button.dataset.copy).textContent, button));
  let width = innerWidth;
  addEventListener("resize", () => { if (width !== innerWidth && found.plan) { width = innerWidth; redraw(); } });
}

function redraw() {
  drawWork(byId("work-chart"), found.plan.work_before, found.plan.work_after);
  if (found.fit) showFit(found.fit);
  if (found.predict) showStep(found.predict);
}

const fromAddress = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

async function start() {
  try {
    const response = await fetch("built.json");
    if (!response.ok) throw new Error(response.statusText);
    built = await response.json();
  } catch (error) {
    return say(`This page needs its built.json, over http: run make calculator, then python -m http.server. (${error.message})`);
  }
  const choices = (id, entries) => byId(id).append(...entries.map(([value, text]) => new Option(text, value)));
  choices("model", built.models.map((name) => [name, name]));
  choices("cluster", Object.entries(built.clusters).map(([name, gpu]) => [name, `${name}: ${gpu}`]));
  choices("recompute", built.recompute.map((name) => [name, name]));
  fill(fromAddress());
  listen();
  ask();
}

start();
