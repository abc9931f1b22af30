// Who has what before and after each collective: drawn from buffers that site/golden.py writes, which
// the lesson's own definitions compute.
(() => {
"use strict";

const { $, form_of, h, s, source, options, define, read, refuse_numbers, attempt } = forms;
const CELL = 30, ROW = 26, NAME = 52, GAP = 60; // pixels

function draw_one(name, before, after) {
  const ranks = before.length, most = Math.max(...after.map((own) => own?.length ?? 4));
  const owner = Object.fromEntries(before.flatMap((own, rank) => own.map((number) => [number, rank])));
  const cells = (buffers, left, sums) => buffers.map((own, rank) => own === null
    ? s("text", { x: left, y: rank * ROW + 17, "font-style": "italic" }, "undefined")
    : own.map((number, place) => [
      s("rect", { x: left + place * CELL + 1, y: rank * ROW + 1, width: CELL - 2, height: ROW - 3,
        fill: sums ? "#595959" : presets.owner_colors[owner[number]] }),
      s("text", { x: left + (place + 0.5) * CELL, y: rank * ROW + 17, "text-anchor": "middle",
        class: sums ? "on-sum" : "on-color" }, number),
    ]));
  const right = NAME + ranks * CELL + GAP, middle = (ranks * ROW) / 2;
  const arrow = s("path", { d: `M${right - GAP + 12} ${middle} H${right - 18} m-7 -5 l7 5 l-7 5`,
    fill: "none", stroke: "currentColor" });
  const names = before.map((_, rank) => s("text", { x: 0, y: rank * ROW + 17 }, `rank ${rank}`));
  const said = `${name} on ${ranks} ranks: ` + after.map((own, rank) =>
    `rank ${rank} has ${own?.join(" ") ?? "nothing defined"}`).join("; ");
  const drawn = s("svg", { role: "img", "aria-label": said, height: ranks * ROW,
    style: `width:${right + most * CELL}px` },
    names, cells(before, NAME, false), arrow, cells(after, right, name.includes("reduce")));
  return h("div", { class: "calc-scroll", tabindex: "0", role: "region", "aria-label": name }, drawn);
}

function show_collectives() {
  attempt("collectives-result", () => {
    refuse_numbers("collectives");
    const { ranks, shown } = read("collectives");
    const names = Object.keys(presets.collectives).filter((name) => !shown || name === shown);
    return names.flatMap((name) => {
      const { for: purpose, buffers } = presets.collectives[name];
      return [h("h3", {}, source("who has what", name)), h("p", {}, purpose),
        draw_one(name, ...buffers[ranks])];
    });
  });
}

const { shown } = form_of("collectives").elements;
options(shown, [["", "all eight"], ...Object.keys(presets.collectives).map((name) => [name])]);
define("collectives", { ranks: 3, shown: null }, show_collectives);
})();
