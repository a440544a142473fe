// Tables sort and download, figures download. The controls are made here: without scripts there are none to fail.
(() => {
  "use strict";
  const words = new Intl.Collator("en", { numeric: true });
  const valueOf = (cell) => cell.dataset.value ?? cell.textContent;

  function button(text, label, action) {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    if (label) made.setAttribute("aria-label", (made.title = label));
    made.addEventListener("click", action);
    return made;
  }

  function tools(after, ...buttons) {
    const row = document.createElement("div");
    row.className = "tools";
    row.append(...buttons);
    after.after(row);
  }

  function download(name, blob) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  }

  // ---------------------------------------------------------------- tables

  // numbers before words, and what is missing last whichever way the rest goes
  function compare(a, b, sign) {
    if (a === "" || b === "") return (a === "") - (b === "");
    const [x, y] = [Number(a), Number(b)];
    if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
    return sign * (Number.isNaN(x) ? words.compare(a, b) : x - y);
  }

  function sortable(table) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    const original = [...body.rows];
    heads.forEach((head, column) => {
      const next = { ascending: "descending", descending: null };
      head.replaceChildren(button(head.textContent, "", () => {
        const now = head.getAttribute("aria-sort");
        const order = now === null ? "ascending" : next[now];
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        if (order) head.setAttribute("aria-sort", order);
        const sign = order === "descending" ? -1 : 1;
        const key = (row) => valueOf(row.cells[column]);
        const rows = order ? [...original].sort((a, b) => compare(key(a), key(b), sign)) : original;
        body.append(...rows);
      }));
    });
  }

  const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

  function csv(table) {
    const line = (row) => [...row.cells].map((cell) => quoted(valueOf(cell))).join(",");
    return [...table.rows].map(line).join("\r\n") + "\r\n";
  }

  for (const table of document.querySelectorAll("table")) {
    const name = `${table.dataset.name}.csv`;
    const save = () => download(name, new Blob([csv(table)], { type: "text/csv" }));
    tools(table.parentNode, button("CSV", `Download ${name}`, save));
    if (table.tHead && table.tBodies[0].rows.length > 1) sortable(table);
  }

  // ---------------------------------------------------------------- figures

  const sizeOf = (svg) => svg.getAttribute("viewBox").split(" ").slice(2).map(Number);

  // a drawing that stands alone: own size, black on white whatever the page's colours are
  function standalone(svg) {
    const copy = svg.cloneNode(true);
    const [width, height] = sizeOf(svg);
    const ground = document.createElementNS(svg.namespaceURI, "rect");
    for (const [key, value] of Object.entries({ width, height, fill: "#fff" })) ground.setAttribute(key, value);
    copy.prepend(ground);
    copy.setAttribute("width", `${width}pt`);
    copy.setAttribute("height", `${height}pt`);
    return new XMLSerializer().serializeToString(copy).replaceAll("currentColor", "#000");
  }

  function savePng(svg, name) {
    const [width, height] = sizeOf(svg);
    const picture = new Image();
    picture.onload = () => {
      const canvas = document.createElement("canvas");
      canvas.width = Math.round(4 * width);
      canvas.height = Math.round(4 * height);
      canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((blob) => download(name, blob), "image/png");
    };
    picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(svg))}`;
  }

  for (const figure of document.querySelectorAll("figure")) {
    const svg = figure.querySelector("svg");
    const [png, vector] = ["png", "svg"].map((kind) => `${figure.dataset.name}.${kind}`);
    const saveSvg = () => download(vector, new Blob([standalone(svg)], { type: "image/svg+xml" }));
    tools(figure.lastElementChild, button("PNG", `Download ${png}`, () => savePng(svg, png)),
      button("SVG", `Download ${vector}`, saveSvg));
  }

  // ---------------------------------------------------------------- paper

  const folded = () => [...document.querySelectorAll("details:not([open])")];
  let opened = [];
  addEventListener("beforeprint", () => { opened = folded(); opened.forEach((part) => { part.open = true; }); });
  addEventListener("afterprint", () => { opened.forEach((part) => { part.open = false; }); });
})();
