// Only the page of a running study has this. It loads the page again until the file is that of a finished study.
"use strict";
(() => {
  const EVERY_MS = 10000;
  const reads = () => !getSelection().isCollapsed || document.querySelector(":is(input, select):focus");

  function again() {
    if (reads()) return;
    const sections = [...document.querySelectorAll("section[id]")];
    const top = (one) => one.getBoundingClientRect().top;
    const at = sections.findLast((one) => top(one) <= innerHeight / 3) ?? sections[0];
    const open = [...document.querySelectorAll("details")].map((one) => one.open);
    history.scrollRestoration = "manual";
    history.replaceState({ reading: { id: at.id, top: top(at), open } }, "");
    location.reload();
  }
  setInterval(again, EVERY_MS);
})();
