"use strict";
// Opens the cell that a link leads to; the page can be read without this.
function openTarget() {
  let part = document.getElementById(location.hash.slice(1));
  while (part) {
    if (part.tagName === "DETAILS") part.open = true;
    part = part.parentElement;
  }
  const target = document.getElementById(location.hash.slice(1));
  if (target) target.scrollIntoView();
}
window.addEventListener("hashchange", openTarget);
openTarget();
const all = document.getElementById("all-cells");
all.hidden = false;
all.addEventListener("click", () => {
  const cells = document.querySelectorAll("details.cell");
  const open = Array.from(cells).some((cell) => !cell.open);
  cells.forEach((cell) => { cell.open = open; });
  all.textContent = open ? "Close all cells" : "Open all cells";
});
