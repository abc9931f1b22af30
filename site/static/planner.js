// Python in the browser: the guide's own planner/plan.py, run by Pyodide in a Worker.
// All files come as text in python.js (site/in_browser.py), which is loaded when first needed.
// The page plan_in_browser.md has a form for its arguments and a place for what it prints.
(() => {
"use strict";

const SCRIPT = "planner/plan.py";

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream);
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
    const here = "https://guide.invalid/"; // what it asks fetch for is here, and never there
    const pyodide = await loadPyodide({ indexURL: here, lockFileContents: await json("lock.json") });
    const { FS } = pyodide;
    for (const [name, text] of Object.entries(await json("guide.json"))) {
      FS.mkdirTree(`/guide/${name}`.replace(/\/[^/]*$/, ""));
      FS.writeFile(`/guide/${name}`, text);
    }
    FS.chdir("/guide");
    return { pyodide, run: pyodide.pyimport("command").run };
  }

  onmessage = async ({ data }) => {
    try {
      if (data.files) python = await start(data.files);
      else {
        python.pyodide.FS.writeFile("config.json", data.config);
        const [code, out, error] = python.run(data.script, python.pyodide.toPy(data.argv)).toJs();
        postMessage({ code, out, error });
        return;
      }
      postMessage({ code: 0 });
    } catch (fault) {
      postMessage({ code: 1, error: String(fault) });
    }
  };
}

function loaded(address) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    Object.assign(script, { src: address, onload: resolve,
      onerror: () => reject(new Error(`${address} is not there`)) });
    document.head.append(script);
  });
}

function answered(worker, message) {
  return new Promise((resolve, reject) => {
    worker.onmessage = ({ data }) => resolve(data);
    worker.onerror = (event) => reject(new Error(event.message ?? "the Worker does not start"));
    worker.postMessage(message);
  });
}

// Start once; `says` is told what is waited for.
async function start(says) {
  says("Loading Python");
  await loaded(`${BASE}python.js`);
  says("Starting Python");
  const code = await (await unpacked(python_files["pyodide.js"])).text();
  const source = `${code}\n${unpacked}\n(${work})()`;
  const worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  const { code: failed, error } = await answered(worker, { files: python_files });
  if (failed) throw new Error(error);
  return worker;
}
const BASE = document.currentScript.src.replace(/[^/]*$/, "");

// One command after another, since Python has one thread. The newest question is answered last.
let started = null, turn = Promise.resolve();
function run(argv, config) {
  turn = turn.catch(() => {}).then(async () => {
    started ||= start(say);
    const worker = await started;
    say("Computing");
    return answered(worker, { script: SCRIPT, argv, config });
  });
  return turn;
}

// The page

const form = document.getElementById("plan-form"), { command, config } = form.elements;
const status = document.getElementById("plan-status"), result = document.getElementById("plan-result");
const say = (text) => { status.textContent = text; };

async function show() {
  const argv = command.value.trim().split(/\s+/);
  result.setAttribute("aria-busy", "true");
  try {
    const { code, out, error } = await run(argv, config.value);
    result.textContent = code === 0 ? out : error || out;
    say(`python ${SCRIPT} ${argv.join(" ")}: exit code ${code}`);
  } catch (fault) {
    say(`Python does not start here: ${fault.message}. The script does: python ${SCRIPT} plan`);
  }
  result.setAttribute("aria-busy", "false");
}

function from_address() {
  const asked = new URLSearchParams(location.hash.slice(1)).get("command");
  if (asked === null) return; // a heading was gone to
  command.value = asked;
  show();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const address = `#${new URLSearchParams({ command: command.value })}`;
  if (location.hash === address) show();
  else location.hash = address; // from_address runs it
});
addEventListener("hashchange", from_address);
from_address();
})();
