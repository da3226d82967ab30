// The operator graph: segments in program order, each drawn in layers when it is first opened.
const NODE_W = 216, GAP_X = 22, GAP_Y = 26;
const DTYPES = [["bfloat", "bf"], ["float", "f"], ["uint", "u"], ["int", "i"], ["complex", "c"]];
function shortType(dtype) {
  for (const [name, short] of DTYPES) if (dtype.startsWith(name)) return short + dtype.slice(name.length);
  return dtype;
}
const arrayText = (a) => `${shortType(a.dtype)}[${a.shape.join(",")}]`;
function specText(a) {
  const dims = a.axes.map((axes) => axes.length ? axes.join("·") : "–");
  return a.axes.some((axes) => axes.length) ? `split ${dims.join(", ")}` : "on every device whole";
}
// The last two names of a path: [0]['params']['up']['kernel'] -> up.kernel
const leafName = (path) => {
  const names = path.match(/[A-Za-z_]\w*/g);
  return names ? names.slice(-2).join(".") : path;
};
const isProduct = (node) => /^(dot_general|conv_general_dilated|ragged_dot)\b/.test(node.kind);

// Boxes for the dimensions of an array, coloured by the axes that split them; returns their width.
function dimBoxes(group, array, x, y, size) {
  const start = x;
  group.append(svg("text", { class: "read", x, y: y + size - 4, text: shortType(array.dtype) }));
  x += 7 * shortType(array.dtype).length + 4;
  array.shape.forEach((n, d) => {
    const axes = array.axes[d] || [], width = Math.max(7 * String(n).length + 8, 18);
    if (x + width - start > NODE_W - 16) return;
    const parts = axes.length ? axes : [null];
    parts.forEach((axis, k) => group.append(svg("rect", { x: x + k * width / parts.length, y, width: width / parts.length, height: size,
      rx: parts.length > 1 ? 0 : 3, style: { fill: axis === null ? "var(--whole)" : axisColor(axis) } })));
    group.append(svg("text", { class: `dim${axes.length ? " split" : ""}`, x: x + width / 2, y: y + size - 4, text: n }));
    x += width + 2;
  });
  return x - start;
}

function nodeHeight(node) {
  return 24 + (node.result ? 20 : 0) + 18 * Math.min(node.reads.length, 3) + 15 * node.sends.length + 4;
}
function nodeText(node, segment) {
  const lines = [`${node.kind}${node.ops > 1 ? ` (${many(node.ops, "operation")})` : ""}`];
  if (node.source) lines.push(node.source);
  if (node.result) lines.push(`result ${arrayText(node.result)}: ${specText(node.result)}`);
  node.reads.forEach((a) => lines.push(`reads ${a.name} ${arrayText(a)}: ${specText(a)}`));
  lines.push(`compute ${timeText(node.compute_s)}${segment.count > 1 ? ` in all ${segment.count}` : ""}`);
  node.sends.forEach(([kind, axes, runs, s]) => lines.push(`${kind} over ${axes.join(", ")}: ${countText(runs)} a step, ${timeText(s)}`));
  return lines.join("\n");
}
function drawNode(node, segment, x, y) {
  const height = nodeHeight(node), text = nodeText(node, segment);
  const group = svg("g", { class: `node${isProduct(node) ? " product" : ""}${node.sends.length ? " sends" : ""}`, tabindex: "-1",
    role: "img", "aria-label": text.replaceAll("\n", "; "), transform: `translate(${x},${y})`, ...tipped(text) });
  group.append(svg("rect", { class: "box", width: NODE_W, height, rx: 8 }));
  const seconds = node.compute_s > 0 ? timeText(node.compute_s) : "", room = Math.floor((NODE_W - 26 - 6.6 * seconds.length) / 7.2);
  const label = node.kind.length > room ? `${node.kind.slice(0, room - 1)}…` : node.kind;
  group.append(svg("text", { class: "kind", x: 9, y: 16, text: label }),
    svg("text", { x: NODE_W - 8, y: 16, "text-anchor": "end", text: seconds }));
  let at = 23;
  if (node.result) { dimBoxes(group, node.result, 9, at, 16); at += 20; }
  node.reads.slice(0, 3).forEach((array, k) => {
    const more = k === 2 && node.reads.length > 3 ? ` +${node.reads.length - 3}` : "";
    let name = leafName(array.name);
    if (name.length > 17) name = `…${name.slice(-16)}`;
    group.append(svg("text", { class: "read", x: 9, y: at + 12, text: `◂ ${name}${more}` }));
    const wide = array.shape.reduce((w, n) => w + Math.max(7 * String(n).length + 8, 18) + 2, 7 * shortType(array.dtype).length + 4);
    if (wide < NODE_W - 118) dimBoxes(group, array, NODE_W - 8 - wide, at, 15);
    at += 18;
  });
  node.sends.forEach(([kind, axes, , s]) => {
    group.append(svg("text", { class: "send", x: 9, y: at + 11, text: `⇄ ${kind} ${axes.join(",")} ${timeText(s)}` }));
    at += 15;
  });
  return group;
}

