// The calculator: the guide's planner and schedules, run by Pyodide in a Worker.
// All files come as text in python.js (site/calculator.py), loaded when first needed.
(() => {
  const SCRIPT = "planner/plan.py";
  const BASE = document.currentScript.src.replace(/[^/]*$/, "");
  const GIB = 2 ** 30;
  const COLORS = ["#4f7df0", "#f0a13c", "#3fae7c", "#d9607a", "#8e6fd8", "#4fb3c7", "#b0893f", "#8894a8", "#c65fb4"];

  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
  }

  // The Worker's own code: a function, because over file:// a Worker has no file either.
  function work() {
    let python;
    async function start(files) {
      const json = async (name) => (await unpacked(files[name])).json();
      self.fetch = async (address) => {
        const response = await unpacked(files[String(address).split("/").at(-1)]);
        const kind = String(address).endsWith(".wasm") ? "application/wasm" : "application/octet-stream";
        return new Response(response.body, { headers: { "content-type": kind } });
      };
      const nowhere = "https://guide.invalid/"; // fetch above answers, nothing is asked there
      const pyodide = await loadPyodide({ indexURL: nowhere, lockFileContents: await json("lock.json") });
      for (const [name, text] of Object.entries(await json("guide.json"))) {
        pyodide.FS.mkdirTree(`/guide/${name}`.replace(/\/[^/]*$/, ""));
        pyodide.FS.writeFile(`/guide/${name}`, text);
      }
      pyodide.FS.chdir("/guide");
      return { pyodide, command: pyodide.pyimport("command") };
    }
    onmessage = async ({ data }) => {
      try {
        if (data.files) python = await start(data.files);
        const [name, ...args] = data.call ?? [];
        const answer = name && python.command[name](...args.map((each) => python.pyodide.toPy(each)));
        postMessage({ answer: answer?.toJs ? answer.toJs() : answer });
      } catch (fault) {
        postMessage({ fault: String(fault) });
      }
    };
  }

  function loaded(address) {
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      Object.assign(script, { src: address, onload: resolve, onerror: () => reject(new Error(`${address} is missing`)) });
      document.head.append(script);
    });
  }

  function answered(worker, message) {
    return new Promise((resolve, reject) => {
      worker.onmessage = ({ data }) => (data.fault ? reject(new Error(data.fault)) : resolve(data.answer));
      worker.onerror = (event) => reject(new Error(event.message ?? "the Worker does not start"));
      worker.postMessage(message);
    });
  }

  async function start() {
    say("Loading Python …");
    await loaded(`${BASE}python.js`);
    const code = await (await unpacked(python_files["pyodide.js"])).text();
    const source = `${code}\n${unpacked}\n(${work})()`;
    const worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    await answered(worker, { files: python_files });
    return worker;
  }

  // One call after another, since Python has one thread.
  let started = null;
  let turn = Promise.resolve();
  function call(...args) {
    turn = turn.catch(() => {}).then(async () => answered(await (started ||= start()), { call: args }));
    return turn;
  }

  // The plans

  const form = byId("plan");
  const plans = byId("plans");
  const say = (text) => { byId("plan-status").textContent = text; };

  function element(name, text = "", className = "") {
    return Object.assign(document.createElement(name), { textContent: text, className });
  }

  // A bar of parts that add up, and a key with their numbers.
  function bar(parts, whole, unit) {
    const strip = element("div", "", "bar");
    const keys = element("ul", "", "keys");
    Object.entries(parts).forEach(([name, value], n) => {
      if (value / whole < 0.0005) return;
      const piece = element("i");
      piece.style.cssText = `width: ${(100 * value) / whole}%; background: ${COLORS[n % COLORS.length]}`;
      strip.append(piece);
      const key = element("li");
      key.append(Object.assign(piece.cloneNode(), { style: `background: ${COLORS[n % COLORS.length]}` }), `${name} ${unit(value)}`);
      keys.append(key);
    });
    return [strip, keys];
  }

  function card(plan, number) {
    const { total, limit, ...memory } = plan.memory_bytes;
    const card = element("section", "", "result");
    const gib = (bytes) => `${(bytes / GIB).toFixed(1)} GiB`;
    const seconds = (value) => `${value.toPrecision(3)} s`;
    const speed = Math.round(plan.tokens_per_s_per_gpu).toLocaleString("en");
    card.append(
      element("h3", `${number}. ${plan.name}`),
      element("p", `${seconds(plan.step_time_s)} per step, ${speed} tokens/s per GPU, ${(100 * plan.mfu).toFixed(1)}% of the peak (MFU); ${plan.micro_batches} micro-batches`),
      element("p", `Memory of a GPU: ${gib(total)} of ${gib(limit)}`), ...bar(memory, limit, gib),
      element("p", "Time of a step"), ...bar(plan.step_s, plan.step_time_s, seconds),
    );
    return card;
  }

  function argv() {
    const given = [...new FormData(form)].filter(([, value]) => value.trim());
    return ["plan", ...given.flatMap(([flag, value]) => [flag, value.trim()])];
  }

  async function plan() {
    plans.setAttribute("aria-busy", "true");
    try {
      const words = argv();
      const [code, out, error] = await call("run", SCRIPT, [...words, "--json"]);
      plans.replaceChildren();
      byId("printed").hidden = code !== 0;
      if (code !== 0) {
        say("");
        plans.append(element("p", error.trim() || out.trim(), "result"));
      } else {
        const found = JSON.parse(out).plans;
        found.forEach((each, n) => plans.append(card(each, n + 1)));
        say(`${found.length} layouts, the fastest first`);
        drawPlanned(found[0].layout.pp, found[0].micro_batches);
        const [, text] = await call("run", SCRIPT, words);
        byId("plan-text").textContent = `python ${SCRIPT} ${words.join(" ")}\n\n${text}`;
      }
    } catch (fault) {
      say(`Python does not start here: ${fault.message}. The program does: python ${SCRIPT} plan`);
    }
    plans.setAttribute("aria-busy", "false");
  }

  function fromAddress() {
    if (!location.hash.startsWith("#--")) return;
    form.reset();
    for (const [flag, value] of new URLSearchParams(location.hash.slice(1)))
      if (form.elements[flag]) form.elements[flag].value = value;
    plan();
  }
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const given = [...new FormData(form)].filter(([, value]) => value.trim());
    const address = `#${new URLSearchParams(given)}`;
    if (location.hash === address) plan();
    else location.hash = address; // fromAddress plans
  });
  addEventListener("hashchange", fromAddress);

  // The pipeline

  const pipeline = byId("pipeline");
  const FILL = { F: ["#9db8f7", "#d3dffc"], B: ["#8fd3b2", "#cdeedd"], I: ["#8fd3b2", "#cdeedd"], W: ["#f3cf8e", "#f9e7c6"] };

  function svg(name, attributes, text = "") {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return made;
  }

  async function draw() {
    const { schedule, stages, micro_batches } = Object.fromEntries(new FormData(pipeline));
    const place = byId("timeline");
    const found = JSON.parse(await call("timeline", schedule, Number(stages), Number(micro_batches)));
    say("");
    if (found.error) return place.replaceChildren(element("p", found.error));
    const unit = 800 / found.duration;
    const picture = svg("svg", { class: "pipeline", viewBox: `0 0 860 ${found.rows.length * 24}`, role: "img",
      "aria-label": `${schedule}: when each of ${stages} ranks works` });
    found.rows.forEach((row, rank) => {
      picture.append(svg("text", { class: "rank", x: 0, y: rank * 24 + 15 }, `rank ${rank}`));
      for (const [kind, chunk, micro, begin, end] of row) {
        const width = (end - begin) * unit;
        const x = 50 + begin * unit;
        picture.append(svg("rect", { x, y: rank * 24 + 1, width: width - 1, height: 20, rx: 2, fill: FILL[kind][chunk % 2] }));
        if (width > 11) picture.append(svg("text", { x: x + width / 2, y: rank * 24 + 15 }, micro));
      }
    });
    const kept = Math.max(...found.kept);
    const note = `${(100 * found.bubble).toFixed(1)}% of the time is bubble; a rank keeps the activations of up to ${kept} micro-batches. Blue: forward. Green: backward. Yellow: gradients of weights. A paler box belongs to the rank's second stage.`;
    place.replaceChildren(picture, element("p", note));
  }

  function drawPlanned(stages, microBatches) {
    if (stages < 2) return;
    pipeline.elements.stages.value = Math.min(stages, 12);
    pipeline.elements.micro_batches.value = Math.min(microBatches, 24);
    draw();
  }
  pipeline.addEventListener("submit", (event) => {
    event.preventDefault();
    draw();
  });
  fromAddress();
})();
