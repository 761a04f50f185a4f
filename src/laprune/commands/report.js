// The report's page: theme, sortable tables, figures to zoom into.
(function () {
  "use strict";

  const root = document.documentElement;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  if (matchMedia("(max-width: 60rem)").matches)
    document.querySelector("nav details").removeAttribute("open");

  // A cell that begins with a number sorts by it, else by its text; empty cells go last.
  function key(cell) {
    const text = cell.textContent.trim();
    const number = /^[^\d]{0,2}?([-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)/i.exec(text);
    return { text, number: number ? Number(number[1].replaceAll(",", "")) : NaN };
  }

  function compare(a, b) {
    if (!a.text || !b.text) return a.text ? -1 : b.text ? 1 : 0;
    if (Number.isNaN(a.number) || Number.isNaN(b.number)) return a.text.localeCompare(b.text);
    return a.number - b.number;
  }

  // Cells left empty because they repeat the line above get its text before lines part.
  function fillDown(rows) {
    rows.forEach((row, i) => {
      for (let j = 0; i && j < row.cells.length && !row.cells[j].textContent.trim(); j++)
        row.cells[j].textContent = rows[i - 1].cells[j].textContent;
    });
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.tabIndex = 0;
      const sort = () => {
        const rows = [...table.tBodies[0].rows];
        fillDown(rows);
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((h) => h.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const keyed = rows.map((row) => [key(row.cells[column]), row]);
        keyed.sort(([a], [b]) => (a.text && b.text && !up ? -1 : 1) * compare(a, b));
        table.tBodies[0].append(...keyed.map(([, row]) => row));
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (e) => { if (e.key === "Enter") sort(); });
    });
  }

  // The viewer: wheel or pinch to zoom, drag to move, double click to fit again.
  const viewer = document.getElementById("viewer");
  const image = viewer.querySelector("img");
  let view = { x: 0, y: 0, scale: 1 };
  const place = () => {
    image.style.transform = `translate(${view.x}px, ${view.y}px) scale(${view.scale})`;
  };
  function fit() {
    const { naturalWidth: w, naturalHeight: h } = image;
    const scale = Math.min(viewer.clientWidth / w, viewer.clientHeight / h) * 0.96;
    view = { scale, x: (viewer.clientWidth - w * scale) / 2, y: (viewer.clientHeight - h * scale) / 2 };
    place();
  }
  function zoom(factor, x, y) {
    view = { scale: view.scale * factor, x: x + (view.x - x) * factor, y: y + (view.y - y) * factor };
    place();
  }
  for (const button of document.querySelectorAll(".zoom"))
    button.addEventListener("click", () => {
      image.src = button.querySelector("img").src;
      image.alt = button.querySelector("img").alt;
      viewer.showModal();
      image.decode().then(fit);
    });
  viewer.querySelector("button").addEventListener("click", () => viewer.close());
  viewer.addEventListener("dblclick", fit);
  viewer.addEventListener("wheel", (e) => {
    e.preventDefault();
    zoom(Math.exp(-e.deltaY / 400), e.clientX, e.clientY);
  }, { passive: false });
  const pointers = new Map();
  viewer.addEventListener("pointerdown", (e) => pointers.set(e.pointerId, e));
  viewer.addEventListener("pointermove", (e) => {
    const before = pointers.get(e.pointerId);
    if (!before) return;
    const other = [...pointers.values()].find((p) => p.pointerId !== e.pointerId);
    if (other) {
      const apart = (p) => Math.hypot(p.clientX - other.clientX, p.clientY - other.clientY);
      const x = (e.clientX + other.clientX) / 2, y = (e.clientY + other.clientY) / 2;
      zoom(apart(e) / Math.max(apart(before), 1), x, y);
    } else {
      view.x += e.clientX - before.clientX;
      view.y += e.clientY - before.clientY;
      place();
    }
    pointers.set(e.pointerId, e);
  });
  for (const end of ["pointerup", "pointercancel", "pointerleave"])
    viewer.addEventListener(end, (e) => pointers.delete(e.pointerId));
})();
