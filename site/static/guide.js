// The frame of each page: menu, theme, copying, keyboard access to wide blocks.
const page = document.documentElement;
const byId = (id) => document.getElementById(id);

byId("theme").addEventListener("click", () => {
  page.dataset.theme = page.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", page.dataset.theme);
});

function openMenu(open) {
  document.body.classList.toggle("menu-open", open);
  byId("menu").setAttribute("aria-expanded", open);
}
byId("menu").addEventListener("click", () => openMenu(!document.body.classList.contains("menu-open")));
document.addEventListener("keydown", (event) => event.key === "Escape" && openMenu(false));
byId("content").addEventListener("click", () => openMenu(false));
byId("pages").addEventListener("click", (event) => event.target.closest(".sections a") && openMenu(false));

const current = document.querySelector("#pages [aria-current]");
if (current) byId("pages").scrollTop = current.offsetTop - byId("pages").clientHeight / 3;

for (const wide of document.querySelectorAll("pre, .wide, .diagram"))
  if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;

for (const block of document.querySelectorAll(".block.bash, .block.python")) {
  const button = document.createElement("button");
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async (event) => {
    event.stopPropagation();
    await navigator.clipboard.writeText(block.querySelector("code").textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  block.append(button);
}

// The heading that a reader has arrived at, for the list of sections and the code.
const headings = [...document.querySelectorAll("article :is(h1, h2, h3, h4)")];
function atHeading() {
  if (innerHeight + scrollY >= page.scrollHeight - 4) return headings.at(-1);
  return headings.filter((each) => each.offsetParent && each.getBoundingClientRect().top < innerHeight * 0.2).at(-1);
}
const entries = [...document.querySelectorAll("#pages .sections a")];
let waiting = false;
function onScroll() {
  waiting = false;
  const heading = atHeading();
  const section = headings.slice(0, headings.indexOf(heading) + 1).filter((each) => each.tagName === "H2").at(-1);
  for (const entry of entries) entry.classList.toggle("now", entry.hash === `#${section?.id}`);
  document.dispatchEvent(new CustomEvent("arrived", { detail: heading }));
}
addEventListener("scroll", () => {
  if (!waiting) requestAnimationFrame(onScroll);
  waiting = true;
}, { passive: true });
addEventListener("load", onScroll);
