// The calculator "ring": times and steps of what rings.js computes.
(() => {
"use strict";

const {
  $, form_of, h, s, source, fixed, general, number, exact, table, options, define, read,
  refuse_numbers, attempt, filler,
} = forms;

const part_of = (buffer) => (buffer === 1 ? "the whole buffer" : `1/${Math.round(1 / buffer)} of the buffer`);

const KINDS = Object.fromEntries(presets.kinds.map(([collective, name]) =>
  [`${collective} by ${name}`, [collective, name]]));
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const film = { step: 0, last: 0, timer: null, key: null };

function duration(seconds) {
  const [unit, name] = seconds < 1e-3 ? [1e-6, "us"] : seconds < 1 ? [1e-3, "ms"] : [1, "s"];
  return `${Number((seconds / unit).toPrecision(3))} ${name}`;
}

function byte_size(text) {
  const [, count, unit] = /^(\d+)([KMG]?)$/i.exec(text || "") || [];
  const size = count * { "": 1, K: 2 ** 10, M: 2 ** 20, G: 2 ** 30 }[(unit || "").toUpperCase()];
  if (!(size > 0)) throw new schedules.UsageError(`size: must be like 8, 4K, 128M or 1G, not '${text ?? ""}'`);
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
      table([`${fixed(size, 0)} bytes, ${KINDS[kind][0]} by ranks${bold}: `, source("collectives", "how")],
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
  return table([source("collectives", "What each rank holds"), `: ${what}`], ["rank", ...columns], rows);
}

options(form_of("ring").elements.kind, Object.keys(KINDS).map((name) => [name]));
const name_link = filler(form_of("ring"), "links", presets.links);
define("ring", { kind: Object.keys(KINDS)[0], ranks: 8, size: `${presets.ring.mib}M`,
  ...Object.values(presets.links)[0] }, show_ring);
})();
