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
for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) box.tabIndex = 0;
