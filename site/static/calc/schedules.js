// 05-advanced/pipeline_schedules.py and its part, for the browser: the same names, in the same
// order. tests/test_site_calculators.py compares both on schedules that site/golden.py draws.
const schedules = (() => {
"use strict";

class UsageError extends Error {}

const instruction = (kind, stage, micro_batch) => ({ kind, stage, micro_batch });

function* naive(rank, p, m) {
  for (let k = 0; k < m; k++) {
    yield instruction("F", rank, k);
    yield instruction("B", rank, k);
  }
}

function* gpipe(rank, p, m) {
  for (let k = 0; k < m; k++) yield instruction("F", rank, k);
  for (let k = m - 1; k >= 0; k--) yield instruction("B", rank, k);
}

function* one_f_one_b(rank, p, m) {
  const warmup = Math.min(m, p - rank);
  for (let k = 0; k < warmup; k++) yield instruction("F", rank, k);
  for (let k = 0; k < m; k++) {
    yield instruction("B", rank, k);
    if (k + warmup < m) yield instruction("F", rank, k + warmup);
  }
}

function* interleaved(rank, p, m, v) {
  function turn(number, kind) {
    const group = Math.floor(number / (p * v)), place = number % (p * v);
    let chunk = Math.floor(place / p);
    const k = place % p;
    chunk = kind === "F" ? chunk : v - 1 - chunk;
    return instruction(kind, rank + chunk * p, group * p + k);
  }

  const warmup = Math.min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1);
  for (let number = 0; number < warmup; number++) yield turn(number, "F");
  for (let number = 0; number < m * v; number++) {
    yield turn(number, "B");
    if (number + warmup < m * v) yield turn(number + warmup, "F");
  }
}

function* zb_h1(rank, p, m) {
  const warmup = Math.min(m, p - rank);
  for (let k = 0; k < warmup; k++) yield instruction("F", rank, k);
  for (let k = 0; k < m; k++) {
    yield instruction("I", rank, k);
    if (k >= rank) yield instruction("W", rank, k - rank);
    if (k + warmup < m) yield instruction("F", rank, k + warmup);
  }
  for (let k = m - rank; k < m; k++) yield instruction("W", rank, k);
}

const SCHEDULES = { naive, gpipe, "1f1b": one_f_one_b, interleaved, "zb-h1": zb_h1 };

function build(name, p, m, v = 1) {
  const ranks = Array.from({ length: p }, (_, rank) => rank);
  if (name === "interleaved") {
    if (m % p) {
      const multiple = `${m} micro-batches must be a multiple of ${p} ranks`;
      const turns = "they take turns in groups of that size";
      throw new UsageError(`interleaved: ${multiple}: ${turns}`);
    }
    return ranks.map((rank) => [...interleaved(rank, p, m, v)]);
  }
  if (name === "zb-h1" && m < p) {
    const late = `the last stage has no ${p - 1} weight gradients to put off`;
    throw new UsageError(`zb-h1: ${m} micro-batches are fewer than ${p} stages: ${late}`);
  }
  return ranks.map((rank) => [...SCHEDULES[name](rank, p, m)]);
}

function* needs({ kind, stage, micro_batch }, last_stage) {
  if (kind === "F" && stage > 0) yield instruction("F", stage - 1, micro_batch);
  if (kind === "B" || kind === "I") {
    yield instruction("F", stage, micro_batch);
    if (stage < last_stage) yield instruction(kind, stage + 1, micro_batch);
  }
  if (kind === "W") yield instruction("I", stage, micro_batch);
}

function durations(name, v, backward = 2) {
  const share = name === "interleaved" ? v : 1;
  return { F: 1 / share, B: backward / share, I: backward / 2, W: backward / 2 };
}

function simulate(schedule, times) {
  const key = (i) => `${i.kind} ${i.stage} ${i.micro_batch}`;
  const last_stage = schedule.flat().reduce((most, i) => Math.max(most, i.stage), 0);
  const spans = schedule.map(() => []);
  const ends = new Map();
  let moved = true;
  while (moved) {
    moved = false;
    schedule.forEach((todo, rank) => {
      const done = spans[rank];
      while (done.length < todo.length) {
        const next = todo[done.length];
        const before = [...needs(next, last_stage)].map(key);
        if (!before.every((other) => ends.has(other))) break; // another rank's turn
        const idle_from = done.length ? done[done.length - 1].end : 0;
        const start = Math.max(idle_from, ...before.map((other) => ends.get(other)));
        ends.set(key(next), start + times[next.kind]);
        done.push({ instruction: next, start, end: ends.get(key(next)) });
        moved = true;
      }
    });
  }
  return spans;
}

function bubble(spans) {
  const [start, end] = span_of(spans);
  const whole = end - start;
  const busy = spans.flat().reduce((sum, span) => sum + (span.end - span.start), 0);
  return 1 - busy / (whole * spans.length);
}

function peak_activations(instructions, v = 1) {
  let held = 0, most = 0;
  for (const { kind } of instructions) {
    held += { F: 1, B: -1, I: 0, W: -1 }[kind];
    most = Math.max(most, held);
  }
  return most / v;
}

function name_of({ kind, stage, micro_batch }, p) {
  const chunk = Math.floor(stage / p);
  return `${kind}${micro_batch}` + (chunk ? `.${chunk}` : "");
}

// advanced_parts/pipeline_schedules.py

function bubble_formula(name, p, m, v = 1, backward = 2) {
  if (name === "naive") return (p - 1) / p;
  if (name === "zb-h1") {
    const idle = p - 1;
    return idle / (idle + m * (1 + backward));
  }
  const share = name === "interleaved" ? v : 1;
  return (p - 1) / (share * m + p - 1);
}

function peak_formula(name, rank, p, m, v = 1) {
  return {
    naive: 1,
    gpipe: m,
    "1f1b": Math.min(m, p - rank),
    interleaved: Math.min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1) / v,
    "zb-h1": Math.min(m, p),
  }[name];
}

function span_of(spans) {
  const every = spans.flat();
  return [
    every.reduce((least, span) => Math.min(least, span.start), Infinity),
    every.reduce((most, span) => Math.max(most, span.end), -Infinity),
  ];
}

return {
  UsageError, SCHEDULES, build, needs, durations, simulate, bubble, peak_activations, name_of,
  bubble_formula, peak_formula, span_of,
};
})();
if (typeof module !== "undefined") module.exports = schedules;
