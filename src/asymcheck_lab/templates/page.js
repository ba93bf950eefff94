"use strict";
// Sorting: the button of a heading turns its column up, then down.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  for (const button of table.querySelectorAll("thead button")) {
    button.addEventListener("click", () => {
      const heading = button.closest("th");
      const column = heading.cellIndex;
      const down = heading.getAttribute("aria-sort") === "ascending";
      for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const numeric = heading.classList.contains("figure");
      const rows = [...body.rows].map((row) => [row.cells[column].dataset.value ?? "", row]);
      rows.sort(([a], [b]) => {
        // What has no value stays at the end, in either direction.
        if (a === "" || b === "") return (a === "") - (b === "");
        const order = numeric ? Number(a) - Number(b) : a.localeCompare(b);
        return down ? -order : order;
      });
      body.append(...rows.map(([, row]) => row));
    });
  }
}
// Filters: cells by what they compare, rows by kind and words.
const form = document.querySelector("form.filters");
function filter() {
  const chosen = (name) => form.elements[name]?.value ?? "";
  const words = chosen("words").trim().toLowerCase();
  const kinds = new Set([...form.querySelectorAll("[name=kind]:checked")].map((box) => box.value));
  const names = ["model", "store", "every"];
  let cells = 0;
  for (const part of document.querySelectorAll("[data-model]")) {
    part.hidden = names.some((name) => chosen(name) && part.dataset[name] !== chosen(name));
    if (!part.hidden && part.classList.contains("cell")) cells += 1;
  }
  for (const row of document.querySelectorAll("[data-kind]")) {
    row.hidden = !kinds.has(row.dataset.kind) || !row.dataset.words.toLowerCase().includes(words);
  }
  form.querySelector("output").value = cells === 1 ? "1 table" : cells + " tables";
}
if (form) {
  form.hidden = false;
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  filter();
}
