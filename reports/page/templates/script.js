// The page is whole without this. It sorts tables, filters, copies and downloads the full one, shows what a
// point says, switches series and axes, and keeps all of that in the address, so that a view can be sent.
"use strict";
(() => {
  const NOTHING = "-";
  const reading = history.state?.reading;
  const letters = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
  const said = (element) => element.textContent.replace(/\s+/g, " ").trim();

  function made(tag, properties, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  // The address: #ANCHOR~name=value&...
  const parts = () => location.hash.slice(1).split("~");
  const state = new URLSearchParams(parts()[1] ?? "");
  const address = () => `#${parts()[0]}${state.size ? `~${state}` : ""}`;
  const write = () => address() !== (location.hash || "#") && history.replaceState("written", "", address());

  function keep(name, value) {
    value ? state.set(name, value) : state.delete(name);
    write();
  }

  // Numbers before words, in the direction asked for; nothing is last in both.
  function key(row, place) {
    const cell = row.cells[place];
    if ("value" in cell.dataset) return { rank: 0, number: Number(cell.dataset.value) };
    const text = said(cell);
    return { rank: text === NOTHING || text === "" ? 2 : 1, text };
  }

  function compare(a, b, way) {
    return a.rank - b.rank || way * (a.rank === 0 ? a.number - b.number : letters.compare(a.text, b.text));
  }

  function sortable(table) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];

    function sort(head, place) {
      const order = head.ariaSort === "ascending" ? "descending" : head.ariaSort ? null : "ascending";
      for (const one of heads) one.ariaSort = one === head ? order : null;
      const keyed = rows.map((row) => ({ row, key: key(row, place) }));
      if (order) keyed.sort((a, b) => compare(a.key, b.key, order === "descending" ? -1 : 1));
      body.append(...keyed.map((one) => one.row));
      if (table.dataset.tools) keep("sort", order && `${head.dataset.title}|${order}`);
    }

    // The words of a head become the button, and its link to the definition a question mark beside them.
    heads.forEach((head, place) => {
      const title = head.dataset.title;
      const link = head.querySelector("a");
      head.replaceChildren(made("button", { type: "button", className: "sort" }, title));
      if (link) {
        Object.assign(link, { textContent: "", className: "what", ariaLabel: `What ${title} is` });
        // Beside the words, and not between them and the edge with which figures line up.
        head.classList.contains("n") ? head.prepend(link) : head.append(link);
      }
      head.addEventListener("click", (event) => event.target !== link && sort(head, place));
    });
  }

  // A text that a spreadsheet would take for a formula begins with an apostrophe; numbers are left as they are.
  function plain(cell) {
    const text = said(cell);
    if (text === NOTHING) return "";
    return !("value" in cell.dataset) && /^[=+\-@']/.test(text) ? `'${text}` : text;
  }

  function shown(table) {
    const heads = [...table.tHead.rows[0].cells].map((head) => head.dataset.title);
    const rows = [...table.tBodies[0].rows].filter((row) => !row.hidden);
    return [heads, ...rows.map((row) => [...row.cells].map(plain))];
  }

  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

  // Undefined where the page is served without encryption.
  const copy = (text) => Promise.resolve(navigator.clipboard?.writeText(text).then(() => true)).catch(() => false);

  function download(text) {
    const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    made("a", { href: address, download: "table.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  }

  function tools(table) {
    const rows = [...table.tBodies[0].rows];
    const texts = rows.map((row) => said(row).toLowerCase());
    const count = made("output", { className: "count" });
    count.setAttribute("role", "status");
    const box = made("input", { type: "search", autocomplete: "off", spellcheck: false });

    function filter(event) {
      const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
      const meant = (row, place) => row.id === event?.detail || words.every((word) => texts[place].includes(word));
      rows.forEach((row, place) => (row.hidden = !meant(row, place)));
      const left = rows.filter((row) => !row.hidden).length;
      keep("filter", box.value);
      count.textContent = `${left.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows shown`;
    }

    const copier = made("button", { type: "button" }, "Copy");
    copier.addEventListener("click", async () => {
      const done = await copy(shown(table).map((row) => row.join("\t")).join("\n"));
      count.textContent = done ? "Copied, columns set apart by tabs" : "The browser refused to copy";
    });
    const saver = made("button", { type: "button" }, "Download CSV");
    saver.addEventListener("click", () => download(shown(table).map((row) => `${row.map(quoted).join(",")}\n`).join("")));
    box.addEventListener("input", filter);
    box.value = state.get("filter") ?? "";
    filter();
    table.closest(".scroll").before(made("div", { className: "tools" }, made("label", {}, "Filter ", box), copier, saver, count));
  }

  // What a head, a radio button and the sorted order were in the address.
  function restored(table) {
    const [title, order] = (state.get("sort") ?? "").split("|");
    const head = [...table.tHead.rows[0].cells].find((one) => one.dataset.title === title);
    for (let times = order === "descending" ? 2 : 1; head && times; times--) head.click();
    for (const radio of table.closest(".columns")?.querySelectorAll("[type=radio]") ?? []) {
      if (radio.value === state.get("columns")) radio.checked = true;
      radio.addEventListener("change", () => keep("columns", radio.value));
    }
  }

  // Drawings: the values stand in data-x and data-y, the ends of the axes in data-x-axis and data-y-axis.
  const SPACE = 13, NEAR = 26;

  // A logarithmic axis that cannot begin at 0 begins at the least of all that is drawn.
  function scale(svg, name) {
    const [low, high, start, end, drawn] = svg.dataset[`${name}Axis`].split(" ");
    const kind = state.get(name) ?? drawn;
    const log = kind === "log";
    const all = [...svg.querySelectorAll(`[data-${name}]`)].map((one) => one.dataset[name]);
    for (const one of svg.querySelectorAll("[data-start]")) all.push(one.dataset.start.split(" ")[name === "x" ? 0 : 1]);
    const first = log && Number(low) <= 0 ? Math.min(...all.map(Number).filter((one) => one > 0)) : Number(low);
    const to = (value) => (log ? Math.log(value) : value);
    const span = to(Number(high)) - to(first);
    return (value) => Number(start) + ((to(value) - to(first)) / span) * (Number(end) - Number(start));
  }

  function named(svg) {
    const found = [...svg.querySelectorAll(".series:not(.off)")].map((series) => {
      const [x, y] = [...series.querySelectorAll(".point")].at(-1).getAttribute("transform").match(/[-\d.]+/g).map(Number);
      return { x, y, name: series.querySelector(".name"), leader: series.querySelector(".leader") };
    });
    for (const name of svg.querySelectorAll(".level")) found.push({ y: Number(name.dataset.at), name });
    let place = -Infinity;
    for (const one of found.sort((a, b) => a.y - b.y)) {
      place = Math.max(one.y, place + SPACE);
      one.name.setAttribute("y", place + 3.5);
      one.leader?.setAttribute("d", `M${one.x + 5} ${one.y}L${one.name.getAttribute("x") - 2} ${place}`);
    }
  }

  function redraw(svg) {
    const [x, y] = [scale(svg, "x"), scale(svg, "y")];
    const [foot, top] = svg.dataset.yAxis.split(" ").slice(2, 4).map(Number);
    // Beyond the axis: at its end, as it was drawn.
    const held = (value) => Math.max(top, Math.min(foot, y(Number(value)) || foot));
    for (const one of svg.querySelectorAll("[data-x], [data-y]")) {
      const [oldX, oldY] = one.getAttribute("transform").match(/[-\d.]+/g).map(Number);
      const newX = "x" in one.dataset ? x(Number(one.dataset.x)) : oldX;
      const there = Number.isFinite(newX + ("y" in one.dataset ? y(Number(one.dataset.y)) : oldY));
      const newY = "y" in one.dataset ? held(one.dataset.y) : oldY;
      one.style.display = there ? "" : "none";
      if (there) one.setAttribute("transform", `translate(${newX} ${newY})`);
      if ("low" in one.dataset) {
        const { low, high } = one.dataset;
        const [down, up] = [y(Number(low)) > foot + 1, y(Number(high)) < top - 1];
        const ends = [`M0 ${held(low) - newY}${down ? "m-3 -4l3 4l3 -4m-3 4" : ""}`, `V${held(high) - newY}${up ? "m-3 4l3 -4l3 4" : ""}`];
        one.querySelector(".bar").setAttribute("d", ends.join(""));
      }
    }
    for (const series of svg.querySelectorAll(".series")) {
      const [startX, startY] = series.dataset.start?.split(" ") ?? [];
      const start = startX ? [{ dataset: { x: startX, y: startY } }] : [];
      const at = (one) => `${x(Number(one.dataset.x))},${held(one.dataset.y)}`;
      series.querySelector("polyline").setAttribute("points", [...start, ...series.querySelectorAll(".point")].map(at).join(" "));
    }
    for (const line of svg.querySelectorAll("[data-slope]")) line.style.display = state.get("x") || state.get("y") ? "none" : "";
    for (const level of svg.querySelectorAll(".level")) level.dataset.at = held(level.dataset.level);
    let last = Infinity;
    for (const tick of [...svg.querySelectorAll(".tick[data-x]")]) {
      const at = x(Number(tick.dataset.x));
      tick.querySelector("text").classList.toggle("near", last - at < NEAR);
      if (last - at >= NEAR) last = at;
    }
    named(svg);
  }

  const charts = [...document.querySelectorAll(".chart[data-x-axis]")];
  const gone = () => (state.get("off") ?? "").split("|").filter(Boolean);

  function drawn() {
    const off = gone();
    const all = (selector, act) => document.querySelectorAll(selector).forEach(act);
    all(".series", (one) => one.classList.toggle("off", off.includes(one.dataset.series)));
    all(".switches button", (one) => one.setAttribute("aria-pressed", String(!off.includes(one.textContent))));
    all(".switches select", (one) => (one.value = state.get(one.name) ?? ""));
    charts.forEach(redraw);
  }

  function switches(place) {
    const names = new Set(charts.flatMap((svg) => [...svg.querySelectorAll(".series")].map((one) => one.dataset.series)));
    const buttons = [...names].map((name) => made("button", { type: "button" }, name));
    for (const button of buttons) {
      button.addEventListener("click", () => {
        const [name, off] = [button.textContent, gone()];
        drawn(keep("off", (off.includes(name) ? off.filter((one) => one !== name) : [...off, name]).join("|")));
      });
    }
    const axes = [["x", "sizes"], ["y", "values"]].map(([name, words]) => {
      const options = [["", "as drawn"], ["linear", "linear"], ["log", "log"]];
      const select = made("select", { name }, ...options.map(([value, text]) => made("option", { value }, text)));
      select.addEventListener("change", () => drawn(keep(name, select.value)));
      return made("label", {}, `${words} `, select);
    });
    place.append(made("div", { className: "switches" }, ...buttons, ...axes));
  }

  // What a point says, for the eye; a screen reader reads its label.
  const tip = made("div", { className: "tip", ariaHidden: "true", hidden: true });

  // The point that was clicked last. Its series is lit in all drawings, or else the one under the pointer.
  let clicked;

  function light(point) {
    const name = (point ?? clicked)?.closest(".series")?.dataset.series;
    for (const one of document.querySelectorAll(".series")) one.classList.toggle("lit", one.dataset.series === name);
  }

  function tell(point) {
    light(point);
    tip.hidden = !point;
    if (!point) return;
    tip.textContent = point.getAttribute("aria-label");
    const box = point.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(box.left + scrollX, scrollX + innerWidth - tip.offsetWidth - 12))}px`;
    tip.style.top = `${box.top + scrollY - tip.offsetHeight - 8}px`;
  }

  // The row that a point leads to stays marked, and leads back.
  function marked(row) {
    for (const one of document.querySelectorAll("tr.lit")) one.classList.remove("lit");
    document.querySelector(".back")?.remove();
    row?.classList.add("lit");
    const figure = clicked?.closest("figure[id]");
    if (row && figure) row.cells[0].append(made("a", { className: "back", href: `#${figure.id}`, ariaLabel: "Back to the drawing" }));
  }

  function pressed(event) {
    const link = event.target.closest?.("a.copy");
    if (link) copy(link.href).then((done) => done && (link.textContent = "Link copied"));
    clicked = event.target.closest?.("a.point[href]") ?? (event.target.closest?.(".back, tr") ? clicked : undefined);
    light();
  }

  // What the address leads to is shown, though filtered out or folded; one that was sent with another view needs a new page.
  function reveal(event) {
    const [anchor, view] = parts();
    if (event && view !== undefined && view !== String(state)) return location.reload();
    const there = document.getElementById(anchor);
    // Else the browser goes there by itself: by a link of the page, and Back to what this script has written.
    let goes = there?.hidden || (view !== undefined && !(event && history.state));
    for (const one of document.querySelectorAll("details:not([open])")) goes = (one.open = one.contains(there)) || goes;
    for (const box of document.querySelectorAll("[type=search]")) box.dispatchEvent(new CustomEvent("input", { detail: there?.id }));
    write();
    marked(there?.closest("tr"));
    if (goes) there?.scrollIntoView();
  }

  document.querySelectorAll("table:not(.answers)").forEach((table) => {
    for (const head of table.tHead.rows[0].cells) head.dataset.title = said(head);
    if (table.tBodies[0].rows.length > 1) sortable(table);
  });
  const full = document.querySelectorAll("table[data-tools]");
  full.forEach(restored);
  full.forEach(tools);
  const place = document.querySelector(".s-summary figure") ?? document.querySelector(".s-curves figure");
  if (place && charts.length) switches(place);
  if (state.get("x") || state.get("y") || state.get("off")) drawn();
  document.body.append(tip);
  for (const kind of ["pointerover", "focusin"]) addEventListener(kind, (event) => tell(event.target.closest?.(".point")));
  addEventListener("keydown", (event) => event.key === "Escape" && tell(null));
  addEventListener("click", pressed);
  addEventListener("hashchange", reveal);
  reveal();

  // A page of a running study has loaded itself again (reload.js): the reader stays at the same place.
  if (reading) {
    const there = document.getElementById(reading.id);
    const back = () => there && scrollBy(0, there.getBoundingClientRect().top - reading.top);
    document.querySelectorAll("details").forEach((one, place) => (one.open ||= Boolean(reading.open[place])));
    back();
    history.replaceState("written", "");
    addEventListener("load", () => (history.scrollRestoration = "auto") && back());
  }
})();
