// The page: summary first, then where every number comes from.
function tile(name, big, unit, wide, ...children) {
  return el("div", { class: `card tile${wide ? " wide" : ""}` }, el("div", { class: "name", text: name }),
    el("div", { class: "big" }, big, unit ? el("small", { text: ` ${unit}` }) : null), ...children);
}
function barRow(name, parts, whole, figure) {
  return [el("span", { text: name }), el("span", { class: "bar", role: "img", "aria-label": `${name}: ${figure}` },
    parts.map(([value, background]) => el("span", { style: { width: `${100 * value / whole}%`, background } }))), el("span", { text: figure })];
}
function summary() {
  const P = D.prediction, waits = Math.max(P.communication_s - P.overlapped_s, 0);
  const scale = Math.max(P.step_s, P.communication_s);
  const share = P.limit_bytes > 0 ? P.peak_bytes / P.limit_bytes : 0;
  const devices = D.wiring.axes.reduce((n, [, size]) => n * size, 1);
  return [el("div", { class: "tiles" },
    tile("step time, predicted", timeText(P.step_s), "", true,
      el("div", { class: "bars" }, barRow("compute", [[P.compute_s, "var(--product)"]], scale, timeText(P.compute_s)),
        barRow("communication", [[waits, "var(--wait)"], [P.overlapped_s, "var(--accent)"]], scale, timeText(P.communication_s))),
      P.communication_s > 0 && legend([["var(--wait)", `compute waits for ${timeText(waits)}`], ["var(--accent)", `${timeText(P.overlapped_s)} hides under compute`]]),
      D.likely && el("div", { class: "soft small", text: micro(`Likely ${D.likely}.`) })),
    tile("peak memory, per device", bytesText(P.peak_bytes), P.limit_bytes > 0 ? `of ${bytesText(P.limit_bytes)}` : "", true,
      el("div", { class: "bars", style: { "grid-template-columns": "1fr max-content" } },
        el("span", { class: "bar", role: "img", "aria-label": `${percentText(share)} of the limit` },
          el("span", { style: { width: `${Math.min(100 * share, 100)}%`, background: share > 0.95 ? "var(--bad)" : "var(--good)" } })),
        el("span", { text: percentText(share) })),
      el("div", { class: "soft small", text: [...new Set(D.leaves.columns.kind.map(T))].map((kind) => `${bytesText(sumOf(kind))} ${kind}`).join(", ") })),
    tile("mesh", D.mesh.replaceAll(",", ", "), "", true,
      el("div", {}, D.axes.map((name) => [axisChip(name), " "]), el("span", { class: "soft small", text: `${many(devices, "device")} of ${D.cluster}` })),
      D.idle && el("div", { class: "small", text: `${D.idle}.` }), D.strategy && el("div", { class: "small", text: `${D.strategy}.` }),
      ...D.recipe.map((line) => el("div", { class: "small", text: `${line}.` })),
      D.schedule && el("pre", { class: "small schedule", role: "img", tabindex: "0", "aria-label": "the schedule: a row per stage, time from left to right", style: { "overflow-x": "auto", margin: "6px 0" }, text: D.schedule }),
      el("div", { class: "soft small", text: micro(`${D.choice}.`) })),
    tile("gap to the lower bound", percentText(D.search.gap), "", true,
      el("div", { class: "small", text: micro(`${D.proof}.`) }),
      el("div", { class: "soft small", text: `Search ${D.search.name}: ${D.search.reason}. Bound ${timeText(D.search.lower_bound_s)}, found ${timeText(D.search.cost_s)} (without the start of the step).` }),
      el("div", { class: "soft small", text: `Constants: ${D.constants}.` })))];
}
function sumOf(kind) {
  const c = D.leaves.columns;
  return c.size.reduce((n, size, k) => n + (T(c.kind[k]) === kind ? size : 0), 0);
}
function activations() {
  const rows = D.activations.map(([name, array, spec, size, source]) => ({ name, array, spec, size, source }));
  if (!rows.length) return null;
  return dataTable({ name: "largest activations", views: { all: rows }, sort: 4, columns: [
    { label: "operation", get: (r) => r.name, cls: "code" }, { label: "line", get: (r) => r.source, cls: "code keep" },
    { label: "array", get: (r) => r.array, cls: "code keep" }, { label: "sharded as", get: (r) => r.spec, show: (r) => specView(r.spec), cls: "code" },
    { label: "per device", get: (r) => r.size, show: (r) => bytesText(r.size), num: true }] });
}
function compute() {
  const rows = D.compute.map(([line, seconds]) => ({ line, seconds }));
  if (!rows.length) return null;
  return dataTable({ name: "most compute", views: { all: rows }, sort: 1, columns: [
    { label: "line", get: (r) => r.line, cls: "code keep" },
    { label: "compute", get: (r) => r.seconds, show: (r) => timeText(r.seconds), num: true },
    { label: "share", get: (r) => r.seconds / D.prediction.compute_s, show: (r) => percentText(r.seconds / D.prediction.compute_s), num: true }] });
}
function lines(title, texts, none) {
  return el("div", { class: "card" }, el("h3", { text: title }), texts.length
    ? el("ul", { class: "plain small" }, texts.map((text) => el("li", { text: micro(text) }))) : el("p", { class: "soft small", text: none }));
}

function page() {
  const total = D.prediction.communication_s;
  const sections = [
    ["summary", "Summary", "", summary],
    ["step", "One step over time", "compute, collectives and memory of one device", timeFigure],
    ["graph", "Operator graph", "repeated blocks once, shardings as colours", graphSection],
    ["mesh", "Devices", `${D.cluster} as mesh ${D.mesh}`, () => [meshDrawing()]],
    ["collectives", "Collectives", `${many(D.collectives.folded.length, "collective")}, ${timeText(total)} a step`,
      () => D.collectives.folded.length ? [collectivesTable()] : [lines("None", [], "The devices never talk.")]],
    ["arguments", "Parameters and other arguments", "how each is stored and used", () => [leavesTable()]],
    ["compute", "Most compute", "of one device, by line of the model", () => [compute()]],
    ["activations", "Largest activations", "one of each shape, sharding and line", () => [activations()]],
    ["meshes", "Meshes tried", many(D.meshes.length, "mesh").replace("meshs", "meshes"), () => [meshesTable()]],
    ["comparison", "Beside plans made by hand", "each planned with the same prices", () => D.rivals.length ? [el("div", { class: "head" }, legend([["var(--product)", "compute"], ["var(--wait)", "waiting for collectives"]])), rivalsTable()] : []],
    ["notes", "Notes", "", () => [lines("Fallbacks", D.fallbacks, "Every operation has a rule."), lines("Remarks", D.notes, "None.")]],
  ];
  document.getElementById("top").append(el("h1", { text: D.title || "Plan" }),
    el("div", { class: "soft" }, `${D.mode} on ${D.cluster}, mesh ${D.mesh}`, D.planning_s > 0 ? ` · planned in ${timeText(D.planning_s)}` : ""));
  const main = document.getElementById("main");
  const links = el("ul", {});
  sections.forEach(([id, title, note, build]) => {
    const parts = build().filter(Boolean);
    if (!parts.length) return;
    main.append(section(id, title, note, parts));
    links.append(el("li", {}, el("a", { href: `#${id}`, text: title })));
  });
  document.getElementById("nav").append(links);
  document.documentElement.dataset.ready = "yes";
}
page();
