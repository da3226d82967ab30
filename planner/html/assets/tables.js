// Tables that sort, filter and page; only the rows of one page are in the document.
const PAGE = 20;

// columns: [{label, get(row), show(row), num, cls}]; rows: any; facets: [{label, get(row)}]; views: {name: rows}
function dataTable({ name, columns, views, sort, up = false, facets = [], page = PAGE, mark }) {
  const state = { view: Object.keys(views)[0], sort: sort ?? 0, down: !up, text: "", at: 0, picks: facets.map(() => "") };
  const body = el("tbody", {});
  const status = el("span", { class: "soft small", role: "status" });
  const words = new Map();
  const wordsOf = (row) => {
    if (!words.has(row)) words.set(row, columns.map((c) => String(c.get(row))).join("\u0000").toLowerCase());
    return words.get(row);
  };
  const heads = columns.map((column, k) => el("th", { scope: "col", class: column.num ? "num" : "" },
    el("button", { type: "button", onclick: () => {
      state.down = state.sort === k ? !state.down : Boolean(column.num);
      state.sort = k; state.at = 0; draw();
    }, text: column.label })));
  const input = el("input", { type: "search", placeholder: "Filter", "aria-label": `Filter ${name}`,
    oninput: () => { state.text = input.value.toLowerCase(); state.at = 0; draw(); } });
  const selects = facets.map((facet, k) => {
    const select = el("select", { "aria-label": facet.label, onchange: () => { state.picks[k] = select.value; state.at = 0; draw(); } });
    return select;
  });
  const fill = () => facets.forEach((facet, k) => {
    const found = [...new Set(views[state.view].map(facet.get))].sort();
    selects[k].replaceChildren(el("option", { value: "", text: `${facet.label}: all` }),
      ...found.map((value) => el("option", { value, text: value || "none" })));
    state.picks[k] = "";
  });
  const toggles = Object.keys(views).length < 2 ? null : el("select", { "aria-label": `Rows of ${name}`,
    onchange: (event) => { state.view = event.target.value; state.at = 0; fill(); draw(); } },
  Object.keys(views).map((view) => el("option", { value: view, text: view })));
  const step = (by) => () => { state.at += by; draw(); };
  const back = el("button", { type: "button", onclick: step(-1), text: "Previous" });
  const next = el("button", { type: "button", onclick: step(1), text: "Next" });

  function draw() {
    const parts = state.text.split(/\s+/).filter(Boolean);
    const rows = views[state.view].filter((row) => state.picks.every((pick, k) => !pick || facets[k].get(row) === pick)
      && parts.every((part) => wordsOf(row).includes(part)));
    const column = columns[state.sort];
    const keyed = rows.map((row, k) => [column.get(row), k, row]);
    const sign = state.down ? -1 : 1;
    keyed.sort((a, b) => (a[0] < b[0] ? -sign : a[0] > b[0] ? sign : a[1] - b[1]));
    const pages = Math.max(Math.ceil(rows.length / page), 1);
    state.at = Math.min(Math.max(state.at, 0), pages - 1);
    body.replaceChildren(...keyed.slice(state.at * page, (state.at + 1) * page).map(([, , row]) =>
      el("tr", { class: mark && mark(row) }, columns.map((c) => el("td", { class: [c.num && "num", c.cls].filter(Boolean).join(" ") },
        c.show ? c.show(row) : String(c.get(row)))))));
    if (!rows.length) body.append(el("tr", {}, el("td", { colspan: columns.length, class: "soft", text: "Nothing matches." })));
    heads.forEach((head, k) => {
      if (k === state.sort) head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    const all = views[state.view].length;
    const shown = rows.length === all ? many(all, "row") : `${rows.length.toLocaleString("en")} of ${many(all, "row")}`;
    status.textContent = pages > 1 ? `${shown}, page ${state.at + 1} of ${pages}` : shown;
    back.hidden = next.hidden = pages < 2;
    back.disabled = state.at === 0;
    next.disabled = state.at === pages - 1;
  }
  fill();
  draw();
  return el("div", { class: "card", "data-table": name },
    el("div", { class: "tools" }, input, selects, toggles, el("span", { class: "grow" }), status, back, next),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, heads)), body)));
}

