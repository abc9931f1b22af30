// The calculator "pipeline": draws what schedules.js computes.
(() => {
"use strict";

const {
  $, form_of, h, s, source, fixed, general, share, number, exact, swatch, table, options, define,
  read, refuse_numbers, attempt,
} = forms;

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
    return wide > 4 + 6 * String(micro_batch).length ? [box, name] : [box];
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

options(form_of("pipeline").elements.schedule, Object.keys(schedules.SCHEDULES).map((name) => [name]));
define("pipeline", { schedule: "1f1b", ...presets.pipeline }, show_pipeline);
addEventListener("resize", () => {
  clearTimeout(show_pipeline.later);
  show_pipeline.later = setTimeout(show_pipeline, 200);
});
})();
