// Helpers: elements, numbers as people read them, colours, one tooltip. Text is only ever set as text.
const D = JSON.parse(document.getElementById("data").textContent);
const T = (index) => D.texts[index];

function make(space, tag, options, children) {
  const node = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(options || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "style") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(3)) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}
const el = (tag, options, ...children) => make("", tag, options, children);
const svg = (tag, options, ...children) => make("http://www.w3.org/2000/svg", tag, options, children);

function scaled(value, units) {
  let step = 0;
  while (value >= 999.5 && step < units.length - 1) { value /= 1000; step += 1; }
  const digits = value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[step]}`;
}
const missing = (x) => x === null || x === undefined || x < 0;
const bytesText = (n) => missing(n) ? "–" : Math.round(n) < 1000 ? `${Math.round(n)} B` : scaled(n, ["B", "kB", "MB", "GB", "TB", "PB"]);
const timeText = (s) => missing(s) ? "–" : s < 5e-13 ? "0 s" : scaled(s * 1e9, ["ns", "µs", "ms", "s"]);
const countText = (n) => Math.abs(n - Math.round(n)) < 1e-9 ? String(Math.round(n)) : String(Number(n.toPrecision(3)));
const percentText = (x) => x === null ? "unknown" : x < 1e-9 ? "0 %" : x < 5e-4 ? "<0.1 %" : `${(100 * x).toFixed(1)} %`;
// Texts of the planner keep to ASCII: 12 us.
const micro = (text) => text.replace(/(\d) us\b/g, "$1 µs");
const many = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

const axisColor = (name) => `var(--axis-${Math.max(D.axes.indexOf(name), 0) % 4})`;
const axesFill = (axes) => !axes.length ? "var(--whole)" : axes.length === 1 ? axisColor(axes[0])
  : `linear-gradient(90deg, ${axes.map((a, k) => `${axisColor(a)} ${100 * k / axes.length}% ${100 * (k + 1) / axes.length}%`).join(", ")})`;
const swatch = (background) => el("span", { class: "swatch", style: { background } });
const axisChip = (name) => el("span", { class: "chip axis", style: { background: axisColor(name) }, text: name });

const tip = document.getElementById("tip");
function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = event.clientX ?? event.target.getBoundingClientRect().left;
  const y = event.clientY ?? event.target.getBoundingClientRect().bottom;
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 18}px`;
}
const hideTip = () => { tip.hidden = true; };
const tipped = (text) => ({
  onpointermove: (event) => showTip(event, text), onpointerleave: hideTip,
  onfocus: (event) => showTip(event, text), onblur: hideTip,
});
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

function section(id, title, note, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` },
    el("div", { class: "head" }, el("h2", { id: `${id}-title`, text: title }),
      note ? el("span", { class: "soft small", text: note }) : null), ...children);
}
function legend(pairs) {
  return el("div", { class: "legend" }, pairs.map(([background, text]) => el("span", {}, swatch(background), text)));
}