// Rows [index, ...] of a table by columns; folded ones as {first, count}.
function foldedRows(table) {
  const rows = [];
  table.folded.forEach((group, k) => { (rows[group] ??= []).push(k); });
  return rows.filter(Boolean);
}

function collectivesTable() {
  const c = D.collectives.columns;
  const total = c.total.reduce((a, b) => a + b, 0);
  const row = (members) => {
    const k = members[0];
    return { k, kind: T(c.kind[k]), axes: T(c.axes[k]), source: T(c.source[k]), value: T(c.value[k]),
      count: members.reduce((n, m) => n + c.count[m], 0), payload: c.payload[k], each: c.each[k],
      total: members.reduce((n, m) => n + c.total[m], 0),
      cause: members.length > 1 ? common(members.map((m) => T(c.cause[m]))) : T(c.cause[k]) };
  };
  const views = { "equal ones together": foldedRows(D.collectives).map(row), "every one": c.kind.map((_, k) => row([k])) };
  const width = (r) => `${Math.max(60 * r.total / (total || 1), 1)}px`;
  return dataTable({ name: "collectives", views, sort: 5, facets: [
    { label: "kind", get: (r) => r.kind }, { label: "over", get: (r) => r.axes }],
  columns: [
    { label: "collective", get: (r) => r.kind, cls: "code keep" },
    { label: "over", get: (r) => r.axes, cls: "keep", show: (r) => r.axes.split(",").map(axisChip).flatMap((x) => [x, " "]) },
    { label: "runs a step", get: (r) => r.count, show: (r) => countText(r.count), num: true },
    { label: "bytes each", get: (r) => r.payload, show: (r) => bytesText(r.payload), num: true },
    { label: "time each", get: (r) => r.each, show: (r) => timeText(r.each), num: true },
    { label: "time a step", get: (r) => r.total, num: true,
      show: (r) => [el("span", { class: "share", style: { width: width(r) }, title: percentText(r.total / (total || 1)) }), timeText(r.total)] },
    { label: "value", get: (r) => r.value, cls: "code keep" },
    { label: "line", get: (r) => r.source, cls: "code keep" },
    { label: "caused by", get: (r) => r.cause, cls: "code" },
  ] });
}

// Texts that differ only by numbers as one: the numbers that differ become *.
function common(texts) {
  const rows = texts.map((text) => text.split(/(\d+)/));
  if (rows.some((row) => row.length !== rows[0].length)) return texts[0];
  return rows[0].map((piece, k) => rows.every((row) => row[k] === piece) ? piece : "*").join("");
}

function leavesTable() {
  const c = D.leaves.columns;
  const row = (members) => {
    const k = members[0];
    return { path: members.length > 1 ? T(c.common[k]) : T(c.path[k]), kind: T(c.kind[k]), array: T(c.array[k]), stored: T(c.stored[k]),
      used: T(c.used[k]), size: c.size[k], count: members.length, all: members.reduce((n, m) => n + c.size[m], 0), whole: c.whole[k] };
  };
  const views = { "equal ones together": foldedRows(D.leaves).map(row), "every one": c.path.map((_, k) => row([k])) };
  return dataTable({ name: "arguments", views, sort: 7, facets: [
    { label: "kind", get: (r) => r.kind }, { label: "stored", get: (r) => r.stored }],
  columns: [
    { label: "path", get: (r) => r.path, cls: "code" },
    { label: "kind", get: (r) => r.kind, cls: "keep" },
    { label: "array", get: (r) => r.array, cls: "code keep" },
    { label: "stored as", get: (r) => r.stored, cls: "code keep", show: (r) => specView(r.stored) },
    { label: "used as", get: (r) => r.used, cls: "code keep", show: (r) => r.used === r.stored ? "the same" : specView(r.used) },
    { label: "each", get: (r) => r.size, show: (r) => bytesText(r.size), num: true },
    { label: "count", get: (r) => r.count, show: (r) => `×${r.count}`, num: true },
    { label: "per device", get: (r) => r.all, show: (r) => bytesText(r.all), num: true },
  ] });
}

