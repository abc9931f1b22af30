// Search: a dialog on every page, opened with "/". Pages first, then scripts.
(() => {
  const root = page.dataset.root;
  const HINT = "Type an error message, a function or a term.";
  // What readers type, in the words of the pages.
  const SAME = { oom: "out of memory", "zero-1": "zero stages", "zero-2": "zero stages", "zero-3": "zero stages", deadlock: "hang", stuck: "hang", tp: "tensor parallel", pp: "pipeline" };
  const SMALL = new Set("a an and are at for from how i in is it my of on or the to what why with".split(" "));
  let engine = null;
  let dialog = null;

  function load(name) {
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      Object.assign(script, { src: `${root}_static/${name}`, onload: resolve, onerror: reject });
      document.head.append(script);
    });
  }

  // "set_epoch" and "ZeRO-3" are found as they stand and by their parts.
  function words(text) {
    const found = text.toLowerCase().match(/[a-z0-9_]+(?:-\d+)?/g) ?? [];
    const parts = (word) => word.split(/[_-]/).filter((part) => part.length > 1);
    return found.flatMap((word) => (/[_-]/.test(word) ? [word, ...parts(word)] : [word]));
  }

  async function start() {
    await Promise.all([load("minisearch.js"), load("search-data.js")]);
    engine = new MiniSearch({
      fields: ["title", "heading", "text"],
      storeFields: ["url", "title", "heading", "text", "path"],
      tokenize: words,
      processTerm: (term) => term.replace(/(?<=[a-z]{3})s$/, ""),
    });
    engine.addAll(guideEntries.map(([url, title, heading, text, path], id) => ({ id, url, title, heading, text, path })));
  }

  // The words as typed, and in the words of the pages.
  function phrases(asked) {
    const typed = asked.trim().toLowerCase();
    return { typed, meant: typed.split(/\s+/).map((word) => SAME[word] ?? word).join(" ") };
  }

  // A page ranks by its best section; the asked words as they were typed count more.
  function find(asked) {
    const { typed, meant } = phrases(asked);
    const all = (text) => ({ combineWith: "AND", queries: words(text).filter((word) => !SMALL.has(word)) });
    const queries = words(typed).filter((word) => !SMALL.has(word));
    const query = queries.map((word) => (SAME[word] ? { combineWith: "OR", queries: [word, all(SAME[word])] } : word));
    const options = {
      boost: { title: 6, heading: 4 },
      prefix: (term, at, terms) => at === terms.length - 1 && term.length > 2,
      fuzzy: (term) => (term.length > 5 ? 0.15 : false),
      boostDocument: (id, term, { path, title, heading, text }) => {
        const whole = `${title} ${heading} ${text}`.toLowerCase();
        const phrase = whole.includes(typed) || whole.includes(meant) ? 3 : 1;
        const lesson = /^(\d|SYMPTOMS)/.test(path) ? 1 : 0.6;
        return (path ? lesson : 0.1) * phrase;
      },
    };
    const hits = engine.search({ combineWith: "AND", queries: query }, options);
    if (hits.length < 3) hits.push(...engine.search({ combineWith: "OR", queries: query }, options));
    const best = new Map();
    for (const hit of hits) {
      const key = hit.path || hit.url;
      if (!best.has(key)) best.set(key, hit);
    }
    const found = [...best.values()];
    return [...found.filter((hit) => hit.path), ...found.filter((hit) => !hit.path)].slice(0, 20);
  }

  // Where the text has the phrase, else the first of the words.
  function excerpt(text, asked, terms) {
    const { typed, meant } = phrases(asked);
    const lower = text.toLowerCase();
    const phrase = [typed, meant].find((each) => lower.includes(each));
    const wanted = phrase ? [phrase] : terms.filter((term) => term.length > 2);
    const pattern = wanted.map((term) => term.replace(/\W/g, "\\$&")).join("|");
    const found = pattern ? text.search(new RegExp(`\\b(?:${pattern})`, "i")) : -1;
    const from = Math.max(0, text.lastIndexOf(" ", Math.max(0, found - 50)));
    const line = document.createElement("p");
    if (from) line.append("… ");
    const shown = text.slice(from, from + 190).trim();
    const parts = pattern ? shown.split(new RegExp(`\\b(${pattern})`, "i")) : [shown];
    for (const [n, part] of parts.entries()) {
      const node = n % 2 ? document.createElement("mark") : document.createTextNode(part);
      if (n % 2) node.textContent = part;
      line.append(node);
    }
    if (from + 190 < text.length) line.append(" …");
    return line;
  }

  function draw(asked) {
    const list = byId("found");
    list.replaceChildren();
    const hint = dialog.querySelector(".hint");
    const hits = asked.trim() ? find(asked) : [];
    hint.textContent = asked.trim() ? `${hits.length} pages and scripts` : HINT;
    hint.hidden = hits.length > 0;
    for (const [number, hit] of hits.entries()) {
      const link = document.createElement("a");
      link.href = root + hit.url;
      link.setAttribute("role", "option");
      link.setAttribute("aria-selected", number === 0);
      link.tabIndex = -1;
      const title = document.createElement("strong");
      title.textContent = hit.title;
      title.className = hit.path ? "" : "script";
      const where = document.createElement("small");
      where.textContent = hit.path ? hit.heading : "";
      link.append(title, where, excerpt(hit.text, asked, hit.terms));
      list.append(link);
    }
  }

  function move(step) {
    const links = [...byId("found").querySelectorAll("a")];
    const at = links.findIndex((link) => link.getAttribute("aria-selected") === "true");
    const next = links[Math.max(0, Math.min(links.length - 1, at + step))];
    links.forEach((link) => link.setAttribute("aria-selected", link === next));
    next?.scrollIntoView({ block: "nearest" });
  }

  function build() {
    dialog = document.createElement("dialog");
    dialog.setAttribute("aria-label", "Search");
    dialog.innerHTML = `<input type="search" aria-label="Search the guide" aria-controls="found" placeholder="Search the guide" spellcheck="false">
      <p class="hint" role="status">${HINT}</p><div id="found" role="listbox" aria-label="Results"></div>`;
    document.body.append(dialog);
    const input = dialog.querySelector("input");
    input.addEventListener("input", () => engine && draw(input.value));
    input.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (step) { event.preventDefault(); move(step); }
      if (event.key === "Enter") byId("found").querySelector("[aria-selected=true]")?.click();
    });
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    byId("found").addEventListener("click", () => dialog.close());
  }

  async function open() {
    if (!dialog) build();
    dialog.showModal();
    dialog.querySelector("input").select();
    if (!engine) {
      await start();
      draw(dialog.querySelector("input").value);
    }
  }
  byId("search").addEventListener("click", open);
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, textarea, select");
    if ((event.key === "/" && !typing) || (event.key === "k" && (event.ctrlKey || event.metaKey))) {
      event.preventDefault();
      open();
    }
  });
})();
