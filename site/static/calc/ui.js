// The calculators' page: reads the forms, draws what schedules.js, layout.js, rings.js and
// strategies.js compute, and keeps the inputs in the address. It holds no formula and no constant of
// the models: models, rates, defaults and words are in presets.js, which site/golden.py writes.
(() => {
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const CONFIG = "config.json"; // the choice of `model` for a pasted one
const $ = (id) => document.getElementById(id);
const form_of = (id) => $(`${id}-form`); // a heading has its own name for an id

// Each number links to the page that derives it: the table at the page's end has the links.
const SOURCES = Object.fromEntries(
  [...document.querySelectorAll("#where-the-numbers-come-from a.reference")].map((a) =>
    [a.textContent, a.getAttribute("href")]));

// elements

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}
const h = (name, attributes = {}, ...children) =>
  fill(document.createElement(name), attributes, children);
const s = (name, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, name), attributes, children);
const source = (name, text) => h("a", { href: SOURCES[name] }, text);

// numbers as Python's f"{x:,.1f}" and f"{x:g}" print them

const fixed = (value, digits) =>
  value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const general = (value) => String(Number(value.toPrecision(6)));
const gib = (bytes) => `${fixed(bytes / layout.GIB, 1)} GiB`;
const share = (part) => layout.percent(part, 1);
function duration(seconds) {
  const [unit, name] = seconds < 1e-3 ? [1e-6, "us"] : seconds < 1 ? [1e-3, "ms"] : [1, "s"];
  return `${Number((seconds / unit).toPrecision(3))} ${name}`;
}
const number = (text, value) => h("td", { class: "number", "data-value": value }, text);
const exact = (text, value, key) => h("span", { "data-value": value, "data-key": key }, text);

function table(caption, headers, rows) {
  const kind = (i) => rows[0].cells[i - 1]?.getAttribute("class"); // a column is what its cells are
  const heads = headers.map((head, i) => h("th", { scope: "col", class: kind(i) }, head));
  const body = rows.map(({ name, cells, kind = null }) =>
    h("tr", { class: kind }, h("th", { scope: "row" }, name), cells));
  const inner = h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, heads)),
    h("tbody", {}, body));
  const label = [caption].flat().map((part) => part.textContent ?? part).join("");
  return h("div", { class: "calc-scroll", tabindex: "0", role: "region", "aria-label": label }, inner);
}
const words = (text) => h("td", {}, text);
const swatch = (color) => h("span", { class: "calc-swatch", style: `background:${color}` });

function template(text, values) {
  return text.replace(/\{(\w+)(:\.4g)?\}/g, (_, name, short) =>
    short ? String(Number(values[name].toPrecision(4))) : String(values[name]));
}

// One bar of parts, with marks at some of its places.
function bar(parts, marks, label) {
  const whole = Math.max(...marks.map((mark) => mark.at), parts.reduce((a, b) => a + b.size, 0));
  const place = (value) => `${(100 * value) / whole}%`;
  let start = 0;
  const boxes = parts.filter((part) => part.size > 0).map((part) => {
    const box = s("rect", { x: place(start), y: 18, width: place(part.size), height: 30, fill: part.color },
      s("title", {}, `${part.name}: ${part.text}`));
    start += part.size;
    return box;
  });
  const lines = marks.flatMap((mark, i) => {
    const anchor = mark.at > whole / 2 ? "end" : "start";
    const y = i % 2 ? 64 : 12;
    return [
      s("line", { x1: place(mark.at), x2: place(mark.at), y1: 14, y2: 52, stroke: "currentColor",
        "stroke-width": 2, "stroke-dasharray": i % 2 ? null : "4 3" }),
      s("text", { x: place(mark.at), y, "text-anchor": anchor }, mark.name),
    ];
  });
  return s("svg", { role: "img", "aria-label": label, height: marks.length ? 70 : 54 }, boxes, lines);
}

// forms: one entry of the address for each input that is not at its default

const FORMS = {};

function options(select, choices) {
  select.replaceChildren(...choices.map(([value, text]) => h("option", { value }, text ?? value)));
}

function define(id, defaults, update) {
  const form = form_of(id);
  FORMS[id] = { form, defaults, update };
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    set(id, {});
    changed(id);
  });
  form.addEventListener("input", (event) => {
    const other = event.target.dataset.for;
    if (other) form.elements[other].value = event.target.value;
    changed(id);
  });
  const link = form.querySelector("[data-do=link]");
  if (link) link.addEventListener("click", () => copy(link, id));
}

function set(id, values) {
  const { form, defaults } = FORMS[id];
  for (const [name, value] of Object.entries({ ...defaults, ...values })) {
    if (form.elements[name]) form.elements[name].value = value ?? "";
  }
}

