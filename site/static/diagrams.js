// Draw Mermaid's diagrams in the page's colors, and again when a reader changes them.
(() => {
  const diagrams = [...document.querySelectorAll("pre.mermaid")];
  const sources = diagrams.map((each) => each.textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");

  async function draw() {
    const theme = document.body.dataset.theme;
    const isDark = theme === "dark" || (theme !== "light" && dark.matches);
    mermaid.initialize({
      startOnLoad: false, securityLevel: "strict", theme: isDark ? "dark" : "neutral",
      themeVariables: isDark ? { edgeLabelBackground: "#131416", labelBackground: "#131416" } : {},
    });
    diagrams.forEach((each, n) => {
      each.removeAttribute("data-processed");
      each.textContent = sources[n];
    });
    await mermaid.run({ nodes: diagrams });
  }

  let drawing = draw();
  const again = () => { drawing = drawing.then(draw); };
  new MutationObserver(again).observe(document.body, { attributeFilter: ["data-theme"] });
  dark.addEventListener("change", again);
})();
