// The step over time: a lane of compute, one for each set of mesh axes, and memory, on one clock.
const CATEGORY_NAMES = ["parameters", "optimizer state", "batch and other inputs", "gathered for use", "results", "activations and temporaries"];
const LANE_H = 30, LANE_GAP = 12, RIGHT = 14, MEMORY_H = 230;

function timeFigure() {
  const S = D.step, M = S.memory, bins = M.moment.length, P = D.prediction, END = S.step_s || 1e-9;
  const totals = M.moment.map((_, b) => M.bytes.reduce((s, c) => s + c[b], 0));
  const used = CATEGORY_NAMES.map((_, c) => c).filter((c) => M.bytes[c].some((x) => x > 0));
  const state = { from: 0, to: END, bin: M.peak_bin, drag: null };
  const box = el("div", { class: "figure", tabindex: "0", role: "application",
    "aria-label": "Timeline and memory. Arrow keys move the cursor, plus and minus zoom, 0 shows the whole step." });
  const panel = el("div", { "aria-live": "polite" });
  const lanesH = S.lanes.length * (LANE_H + LANE_GAP);
  const height = lanesH + 26 + MEMORY_H + 26;
  const top = Math.max(...totals, 1);
  const limit = P.limit_bytes;
  const ceiling = limit > 0 && top > 0.3 * limit ? Math.max(limit, top) * 1.08 : top * 1.12;
  let width = 900, left = 150, root = null, cursor = null, select = null;

  const x = (t) => left + (t - state.from) / (state.to - state.from || 1) * (width - left - RIGHT);
  const time = (px) => state.from + (px - left) / (width - left - RIGHT) * (state.to - state.from);
  const binTime = (b) => (b + 0.5) / bins * END;
  const binOf = (t) => Math.max(0, Math.min(bins - 1, Math.floor(t / END * bins)));
  const memoryTop = lanesH + 26;
  const y = (n) => memoryTop + MEMORY_H - n / ceiling * MEMORY_H;
  const visible = (lane, k) => lane.end_s[k] > state.from && lane.start_s[k] < state.to;

  function laneDrawing(lane, row) {
    const y0 = row * (LANE_H + LANE_GAP) + 4, compute = !lane.axes.length;
    const group = svg("g", {});
    group.append(svg("rect", { class: "lane", x: left, y: y0, width: width - left - RIGHT, height: LANE_H, rx: 4 }));
    group.append(svg("text", { x: 2, y: y0 + 13, text: compute ? "compute" : lane.axes.join(", "),
      style: { fill: "var(--ink)", "font-weight": 600 } }), svg("text", { x: 2, y: y0 + 27, text: left > 100 ? lane.reach : "" }));
    const paths = new Map();
    let waits = "";
    lane.start_s.forEach((start, k) => {
      if (!visible(lane, k)) return;
      const x0 = Math.max(x(start), left), x1 = Math.min(x(lane.end_s[k]), width - RIGHT);
      const w = Math.max(x1 - x0, 0.7), length = lane.end_s[k] - start;
      const full = Math.max(Math.min(lane.busy_s[k] / (length || 1), 1), 0.12) * LANE_H;
      const fill = compute ? ["var(--start)", "var(--product)", "var(--elementwise)"][lane.kind[k]] : axisColor(lane.axes[0]);
      const d = `M${x0.toFixed(2)} ${(y0 + LANE_H - full).toFixed(2)}h${w.toFixed(2)}v${full.toFixed(2)}h${(-w).toFixed(2)}z`;
      paths.set(fill, (paths.get(fill) || "") + d);
      if (lane.pause_s[k] > 0) {
        const long = Math.max(Math.min(w * lane.pause_s[k] / (length || 1), w), 0.7);
        waits += `M${x0.toFixed(2)} ${y0 + LANE_H}h${long.toFixed(2)}v5h${(-long).toFixed(2)}z`;
      }
    });
    paths.forEach((d, fill) => group.append(svg("path", { d, style: { fill } })));
    if (lane.axes.length > 1) lane.axes.forEach((name, k) => group.append(svg("rect", { x: left - 12, y: y0 + k * LANE_H / lane.axes.length, width: 7,
      height: LANE_H / lane.axes.length, style: { fill: axisColor(name) } })));
    if (waits) group.append(svg("path", { d: waits, style: { fill: "var(--wait)" } }));
    return group;
  }

  function memoryDrawing() {
    const group = svg("g", {});
    const lines = 4;
    for (let k = 0; k <= lines; k += 1) {
      const value = ceiling * k / lines;
      group.append(svg("line", { class: "grid", x1: left, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end", text: bytesText(value) }));
    }
    group.append(svg("text", { x: 2, y: left > 100 ? memoryTop + 13 : memoryTop - 10, text: "memory", style: { fill: "var(--ink)", "font-weight": 600 } }),
      svg("text", { x: 2, y: memoryTop + 28, text: left > 100 ? "per device" : "" }));
    const first = binOf(state.from), last = binOf(state.to);
    const base = new Array(bins).fill(0);
    used.forEach((c) => {
      let up = "", down = "";
      for (let b = first; b <= last; b += 1) {
        const x0 = Math.max(x(b / bins * END), left).toFixed(2), x1 = Math.min(x((b + 1) / bins * END), width - RIGHT).toFixed(2);
        const high = y(base[b] + M.bytes[c][b]).toFixed(2), low = y(base[b]).toFixed(2);
        up += `${b === first ? "M" : "L"}${x0} ${high}L${x1} ${high}`;
        down = `L${x1} ${low}L${x0} ${low}${down}`;
        base[b] += M.bytes[c][b];
      }
      group.append(svg("path", { d: `${up}${down}Z`, style: { fill: `var(--held-${c})` } }));
    });
    if (limit > 0 && limit <= ceiling) {
      group.append(svg("line", { class: "limit", x1: left, x2: width - RIGHT, y1: y(limit), y2: y(limit) }),
        svg("text", { x: width - RIGHT - 4, y: y(limit) - 5, "text-anchor": "end", text: `limit ${bytesText(limit)}`, style: { fill: "var(--bad)" } }));
    } else if (limit > 0) {
      group.append(svg("text", { x: width - RIGHT - 4, y: memoryTop + 12, "text-anchor": "end", text: `the limit, ${bytesText(limit)}, is ${countText(Math.round(limit / top))} times the peak`, style: { fill: "var(--bad)" } }));
    }
    const peak = binTime(M.peak_bin);
    if (peak >= state.from && peak <= state.to) {
      group.append(svg("circle", { cx: x(peak), cy: y(totals[M.peak_bin]), r: 4, style: { fill: "var(--card)", stroke: "var(--ink)", "stroke-width": 2 } }));
    }
    const ticks = width < 600 ? 2 : 5;
    for (let k = 0; k <= ticks; k += 1) {
      const t = state.from + (state.to - state.from) * k / ticks;
      group.append(svg("text", { x: x(t), y: height - 8, "text-anchor": k === 0 ? "start" : k === ticks ? "end" : "middle", text: timeText(t) }));
    }
    return group;
  }

  function draw() {
    width = Math.max(box.clientWidth, 300);
    left = width < 600 ? 88 : 150;
    root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
    S.lanes.forEach((lane, row) => root.append(laneDrawing(lane, row)));
    root.append(memoryDrawing());
    cursor = svg("line", { class: "cursor", y1: 0, y2: memoryTop + MEMORY_H });
    select = svg("rect", { class: "select", y: 0, height: memoryTop + MEMORY_H, visibility: "hidden" });
    root.append(cursor, select);
    box.replaceChildren(root);
    point();
  }

  function point() {
    const t = binTime(state.bin);
    cursor.setAttribute("visibility", t >= state.from && t <= state.to ? "visible" : "hidden");
    cursor.setAttribute("x1", x(t));
    cursor.setAttribute("x2", x(t));
    const moment = M.moment[state.bin], held = new Map();
    let known = 0;
    M.start.forEach((start, k) => {
      if (start > moment || M.end[k] <= moment) return;
      const key = `${M.category[k]} ${M.label[k]}`, entry = held.get(key) || { bytes: 0, count: 0, k };
      entry.bytes += M.size[k];
      entry.count += M.count[k];
      held.set(key, entry);
      known += M.size[k];
    });
    const rows = [...held.values()].sort((a, b) => b.bytes - a.bytes);
    const rest = rows.slice(15).reduce((s, r) => s + r.bytes, 0) + Math.max(totals[state.bin] - known, 0);
    const line = (background, bytes, what) => el("div", {}, swatch(background), el("b", { text: bytesText(bytes) }), el("span", { class: "what code mono", text: what }));
    const title = state.bin === M.peak_bin ? "At the peak" : `At ${timeText(t)}`;
    panel.replaceChildren(
      el("h3", { style: { margin: "10px 0 0" } }, `${title}: ${bytesText(totals[state.bin])} per device`, el("span", { class: "soft", style: { "font-weight": 400 }, text: ` · ${running(t)}` })),
      el("div", { class: "held" }, rows.slice(0, 15).map((r) => line(`var(--held-${M.category[r.k]})`, r.bytes, T(M.label[r.k]) + (r.count > 1 ? ` ×${r.count}` : ""))),
        rest > 0.5 ? line("var(--whole)", rest, rows.length > 15 ? `${rows.length - 15} kinds of smaller values` : "smaller values") : null));
  }

  function running(t) {
    return S.lanes.map((lane) => {
      const k = find(lane, t);
      if (k < 0) return lane.axes.length ? null : "compute waits";
      return pieceText(lane, k).split("\n")[0];
    }).filter(Boolean).join(" · ");
  }
  function find(lane, t) {
    let low = 0, high = lane.start_s.length - 1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (lane.start_s[middle] <= t) low = middle; else high = middle - 1; }
    return lane.start_s.length && lane.start_s[low] <= t && t < lane.end_s[low] ? low : -1;
  }
  function pieceText(lane, k) {
    const more = lane.joined[k] > 1 ? ` and ${many(lane.joined[k] - 1, "shorter one")}` : "";
    const source = T(lane.source[k]);
    const wait = lane.pause_s[k] > 0 ? `\ncompute waits ${timeText(lane.pause_s[k])} for it` : "";
    return `${T(lane.text[k])}${source ? ` (${source})` : ""}${more}\n${timeText(lane.start_s[k])} to ${timeText(lane.end_s[k])}, ${timeText(lane.busy_s[k])} in use${wait}`;
  }

  function zoom(factor, middle = binTime(state.bin)) {
    const least = END / 4000, length = Math.min(Math.max((state.to - state.from) * factor, least), END);
    const share = Math.min(Math.max((middle - state.from) / (state.to - state.from), 0), 1);
    state.from = Math.min(Math.max(middle - share * length, 0), END - length);
    state.to = state.from + length;
    draw();
  }
  const reset = () => { state.from = 0; state.to = END; draw(); };
  const move = (by) => {
    state.bin = Math.max(0, Math.min(bins - 1, state.bin + by));
    const t = binTime(state.bin), length = state.to - state.from;
    if (t < state.from || t > state.to) {
      state.from = Math.min(Math.max(t - length / 2, 0), END - length);
      state.to = state.from + length;
      draw();
    } else point();
  };
  box.addEventListener("keydown", (event) => {
    const jump = event.shiftKey ? 20 : 1;
    const actions = { ArrowLeft: () => move(-jump), ArrowRight: () => move(jump), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: reset };
    if (event.ctrlKey || event.metaKey || event.altKey || !actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });
  const at = (event) => (event.clientX - root.getBoundingClientRect().left) * width / root.getBoundingClientRect().width;
  box.addEventListener("pointermove", (event) => {
    const px = at(event), py = event.clientY - root.getBoundingClientRect().top;
    if (state.drag !== null) {
      select.setAttribute("visibility", "visible");
      select.setAttribute("x", Math.min(px, state.drag));
      select.setAttribute("width", Math.abs(px - state.drag));
      return;
    }
    if (px < left || px > width - RIGHT) { hideTip(); return; }
    const row = Math.floor(py / (LANE_H + LANE_GAP)), lane = S.lanes[row];
    if (lane && py < lanesH) {
      const k = find(lane, time(px));
      if (k >= 0) showTip(event, pieceText(lane, k)); else hideTip();
    } else if (py > memoryTop && py < memoryTop + MEMORY_H) {
      const b = binOf(time(px));
      showTip(event, `${timeText(time(px))}: ${bytesText(totals[b])}\n${used.map((c) => `${CATEGORY_NAMES[c]} ${bytesText(M.bytes[c][b])}`).join("\n")}\nclick to list the values`);
    } else hideTip();
  });
  box.addEventListener("pointerdown", (event) => { const px = at(event); if (event.button === 0 && px >= left) { state.drag = px; box.setPointerCapture(event.pointerId); } });
  box.addEventListener("pointerup", (event) => {
    if (state.drag === null) return;
    const px = at(event), from = Math.min(px, state.drag), to = Math.max(px, state.drag);
    state.drag = null;
    select.setAttribute("visibility", "hidden");
    if (to - from > 8) {
      const ends = [Math.max(time(from), 0), Math.min(time(to), END)];
      if (ends[1] - ends[0] > END / 4000) { [state.from, state.to] = ends; draw(); }
    } else { state.bin = binOf(time(px)); point(); }
  });
  box.addEventListener("pointerleave", hideTip);
  box.addEventListener("dblclick", reset);
  new ResizeObserver(() => { if (Math.abs(box.clientWidth - width) > 1) draw(); }).observe(box);
  addEventListener("beforeprint", reset);

  const button = (text, label, action) => el("button", { type: "button", "aria-label": label, onclick: action, text });
  const anyWait = S.lanes.some((lane) => lane.pause_s.some((p) => p > 0));
  const keys = [["var(--product)", "matrix products, convolutions"], ["var(--elementwise)", "elementwise, reductions, moves"],
    ...(S.lanes[0].kind.includes(0) ? [["var(--start)", "start of the step"]] : []),
    ...(anyWait ? [["var(--wait)", "compute waits for it"]] : [])];
  const [waited, ahead, behind] = D.overlap;
  const order = M.traced_order ? "in the order of the trace, to which compilers keep where memory is short, as far as they must" : "in the order that the memory prediction assumes for the compiler";
  const card = el("div", { class: "card" },
    el("div", { class: "tools" }, legend(keys), el("span", { class: "grow" }),
      button("+", "Zoom in", () => zoom(0.5)), button("−", "Zoom out", () => zoom(2)), button("Whole step", "Show the whole step", reset),
      button("Peak", "Go to the memory peak", () => { state.bin = M.peak_bin; state.from = 0; state.to = END; draw(); })),
    M.traced_order ? el("p", { class: "small" }, `The prediction, ${bytesText(P.peak_bytes)}, is the order in which the compiler takes the memory that there is, to compute gradients late. Drawn is the order of the trace, which it can fall back to: ${bytesText(totals[M.peak_bin])} at the peak.`) : null,
    box, legend(used.map((c) => [`var(--held-${c})`, CATEGORY_NAMES[c]])), panel,
    el("details", { class: "small soft", style: { "margin-top": "12px" } }, el("summary", { style: { cursor: "pointer" }, text: "What is assumed here" }),
      el("ul", { class: "plain" },
        el("li", { text: `The cost model adds up seconds and does not order them; this picture does. Operations run one after another, ${order}.` }),
        el("li", { text: `Of a collective that compute waits for, ${percentText(waited)} hides under compute; of gathers of parameters, ${percentText(ahead)}; of reductions of gradients, ${percentText(behind)}${S.hiding < 1 - 1e-9 ? ", less where there is not that much compute" : ""}. What does not hide is a pause of compute. The end is the predicted step time.` }),
        el("li", { text: "Lanes do not slow each other down. A collective starts when its lane is free: before the operation that needs it, or behind the one that makes the value." }),
        el("li", { text: "All trips of a loop are told as one piece. Pieces too short to be seen are drawn as one, as high as the share of it in use." }),
        el("li", { text: "Memory is the most in use within each part of the step, padding and packing included. Compilers reorder and fuse; planner verify compares the peak with theirs." }))));
  queueMicrotask(draw);
  return [card];
}
