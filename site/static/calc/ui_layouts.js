// The calculators "what fits" and "which strategy": what layout.js and strategies.js compute.
(() => {
"use strict";

const {
  $, form_of, h, s, source, fixed, general, gib, share, number, exact, words, swatch, table,
  options, define, read, label_of, refuse_numbers, changed, attempt, filler,
} = forms;

const CONFIG = "config.json"; // the choice of `model` for a pasted one

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
    ? layout.config_of(args.config || "{}", presets.hf_shape, presets.hf_defaults) : presets.models[args.model];
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
  return table(["What would change the choice by ", source("the rule", "the rule")], headers, rows);
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

const PLAN = { ...presets.flags, reduce_bytes: Object.keys(presets.reduce_bytes)[0], config: null };
const inputs = form_of("plan").elements, named = (names) => names.map((name) => [name]);
options(inputs.model, [...named(Object.keys(presets.models)), [CONFIG, "a config.json, pasted"]]);
options(inputs.reduce_bytes, named(Object.keys(presets.reduce_bytes)));
options(inputs.fsdp, [["", "any"], ...named(layout.SHARDINGS)]);
options(inputs.recompute, [["", "any"], ...named(layout.RECOMPUTE)]);
options(inputs.schedule, named(presets.schedules));
const orders = (left) => (left.length ? left.flatMap((axis) =>
  orders(left.filter((other) => other !== axis)).map((rest) => [axis, ...rest])) : [[]]);
options(inputs.order, named(orders(layout.AXES).map((order) => order.join("-"))));
options(form_of("strategy").elements.precision, named(presets.precisions));

const rates = ({ gpus_per_node, ...rest }) => rest;
const name_cluster = filler(form_of("plan"), "clusters", Object.fromEntries(
  Object.entries(presets.clusters).map(([name, cluster]) => [name, rates(cluster)])));

define("plan", PLAN, show_plan);
define("strategy", { precision: presets.precisions[0] }, () =>
  attempt("strategy-result", () => [list_strategies(plan_of())]));
})();
