// The code next to the page. A place in the page names lines: data-code="FILE:FIRST:LAST".
(() => {
  const aside = document.querySelector("aside");
  const tabs = [...aside.querySelectorAll("[role=tab]")];
  const follow = document.getElementById("follow");
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const phone = matchMedia("(max-width: 899px)");
  let shown = null; // the place whose lines are lit
  let held = null; // a click keeps its lines until the reader scrolls on

  function open(id) {
    for (const tab of tabs) {
      const chosen = tab.id === `tab-${id}`;
      tab.setAttribute("aria-selected", chosen);
      tab.tabIndex = chosen ? 0 : -1;
      byId(tab.getAttribute("aria-controls")).hidden = !chosen;
    }
  }

  function show(place) {
    if (place === shown) return;
    shown?.classList.remove("now");
    aside.querySelectorAll(".lit").forEach((line) => line.classList.remove("lit"));
    shown = place;
    if (!place) return;
    if (!/^H\d$/.test(place.tagName)) place.classList.add("now");
    const [file, first, last] = place.dataset.code.split(":");
    open(file);
    for (let n = Number(first); n <= Number(last); n++) byId(`${file}-${n}`)?.classList.add("lit");
    const panel = byId(`panel-${file}`);
    const top = byId(`${file}-${first}`).offsetTop - panel.offsetTop - panel.clientHeight / 6;
    panel.scrollTo({ top, behavior: calm.matches ? "auto" : "smooth" });
  }

  function isWithin(inner, outer) {
    const [file, first, last] = inner.dataset.code.split(":");
    const [outerFile, outerFirst, outerLast] = outer.dataset.code.split(":");
    return file === outerFile && Number(first) >= Number(outerFirst) && Number(last) <= Number(outerLast);
  }

  // A heading shows the code that its section explains, or none; a snippet its own lines.
  const snippets = [...document.querySelectorAll("article .block[data-code]")];
  function followReader(heading) {
    if (follow.getAttribute("aria-pressed") !== "true") return;
    if (held !== null && Math.abs(scrollY - held) < 150) return;
    held = null;
    const after = (node) => heading && heading.compareDocumentPosition(node) & Node.DOCUMENT_POSITION_FOLLOWING;
    const passed = snippets.filter((each) => each.offsetParent && after(each) && each.getBoundingClientRect().top < innerHeight * 0.45);
    const explained = heading?.dataset.code ? heading : null;
    const other = passed.filter((each) => !explained || !isWithin(each, explained)).at(-1);
    show(other ?? explained);
  }
  document.addEventListener("arrived", (event) => followReader(event.detail));

  // On a phone the code is a view of its own, and the Back key returns to the page.
  function view(name) {
    page.dataset.view = name;
    for (const button of document.querySelectorAll(".switch button"))
      button.setAttribute("aria-pressed", button.dataset.view === name);
  }
  function goTo(name) {
    if (!phone.matches || page.dataset.view === name) return;
    if (name === "page") history.back();
    else history.pushState({ view: "code" }, "");
    view(name);
  }
  addEventListener("popstate", (event) => view(event.state?.view ?? "page"));
  for (const button of document.querySelectorAll(".switch button"))
    button.addEventListener("click", () => goTo(button.dataset.view));

  document.querySelector("article").addEventListener("click", (event) => {
    const place = event.target.closest("a.name, .block[data-code]");
    if (!place || getSelection().toString()) return;
    event.preventDefault();
    held = scrollY;
    if (place.matches("a")) goTo("code");
    show(place);
  });

  aside.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
    open(next.id.slice(4));
    next.focus();
  });
  for (const tab of tabs) tab.addEventListener("click", () => open(tab.id.slice(4)));
  follow.addEventListener("click", () => follow.setAttribute("aria-pressed", follow.getAttribute("aria-pressed") !== "true"));
  view("page");
})();
