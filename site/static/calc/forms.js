// What the four calculators share: elements, numbers, tables, and forms whose inputs are in the
// address. No file of the page but the ports holds a formula or a constant of the models: models,
// rates, defaults and words are in presets.js, which site/golden.py writes.
const forms = (() => {
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);
const form_of = (id) => $(`${id}-form`); // a heading has its own name for an id

// Each number links to the page that derives it: the table at the page's end has the links.
const SOURCES = Object.fromEntries(
  [...document.querySelectorAll("#where-the-numbers-come-from a.reference")].map((a) =>
    [a.textContent, a.getAttribute("href")]));

// elements

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}
const h = (name, attributes = {}, ...children) =>
  fill(document.createElement(name), attributes, children);
const s = (name, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, name), attributes, children);
const source = (name, text) => h("a", { href: SOURCES[name] }, text);

// numbers as Python's f"{x:,.1f}" and f"{x:g}" print them

const fixed = (value, digits) => {
  const [whole, ...fraction] = value.toFixed(digits).split(".");
  return [whole.replace(/\B(?=(\d{3})+$)/g, ","), ...fraction].join(".");
};
const general = (value) => String(Number(value.toPrecision(6)));
const gib = (bytes) => `${fixed(bytes / presets.gib, 1)} GiB`;
const share = (part) => `${(100 * part).toFixed(1)}%`;
const number = (text, value) => h("td", { class: "number", "data-value": value }, text);
const exact = (text, value, key) => h("span", { "data-value": value, "data-key": key }, text);

function table(caption, headers, rows) {
  const kind = (i) => rows[0].cells[i - 1]?.getAttribute("class"); // a column is what its cells are
  const heads = headers.map((head, i) => h("th", { scope: "col", class: kind(i) }, head));
  const body = rows.map(({ name, cells, kind = null }) =>
    h("tr", { class: kind }, h("th", { scope: "row" }, name), cells));
  const inner = h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, heads)),
    h("tbody", {}, body));
  const label = [caption].flat().map((part) => part.textContent ?? part).join("");
  return h("div", { class: "calc-scroll", tabindex: "0", role: "region", "aria-label": label }, inner);
}
const words = (text) => h("td", {}, text);
const swatch = (color) => h("span", { class: "calc-swatch", style: `background:${color}` });

// forms: one entry of the address for each input that is not at its default

const FORMS = {};

function options(select, choices) {
  select.replaceChildren(...choices.map(([value, text]) => h("option", { value }, text ?? value)));
}

function define(id, defaults, update) {
  const form = form_of(id);
  FORMS[id] = { form, defaults, update };
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    set(id, {});
    changed(id);
  });
  form.addEventListener("input", (event) => {
    const slider = event.target, { for: other, base } = slider.dataset;
    if (other) form.elements[other].value = base ? base ** slider.value : slider.value;
    changed(id);
  });
  const link = form.querySelector("[data-do=link]");
  const address = () => location.href.split("#")[0] + written(state_of(id));
  if (link) link.addEventListener("click", () => copy(link, address()));
}

function set(id, values) {
  const { form, defaults } = FORMS[id];
  for (const [name, value] of Object.entries({ ...defaults, ...values })) {
    if (form.elements[name]) form.elements[name].value = value ?? "";
  }
}

function read(id) {
  const { form, defaults } = FORMS[id], values = {};
  for (const name of Object.keys(defaults)) {
    const input = form.elements[name], text = input.value.trim();
    if (input.type !== "number") values[name] = text || null;
    else values[name] = text === "" && !input.validity.badInput ? null : Number(text);
  }
  return values;
}

const label_of = (input) => input.closest("label").firstChild.textContent.trim();

// What argparse refuses: a number that is missing, not whole or out of its range.
function refuse_numbers(id) {
  const { form, defaults } = FORMS[id];
  for (const name of Object.keys(defaults)) {
    const input = form.elements[name];
    if (input.type !== "number") continue;
    const whole = input.step === "1";
    const range = `a ${whole ? "whole " : ""}number ${whole ? `from ${input.min}` : "above 0"}`;
    const limits = range + (input.max ? ` to ${input.max}` : "");
    const missing = input.value === "" && defaults[name] !== null;
    if (missing || !input.validity.valid || (!whole && Number(input.value) <= 0)) {
      throw new schedules.UsageError(`${label_of(input)}: must be ${limits}`);
    }
  }
}

function state_of(id) {
  const { form, defaults } = FORMS[id];
  return Object.entries(defaults)
    .filter(([name, value]) => form.elements[name].value !== String(value ?? ""))
    .filter(([name]) => !form.elements[name].closest("[hidden]"))
    .map(([name]) => [`${id}.${name}`, form.elements[name].value]);
}

const written = (entries) => "#" + new URLSearchParams(entries).toString();

function changed(id) {
  show(id); // first: it hides inputs that do not count
  const entries = Object.keys(FORMS).flatMap(state_of);
  history.replaceState(null, "", entries.length ? written(entries) : location.pathname + location.search);
}

function show(id) {
  const { form, update } = FORMS[id];
  for (const slider of form.querySelectorAll("[data-for]")) {
    const { for: other, base } = slider.dataset, { value } = form.elements[other];
    slider.value = base ? Math.log(value) / Math.log(base) : value;
    slider.setAttribute("aria-valuetext", value);
  }
  update();
}

async function copy(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    prompt("To copy:", text); // no clipboard over file:// in some browsers
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

function from_address() {
  const entries = [...new URLSearchParams(location.hash.slice(1))].filter(([key]) => key.includes("."));
  const values = {};
  for (const [key, value] of entries) {
    const [id, name] = key.split(".");
    if (FORMS[id] && name in FORMS[id].defaults) (values[id] ||= {})[name] = value;
  }
  for (const id of Object.keys(FORMS)) set(id, values[id] || {});
  for (const id of Object.keys(FORMS)) show(id);
  return Object.keys(values)[0];
}

function attempt(where, work) {
  const target = $(where);
  try {
    target.replaceChildren(...work().filter(Boolean));
  } catch (error) {
    if (!(error instanceof schedules.UsageError)) throw error;
    target.replaceChildren(h("p", { class: "calc-error", role: "alert" }, error.message));
  }
}

// What a choice in a select without a name fills in, and which one the numbers are of.
function filler(form, kind, choices) {
  const select = form.querySelector(`[data-fill=${kind}]`);
  options(select, [...Object.keys(choices).map((name) => [name]), ["", "your own"]]);
  select.addEventListener("input", () => {
    for (const [name, value] of Object.entries(choices[select.value] || {})) {
      form.elements[name].value = value;
    }
  });
  return () => {
    const same = ([, values]) => Object.entries(values).every(([name, value]) =>
      Number(form.elements[name].value) === value);
    select.value = (Object.entries(choices).find(same) || [""])[0];
  };
}

addEventListener("DOMContentLoaded", () => {
  const first = from_address();
  if (!first) return;
  // What stands above it fills in later: stay there until the reader does something.
  const settle = new ResizeObserver(() => form_of(first).scrollIntoView({ behavior: "instant" }));
  settle.observe(document.querySelector("article"));
  for (const name of ["wheel", "touchmove", "pointerdown", "keydown"]) {
    addEventListener(name, () => settle.disconnect(), { once: true });
  }
});
addEventListener("hashchange", () => {
  if (location.hash.includes("=")) from_address(); // else a heading was gone to
});

return {
  $, form_of, h, s, source, fixed, general, gib, share, number, exact, words, swatch, table,
  options, define, read, refuse_numbers, changed, attempt, filler, copy,
};
})();
