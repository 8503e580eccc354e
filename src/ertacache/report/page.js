"use strict";
// Sorts tables, shows the numbers of points, and drags dividers. Uses nothing from elsewhere.

function sort(table, column, head) {
  const largestFirst = head.getAttribute("aria-sort") !== "descending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", largestFirst ? "descending" : "ascending");
  const sign = largestFirst ? -1 : 1;
  const value = (row) => row.cells[column].dataset.value;
  const compare = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x !== undefined && y !== undefined) return sign * (x - y);
    if (x !== undefined || y !== undefined) return x === undefined ? 1 : -1; // no number: last
    return -sign * a.cells[column].textContent.localeCompare(b.cells[column].textContent);
  };
  table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
}

for (const table of document.querySelectorAll(".sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => sort(table, column, head));
  });
}

const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);

function showTip(text, event) {
  tip.textContent = text;
  tip.hidden = false;
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${window.scrollX + Math.max(0, Math.min(event.clientX + 14, room))}px`;
  tip.style.top = `${window.scrollY + event.clientY + 14}px`;
}

function light(svg, method) {
  svg.classList.toggle("dim", method !== undefined);
  for (const part of svg.querySelectorAll("[data-method]")) {
    part.classList.toggle("lit", part.dataset.method === method);
  }
}

// Points lie close together, so the nearest one counts, wherever the pointer is beside it.
function nearest(svg, points, event) {
  const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  let [best, least] = [undefined, 12];
  for (const point of points) {
    const distance = Math.hypot(point.x - place.x, point.y - place.y);
    if (distance < least) [best, least] = [point, distance];
  }
  return best;
}

for (const svg of document.querySelectorAll(".pareto")) {
  const points = [...svg.querySelectorAll(".point")].map((point) => {
    const circle = point.querySelector("circle"), title = point.querySelector("title");
    title.remove(); // the browser would show it as well, later
    const method = point.closest("[data-method]").dataset.method;
    return { method, text: title.textContent, x: circle.cx.baseVal.value, y: circle.cy.baseVal.value };
  });
  svg.addEventListener("pointermove", (event) => {
    const point = nearest(svg, points, event);
    light(svg, point ? point.method : event.target.closest("[data-method]")?.dataset.method);
    if (point) showTip(point.text, event);
    else tip.hidden = true;
  });
  svg.addEventListener("pointerleave", () => {
    light(svg, undefined);
    tip.hidden = true;
  });
}

function addDivider(film, full) {
  const over = document.createElement("div");
  over.className = "over";
  const image = full.querySelector("img").cloneNode();
  image.alt = "";
  over.append(image);
  const divider = document.createElement("div");
  divider.className = "divider";
  film.append(over, divider);
  film.querySelector("img").draggable = image.draggable = false;
}

function addControls(section) {
  const controls = document.createElement("div");
  controls.className = "controls";
  const label = document.createElement("label");
  const range = document.createElement("input");
  Object.assign(range, { type: "range", min: 0, max: 100, step: "any", value: 50 });
  range.setAttribute("aria-label", "Divider: left of it the full run");
  label.append("Left of the divider: the full run", range);
  controls.append(label);
  section.querySelector("h2, h4").after(controls);
  const move = () => section.style.setProperty("--at", `${range.value}%`);
  range.addEventListener("input", move);
  move();
  return { controls, range, move };
}

function addPause(section, controls) {
  const moving = [...section.querySelectorAll(".moving")];
  if (moving.length === 0) return;
  const button = document.createElement("button");
  let playing = !matchMedia("(prefers-reduced-motion: reduce)").matches;
  const update = () => {
    button.textContent = playing ? "Pause" : "Play";
    for (const film of moving) {
      film.classList.toggle("playing", playing);
      film.classList.toggle("paused", !playing);
    }
    for (const animation of section.getAnimations({ subtree: true })) {
      if (animation.animationName === "play" && playing) animation.startTime = 0; // in step
    }
  };
  button.addEventListener("click", () => { playing = !playing; update(); });
  controls.append(button);
  requestAnimationFrame(update);
}

for (const section of document.querySelectorAll(".compare")) {
  const { controls, range, move } = addControls(section);
  for (const film of section.querySelectorAll("[data-full]")) {
    addDivider(film, document.getElementById(film.dataset.full));
    const drag = (event) => {
      const box = film.getBoundingClientRect();
      range.value = (100 * (event.clientX - box.left)) / box.width;
      move();
    };
    film.addEventListener("pointerdown", (event) => {
      film.setPointerCapture(event.pointerId);
      drag(event);
    });
    film.addEventListener("pointermove", (event) => { if (event.buttons) drag(event); });
  }
  section.classList.add("compared");
  addPause(section, controls);
}