// Layers top to bottom (Sugiyama et al. 1981): long edges pass through points of their own, the order
// in a layer is by barycentres, places are then evened out.
function layered(nodes) {
  const items = nodes.map((node, k) => ({ node, layer: node.layer, width: NODE_W, height: nodeHeight(node), up: [], down: [], k }));
  const chains = [];
  nodes.forEach((node, k) => node.before.forEach((b) => {
    const chain = [items[b]];
    for (let layer = nodes[b].layer + 1; layer < node.layer; layer += 1) {
      const point = { layer, width: 8, height: 0, up: [], down: [] };
      items.push(point);
      chain.push(point);
    }
    chain.push(items[k]);
    for (let i = 1; i < chain.length; i += 1) { chain[i].up.push(chain[i - 1]); chain[i - 1].down.push(chain[i]); }
    chains.push(chain);
  }));
  const layers = [];
  items.forEach((item) => (layers[item.layer] ??= []).push(item));
  layers.forEach((layer) => layer.forEach((item, k) => { item.order = k; }));
  const mean = (list, key, own) => list.length ? list.reduce((s, x) => s + x[key], 0) / list.length : own;
  for (let sweep = 0; sweep < 12; sweep += 1) {
    const side = sweep % 2 ? "down" : "up";
    const along = sweep % 2 ? [...layers].reverse() : layers;
    along.forEach((layer) => {
      layer.forEach((item) => { item.key = mean(item[side], "order", item.order); });
      layer.sort((a, b) => a.key - b.key);
      layer.forEach((item, k) => { item.order = k; });
    });
  }
  layers.forEach((layer) => { let x = 0; layer.forEach((item) => { item.x = x + item.width / 2; x += item.width + GAP_X; }); });
  for (let sweep = 0; sweep < 16; sweep += 1) {
    const side = sweep % 2 ? "down" : "up";
    (sweep % 2 ? [...layers].reverse() : layers).forEach((layer) => {
      layer.forEach((item) => { item.want = mean(item[side], "x", item.x); });
      let edge = -Infinity;
      const left = layer.map((item) => { const x = Math.max(item.want, edge + item.width / 2); edge = x + item.width / 2 + GAP_X; return x; });
      edge = Infinity;
      const right = [...layer].reverse().map((item) => { const x = Math.min(item.want, edge - item.width / 2); edge = x - item.width / 2 - GAP_X; return x; }).reverse();
      layer.forEach((item, k) => { item.x = (left[k] + right[k]) / 2; });
    });
  }
  let y = 8;
  layers.forEach((layer) => {
    const height = Math.max(...layer.map((item) => item.height));
    layer.forEach((item) => { item.y = y; item.room = height; });
    y += height + GAP_Y;
  });
  const low = Math.min(...items.map((item) => item.x - item.width / 2)), high = Math.max(...items.map((item) => item.x + item.width / 2));
  items.forEach((item) => { item.x += 8 - low; });
  return { items, chains, width: high - low + 16, height: y - GAP_Y + 8 };
}

function drawSegment(segment) {
  const linked = new Set();
  segment.nodes.forEach((node, k) => node.before.forEach((b) => { linked.add(k); linked.add(b); }));
  const box = el("div", { class: "drawing", tabindex: "0", role: "region", "aria-label": "Operations of this piece; arrow keys go from one to the next" });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    const nodes = [...box.querySelectorAll(".node")], at = nodes.indexOf(document.activeElement);
    event.preventDefault();
    nodes[at < 0 ? 0 : Math.min(Math.max(at + step, 0), nodes.length - 1)]?.focus();
  });
  if (linked.size) {
    const kept = [...linked].sort((a, b) => a - b), number = new Map(kept.map((k, i) => [k, i]));
    const nodes = kept.map((k) => ({ ...segment.nodes[k], before: segment.nodes[k].before.map((b) => number.get(b)) }));
    const { items, chains, width, height } = layered(nodes);
    const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Operator graph" });
    chains.forEach((chain) => {
      let path = `M${chain[0].x},${chain[0].y + chain[0].height}`;
      if (chain[0].height < chain[0].room) path += `V${chain[0].y + chain[0].room}`;
      chain.slice(1).forEach((item, k) => {
        const from = chain[k], y0 = from.y + from.room, y1 = item.y, middle = (y0 + y1) / 2;
        path += `C${from.x},${middle} ${item.x},${middle} ${item.x},${y1}`;
        if (!item.node) path += `V${item.y + item.room}`;
      });
      drawing.append(svg("path", { class: "edge", d: path }));
    });
    items.forEach((item) => { if (item.node) drawing.append(drawNode(item.node, segment, item.x - NODE_W / 2, item.y)); });
    box.append(drawing);
    const first = items.filter((item) => item.node && item.layer === 0);
    requestAnimationFrame(() => { box.scrollLeft = first.reduce((sum, item) => sum + item.x, 0) / (first.length || 1) - box.clientWidth / 2; });
  }
  const alone = segment.nodes.filter((_, k) => !linked.has(k));
  if (alone.length) {
    const grid = el("div", { style: { display: "flex", "flex-wrap": "wrap", gap: "8px" } });
    alone.forEach((node) => {
      const height = nodeHeight(node);
      grid.append(svg("svg", { width: NODE_W + 4, height: height + 4, style: { margin: "0" } }, drawNode(node, segment, 2, 2)));
    });
    box.append(grid);
  }
  if (!segment.nodes.length) box.append(el("p", { class: "soft small", text: "Nothing but scalars, or other names for arrays." }));
  if (segment.left_out) box.append(el("p", { class: "soft small", text: `${segment.left_out} more, the cheapest, are not drawn.` }));
  return box;
}

