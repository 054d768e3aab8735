"use strict";
// Motion can be stopped; tables and code that scroll can be reached by the keyboard.
for (const button of document.querySelectorAll(".drawing .hold")) {
  const drawing = button.closest(".drawing").querySelector("svg");
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) continue;
  button.hidden = false;
  button.addEventListener("click", () => {
    const running = drawing.getAnimations({subtree: true});
    const hold = button.textContent === "Pause";
    for (const animation of running) hold ? animation.pause() : animation.play();
    button.textContent = hold ? "Play" : "Pause";
  });
}

// What the theme leaves out for readers of screens and keyboards: names of landmarks, and boxes that scroll.
function complete() {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code"))
    if (!box.hasAttribute("tabindex")) box.tabIndex = 0;
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach(one =>
    one.setAttribute("aria-label", `Code ${1 + [...document.querySelectorAll(".md-code__nav")].indexOf(one)}`));
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
}
new MutationObserver(complete).observe(document.body, {subtree: true, childList: true, attributeFilter: ["tabindex"]});
complete();
