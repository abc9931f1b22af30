// 04-nccl-operations/point_to_point.py, its part, and the bus factors of bandwidth_test.py, for the
// browser: the same names, in the same order. A `move` in Python is a `yield` here: it hands over
// what is sent, and returns what arrived. tests/test_site_calculators.py compares both.
const rings = (() => {
"use strict";

const mod = (a, n) => ((a % n) + n) % n;

function* ring_reduce_scatter(parts, rank, ranks) {
  const following = mod(rank + 1, ranks), previous = mod(rank - 1, ranks);
  for (let step = 0; step < ranks - 1; step++) {
    const target = mod(rank - step - 1, ranks);
    const sent = mod(rank - step, ranks);
    const arrived = yield { sent: [sent], to: following, source: previous };
    parts[target] += arrived[0];
  }
}

function* ring_all_gather(parts, rank, ranks) {
  const following = mod(rank + 1, ranks), previous = mod(rank - 1, ranks);
  for (let step = 0; step < ranks - 1; step++) {
    const sent = mod(rank + 1 - step, ranks);
    const arrived = yield { sent: [sent], to: following, source: previous };
    parts[mod(rank - step, ranks)] = arrived[0];
  }
}

function* ring_all_reduce(parts, rank, ranks) {
  yield* ring_reduce_scatter(parts, rank, ranks);
  yield* ring_all_gather(parts, rank, ranks);
}

function* doubling_all_reduce(x, rank, ranks) {
  const power = 2 ** Math.floor(Math.log2(ranks)), every = [...x.keys()];
  if (rank >= power) {
    yield { sent: every, to: rank - power };
    copy(x, yield { source: rank - power });
    return;
  }
  if (rank + power < ranks) add(x, yield { source: rank + power });
  let distance = 1;
  while (distance < power) {
    const peer = rank ^ distance;
    add(x, yield { sent: every, to: peer, source: peer });
    distance *= 2;
  }
  if (rank + power < ranks) yield { sent: every, to: rank + power };
}

function* tree_all_reduce(x, rank, ranks) {
  const every = [...x.keys()], children = [];
  let distance = 1;
  while (distance < ranks && !(rank & distance)) {
    if (rank + distance < ranks) {
      add(x, yield { source: rank + distance });
      children.push(rank + distance);
    }
    distance *= 2;
  }
  if (rank) {
    yield { sent: every, to: rank - distance };
    copy(x, yield { source: rank - distance });
  }
  for (const child of children.reverse()) yield { sent: every, to: child };
}

const add = (x, arrived) => arrived.forEach((value, i) => { x[i] += value; });
const copy = (x, arrived) => arrived.forEach((value, i) => { x[i] = value; });

const ALGORITHMS = {
  ring: ring_all_reduce,
  "recursive doubling": doubling_all_reduce,
  tree: tree_all_reduce,
};
// The two halves of the ring are collectives of their own.
const HALVES = { reduce_scatter: ring_reduce_scatter, all_gather: ring_all_gather };

// nccl_parts/point_to_point.py

function predict(cost, steps, nbytes) {
  return steps * (cost.alpha + nbytes / cost.rate);
}

function theory(name, ranks) {
  const whole = Math.floor(Math.log2(ranks));
  const extra = ranks > 2 ** whole;
  return {
    ring: [2 * (ranks - 1), (2 * (ranks - 1)) / ranks, 1 / ranks],
    "recursive doubling": [whole + 2 * extra, whole + extra, 1],
    tree: [2 * (whole + extra), whole + extra, 1],
  }[name];
}

// Half of the ring's theory: as many steps and bytes less, and the same bytes in a step.
function theory_of(collective, name, ranks) {
  const [steps, sent, in_a_step] = theory(name, ranks);
  return collective === "all_reduce" ? [steps, sent, in_a_step] : [steps / 2, sent / 2, in_a_step];
}

// Watcher and messages_of: a clock of steps travels beside each message. Returns the messages
// [leaves, sender, receiver, share of the buffer], and for each rank what it held, and when: a
// number has the bit r where rank r is in the sum.
function watch(algorithm, held) {
  const ranks = held.length, messages = [], inbox = new Map();
  const state = held.map((x, rank) => {
    const moves = algorithm(x, rank, ranks);
    return { x, moves, move: moves.next().value, clock: 0, sent: false, seen: [[0, [...x]]] };
  });
  const box = (from, to) => {
    const key = from * ranks + to;
    if (!inbox.has(key)) inbox.set(key, []);
    return inbox.get(key);
  };
  for (let moved = true; moved; ) {
    moved = false;
    state.forEach((one, rank) => {
      while (one.move) {
        const { sent, to, source } = one.move, ready = one.clock + (to !== undefined);
        if (to !== undefined && !one.sent) {
          messages.push([one.clock, rank, to, sent.length / one.x.length, sent]);
          box(rank, to).push([ready, sent.map((part) => one.x[part])]);
          one.sent = true;
        }
        let arrived = [0, undefined];
        if (source !== undefined) {
          if (!box(source, rank).length) break; // another rank's turn
          arrived = box(source, rank).shift();
        }
        one.clock = Math.max(ready, arrived[0]);
        one.sent = false;
        one.move = one.moves.next(arrived[1]).value;
        one.seen.push([one.clock, [...one.x]]);
        moved = true;
      }
    });
  }
  messages.sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
  return { messages, seen: state.map((one) => one.seen) };
}

// What each rank holds at the start: its own number, in parts where the algorithm cuts the buffer.
function begun(collective, name, ranks) {
  const parts = name === "ring" ? ranks : 1;
  return Array.from({ length: ranks }, (_, rank) =>
    Array.from({ length: parts }, (_, part) =>
      collective === "all_gather" && part !== (rank + 1) % ranks ? 0 : 2 ** rank));
}

function run(collective, name, ranks) {
  const algorithm = HALVES[collective] || ALGORITHMS[name];
  return watch(algorithm, begun(collective, name, ranks));
}

// bandwidth_test.py, and gb_per_s of nccl_parts/measurement.py

const BUS_FACTOR = {
  all_reduce: (n) => (2 * (n - 1)) / n,
  all_gather: (n) => (n - 1) / n,
  reduce_scatter: (n) => (n - 1) / n,
};
const CLOCK_S = 5e-7;

const gb_per_s = (nbytes, seconds) => nbytes / Math.max(seconds, CLOCK_S) / 1e9;

return { ALGORITHMS, HALVES, predict, theory, theory_of, run, BUS_FACTOR, gb_per_s };
})();
if (typeof module !== "undefined") module.exports = rings;
