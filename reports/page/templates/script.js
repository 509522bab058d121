// The page is whole without this. It sorts tables, filters, copies and downloads the full one.
"use strict";
(() => {
  const NOTHING = "-";
  const order = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
  const said = (element) => element.textContent.replace(/\s+/g, " ").trim();

  function made(tag, properties, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  // Numbers before words, in the direction asked for; nothing is last in both.
  function key(row, place) {
    const cell = row.cells[place];
    if ("value" in cell.dataset) return { rank: 0, number: Number(cell.dataset.value) };
    const text = said(cell);
    return { rank: text === NOTHING || text === "" ? 2 : 1, text };
  }

  function compare(a, b, way) {
    if (a.rank !== b.rank) return a.rank - b.rank;
    if (a.rank === 0) return way * (a.number - b.number);
    return a.rank === 1 ? way * order.compare(a.text, b.text) : 0;
  }

  function sortable(table) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];

    function sort(head, place) {
      const next = { ascending: "descending", descending: null }[head.ariaSort];
      const state = next === undefined ? "ascending" : next;
      for (const other of heads) other.removeAttribute("aria-sort");
      if (state) head.setAttribute("aria-sort", state);
      const way = state === "descending" ? -1 : 1;
      const keyed = rows.map((row) => ({ row, key: key(row, place) }));
      if (state) keyed.sort((a, b) => compare(a.key, b.key, way));
      body.append(...keyed.map((one) => one.row));
    }

    // The words of a head become the button, and its link to the definition a question mark beside them.
    heads.forEach((head, place) => {
      const title = head.dataset.title;
      const link = head.querySelector("a");
      head.replaceChildren(made("button", { type: "button", className: "sort" }, title));
      head.setAttribute("aria-label", title);
      if (link) {
        Object.assign(link, { textContent: "?", className: "what", ariaLabel: `What ${title} is` });
        head.append(link);
      }
      head.addEventListener("click", (event) => {
        if (event.target !== link) sort(head, place);
      });
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

  function quoted(text) {
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }

  function copyOldWay(text) {
    const area = made("textarea", { value: text });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }

  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      return copyOldWay(text);
    }
  }

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

    function filter() {
      const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
      rows.forEach((row, place) => {
        row.hidden = !words.every((word) => texts[place].includes(word));
      });
      const left = rows.filter((row) => !row.hidden).length;
      count.textContent = `${left.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows shown`;
    }

    const copier = made("button", { type: "button" }, "Copy");
    copier.addEventListener("click", async () => {
      const done = await copy(shown(table).map((row) => row.join("\t")).join("\n"));
      count.textContent = done ? "Copied, columns set apart by tabs" : "The browser refused to copy";
    });
    const saver = made("button", { type: "button" }, "Download CSV");
    saver.addEventListener("click", () => {
      download(shown(table).map((row) => row.map(quoted).join(",")).join("\n") + "\n");
    });
    box.addEventListener("input", filter);
    filter();
    table.closest(".scroll").before(
      made("div", { className: "tools" }, made("label", {}, "Filter ", box), copier, saver, count),
    );
  }

  document.querySelectorAll("table").forEach((table) => {
    for (const head of table.tHead.rows[0].cells) head.dataset.title = said(head);
    if (table.tBodies[0].rows.length > 1) sortable(table);
  });
  document.querySelectorAll("table[data-tools]").forEach(tools);
})();