function read(id) {
  const { form, defaults } = FORMS[id], values = {};
  for (const name of Object.keys(defaults)) {
    const input = form.elements[name], text = input.value.trim();
    if (input.type !== "number") values[name] = text || null;
    else values[name] = text === "" && !input.validity.badInput ? null : Number(text);
  }
  return values;
}

// What argparse refuses: a number that is missing, not whole or out of its range.
function refuse_numbers(id) {
  const { form, defaults } = FORMS[id];
  for (const name of Object.keys(defaults)) {
    const input = form.elements[name];
    if (input.type !== "number") continue;
    const whole = input.step === "1";
    const range = `a ${whole ? "whole " : ""}number ${whole ? `from ${input.min}` : "above 0"}`;
    const limits = range + (input.max ? ` to ${input.max}` : "");
    const missing = input.value === "" && defaults[name] !== null;
    if (missing || !input.validity.valid || (!whole && Number(input.value) <= 0)) {
      throw new layout.UsageError(`${label_of(input)}: must be ${limits}`);
    }
  }
}

function state_of(id) {
  const { form, defaults } = FORMS[id];
  return Object.entries(defaults)
    .filter(([name, value]) => form.elements[name].value !== String(value ?? ""))
    .filter(([name]) => name !== "config" || form.elements.model.value === CONFIG)
    .map(([name]) => [`${id}.${name}`, form.elements[name].value]);
}

const written = (entries) => "#" + new URLSearchParams(entries).toString();

function changed(id) {
  const entries = Object.keys(FORMS).flatMap(state_of);
  history.replaceState(null, "", entries.length ? written(entries) : location.pathname + location.search);
  show(id);
}

function show(id) {
  const { form, update } = FORMS[id];
  for (const slider of form.querySelectorAll("[data-for]")) {
    slider.value = form.elements[slider.dataset.for].value;
  }
  update();
}

