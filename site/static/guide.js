// What is wider than its column scrolls, by keyboard too.
for (const wide of document.querySelectorAll("article pre, article .table-wrapper")) {
  if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;
}

// Symptoms: keep the rows that have all the words.
const asked = document.getElementById("symptom");
asked?.addEventListener("input", () => {
  const words = asked.value.toLowerCase().split(/\s+/);
  for (const table of document.querySelectorAll("article table")) {
    const rows = [...table.tBodies[0].rows];
    rows.forEach((row) => { row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word)); });
    table.closest("section").hidden = rows.every((row) => row.hidden);
  }
});

// What this browser has read to its end, marked in the list of pages.
(() => {
  const root = document.documentElement.dataset.content_root;
  const home = new URL(root, location.href).href;
  const pageOf = (link) => new URL(link, location.href).href.split("#")[0].replace(home, "");
  const read = new Set(JSON.parse(localStorage.getItem("read") ?? "[]"));
  const mark = () => document.querySelectorAll(".sidebar-tree a").forEach((link) =>
    link.classList.toggle("read", read.has(pageOf(link.getAttribute("href")))));
  const box = document.getElementById("page-read");
  if (box) {
    box.checked = read.has(pageOf("#"));
    box.addEventListener("change", () => {
      box.checked ? read.add(pageOf("#")) : read.delete(pageOf("#"));
      localStorage.setItem("read", JSON.stringify([...read]));
      mark();
    });
  }
  mark();
})();

// The script beside its page: tabs, the lines that a paragraph or snippet is about, and back.
(() => {
  const beside = document.querySelector(".beside");
  if (!beside) return;
  const article = document.querySelector("article");
  const tabs = [...beside.querySelectorAll("[role=tab]")];
  const follow = beside.querySelector(".beside-follow");
  const calm = matchMedia("(prefers-reduced-motion: reduce)");

  function open(id) {
    for (const tab of tabs) {
      const chosen = tab.id === `tab-${id}`;
      tab.setAttribute("aria-selected", chosen);
      tab.tabIndex = chosen ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = !chosen;
    }
  }

  // A place in the page names lines by a class: code--FILE--FIRST--LAST.
  function linesOf(place) {
    const name = [...place.classList].find((each) => each.startsWith("code--"));
    const [, file, first, last] = name.split("--");
    return { file, first: Number(first), last: Number(last) };
  }

  function show(place) {
    const { file, first, last } = linesOf(place);
    open(file);
    beside.querySelectorAll(".line.lit").forEach((line) => line.classList.remove("lit"));
    for (let n = first; n <= last; n++) document.getElementById(`${file}-${n}`)?.classList.add("lit");
    const panel = document.getElementById(`panel-${file}`);
    const line = document.getElementById(`${file}-${first}`);
    const top = line.getBoundingClientRect().top - panel.getBoundingClientRect().top + panel.scrollTop;
    panel.scrollTo({ top: top - panel.clientHeight / 5, behavior: calm.matches ? "auto" : "smooth" });
    places.forEach((each) => each.classList.toggle("current", each === place));
  }

  const places = [...article.querySelectorAll("[class*='code--']")];
  const folded = (place) => place.closest("details:not([open])");
  let last = null;
  let held = null; // where a click was: what it showed stays until the reader scrolls on

  // The last place above the middle of the window is what the reader is at.
  function atReader() {
    if (follow.getAttribute("aria-pressed") !== "true") return;
    if (held !== null && Math.abs(scrollY - held) < 200) return;
    held = null;
    const line = innerHeight * 0.45;
    const above = places.filter((each) => !folded(each) && each.getBoundingClientRect().top < line);
    const place = above.at(-1); // none at the page's top: the script is at its own
    if (place && place !== last) show((last = place));
  }

  let waiting = false;
  addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; atReader(); });
  }, { passive: true });

  function view(name) {
    document.documentElement.dataset.show = name;
    document.querySelectorAll(".beside-switch button").forEach((button) =>
      button.setAttribute("aria-pressed", button.dataset.show === name));
  }
  document.querySelectorAll(".beside-switch button").forEach((button) =>
    button.addEventListener("click", () => view(button.dataset.show)));

  article.addEventListener("click", (event) => {
    const place = event.target.closest("a.named-code, .shown-code");
    if (!place || getSelection().toString() || event.target.closest("button")) return;
    if (place.matches("a")) event.preventDefault();
    if (place.matches("a")) view("code");
    held = scrollY;
    show((last = place));
  });

  // From a function to where the page speaks of it.
  beside.addEventListener("click", (event) => {
    const link = event.target.closest("a.nr");
    if (!link) return;
    const place = document.getElementById(link.hash.slice(1));
    for (let up = place.parentElement; up; up = up.parentElement) if (up.matches("details")) up.open = true;
    view("page");
    held = scrollY;
    show((last = place));
    place.focus({ preventScroll: true });
  });

  beside.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
    open(next.id.slice(4));
    next.focus();
  });
  tabs.forEach((tab) => tab.addEventListener("click", () => open(tab.id.slice(4))));
  follow.addEventListener("click", () => {
    follow.setAttribute("aria-pressed", follow.getAttribute("aria-pressed") !== "true");
    atReader();
  });

  view("page");
  atReader();
})();
