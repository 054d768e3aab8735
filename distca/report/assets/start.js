"use strict";
// Draw what is in sight first, so that the page answers at once, then the rest in reading order while nothing else is
// to do; and again when light turns to dark.
(() => {
  const top = key => document.getElementById(key).offsetTop;
  const inOrder = Report.drawers.sort((a, b) => top(a.key) - top(b.key));
  const drawn = new Set();
  const idle = () => new Promise(resume => (window.requestIdleCallback ?? setTimeout)(resume));

  function once(drawer) {
    if (drawn.has(drawer)) return;
    drawn.add(drawer);
    drawer.draw();
  }

  function mark(name) {
    performance.mark(`report-${name}`);
    document.documentElement.dataset[name] = "true";
  }

  async function start() {
    const bottom = scrollY + innerHeight;
    inOrder
      .filter(({key}) => top(key) < bottom && top(key) + document.getElementById(key).offsetHeight > scrollY)
      .forEach(once);
    Report.fillTables();
    mark("ready");
    const watcher = new IntersectionObserver(entries =>
      entries
        .filter(entry => entry.isIntersecting)
        .forEach(entry => once(inOrder.find(({key}) => key === entry.target.id))),
    );
    for (const {key} of inOrder) watcher.observe(document.getElementById(key));
    for (const drawer of inOrder) {
      await idle();
      once(drawer);
    }
    watcher.disconnect();
    mark("complete");
  }

  Report.dark.addEventListener("change", () => drawn.forEach(drawer => drawer.draw()));
  start();
})();
