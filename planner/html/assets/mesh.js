// The devices: where they stand (nodes, or a torus), and their place on each axis of the mesh.
function meshDrawing() {
  const w = D.wiring, cell = 34, gap = 5, pad = 9;
  const sizes = w.axes.map(([, size]) => size);
  const coordinates = (device) => {
    const out = [];
    for (let k = sizes.length - 1; k >= 0; k -= 1) { out[k] = device % sizes[k]; device = Math.floor(device / sizes[k]); }
    return out;
  };
  const tone = (k, at) => {
    const size = sizes[k], share = size < 2 ? 100 : 100 - 78 * at / (size - 1);
    return `color-mix(in srgb, ${axisColor(w.axes[k][0])} ${share}%, var(--card))`;
  };
  // units: devices that stand together, in columns
  const torus = w.kind === "torus";
  const last = torus ? w.shape[w.shape.length - 1] : 0;
  const unitSize = torus ? last * (w.shape.length > 1 ? w.shape[w.shape.length - 2] : 1) : w.per_node;
  const columns = torus ? last : w.per_node <= 4 ? w.per_node : w.per_node <= 8 ? 4 : 8;
  const units = Math.ceil(w.drawn / unitSize);
  const rows = Math.ceil(unitSize / columns);
  const unitWidth = columns * cell + (columns - 1) * gap + 2 * pad, unitHeight = rows * cell + (rows - 1) * gap + 2 * pad + 16;
  let across = Math.max(1, Math.min(units, Math.max(Math.floor(780 / (unitWidth + 14)), Math.ceil(Math.sqrt(units * 1.8 * unitHeight / unitWidth)))));
  if (units % across && units % (across - 1) === 0) across -= 1;
  const width = across * (unitWidth + 14), height = Math.ceil(units / across) * (unitHeight + 14);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", style: { "max-width": `${Math.round(width * 1.25)}px` },
    "aria-label": `${w.drawn} devices of ${D.cluster}; mesh ${D.mesh}` });
  const devices = [];
  const planes = torus ? Math.max(Math.round(w.per_node / unitSize), 1) : 1;
  const unitName = (u) => torus ? [w.slices > 1 ? `slice ${Math.floor(u / planes)}` : "", planes > 1 ? `plane ${u % planes}` : ""].filter(Boolean).join(", ") || "torus" : `node ${u}`;
  for (let u = 0; u < units; u += 1) {
    const x0 = (u % across) * (unitWidth + 14) + 7, y0 = Math.floor(u / across) * (unitHeight + 14) + 7;
    drawing.append(svg("rect", { class: "unit", x: x0, y: y0 + 14, width: unitWidth, height: unitHeight - 14, rx: 9 }),
      svg("text", { x: x0 + 2, y: y0 + 9, text: unitName(u) }));
    for (let k = 0; k < unitSize && u * unitSize + k < w.drawn; k += 1) {
      const device = u * unitSize + k, place = coordinates(device);
      const x = x0 + pad + (k % columns) * (cell + gap), y = y0 + 14 + pad + Math.floor(k / columns) * (cell + gap);
      const group = svg("g", { class: "device" });
      sizes.forEach((_, a) => group.append(svg("rect", { x, y: y + a * cell / sizes.length, width: cell, height: cell / sizes.length,
        style: { fill: tone(a, place[a]) } })));
      group.append(svg("rect", { x, y, width: cell, height: cell, rx: 4, style: { fill: "none", stroke: "var(--line)" } }),
        svg("text", { x: x + cell / 2, y: y + cell / 2 + 4, "text-anchor": "middle", text: device,
          style: { fill: "var(--ink)", "font-weight": 600, "paint-order": "stroke", stroke: "var(--card)", "stroke-width": "2.5px" } }));
      group.addEventListener("pointermove", (event) => {
        showTip(event, `device ${device}\n${w.axes.map(([name], a) => `${name} = ${place[a]}`).join(", ")}`);
        devices.forEach((other) => other.group.classList.toggle("peer",
          other.place.filter((p, a) => p !== place[a]).length === 1));
      });
      group.addEventListener("pointerleave", () => { hideTip(); devices.forEach((other) => other.group.classList.remove("peer")); });
      devices.push({ group, place });
      drawing.append(group);
    }
  }
  const total = sizes.reduce((a, b) => a * b, 1);
  const wires = torus
    ? `${w.shape.join("×")} torus${w.slices > 1 ? `, ${w.slices} slices` : ""}; ${w.wraps.some(Boolean) ? `dimensions ${w.wraps.map((x, k) => x ? k : -1).filter((k) => k >= 0).join(", ")} wrap around` : "no dimension wraps around"}. A link moves ${bytesText(w.link_bytes_per_s)}/s, one way${w.slices > 1 ? `; slices are joined at ${bytesText(w.network_bytes_per_s)}/s a device` : ""}.`
    : `${many(w.shape[1] ?? 1, "node")} of ${many(w.per_node, "device")}. A device gets ${bytesText(w.link_bytes_per_s)}/s inside a node${(w.shape[1] ?? 1) > 1 ? `, ${bytesText(w.network_bytes_per_s)}/s between nodes` : ""}.`;
  return el("div", { class: "card mesh" }, el("div", {}, drawing,
    w.drawn < total ? el("p", { class: "soft small", text: `Drawn: the first ${many(w.drawn, "device")} of ${total.toLocaleString("en")}.` }) : null),
  el("div", {}, el("p", { class: "small", text: `${w.device}: ${wires}` }),
    el("p", { class: "soft small", text: "Each device is striped with its place along every mesh axis: the stripe's colour names the axis, its strength the place. Point at a device to see those that it exchanges data with along one axis." }),
    w.axes.map(([name, size, reach], k) => el("div", { style: { margin: "9px 0" } }, axisChip(name), ` ${size === 1 ? "" : `${size} devices, `}${reach}`,
      el("div", { class: "bar", style: { "margin-top": "3px", height: "9px" } },
        Array.from({ length: Math.min(size, 64) }, (_, at) => el("span", { style: { flex: "1", background: tone(k, at * (size > 64 ? size / 64 : 1)) } })))))));
}
