"use strict";
// Sorts tables and copies commands; a page without it shows the same.
(() => {
  const units = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };
  function value(row, column) {
    const text = row.cells[column].textContent.trim();
    const [, number, unit] = text.match(/^(-?[\d.]+(?:e-?\d+)?)(?:\s(\w+))?/) || [];
    return number === undefined ? text : Number(number) * (units[unit] || 1);
  }

  for (const table of document.querySelectorAll("table.data")) {
    const body = table.tBodies[0];
    if (body.rows.length < 3) continue;
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.title = "Sort by this column";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const order = (a, b) =>
          typeof a === "number" && typeof b === "number" ? a - b : typeof a === "number" ? 1
            : typeof b === "number" ? -1 : a.localeCompare(b);
        const rows = [...body.rows].sort((a, b) => order(value(a, column), value(b, column)));
        body.append(...(down ? rows.reverse() : rows));
      });
    });
  }

  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const text = button.parentElement.querySelector("pre");
      getSelection().selectAllChildren(text);
      try {
        await navigator.clipboard.writeText(text.textContent.trim());
      } catch {
        document.execCommand("copy"); // the selection, where a page may not use the clipboard
      }
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 2000);
    });
  }
})();