// P('data', None) with its axes coloured.
function specView(text) {
  const parts = text.split(/('[^']*')/);
  return parts.map((part) => D.axes.includes(part.slice(1, -1)) && part.startsWith("'")
    ? el("span", { style: { color: axisColor(part.slice(1, -1)), "font-weight": "650" }, text: part }) : part);
}

function meshesTable() {
  const rows = D.meshes.map(([mesh, cost, bound, peak, verdict]) => ({ mesh, cost: cost ?? -1, bound: bound ?? -1, peak: peak ?? -1, verdict: micro(verdict) }));
  const top = Math.max(...rows.map((r) => Math.max(r.cost, r.bound)));
  const bar = (r) => el("div", { class: "bar", style: { width: "150px", height: "9px" }, title: `at least ${timeText(r.bound)}` },
    el("span", { style: { width: `${100 * Math.max(r.bound, 0) / top}%`, background: r.verdict === "chosen" ? "var(--good)" : "var(--accent)" } }),
    el("span", { style: { width: `${100 * Math.max(r.cost - r.bound, 0) / top}%`, background: "var(--elementwise)" } }));
  const endless = (x) => x < 0 ? Infinity : x;
  return dataTable({ name: "meshes", views: { all: rows }, sort: 2, up: true, page: 12, mark: (r) => r.verdict === "chosen" && "chosen",
    columns: [
      { label: "mesh", get: (r) => r.mesh, cls: "code keep" },
      { label: "bound | found", get: (r) => endless(r.bound), num: true, show: bar },
      { label: "step time", get: (r) => endless(r.cost), num: true, show: (r) => timeText(r.cost) },
      { label: "lower bound", get: (r) => r.bound, num: true, show: (r) => timeText(r.bound) },
      { label: "peak memory", get: (r) => r.peak, num: true, show: (r) => bytesText(r.peak) },
      { label: "verdict", get: (r) => r.verdict },
    ] });
}

// The chosen plan beside those that people write by hand: bars of time and memory on one scale.
function rivalsTable() {
  const limit = D.prediction.limit_bytes, chosen = D.rivals[0].step_s;
  const longest = Math.max(...D.rivals.map((r) => r.step_s ?? 0)), highest = Math.max(...D.rivals.map((r) => r.peak_bytes ?? 0));
  const largest = limit > 0 && limit < 4 * highest ? Math.max(limit, highest) : highest;
  const bar = (parts, whole, text, title) => el("div", { class: "barcell", title },
    el("span", { class: "bar" }, parts.map(([value, background]) => el("span", { style: { width: `${100 * value / (whole || 1)}%`, background } }))),
    el("span", { text }));
  const waits = (r) => Math.max(r.communication_s - r.overlapped_s, 0);
  const time = (r) => r.step_s === null ? "–" : bar([[r.compute_s, "var(--product)"], [waits(r), "var(--wait)"]], longest, timeText(r.step_s),
    `${timeText(r.compute_s)} compute, ${timeText(waits(r))} waiting for collectives`);
  const memory = (r) => r.peak_bytes === null ? "–" : bar([[r.peak_bytes, r.fits ? "var(--good)" : "var(--bad)"]], largest, bytesText(r.peak_bytes),
    limit > 0 ? `${percentText(r.peak_bytes / limit)} of the limit` : "");
  const verdict = (r) => r.step_s === null ? "no plan" : r.fits ? "fits" : "too large";
  const sends = (r) => r.sends.length ? r.sends.map(([kind, runs, s]) => `${kind} ×${countText(runs)}, ${timeText(s)}`).join("; ") : r.step_s === null ? r.refused : "nothing";
  const known = (x) => x === null ? Infinity : x;
  return dataTable({ name: "comparison", views: { all: D.rivals }, sort: 1, up: true, page: 30, mark: (r) => r === D.rivals[0] && "chosen", columns: [
    { label: "plan", get: (r) => r.name, show: (r) => [el("b", { text: r.name }), r.mesh ? el("code", { class: "soft", text: ` ${r.mesh}` }) : null,
      el("div", { class: "soft small", text: r.what })] },
    { label: "step time", get: (r) => known(r.step_s), num: true, show: time },
    { label: "× chosen", get: (r) => known(r.step_s), num: true, show: (r) => r.step_s === null ? "–" : (r.step_s / (chosen || 1)).toFixed(2) },
    { label: "peak memory", get: (r) => known(r.peak_bytes), num: true, show: memory },
    { label: "verdict", get: verdict, cls: "keep", show: (r) => el("span", { class: `chip ${r.fits ? "good" : "bad"}`, text: verdict(r) }) },
    { label: "collectives a step", get: sends, cls: "small" },
  ] });
}
