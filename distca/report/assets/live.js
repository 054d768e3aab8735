"use strict";
// The live page asks its own server for newer figures, and loads itself again when there is more to show than curves.
(() => {
  const everyMs = 2000;
  const line = document.getElementById("live");
  let known = "";

  function say(text) {
    if (line.textContent !== text) line.textContent = text; // else screen readers would repeat it
  }

  function show({contents, summary, run}) {
    if (contents !== line.dataset.contents) return location.reload();
    document.getElementById("summary").innerHTML = summary; // escaped by the server, as in the page
    if (!run) return;
    Report.data.run = run;
    Report.drawers.find(({key}) => key === "run").draw();
    const details = document.querySelector("[data-table=run]");
    if (details.open) Report.tables.run(details.querySelector(".table"));
  }

  async function poll() {
    try {
      const answer = await fetch("figures", {cache: "no-store"});
      const text = await answer.text();
      if (!answer.ok) say(text);
      else {
        const news = JSON.parse(text);
        if (text !== known) show(news);
        known = text;
        say(news.status);
      }
    } catch {
      say("distca watch has ended: these are the last figures that it sent.");
    }
    setTimeout(poll, everyMs);
  }

  poll();
})();
