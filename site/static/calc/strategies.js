// What DDP, FSDP and ZeRO hold and send: 02-fsdp/fsdp_parts/strategies.py, weigh of fsdp_basics.py
// there, and sent_per_weight of 03-deepspeed/deepspeed_parts/zero_stages.py, for the browser: the
// same names, in the same order. tests/test_site_calculators.py compares both.
const strategies = (() => {
"use strict";

const GIB = 2 ** 30; // bytes

// fsdp_parts/strategies.py

const NAMES = ["full", "grad-op", "hybrid", "none", "hpz"];

function Plan(sharding, weights, precision, micro_batches, ranks, group) {
  return { sharding, weights, precision, micro_batches, ranks, group };
}
const gathered_bytes = (plan) => (plan.precision === "bf16-mixed" ? 2 : 4);

function sent_per_weight(plan, rest) {
  const others = (ranks) => (ranks - 1) / ranks;
  const m = plan.micro_batches, N = plan.ranks, G = plan.group, w = gathered_bytes(plan);
  const again = 1 - rest;
  return {
    none: 2 * 4 * others(N),
    "grad-op": m * (w + 4) * others(N),
    full: m * (w + w * again + 4) * others(N),
    hpz: m * ((w + 4) * others(N) + w * again * others(G)),
    hybrid: m * (w + w * again + 4) * others(G) + ((2 * 4) / G) * others(Math.floor(N / G)),
  }[plan.sharding];
}

function held_per_weight(way, precision, ranks) {
  const w = precision === "bf16-mixed" ? 2 : 4;
  const [weight, gradient, state] = way.startsWith("ZeRO") ? [w, w, 4 + 8] : [4, 4, 8];
  const sharded = { DDP: 0, "ZeRO-1": 1, "ZeRO-2": 2 }[way] ?? 3;
  return [
    sharded === 3 ? weight / ranks : weight,
    sharded >= 2 ? gradient / ranks : gradient,
    sharded >= 1 ? state / ranks : state,
  ];
}

// `units` are lists of shapes here, as units_of returns them.
function unit_weights(units, shards) {
  return units.map((unit) => unit.reduce((total, [rows, columns]) =>
    total + Math.ceil(rows / shards) * (columns || 1), 0) * shards);
}

function whole_at_once(plan, units) {
  if (plan.sharding === "none") return 0;
  const blocks = units.slice(0, -1), rest = units.at(-1);
  const most = [...blocks].sort((a, b) => a - b).slice(-2);
  const least = plan.sharding !== "grad-op" ? most : blocks;
  return gathered_bytes(plan) * (least.reduce((a, b) => a + b, 0) + rest);
}

// The units of fully_shard: each block, and embedding, last norm and head. A vector has 0 columns.
function units_of(config) {
  const D = config.dim, F = config.ffn_dim, table = [config.vocab_size, D];
  const kv = [(D / config.num_heads) * config.num_kv_heads, D];
  const block = [[D, 0], [D, D], kv, kv, [D, D], [D, 0], [F, D], [F, D], [D, F]];
  const rest = [table, [D, 0], ...(config.tied_embeddings ? [] : [table])];
  return [...Array(config.num_layers).fill(block), rest];
}

// zero_stages.py

function sent_by_zero(name, width, accumulate, ranks, all_reduces = false) {
  const reduction = all_reduces ? 2 * width : width;
  const sizes = {
    "stage 0": 2 * width,
    "stage 1": reduction + width,
    "stage 2": accumulate * reduction + width,
    "stage 3": accumulate * 3 * width,
  };
  return sizes[name] * ((ranks - 1) / ranks);
}

// fsdp_parts/fsdp_basics.py

const MAX_LIVE = 10 ** 9; // weights that ZeRO-3 keeps gathered: stage3_max_live_parameters

function weigh(config, precision, ranks) {
  const units = unit_weights(units_of(config), 1);
  const weights = units.reduce((a, b) => a + b, 0);
  const plan = (name) => Plan(name, weights, precision, 1, ranks, ranks);
  const copied = precision === "bf16-mixed" ? weights - config.vocab_size * config.dim : 0;
  const whole = {
    DDP: 2 * copied,
    "ZeRO-1": 0,
    "ZeRO-2": 0,
    "ZeRO-3": gathered_bytes(plan("full")) * Math.min(weights, MAX_LIVE),
    "FSDP grad-op": whole_at_once(plan("grad-op"), units),
    "FSDP full": whole_at_once(plan("full"), units),
  };
  return Object.entries(whole).map(([way, most]) => {
    const held = held_per_weight(way, precision, ranks).map((b) => (weights * b) / GIB);
    held.push(most / GIB);
    return { way, held, sum: held.reduce((a, b) => a + b, 0) };
  });
}

// Bytes that a rank sends in a step of m micro-batches, by weigh's names.
function sent_by(way, config, precision, m, ranks) {
  const units = unit_weights(units_of(config), 1);
  const weights = units.reduce((a, b) => a + b, 0);
  const stage = { "ZeRO-1": "stage 1", "ZeRO-2": "stage 2", "ZeRO-3": "stage 3" }[way];
  const width = precision === "bf16-mixed" ? 2 : 4;
  if (stage) return weights * sent_by_zero(stage, width, m, ranks);
  const sharding = { DDP: "none", "FSDP grad-op": "grad-op", "FSDP full": "full" }[way];
  const plan = Plan(sharding, weights, precision, m, ranks, ranks);
  return weights * sent_per_weight(plan, units.at(-1) / weights);
}

return {
  NAMES, Plan, sent_per_weight, held_per_weight, unit_weights, whole_at_once, units_of,
  sent_by_zero, weigh, sent_by,
};
})();
if (typeof module !== "undefined") module.exports = strategies;
