// The calculators "what fits" and "which strategy": what the guide's planner answers (tool.js), and
// what strategies.js computes.
(() => {
"use strict";

const {
  $, form_of, h, s, source, fixed, gib, share, number, exact, words, swatch, table, options, define,
  read, refuse_numbers, changed, attempt, copy,
} = forms;

const PASTED = "config.json", SIZES = "sizes"; // choices of `model` that are no preset
const COLORS = ["#77aadd", "#ee8866", "#eedd88", "#44bb99", "#ffaabb", "#bbcc33", "#99ddff",
  "#aaaa00", "#bbbbbb"]; // Paul Tol, light
const form = form_of("plan"), { elements } = form;

// the form: a label for each flag of the planner

const FLAGS = { ...presets.tool.predict, ...presets.tool.plan };

function input_of(name, { kind, choices, default: usual }) {
  const select = (...first) =>
    h("select", { name }, [...first, ...(choices ?? [])].map((choice) => h("option",
      { value: [choice].flat()[0] }, [choice].flat().at(-1))));
  if (name === "model") return select([SIZES, "of sizes, below"], [PASTED, "a config.json, pasted"]);
  if (kind === "switch") return select(["", usual ? "yes" : "no"], ["other", usual ? "no" : "yes"]);
  if (choices) return usual === null ? select(["", ""]) : select();
  if (kind === "text") return h("input", { name, spellcheck: "false" });
  const step = kind === "count" ? "1" : "any";
  return h("input", { name, type: "number", min: step === "1" ? 1 : 0, step });
}

function build_form() {
  const places = [...form.querySelectorAll("[data-flags]")];
  const listed = places.flatMap((place) => place.dataset.flags.split(" "));
  const others = Object.keys(FLAGS).filter((name) => !listed.includes(name));
  for (const place of places) {
    const names = place.dataset.flags === "" ? others : place.dataset.flags.split(" ");
    for (const name of names.filter((each) => FLAGS[each])) {
      const said = h("small", {}, FLAGS[name].help), input = input_of(name, FLAGS[name]);
      const slider = name !== "gpus" ? null : h("input", { type: "range", min: 0, max: 14,
        "data-for": "gpus", "data-base": 2, "aria-label": "GPUs, slider: powers of two" });
      place.append(h("label", {}, h("code", {}, FLAGS[name].flags[0]), said, slider, input));
    }
  }
  options(elements.verb, Object.entries(presets.verbs).map(([verb, text]) => [verb, `${verb}: ${text}`]));
}

// Say what an empty input means: the data sheet's value, or what the flag's help says.
function hint() {
  const sheet = presets.gpus[elements.gpu.value], flags = presets.tool[elements.verb.value];
  for (const name of Object.keys(FLAGS)) {
    const input = elements[name], known = sheet[name];
    input.closest("label").hidden = !flags[name];
    if (!flags[name]) continue;
    const value = typeof known === "object" ? known[elements.precision.value] : known;
    const empty = value ?? flags[name].usual;
    if (input.options?.[0].value === "" && FLAGS[name].kind !== "switch") input.options[0].text = empty;
    else if (!input.options) input.placeholder = empty;
  }
  elements.config.closest("label").hidden = elements.model.value !== PASTED;
  for (const more of form.querySelectorAll("details")) {
    const given = ({ name }) => elements[name].value !== String(DEFAULTS[name] ?? "");
    const inside = [...more.querySelectorAll("[name]")];
    if (elements.model.value === SIZES || inside.some(given)) more.open = true;
  }
}

function argv_of() {
  const verb = elements.verb.value, argv = [verb];
  for (const [name, { flags, kind, default: usual }] of Object.entries(presets.tool[verb])) {
    const value = elements[name].value.trim(), nothing = kind === "switch" ? "" : String(usual ?? "");
    if (name === "model" && value === PASTED) argv.push("--hf-config", PASTED);
    else if (value === nothing || value === "" || (name === "model" && value === SIZES)) continue;
    else if (kind === "switch") argv.push(flags.at(-1));
    else argv.push(flags[0], value);
  }
  return argv;
}

// what is shown

const quoted = (word) => (/^[\w./:=-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);
const to_copy = (text) => h("p", { class: "calc-command" }, h("code", {}, text), " ",
  h("button", { type: "button", onclick: ({ target }) => copy(target, text) }, "Copy"));

// One bar of parts, with a mark at one of its places if it is given.
function bar(parts, mark, label) {
  const whole = Math.max(mark?.at ?? 0, parts.reduce((total, part) => total + part.size, 0));
  const place = (value) => `${(100 * value) / whole}%`;
  let start = 0;
  const boxes = parts.map((part) => {
    const box = s("rect", { x: place(start), y: 18, width: place(part.size), height: 30, fill: part.color },
      s("title", {}, `${part.name}: ${part.text}`));
    start += part.size;
    return box;
  });
  const lines = mark && [
    s("line", { x1: place(mark.at), x2: place(mark.at), y1: 14, y2: 52, stroke: "currentColor",
      "stroke-width": 2, "stroke-dasharray": "4 3" }),
    s("text", { x: place(mark.at), y: 12, "text-anchor": "end" }, mark.name),
  ];
  return s("svg", { role: "img", "aria-label": label, height: 54 }, boxes, lines ?? []);
}

// A bar and its table: all parts that are not 0, and their sum.
function parts_of(values, text_of, mark, caption, from) {
  const named = Object.entries(values).map(([name, size], i) =>
    ({ name, size, text: text_of(size), color: COLORS[i % COLORS.length] }));
  const parts = named.filter((part) => part.size > 0);
  const whole = parts.reduce((total, part) => total + part.size, 0);
  const rows = parts.map(({ name, size, text, color }) => ({
    name: [swatch(color), source(from, name)],
    cells: [number(text, size), number(share(size / whole), size / whole)],
  }));
  rows.push({ name: "sum", cells: [number(text_of(whole), whole), number("100%", 1)], kind: "total" });
  const label = `${caption}: ${parts.map((part) => `${part.name} ${part.text}`).join(", ")}`;
  return [bar(parts, mark, label), table(caption, ["part", "size", "share"], rows)];
}

function describe(one) {
  const { total, limit, ...held } = one.memory_bytes;
  const money = ["days", "dollars"].filter((name) => name in one)
    .map((name) => `, ${fixed(one[name], name === "days" ? 1 : 0)} ${name}`);
  return [
    h("p", { class: "calc-verdict" }, one.fits ? "fits: " : "DOES NOT FIT: ",
      exact(fixed(total / presets.gib, 1), total, "total"), ` of ${gib(limit)}; `,
      exact(`${fixed(one.step_time_s, 3)} s`, one.step_time_s, "step_time_s"), " a step, ",
      exact(fixed(one.model_tflops_per_gpu, 0), one.model_tflops_per_gpu, "model_tflops_per_gpu"),
      " TFLOP/s per GPU, MFU ", exact(share(one.mfu), one.mfu, "mfu"), money),
    h("p", {}, h("strong", {}, one.name), `; ${fixed(one.global_batch, 0)} sequences a step in `,
      `${fixed(one.micro_batches, 0)} micro-batches on each replica`),
    ...parts_of(held, gib, { at: limit, name: `usable: ${gib(limit)}` }, "Held by the fullest GPU", "memory"),
    ...parts_of(one.step_s, (seconds) => `${fixed(seconds, 3)} s`, null,
      "A step: an axis counts by what it adds", "step"),
    ...describe_axes(one.axes ?? {}),
  ];
}

function describe_axes(axes) {
  const seconds = (value) => number(`${fixed(value, 3)} s`, value);
  const rows = Object.entries(axes).map(([name, axis]) => ({
    name: source("axes", `${name} ${axis.ranks}`),
    cells: [
      words(axis.splits), h("td", {}, source("links", axis.link)),
      number(`${fixed(axis.layer_bytes / 1e6, 1)} MB`, axis.layer_bytes),
      number(`${fixed(axis.step_bytes / 1e9, 1)} GB`, axis.step_bytes),
      seconds(axis.seconds), seconds(axis.beside), seconds(axis.exposed),
    ],
  }));
  if (!rows.length) return [];
  const headers = ["axis", "splits", "link", "per layer", "per step", "takes", "beside", "exposed"];
  const said = Object.values(axes).map(({ sends }) => h("li", {}, sends));
  return [table("Sent by a GPU, by axis", headers, rows), h("ul", {}, said)];
}

// Ask for one layout of the list.
function use({ layout }) {
  const usual = [0, 1, "none", "ring"]; // predict's, where nothing is given
  for (const [name, value] of Object.entries(layout)) {
    if (FLAGS[name]?.kind !== "switch" && name in FLAGS && name !== "gpus") {
      const text = [value].flat().join("-"); // the order of ranks is a list
      elements[name].value = usual.includes(value) || text === FLAGS[name].usual ? "" : text;
    }
  }
  elements.verb.value = "predict";
  changed("plan");
  $("plan-result").scrollIntoView();
}

function list(found) {
  const rows = found.plans.map((one, i) => ({
    name: [`${i + 1} `, h("button", { type: "button", title: "Show this layout under What fits",
      onclick: () => use(one) }, one.name)],
    cells: [
      number(gib(one.memory_bytes.total), one.memory_bytes.total),
      number(`${fixed(one.step_time_s, 3)} s`, one.step_time_s),
      number(fixed(one.tokens_per_s_per_gpu, 0), one.tokens_per_s_per_gpu),
      number(share(one.mfu), one.mfu),
    ],
  }));
  const many = `${fixed(found.tried, 0)} layouts looked at, ${fixed(found.fitting, 0)} fit; `;
  const caption = [many, source("the search", "how it chooses")];
  const { plan, commands, remarks, before } = found.launch;
  const item = (text) => h("li", {}, text), template = source("the launch line", "this guide's template");
  return [
    table(caption, ["layout", "memory", "step", "tokens/s", "MFU"], rows),
    h("ul", {}, found.reasons.map(item)),
    plan ? h("p", {}, `${plan} is started by `, template, ":") : null,
    ...commands.map(to_copy),
    h("ul", {}, before.map(item), remarks.map((remark) => item(`but: ${remark}`))),
  ];
}

function list_changes(changes) {
  const rows = changes.map((each) => ({
    name: each.change, kind: each.fits ? null : "unfit",
    cells: [
      number(`${fixed(each.dp_bytes / 1e9, 2)} GB`, each.dp_bytes),
      number(`${fixed(each.dp_takes_s, 3)} s`, each.dp_takes_s),
      number(`${fixed(each.dp_exposed_s, 3)} s`, each.dp_exposed_s),
      number(`${each.fits ? "" : "too much: "}${gib(each.memory_bytes)}`, each.memory_bytes),
      number(`${fixed(each.step_time_s, 3)} s`, each.step_time_s), words(each.price),
    ],
  }));
  const headers = ["change", "dp sends", "takes", "exposed", "memory", "step", "price"];
  return table(["What would change: ", source("changes", "cheaper steps")], headers, rows);
}

function show_answer(argv, { code, out, error }) {
  const line = ["python", tool.SCRIPT, ...argv].map(quoted).join(" ");
  if (code) {
    const said = h("p", { class: "calc-error", role: "alert" }, error.trim());
    $("plan-result").replaceChildren(said, to_copy(line));
    $("layouts-result").replaceChildren();
    return;
  }
  const found = JSON.parse(out), one = found.plans?.[0] ?? found;
  $("plan-result").replaceChildren(...describe(one), h("p", {}, "The same by the script:"), to_copy(line));
  const asked_for_one = "This is one layout: plan, above, lists the best five; --cheaper what would save.";
  $("layouts-result").replaceChildren(...(found.plans ? list(found).filter(Boolean)
    : [found.cheaper ? list_changes(found.cheaper) : h("p", {}, asked_for_one)]));
}

// asked of Python, a moment after the last change

const results = () => [$("plan-result"), $("layouts-result")];
let wanted = null, later = null, clock = null;

function say(text) {
  const begun = Date.now(), status = $("plan-status");
  clearInterval(clock);
  status.hidden = !text;
  if (!text) return;
  const seconds = h("span", { "aria-hidden": "true" });
  status.replaceChildren(`${text} `, seconds);
  clock = setInterval(() => { seconds.textContent = `${Math.round((Date.now() - begun) / 1000)} s`; }, 1000);
}

async function ask(argv, config, key) {
  try {
    const found = await tool.run([...argv, "--json"], config, say, () => key === wanted);
    if (!found || key !== wanted) return; // a newer question stands
    show_answer(argv, found);
  } catch (fault) {
    if (key !== wanted) return;
    show_answer(argv, { code: 1, error: `Python does not start here: ${fault.message}. The script does:` });
  }
  say("");
  for (const place of results()) place.setAttribute("aria-busy", "false");
}

function show_plan() {
  hint();
  const argv = argv_of(), config = elements.model.value === PASTED ? elements.config.value : null;
  const key = JSON.stringify([argv, config]);
  if (key === wanted) return;
  wanted = key;
  for (const place of results()) place.setAttribute("aria-busy", "true");
  clearTimeout(later);
  later = setTimeout(() => ask(argv, config, key), 300);
}

// DDP, FSDP, ZeRO

function list_strategies() {
  refuse_numbers("strategy");
  const { model, precision, gpu, gpus, micro_batches: m } = read("strategy");
  const config = presets.models[model], limit = presets.gpus[gpu].limit_gib;
  const found = strategies.weigh(config, precision, gpus).map((row) => ({
    ...row, fits: row.sum <= limit, sent: strategies.sent_by(row.way, config, precision, m, gpus),
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
  const caption = `${precision} on ${fixed(gpus, 0)} GPUs, ${m} micro-batches a step: GiB on each`;
  const headers = ["strategy", "weights", "gradients", "optimizer state", "whole in a step", "sum",
    "sent per step", `at most ${fixed(limit, 0)}`];
  return table(caption, headers, rows);
}

build_form();
const usual = Object.entries(FLAGS).map(([name, { kind, default: given }]) =>
  [name, kind === "switch" ? null : given]);
const DEFAULTS = { verb: "plan", ...Object.fromEntries(usual), model: presets.model, gpus: 8, config: null };
define("plan", DEFAULTS, show_plan);

const own = form_of("strategy").elements, named = (names) => names.map((name) => [name]);
options(own.model, named(Object.keys(presets.models)));
options(own.gpu, named(Object.keys(presets.gpus)));
options(own.precision, named(presets.precisions));
const STRATEGY = { model: presets.weighed, gpu: DEFAULTS.gpu, gpus: 8, micro_batches: 16,
  precision: presets.precisions[0] };
define("strategy", STRATEGY, () => attempt("strategy-result", () => [list_strategies()]));
})();