const segmentName = (segment) => segment.region || (segment.count > 1 ? "block" : segment.updates ? "update" : "operations");
function segmentRow(segment, longest) {
  const total = segment.compute_s + segment.communication_s;
  const where = segment.sources.slice(0, 3).join(", ") + (segment.sources.length > 3 ? " …" : "");
  const details = el("details", { class: "segment" },
    el("summary", {},
      el("span", {}, el("b", { text: segmentName(segment) }), segment.count > 1 ? el("span", { class: "times", text: ` ×${segment.count}` }) : null,
        el("span", { class: "soft", text: ` ${many(segment.length, "operation")}${where ? `, ${where}` : ""}` }), " ",
        segment.updates ? el("span", { class: "chip", text: "makes the next state" }) : null,
        segment.alike ? null : el("span", { class: "chip bad", text: "shardings differ between repetitions" })),
      el("span", { class: "bar", title: `${timeText(segment.compute_s)} compute, ${timeText(segment.communication_s)} communication` },
        el("span", { style: { width: `${100 * segment.compute_s / longest}%`, background: "var(--product)" } }),
        el("span", { style: { width: `${100 * segment.communication_s / longest}%`, background: "var(--wait)" } })),
      el("span", { class: "num" }, timeText(total), el("span", { class: "soft", text: segment.communication_s ? `, ${timeText(segment.communication_s)} sent` : "" }))));
  details.addEventListener("toggle", () => { if (details.open && details.children.length < 2) details.append(drawSegment(segment)); });
  return details;
}

function graphSection() {
  const segments = D.segments;
  const cost = (s) => s.compute_s + s.communication_s;
  const longest = Math.max(...segments.map(cost), 1e-30);
  const rows = segments.map((segment) => segmentRow(segment, longest));
  const open = (k) => { rows[k].closest("details.more")?.setAttribute("open", ""); rows[k].open = true; rows[k].scrollIntoView({ block: "start" }); };
  const strip = el("div", { class: "strip", role: "group", "aria-label": "Pieces of the step in program order, as wide as their time" },
    segments.map((segment, k) => {
      const label = `${segmentName(segment)}${segment.count > 1 ? ` ×${segment.count}` : ""}`;
      const plain = !segment.nodes.some(isProduct);
      return el("button", { type: "button", class: plain ? "light" : "", style: { flex: `${Math.max(cost(segment) / longest, 0.001)} 1 0` },
        "aria-label": `${label}, ${timeText(cost(segment))}`, onclick: () => open(k),
        text: cost(segment) > 0.09 * longest ? label : "", ...tipped(`${label}\n${segment.sources.slice(0, 4).join(", ")}\n${timeText(cost(segment))}`) });
    }));
  // what costs next to nothing, many in a row, is behind one line
  const out = [];
  let k = 0;
  while (k < segments.length) {
    let stop = k;
    while (stop < segments.length && cost(segments[stop]) < 0.02 * longest) stop += 1;
    if (stop - k > 3) {
      const sum = segments.slice(k, stop).reduce((s, x) => s + cost(x), 0);
      out.push(el("details", { class: "more" }, el("summary", { class: "soft small", style: { cursor: "pointer", padding: "8px 12px" },
        text: `${stop - k} small pieces, ${timeText(sum)} together` }), rows.slice(k, stop)));
      k = stop;
    } else { out.push(rows[k]); k += 1; }
  }
  const first = segments.findIndex((s) => s.count > 1 && s.nodes.some((n) => n.before.length));
  const shown = first >= 0 ? first : segments.findIndex((s) => cost(s) === longest);
  if (shown >= 0) rows[shown].open = true;
  const keys = [...D.axes.map((name) => [axisColor(name), `split over ${name}`]), ["var(--whole)", "not split"]];
  return [el("div", { class: "card" }, legend(keys),
    el("p", { class: "soft small", text: "A box is an operation, or elementwise operations that stand together; its row of numbers is the result's shape, one box a dimension, coloured by the mesh axis that splits it. ◂ are arguments of the step that it reads, as they are used. ⇄ are the collectives it causes. Of repeated blocks the first is drawn; times are those of all." }),
    strip, out)];
}
