// Compute the cases of site/golden.py again: node site_calculators.js CALC_FOLDER GOLDEN_FOLDER
// prints the results as JSON, in the order of golden.json, for test_site_calculators.py to compare.
"use strict";
const path = require("path"), fs = require("fs");
const [calc, folder] = process.argv.slice(2).map((name) => path.resolve(name));
const [schedules, rings, strategies] = ["schedules", "rings", "strategies"].map(
  (name) => require(path.join(calc, `${name}.js`)));
const presets = require(path.join(folder, "presets.js"));
const golden = JSON.parse(fs.readFileSync(path.join(folder, "golden.json")));

function schedule_of(name, p, m, v, backward) {
  const schedule = schedules.build(name, p, m, v);
  const spans = schedules.simulate(schedule, schedules.durations(name, v, backward));
  const row = (span) => [...Object.values(span.instruction), span.start, span.end];
  const ranks = schedule.map((_, rank) => rank);
  return {
    orders: schedule.map((rank) => rank.map((i) => schedules.name_of(i, p)).join(" ")),
    spans: spans.map((rank) => rank.map(row)),
    duration: schedules.span_of(spans)[1],
    bubble: schedules.bubble(spans),
    held: schedule.map((rank) => schedules.peak_activations(rank, v)),
    bubble_formula: schedules.bubble_formula(name, p, m, v, backward),
    peak_formula: ranks.map((rank) => schedules.peak_formula(name, rank, p, m, v)),
  };
}

function ring_of(collective, name, ranks) {
  const { messages, seen } = rings.run(collective, name, ranks);
  return { messages: messages.map((message) => message.slice(0, 4)), seen };
}

function time_of(collective, name, ranks, size, alpha, rate) {
  const [steps, sent, in_a_step] = rings.theory_of(collective, name, ranks);
  const seconds = rings.predict({ alpha, rate }, steps, in_a_step * size);
  const busbw_gb_s = rings.BUS_FACTOR[collective](ranks) * rings.gb_per_s(size, seconds);
  return { steps, sent, in_a_step, seconds, busbw_gb_s };
}

function strategy_of({ preset, plan, zero, own, way }) {
  const units = strategies.units_of(presets.models[preset]);
  const by_shards = [1, 3, 8, 64].map((n) => [n, strategies.unit_weights(units, n)]);
  return {
    units: Object.fromEntries(by_shards),
    sent: strategies.sent_per_weight(plan, own.at(-1) / plan.weights),
    held: strategies.held_per_weight(way, plan.precision, plan.ranks),
    whole: strategies.whole_at_once(plan, own),
    zero: strategies.sent_by_zero(...zero),
  };
}

function weigh_of({ preset, ranks }) {
  const rows = {};
  for (const precision of ["32-true", "bf16-mixed"]) {
    for (const row of strategies.weigh(presets.models[preset], precision, ranks)) {
      rows[`${row.way}_${precision}_gib`] = row.sum;
    }
  }
  return rows;
}

const WORK = {
  schedules: (c) => schedule_of(...c.case),
  rings: (c) => ring_of(...c.case),
  times: (c) => time_of(...c.case),
  strategies: strategy_of,
  weigh: weigh_of,
};
const found = {};
for (const [kind, cases] of Object.entries(golden)) {
  found[kind] = cases.map((one) => {
    try {
      return { result: WORK[kind](one) };
    } catch (error) {
      if (error instanceof schedules.UsageError) return { refused: error.message };
      throw error;
    }
  });
}
process.stdout.write(JSON.stringify(found));