async function copy(button, id) {
  const address = location.href.split("#")[0] + written(state_of(id));
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(address);
    button.textContent = "Copied";
  } catch {
    prompt("The link:", address); // no clipboard over file:// in some browsers
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

function from_address() {
  const entries = [...new URLSearchParams(location.hash.slice(1))].filter(([key]) => key.includes("."));
  const values = {};
  for (const [key, value] of entries) {
    const [id, name] = key.split(".");
    if (FORMS[id] && name in FORMS[id].defaults) (values[id] ||= {})[name] = value;
  }
  for (const id of Object.keys(FORMS)) set(id, values[id] || {});
  for (const id of Object.keys(FORMS)) show(id);
  return Object.keys(values)[0];
}

function attempt(where, work) {
  const target = $(where);
  try {
    target.replaceChildren(...work().filter(Boolean));
  } catch (error) {
    if (!(error instanceof layout.UsageError)) throw error;
    target.replaceChildren(h("p", { class: "calc-error", role: "alert" }, error.message));
  }
}

// What a choice in a select without a name fills in, and which one the numbers are of.
function filler(form, kind, choices) {
  const select = form.querySelector(`[data-fill=${kind}]`);
  options(select, [...Object.keys(choices).map((name) => [name]), ["", "your own"]]);
  select.addEventListener("input", () => {
    for (const [name, value] of Object.entries(choices[select.value] || {})) {
      form.elements[name].value = value;
    }
  });
  return () => {
    const same = ([, values]) => Object.entries(values).every(([name, value]) =>
      Number(form.elements[name].value) === value);
    select.value = (Object.entries(choices).find(same) || [""])[0];
  };
}

// (a) what fits

const PARTS = {};
["weights", "gradients", "optimizer", "activations", "logits", "copies"].forEach((part, i) => {
  PARTS[part] = presets.part_colors[i];
});
const STEP = {};
["compute", ...layout.AXES, "bubble"].forEach((part, i) => { STEP[part] = presets.part_colors[i]; });

function plan_of() {
  refuse_numbers("plan");
  const args = read("plan");
  args.reduce_bytes = presets.reduce_bytes[args.reduce_bytes];
  args.config = args.model === CONFIG
    ? layout.config_of(args.config || "{}", presets.hf_shape) : presets.models[args.model];
  return args;
}

function command_of(args) {
  if (args.model === CONFIG) return null;
  const flags = Object.entries(presets.flags)
    .filter(([name, value]) => args[name] !== value && args[name] !== null)
    .map(([name]) => ` --${name.replaceAll("_", "-")} ${args[name]}`);
  return h("p", { class: "calc-command" }, "The same by the script: ",
    h("code", {}, `python 05-advanced/combining.py${flags.join("")}`));
}

function describe_memory(job, prediction, cluster) {
  const named = layout.words_of(job, prediction);
  const held = Object.entries(prediction.memory).filter(([, size]) => size);
  const parts = held.map(([name, size]) => ({ name, size, text: gib(size), color: PARTS[name] }));
  const marks = [
    { at: prediction.memory_limit, name: `usable: ${gib(prediction.memory_limit)}` },
    { at: cluster.gpu_memory_gib * layout.GIB, name: `a GPU: ${general(cluster.gpu_memory_gib)} GiB` },
  ];
  const label = `Memory: ${parts.map((part) => `${part.name} ${part.text}`).join(", ")}`;
  const rows = parts.map(({ name, size, text, color }) => ({
    name: [swatch(color), source("layouts", name)],
    cells: [words(template(presets.holds[name], named)), number(text, size)],
  }));
  const total = number(`${fixed(prediction.memory_gib, 1)} GiB`, prediction.memory_gib);
  rows.push({ name: "sum", cells: [words(""), total], kind: "total" });
  const caption = `Held by a GPU of stage ${prediction.stage}`;
  return [bar(parts, marks, label), table(caption, ["part", "what", "memory"], rows)];
}

function describe_step(prediction) {
  const spent = Object.entries(prediction.seconds).filter(([, seconds]) => seconds > 0);
  const parts = spent.map(([name, size]) => ({
    name, size, text: `${fixed(size, 3)} s`, color: STEP[name],
  }));
  const label = `A step: ${parts.map((part) => `${part.name} ${part.text}`).join(", ")}`;
  const rows = parts.map(({ name, size, text, color }) => ({
    name: [swatch(color), source(name === "bubble" ? "schedules" : "layouts", name)],
    cells: [number(text, size), number(share(size / prediction.step_s), size / prediction.step_s)],
  }));
  const total = [number(`${fixed(prediction.step_s, 3)} s`, prediction.step_s), number("100%", 1)];
  rows.push({ name: "step", cells: total, kind: "total" });
  return [bar(parts, [], label),
    table("A step's parts: an axis counts while nothing computes", ["part", "seconds", "share"], rows)];
}

function describe_traffic(job, prediction) {
  const named = layout.words_of(job, prediction);
  const rows = Object.entries(prediction.traffic).filter(([, each]) => each.size > 1);
  if (!rows.length) return h("p", {}, "One GPU sends nothing.");
  const seconds = (each) => ["seconds", "behind_s", "exposed_s"].map((name) =>
    number(`${fixed(each[name], 3)} s`, each[name]));
  const cells = rows.map(([axis, each]) => ({
    name: source("layouts", `${axis} ${each.size}`),
    cells: [
      words(presets.splits[axis]),
      h("td", {}, source("links", `${each.link}, ${general(each.rate_gb_s)} GB/s`)),
      number(`${fixed(each.layer_bytes / 1e6, 1)} MB`, each.layer_bytes),
      number(`${fixed(each.step_bytes / 1e9, 1)} GB`, each.step_bytes),
      ...seconds(each),
    ],
  }));
  const says = rows.map(([axis]) => h("li", {}, `${axis}: ${template(presets.sends[axis], named)}`));
  const headers = ["axis", "splits", "link", "per layer", "per step", "takes", "beside", "exposed"];
  return [table("Sent by a GPU, by axis", headers, cells), h("ul", {}, says)];
}

function describe_template(job, prediction) {
  const parts = layout.of_the_template(job, prediction.layout, prediction.stage);
  const held = Object.values(parts).reduce((a, b) => a + b, 0);
  return h("p", {}, source("trust", "hybrid_parallelism.py"), " would hold ",
    exact(gib(held), held / layout.GIB, "template_gib"), ".");
}

let shown_layout = null;

function show_plan() {
  const form = form_of("plan");
  for (const label of form.querySelectorAll("[data-when]")) {
    label.hidden = form.elements.model.value !== CONFIG;
  }
  name_cluster();
  shown_layout = null;
  attempt("plan-result", () => {
    const args = plan_of(), [job, cluster] = layout.read_job(args);
    const found = layout.predict_all(args, job, cluster), one = found[0];
    shown_layout = one.layout;
    const room = [exact(fixed(one.memory_gib, 1), one.memory_gib, "memory_gib"), " of ",
      `${fixed(one.memory_limit / layout.GIB, 1)} GiB`];
    const reserve = ` (${general(cluster.gpu_memory_gib)} less ${layout.percent(layout.RESERVE)} in reserve)`;
    const weights = layout.num_parameters(args.config);
    const micro = `${job.micro_batch_size} x ${layout.micro_batches(job, one.layout)} micro-batches`;
    return [
      h("p", { class: "calc-verdict" }, one.fits ? "fits: " : "DOES NOT FIT: ", room, reserve, "; ",
        exact(`${fixed(one.step_s, 2)} s`, one.step_s, "step_s"), " a step, ",
        exact(fixed(one.tflops, 0), one.tflops, "tflops"), " TFLOP/s per GPU"),
      h("p", {}, exact(fixed(weights, 0), weights, "weights"), " weights; ",
        h("strong", {}, layout.text_of(one.layout)),
        `, sharding ${one.layout.sharding}, recompute ${one.layout.recompute}; global batch `,
        `${job.global_batch_size} = ${micro} x dp ${one.layout.dp}`,
        found.length > 1 ? `; the best of ${fixed(found.length, 0)} layouts` : ""),
      ...describe_memory(job, one, cluster),
      ...describe_step(one),
      ...[describe_traffic(job, one)].flat(),
      describe_template(job, one),
      command_of(args),
    ];
  });
  clearTimeout(show_plan.later);
  show_plan.later = setTimeout(show_choice, 120); // lists of layouts take longer than one of them
}

// (b) which strategy

const without_axes = (args) => ({ ...args, tp: null, cp: null, dp: null, pp: null });

function ranked_of(args) {
  const [job, cluster] = layout.read_job(args);
  return layout.predict_all(without_axes(args), job, cluster);
}

function use(chosen) {
  const { tp, cp, dp, pp, sharding, recompute } = chosen;
  Object.entries({ tp, cp, dp, pp, fsdp: sharding, recompute }).forEach(([name, value]) => {
    form_of("plan").elements[name].value = value;
  });
  changed("plan");
  $("plan-result").scrollIntoView();
}

function list_best(args) {
  const found = ranked_of(args), best = new Map();
  for (const one of found) {
    const cut = layout.text_of(one.layout);
    if (!best.has(cut)) best.set(cut, one);
  }
  const fit = found.filter((one) => one.fits).length;
  const rows = [...best.values()].slice(0, presets.shown).map((one) => ({
    name: h("button", { type: "button", onclick: () => use(one.layout),
      title: "Show this layout under What fits" }, layout.text_of(one.layout)),
    kind: one.fits ? null : "unfit",
    cells: [
      words(one.layout.sharding), words(one.layout.recompute),
      number(`${fixed(one.memory_gib, 1)} GiB`, one.memory_gib),
      number(`${fixed(one.step_s, 2)} s`, one.step_s), number(fixed(one.tflops, 0), one.tflops),
      ...[...layout.AXES, "bubble"].map((part) =>
        number(share(one.seconds[part] / one.step_s), one.seconds[part] / one.step_s)),
    ],
  }));
  const kinds = `${fixed(best.size, 0)} ways to cut the axes, ${fixed(found.length, 0)} with sharding`;
  const fitting = ` and recomputation: ${fixed(fit, 0)} fit` + (fit ? "" : " (the smallest:)");
  const caption = [kinds, fitting, "; how to choose: ", source("the rule", "the rule")];
  const headers = ["layout", "sharding", "recompute", "memory", "step", "TFLOP/s", ...layout.AXES,
    "bubble"];
  return table(caption, headers, rows);
}

// One input at a time, halved and doubled.
const VARIED = ["gpus", "network_gb_s", "nvlink_gb_s", "gpu_memory_gib", "seq_len",
  "global_batch_size", "micro_batch_size"];
const label_of = (input) => input.closest("label").firstChild.textContent.trim();

function list_turns(args) {
  const choice = (one) => `${layout.text_of(one.layout)} ${one.layout.sharding} ${one.layout.recompute}`;
  const first = choice(ranked_of(args)[0]);
  const rows = VARIED.flatMap((name) => [0.5, 2].map((factor) => {
    const value = args[name] * factor, input = form_of("plan").elements[name];
    const label = `${label_of(input)}: ${general(value)}`;
    const whole = input.step === "1";
    if (whole && value % 1) return null;
    try {
      const one = ranked_of({ ...args, [name]: value })[0];
      const same = choice(one) === first;
      return { name: label, kind: same ? null : "best", cells: [
        words(same ? "the same" : layout.text_of(one.layout)), words(one.layout.sharding),
        words(one.layout.recompute), number(`${fixed(one.memory_gib, 1)} GiB`, one.memory_gib),
        number(one.fits ? `${fixed(one.step_s, 2)} s` : "does not fit", one.step_s),
      ] };
    } catch (error) {
      if (!(error instanceof layout.UsageError)) throw error;
      return { name: label, cells: [h("td", { colspan: 5 }, error.message)] };
    }
  })).filter(Boolean);
  const headers = ["if it were", "the best layout", "sharding", "recompute", "memory", "step"];
  return table("What would change the choice", headers, rows);
}

function list_changes(args) {
  if (!shown_layout) return null;
  const [job, cluster] = layout.read_job(args);
  const rows = layout.changes(job, cluster, shown_layout).map(([name, one, price]) => {
    const dp = one.traffic.dp;
    return { name: source("changes", name), kind: one.fits ? null : "unfit", cells: [
      number(`${fixed(dp.step_bytes / 1e9, 2)} GB`, dp.step_bytes),
      number(`${fixed(dp.seconds, 3)} s`, dp.seconds), number(`${fixed(dp.exposed_s, 3)} s`, dp.exposed_s),
      number((one.fits ? "" : "too much: ") + `${fixed(one.memory_gib, 1)} GiB`, one.memory_gib),
      number(`${fixed(one.step_s, 3)} s`, one.step_s), words(price),
    ] };
  });
  const headers = ["change", "dp sends", "takes", "exposed", "memory", "step", "price"];
  const caption = `What would make ${layout.text_of(shown_layout)} cheaper`;
  return table(caption, headers, rows);
}

function list_strategies(args) {
  const { precision } = read("strategy"), ranks = args.gpus;
  const [job, cluster] = layout.read_job(args);
  const m = layout.micro_batches(job, layout.Layout(1, 1, ranks, 1));
  if (m < 1) {
    const least = `${args.global_batch_size} sequences per step give ${ranks} replicas no micro-batch`;
    throw new layout.UsageError(`${least} of ${args.micro_batch_size}`);
  }
  const limit = (1 - layout.RESERVE) * cluster.gpu_memory_gib;
  const found = strategies.weigh(args.config, precision, ranks).map((row) => ({
    ...row, fits: row.sum <= limit,
    sent: strategies.sent_by(row.way, args.config, precision, m, ranks),
  }));
  found.sort((a, b) => b.fits - a.fits || (a.fits ? a.sent - b.sent : a.sum - b.sum));
  const rows = found.map((row, i) => ({
    name: source("held", row.way), kind: !row.fits ? "unfit" : i ? null : "best",
    cells: [
      ...[...row.held, row.sum].map((held) => number(fixed(held, 1), held)),
      h("td", { class: "number", "data-value": row.sent },
        source("sent", `${fixed(row.sent / 1e9, 1)} GB`)),
      words(row.fits ? "yes" : "no"),
    ],
  }));
  const caption = `${precision} on ${fixed(ranks, 0)} GPUs, ${m} micro-batches a step: GiB on each`;
  const headers = ["strategy", "weights", "gradients", "optimizer state", "whole in a step", "sum",
    "sent per step", `at most ${fixed(limit, 0)}`];
  return table(caption, headers, rows);
}

function show_choice() {
  attempt("layouts-result", () => {
    const args = plan_of();
    return [list_best(args), list_turns(args), list_changes(args)];
  });
  attempt("strategy-result", () => [list_strategies(plan_of())]);
}

// (c) pipeline

function draw_schedule(spans, title) {
  const p = spans.length, row = 26, left = 52; // pixels
  const [zero, end] = schedules.span_of(spans);
  const least = Math.max(...spans.map((rank) => rank.length)) * 13;
  const width = Math.max($("pipeline-result").clientWidth, left + least);
  const place = (time) => left + ((width - left) * (time - zero)) / (end - zero);
  const boxes = spans.flatMap((rank, y) => rank.map(({ instruction, start, end }) => {
    const { kind, stage, micro_batch } = instruction, x = place(start), wide = place(end) - x;
    const box = s("rect", { x, y: y * row + 1, width: wide, height: row - 3,
      fill: presets.schedule_colors[kind], "fill-opacity": stage < p ? 0.9 : 0.5,
      stroke: "var(--color-background-primary)" }, s("title", {}, schedules.name_of(instruction, p)));
    const name = s("text", { x: x + wide / 2, y: y * row + 17, "text-anchor": "middle",
      class: stage < p ? "on-color" : "on-pale" }, micro_batch);
    return wide > 11 ? [box, name] : [box];
  }));
  const names = spans.map((_, rank) => s("text", { x: 0, y: rank * row + 17 }, `rank ${rank}`));
  const drawn = s("svg", { role: "img", "aria-label": title, height: p * row + 4,
    style: `width:${width}px` }, names, boxes);
  return h("div", { class: "calc-scroll", tabindex: "0", role: "region", "aria-label": title }, drawn);
}

function show_pipeline() {
  attempt("pipeline-result", () => {
    refuse_numbers("pipeline");
    const { schedule: name, stages: p, micro_batches: m, virtual_stages, backward } = read("pipeline");
    const built = {}, left_out = [];
    for (const each of Object.keys(schedules.SCHEDULES)) {
      const v = each === "interleaved" ? virtual_stages : 1;
      try {
        if (each === "zb-h1" && backward > 2) {
          const why = "its halves must not outlast a forward";
          throw new schedules.UsageError(`zb-h1 fits a backward of at most 2: ${why}`);
        }
        const schedule = schedules.build(each, p, m, v);
        const spans = schedules.simulate(schedule, schedules.durations(each, v, backward));
        built[each] = { schedule, spans, v };
      } catch (error) {
        if (!(error instanceof schedules.UsageError)) throw error;
        if (each === name) throw error;
        left_out.push(h("p", {}, `left out: ${error.message}`));
      }
    }
    const rows = Object.entries(built).map(([each, { schedule, spans, v }]) => {
      const idle = schedules.bubble(spans), [, end] = schedules.span_of(spans);
      const ends = [schedule[0], schedule.at(-1)].map((rank) => schedules.peak_activations(rank, v));
      return { name: source("schedules", each), kind: each === name ? "best" : null, cells: [
        number(general(end), end), number(fixed(idle, 3), idle),
        ...ends.map((kept) => number(general(kept), kept)),
      ] };
    });
    const { schedule, spans, v } = built[name], idle = schedules.bubble(spans);
    const most = Math.max(...schedule.map((rank) => schedules.peak_activations(rank, v)));
    const kinds = new Set(schedule.flat().map((i) => i.kind));
    const legend = Object.entries(presets.schedule_legend)
      .filter(([kind]) => kinds.has(kind) || (kind === "B" && kinds.has("I")))
      .map(([kind, text]) => h("li", {}, swatch(presets.schedule_colors[kind]), text));
    const title = `${name} on ${p} ranks, ${m} micro-batches`;
    const flags = ` --schedule ${name} --stages ${p} --micro-batches ${m}` +
      (name === "interleaved" ? ` --virtual-stages ${v}` : "") +
      (backward !== presets.pipeline.backward ? ` --backward ${backward}` : "");
    return [
      h("p", { class: "calc-verdict" }, "bubble ", exact(share(idle), idle, "bubble"),
        " of all ranks' time; at most ", exact(general(most), most, "peak"), " micro-batches kept"),
      h("ul", { class: "calc-legend" }, legend),
      draw_schedule(spans, title),
      table("All schedules of these numbers; time in forwards of one micro-batch",
        ["schedule", "duration", "bubble", "kept by first rank", "by last rank"], rows),
      ...left_out,
      h("details", {}, h("summary", {}, "What each rank does, in order"), h("ul", {}, schedule.map((rank, n) =>
        h("li", {}, `rank ${n}: ${rank.map((i) => schedules.name_of(i, p)).join(" ")}`)))),
      h("p", { class: "calc-command" }, "The same by the script: ",
        h("code", {}, `python 05-advanced/pipeline_schedules.py${flags}`)),
    ];
  });
}

// (d) ring

const part_of = (buffer) => (buffer === 1 ? "the whole buffer" : `1/${Math.round(1 / buffer)} of the buffer`);

const KINDS = Object.fromEntries(presets.kinds.map(([collective, name]) =>
  [`${collective} by ${name}`, [collective, name]]));
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const film = { step: 0, last: 0, timer: null, key: null };

function byte_size(text) {
  const [, count, unit] = /^(\d+)([KMG]?)$/i.exec(text || "") || [];
  const size = count * { "": 1, K: 2 ** 10, M: 2 ** 20, G: 2 ** 30 }[(unit || "").toUpperCase()];
  if (!(size > 0)) throw new layout.UsageError(`size: must be like 8, 4K, 128M or 1G, not '${text ?? ""}'`);
  return size;
}

function cost_of([collective, name], ranks, size, cost) {
  const [steps, sent, in_a_step] = rings.theory_of(collective, name, ranks);
  const seconds = rings.predict(cost, steps, in_a_step * size);
  const busbw = rings.BUS_FACTOR[collective](ranks) * rings.gb_per_s(size, seconds);
  return { steps, sent, in_a_step, seconds, busbw };
}

function show_ring() {
  name_link();
  attempt("ring-result", () => {
    refuse_numbers("ring");
    const { kind, ranks, size: text, alpha_us, rate_gb_s } = read("ring");
    const size = byte_size(text), cost = { alpha: alpha_us / 1e6, rate: rate_gb_s * 1e9 };
    const one = cost_of(KINDS[kind], ranks, size, cost);
    const rows = Object.entries(KINDS).map(([name, pair]) => ({ name, ...cost_of(pair, ranks, size, cost) }))
      .sort((a, b) => a.seconds - b.seconds)
      .map(({ name, steps, sent, seconds, busbw }) => ({
        name: source("collectives", name), kind: name === kind ? "best" : null,
        cells: [
          number(general(steps), steps), number(general(sent), sent), number(duration(seconds), seconds),
          h("td", { class: "number", "data-value": busbw }, source("busbw", `${general(Number(busbw.toPrecision(3)))} GB/s`)),
        ],
      }));
    const reduces = Object.entries(KINDS).filter(([, [collective]]) => collective === KINDS[kind][0]);
    const powers = [];
    for (let n = 2; n <= Math.max(1024, ranks); n *= 2) powers.push(n);
    const by_ranks = powers.map((n) => {
      const times = reduces.map(([, pair]) => cost_of(pair, n, size, cost).seconds);
      const least = Math.min(...times);
      return { name: fixed(n, 0), cells: times.map((time) => {
        const cell = number(duration(time), time);
        if (times.length > 1 && time === least) cell.style.fontWeight = "bold";
        return cell;
      }) };
    });
    const bold = reduces.length > 1 ? "; the fastest is bold" : "";
    return [
      h("p", { class: "calc-verdict" }, exact(duration(one.seconds), one.seconds, "seconds"), " for ",
        exact(general(one.steps), one.steps, "steps"), " steps, each of ",
        exact(part_of(one.in_a_step), one.in_a_step, "in_a_step")),
      table(`${fixed(size, 0)} bytes on ${fixed(ranks, 0)} ranks`,
        ["collective", "steps", "sends x size", "time", "busbw"], rows),
      table(`${fixed(size, 0)} bytes, ${KINDS[kind][0]} by ranks${bold}`,
        ["ranks", ...reduces.map(([, [, name]]) => name)], by_ranks),
    ];
  });
  show_steps();
}

function show_steps() {
  const { kind, ranks } = read("ring");
  const key = `${kind} ${ranks}`;
  if (!(ranks >= 2 && ranks <= presets.ring.largest) || ranks % 1) {
    stop();
    const up_to = `The steps are drawn for 2 to ${presets.ring.largest} ranks.`;
    $("ring-steps").replaceChildren(h("p", {}, up_to));
    film.key = null;
    return;
  }
  if (film.key === key) return;
  stop();
  Object.assign(film, { key, step: 0, ranks, kind, ...rings.run(...KINDS[kind], ranks) });
  film.last = Math.max(...film.messages.map(([at]) => at + 1));
  const button = (id, text, work) => h("button", { type: "button", id, onclick: work }, text);
  $("ring-steps").replaceChildren(
    h("p", { class: "calc-buttons" },
      button("ring-back", "Back", () => go(film.step - 1)), button("ring-step", "Step", () => go(film.step + 1)),
      calm.matches ? null : button("ring-play", "Play", play), button("ring-start", "Start again", () => go(0)),
      h("span", { id: "ring-at", role: "status" })),
    h("div", { class: "calc-ring" }, h("div", { id: "ring-picture" }), h("div", { id: "ring-held" })));
  go(0, true);
}

function stop() {
  clearInterval(film.timer);
  film.timer = null;
  if ($("ring-play")) $("ring-play").textContent = "Play";
}

function play() {
  if (film.timer) return stop();
  if (film.step === film.last) go(0);
  $("ring-play").textContent = "Pause";
  film.timer = setInterval(() => {
    go(film.step + 1, true);
    if (film.step === film.last) stop();
  }, 1200);
  return undefined;
}

function go(step, playing = false) {
  if (!playing) stop();
  film.step = Math.min(film.last, Math.max(0, step));
  const now = film.messages.filter(([at]) => at === film.step - 1);
  const count = now.length === 1 ? "1 message" : `${now.length} messages`;
  const sent = now.length ? `: ${count} of ${part_of(now[0][3])}` : "";
  $("ring-at").textContent = film.step ? `step ${film.step} of ${film.last}${sent}` : `before step 1 of ${film.last}`;
  $("ring-back").disabled = film.step === 0;
  $("ring-step").disabled = film.step === film.last;
  $("ring-picture").replaceChildren(draw_messages(now));
  $("ring-held").replaceChildren(held_now());
}

function draw_messages(now) {
  const radius = 118, middle = 160, dot = film.ranks > 10 ? 13 : 17;
  const point = (rank, r = radius) => {
    const angle = (2 * Math.PI * rank) / film.ranks - Math.PI / 2;
    return [middle + r * Math.cos(angle), middle + r * Math.sin(angle)];
  };
  const arrows = now.flatMap(([, from, to, , parts]) => {
    const [x1, y1] = point(from), [x2, y2] = point(to);
    const long = Math.hypot(x2 - x1, y2 - y1), dx = (x2 - x1) / long, dy = (y2 - y1) / long;
    const bend = 14 + long / 12; // to the left of its way: the answer takes the other side
    const cx = (x1 + x2) / 2 + bend * dy, cy = (y1 + y2) / 2 - bend * dx;
    const start = [x1 + dx * dot, y1 + dy * dot], stop = [x2 - dx * (dot + 4), y2 - dy * (dot + 4)];
    const arrow = s("path", { d: `M${start} Q${cx},${cy} ${stop}`, fill: "none", stroke: "var(--color-brand-primary)",
      "stroke-width": film.seen[0][0][1].length > 1 ? 2 : 4, "marker-end": "url(#ring-head)" });
    const label = film.seen[0][0][1].length > 1
      ? [s("text", { x: (cx + (x1 + x2) / 2) / 2 + 9 * dy, y: (cy + (y1 + y2) / 2) / 2 - 9 * dx + 4,
          "text-anchor": "middle" }, `${parts[0]}`)] : [];
    return [arrow, ...label];
  });
  const ranks = Array.from({ length: film.ranks }, (_, rank) => {
    const [x, y] = point(rank);
    return [s("circle", { cx: x, cy: y, r: dot, fill: "var(--color-background-secondary)", stroke: "currentColor" }),
      s("text", { x, y: y + 4, "text-anchor": "middle" }, rank)];
  });
  const head = s("defs", {}, s("marker", { id: "ring-head", viewBox: "0 0 8 8", refX: 6, refY: 4, orient: "auto",
    markerWidth: 10, markerHeight: 10, markerUnits: "userSpaceOnUse" },
    s("path", { d: "M0,0 L8,4 L0,8 z", fill: "var(--color-brand-primary)" })));
  const says = now.map(([, from, to]) => `${from} to ${to}`).join(", ");
  const label = now.length ? `Messages: ${says}` : "Ranks in a ring, no message yet";
  return s("svg", { role: "img", "aria-label": label, viewBox: "0 0 320 320" }, head, arrows, ranks);
}

function held_now() {
  const every = 2 ** film.ranks - 1, gathers = KINDS[film.kind][0] === "all_gather";
  const held = film.seen.map((of_rank) => of_rank.filter(([at]) => at <= film.step).at(-1)[1]);
  const parts = held[0].length;
  const text = (bits) => {
    if (bits === every && !gathers) return "all";
    const from = [...Array(film.ranks).keys()].filter((rank) => Math.floor(bits / 2 ** rank) % 2);
    if (!from.length) return "-";
    return from.length > 4 ? `${from.length} of ${film.ranks}` : from.join("+");
  };
  const rows = held.map((of_rank, rank) => ({ name: String(rank), cells: of_rank.map((bits) => {
    const count = [...Array(film.ranks).keys()].filter((r) => Math.floor(bits / 2 ** r) % 2).length;
    const full = gathers ? count : count / film.ranks;
    const shade = `background:color-mix(in srgb, var(--color-brand-primary) ${Math.round(30 * full)}%, transparent)`;
    return h("td", { style: shade, "data-value": bits }, text(bits));
  }) }));
  const columns = parts > 1 ? [...Array(parts).keys()].map((part) => `part ${part}`) : ["the buffer"];
  const what = gathers ? "whose part it is" : "whose numbers are in the sum";
  return table(`What each rank holds: ${what}`, ["", ...columns], rows);
}

// start

const PLAN = { ...presets.flags, reduce_bytes: Object.keys(presets.reduce_bytes)[0], config: null };
const plan = form_of("plan").elements;
options(plan.model, [...Object.keys(presets.models).map((name) => [name]), [CONFIG, "a config.json, pasted"]]);
options(plan.reduce_bytes, Object.keys(presets.reduce_bytes).map((name) => [name]));
options(plan.fsdp, [["", "any"], ...layout.SHARDINGS.map((name) => [name])]);
options(plan.recompute, [["", "any"], ...layout.RECOMPUTE.map((name) => [name])]);
options(plan.schedule, ["1f1b", "interleaved", "gpipe"].map((name) => [name]));
const orders = (left) => (left.length ? left.flatMap((axis) =>
  orders(left.filter((other) => other !== axis)).map((rest) => [axis, ...rest])) : [[]]);
options(plan.order, orders(layout.AXES).map((order) => [order.join("-")]));
options(form_of("strategy").elements.precision, presets.precisions.map((name) => [name]));
options(form_of("pipeline").elements.schedule, Object.keys(schedules.SCHEDULES).map((name) => [name]));
options(form_of("ring").elements.kind, Object.keys(KINDS).map((name) => [name]));

const rates = ({ gpus_per_node, ...rest }) => rest;
const name_cluster = filler(form_of("plan"), "clusters", Object.fromEntries(
  Object.entries(presets.clusters).map(([name, cluster]) => [name, rates(cluster)])));
const LINKS = Object.fromEntries(Object.entries(presets.clusters).flatMap(([name, c]) => [
  [`${name}, NVLink`, { alpha_us: c.latency_us, rate_gb_s: c.nvlink_gb_s }],
  [`${name}, network`, { alpha_us: c.latency_us, rate_gb_s: c.network_gb_s }],
]));
const name_link = filler(form_of("ring"), "links", LINKS);

define("plan", PLAN, show_plan);
define("strategy", { precision: presets.precisions[0] }, () => attempt("strategy-result",
  () => [list_strategies(plan_of())]));
define("pipeline", { schedule: "1f1b", ...presets.pipeline }, show_pipeline);
define("ring", { kind: Object.keys(KINDS)[0], ranks: presets.flags.gpus, size: `${presets.ring.mib}M`,
  ...Object.values(LINKS)[0] }, show_ring);

addEventListener("resize", () => {
  clearTimeout(show_pipeline.later);
  show_pipeline.later = setTimeout(show_pipeline, 200);
});
const first = from_address();
if (first) form_of(first).scrollIntoView();
addEventListener("hashchange", () => {
  if (location.hash.includes("=")) from_address(); // else a heading was gone to
});
})();
