// The status page: it requests /v1/status every two seconds while it is visible, and draws the answer. Text is only ever
// set as text. An unknown figure is a dash, never 0.
"use strict";

const ASK_MS = 2000;
const SAMPLES_MAX = 450;
const READ_COUNTERS = ["http_documents", "kv_hits", "dcp_documents"];
const SILENT_S = 3;
const SENTENCE_MAX = 90;
const KINDS = {
  dead: { sign: "✕", word: "dead", text: "no worker updates it" },
  stalled: { sign: "=", word: "stalled", text: "its source has more but sends nothing, or its worker is silent" },
  lagging: { sign: "▲", word: "lagging", text: "too far behind its source, or it is not known how far" },
  behind: { sign: "▵", word: "a little behind", text: "more than a tenth of the limit behind its source" },
  waiting: { sign: "…", word: "waiting", text: "no contact with its node at the source, its store cannot be written, or a retry is due" },
  filling: { sign: "◐", word: "filling", text: "being filled, rolled back or read again" },
  idle: { sign: "–", word: "stored", text: "no service runs; this is the stored state" },
  ok: { sign: "·", word: "up to date", text: "published and near its source" },
};
const BAD = ["dead", "stalled", "lagging"];
const DEAD = new Set(["damaged", "refused", "no-active-node", "finished"]);
const FILLING = new Set(["starting", "requesting", "backfilling", "rolling-back", "resyncing"]);
const WELL = new Set(["starting", "catching up", "following", "stopping"]);

const $ = (id) => document.getElementById(id);
const make = (tag, text, name) => {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
};
const known = (value) => value !== null && value !== undefined;
const number = (value, digits = 0) =>
  known(value) ? value.toLocaleString("en", { maximumFractionDigits: digits }) : "–";
const share = (value, unit) => (known(value) ? `${number(value, value < 10 ? 1 : 0)}${unit}` : "–");
const bytes = (value) => {
  if (!known(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${number(value, value < 10 && at ? 1 : 0)} ${units[at]}`;
};
const span = (seconds) => {
  if (!known(seconds)) return "–";
  if (seconds < 60) return `${number(seconds, seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${number(seconds / 60, 0)} min`;
  return seconds < 172800 ? `${number(seconds / 3600, 1)} h` : `${number(seconds / 86400, 1)} days`;
};
const seqnos = (count) => `${number(count)} seqno${count === 1 ? "" : "s"}`;
const moment = (ms) => (known(ms) ? new Date(ms).toLocaleString() : "–");

let selected = null;
let looks = 0;
const samples = [];
let reads = new Map();
let lastReport = null;

function kindOf(row, report, workers) {
  if (DEAD.has(row.state)) return "dead";
  if (report.service === "down" || row.state === "stored") return "idle";
  const worker = workers.get(row.group);
  if (worker && worker.phase !== "running" && worker.phase !== "starting" && worker.phase !== "stopping") return "dead";
  if (row.state === "stalled" || silent(worker)) return "stalled";
  if (row.state === "waiting" || (!row.node && row.state !== "starting")) return "waiting";
  if (row.lag_s > report.lag_limit_s || row.lag_seqnos === null || (row.lag_seqnos && row.lag_s === null)) return "lagging";
  if (known(row.lag_s) && row.lag_s > report.lag_limit_s / 10 && !FILLING.has(row.state)) return "behind";
  if (FILLING.has(row.state) || (worker && worker.phase !== "running")) return "filling";
  return "ok";
}

const silent = (process) => process && process.phase === "running" && process.heartbeat_age_s > SILENT_S;
const silence = (process) => `silent for ${span(process.heartbeat_age_s)}`;

function why(row, kind, workers) {
  const said = row.last_error || row.detail;
  if (kind === "stalled" && row.state !== "stalled") {
    const worker = workers.get(row.group);
    return `worker ${worker.slot} is ${silence(worker)}`;
  }
  if (kind === "dead") {
    const worker = workers.get(row.group);
    if (worker && worker.phase !== "running") {
      return `worker ${worker.slot} is ${worker.phase}` + (worker.last_exit ? ` (${worker.last_exit})` : "") + (worker.last_error ? `: ${worker.last_error}` : "");
    }
    return `${row.state}` + (said ? `: ${said}` : "");
  }
  return row.state + (said ? `: ${said}` : "");
}

const behind = (row) => !known(row.lag_seqnos) ? "unknown" : row.lag_seqnos ? `${seqnos(row.lag_seqnos)}, ${span(row.lag_s)}` : "nothing";

function describe(row, kind, workers) {
  return `Vbucket ${row.vbid}: ${KINDS[kind].word}; ${why(row, kind, workers)}; published ${number(row.published_seqno)}` +
    (known(row.source_high_seqno) ? ` of ${number(row.source_high_seqno)}` : "") + `, behind: ${behind(row)}` +
    (row.node ? `, from ${row.node}` : "");
}

function drawMap(report) {
  const workers = new Map();
  for (const worker of report.workers) for (const group of worker.groups) workers.set(group, worker);
  const map = $("map");
  map.classList.toggle("many", report.vbuckets.length > 256);
  while (map.children.length > report.vbuckets.length) map.lastChild.remove();
  while (map.children.length < report.vbuckets.length) {
    const cell = make("button");
    cell.type = "button";
    cell.tabIndex = map.children.length ? -1 : 0;
    cell.setAttribute("role", "option");
    map.append(cell);
  }
  const counts = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, 0]));
  report.vbuckets.forEach((row, index) => {
    const kind = kindOf(row, report, workers);
    const cell = map.children[index];
    const text = describe(row, kind, workers);
    counts[kind] += 1;
    if (cell.className !== kind) { cell.className = kind; cell.textContent = KINDS[kind].sign; }
    if (cell.title !== text) { cell.title = text; cell.setAttribute("aria-label", text); }
    cell.dataset.vbid = row.vbid;
    cell.setAttribute("aria-selected", String(selected === row.vbid));
    if (selected === row.vbid) $("detail").textContent = text;
  });
  if (selected === null) $("detail").textContent = report.vbuckets.length ? "Choose a vbucket to see its state." : "No vbucket is known before the source is reached.";
  $("detail").classList.toggle("chosen", selected !== null);
  const legend = $("legend");
  legend.hidden = map.hidden = !report.vbuckets.length;
  legend.replaceChildren(...Object.entries(KINDS).filter(([kind]) => counts[kind] || (kind !== "idle" && kind !== "behind")).map(([kind, { sign, word, text }]) => {
    const entry = make("span");
    entry.title = text;
    entry.dataset.kind = kind;
    entry.append(make("i", sign, kind), `${number(counts[kind])} ${word}`);
    return entry;
  }));
  drawTroubles(report.troubles || []);
  return counts;
}

// One line for each trouble of vbuckets; troubles of the whole mirror are in the headline.
function drawTroubles(troubles) {
  const table = $("attention");
  const lines = troubles.filter((trouble) => trouble.vbuckets);
  table.hidden = !lines.length;
  table.tBodies[0].replaceChildren(...lines.map(({ what, vbuckets, where, lag_s: lag, error, procedure }) => {
    const line = make("tr");
    const why = make("td", error || "", "long");
    if (procedure) why.append(make("span", `${error ? " " : ""}See docs/${procedure}.`, "quiet"));
    line.append(make("td", number(vbuckets)), make("td", where || "all", "long"), make("td", what, "long"), make("td", span(lag)), why);
    return line;
  }));
}

// The first sentence, cut between words: the page has the rest below.
function sentence(text) {
  if (text.length <= SENTENCE_MAX) return text;
  return `${text.slice(0, SENTENCE_MAX - 1).replace(/\s+\S*$/, "")}…`;
}

function drawHeadline(report, counts) {
  const part = known(report.selection) && report.selection !== "the whole bucket" ? `, ${report.selection}` : "";
  $("bucket").textContent = report.bucket ? `of ${report.bucket}${part}` : "";
  const well = WELL.has(report.state);
  $("state").textContent = report.state;
  $("state").className = well ? "ok" : report.state === "stored" ? "idle" : "dead";
  $("headline").textContent = sentence(report.message || "");
  $("headline").title = report.message || "";
  const since = !well && known(report.since_ms) ? `Since ${moment(report.since_ms)}. ` : "";
  const stale = report.totals.stale ? `${number(report.totals.stale)} vbuckets are being resynced. ` : "";
  $("source").textContent = since + stale + sourceText(report);
  announce(report.state);
  drawLines("warnings", report.warnings || []);
  $("asked").textContent = `as of ${new Date(report.time_ms).toLocaleTimeString()}`;
  document.title = (counts.dead ? "✕ " : BAD.some((kind) => counts[kind]) ? "▲ " : "") + `dcp-mirror ${report.bucket || ""}`;
}

// The source and how many vbuckets are in contact with it.
function sourceText(report) {
  if (report.service === "down" || !known(report.source)) return "";
  const rows = report.vbuckets;
  const contact = rows.filter((row) => row.node).length;
  const nodes = new Set(rows.map((row) => row.node).filter(Boolean)).size;
  const ages = rows.map((row) => row.lag_s).filter(known);  // a damaged vbucket has none
  let text = `Source ${report.source}: `;
  if (report.source_error) text += "not reached";  // the headline says why
  else if (!contact) text += ages.length ? `no contact for ${span(Math.max(...ages))}` : "no contact yet";
  else if (contact < rows.length) text += `${number(contact)} of ${number(rows.length)} vbuckets in contact, with ${number(nodes)} node${nodes === 1 ? "" : "s"}`;
  else text += `in contact with ${number(nodes)} node${nodes === 1 ? "" : "s"}`;
  return text;
}

// Have a screen reader announce changes of state, never figures that move.
function announce(text) {
  if ($("news").textContent !== text) $("news").textContent = text;
}

function drawLines(id, texts) {
  $(id).hidden = !texts.length;
  $(id).replaceChildren(...texts.map((text) => make("li", text)));
}

function drawFigures(report) {
  const sums = report.totals;
  const pairs = [
    known(sums.documents) ? ["documents", number(sums.documents)] : ["versions stored", number(sums.versions)],
    ["longest lag", span(sums.lag_s)],
    ["behind the source", known(sums.lag_seqnos) ? seqnos(sums.lag_seqnos) : "unknown"],
    ["ingest, documents", share(sums.documents_per_s, "/s")],
    ["vbuckets", report.vbuckets_held === report.vbucket_count ? number(report.vbucket_count)
      : `${number(report.vbuckets_held)} of ${number(report.vbucket_count)}`],
    ["rollbacks", number(sums.rollback_count)],
    ["resyncs", number(sums.resync_count)],
    ["service up", span(report.uptime_s)],
  ];
  $("figures").replaceChildren(...pairs.map(([name, value]) => {
    const box = make("div");
    box.append(make("b", value), make("span", name));
    return box;
  }));
}

function drawProcesses(report) {
  const rows = [["supervisor", report.supervisor, report.service === "up" ? "running" : "absent"]];
  for (const worker of report.workers) rows.push([`worker ${worker.slot}`, worker, worker.phase]);
  for (const server of report.servers || []) rows.push([`${server.kind} ${server.slot % 1000}`, server, server.phase]);
  $("processes").tBodies[0].replaceChildren(...rows.map(([name, row, phase]) => {
    const line = make("tr");
    const state = make("td");
    const well = phase === "running";
    const kind = !well ? "dead" : silent({ phase, ...row }) ? "stalled" : "ok";
    state.append(make("span", KINDS[kind].sign, `sign ${kind}`), ` ${kind === "stalled" ? silence(row) : phase}`);
    const ended = row.last_exit ? `${row.last_exit}, ${moment(row.last_exit_ms)}` + (row.last_error ? `: ${row.last_error}` : "") : "";
    line.append(make("td", name), state, make("td", share(row.cpu_percent, " %")), make("td", bytes(row.private_bytes)),
      make("td", known(row.counters?.[`${row.kind}_connections`]) ? number(row.counters[`${row.kind}_connections`]) : ""),
      make("td", known(row.restarts) ? number(row.restarts) : ""), make("td", known(row.uptime_s) ? span(row.uptime_s) : ""), make("td", ended, "long"));
    return line;
  }));
  $("listeners").textContent = Object.entries(report.listeners || {}).map(([kind, urls]) => `${kind} at ${urls.join(", ")}`).join("; ");
}

function drawPast(report) {
  const { history, disk, totals } = report;
  const events = [
    ...history.past.map((entry) => [entry.time_ms, pastText(entry), entry.event === "rollback" ? "lagging" : "filling"]),
    ...(report.events || []).filter((event) => !KEPT.has(event.event)).map((event) => [event.time_ms, event.text, LEVELS[event.level] || "ok"]),
  ];
  events.sort((a, b) => b[0] - a[0]);
  $("history").textContent = (known(history.floor_newest_ms)
    ? `Every vbucket can be read as of any boundary since ${moment(history.floor_newest_ms)}, some since ${moment(history.floor_oldest_ms)}.`
    : "Nothing is published yet.") + ` Rollbacks: ${number(totals.rollback_count)}; resyncs: ${number(history.resync_count)}.`;
  drawLines("leases", (report.leases || []).map((lease) =>
    `${lease.name} holds the history of ${number(lease.vbuckets)} vbuckets until ${moment(lease.until_ms)} at least`));
  $("past").hidden = !events.length;
  $("past").tBodies[0].replaceChildren(...events.slice(0, 20).map(([ms, text, kind]) => {
    const line = make("tr");
    const what = make("td", undefined, "long");
    what.append(make("span", KINDS[kind].sign, `sign ${kind}`), ` ${text}`);
    line.append(make("td", moment(ms)), what);
    return line;
  }));
  const used = disk.total_bytes - disk.free_bytes;
  const percent = (value) => `${(100 * Math.min(1, value / Math.max(1, disk.total_bytes))).toFixed(2)}%`;
  $("disk").textContent = `The mirror takes ${bytes(disk.mirror_bytes)}; ${bytes(disk.free_bytes)} of ${bytes(disk.total_bytes)} are free.`;
  $("disk-bar").children[0].style.width = percent(disk.mirror_bytes);
  $("disk-bar").children[1].style.width = percent(Math.max(0, used - disk.mirror_bytes));
  $("disk-legend").replaceChildren(...[["mirror", "this mirror"], ["others", "other files"], ["free", "free"]].map(([kind, word]) => {
    const entry = make("span");
    entry.append(make("i", "", kind), word);
    return entry;
  }));
  $("disk-bar").setAttribute("aria-label", `mirror ${percent(disk.mirror_bytes)}, others ${percent(used - disk.mirror_bytes)} of the disk`);
}

// Events that the store keeps, also across restarts of the service.
const KEPT = new Set(["rollback", "resync-done"]);
const LEVELS = { error: "dead", warning: "lagging", info: "ok" };

function pastText({ event, vbuckets, seqnos: lost, first }) {
  const who = vbuckets === 1 ? `vbucket ${first.vbid}` : `${number(vbuckets)} vbuckets`;
  if (event !== "rollback") return `${who} resynced from 0`;
  return `${who} rolled back` + (vbuckets === 1 ? ` from ${number(first.from_seqno)} to ${number(first.to_seqno)}` : "") + ` (${seqnos(lost)})`;
}

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 400;
const HEIGHT = 112;

function shape(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function drawChart(title, samples, field, show, style) {
  const figure = make("figure");
  const caption = make("figcaption");
  const values = samples.map((sample) => sample[field]);
  const last = [...values].reverse().find(known);
  caption.append(make("span", title), make("b", show(last)));
  const peak = Math.max(0, ...values.filter(known));
  const top = Math.max(1, peak);
  const picture = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  picture.setAttribute("aria-label", `${title}: now ${show(last)}, at most ${show(peak)} in the last ${span((samples.at(-1)?.time_ms - samples[0]?.time_ms || 0) / 1000)}`);
  const y = (value) => HEIGHT - 18 - (value / top) * (HEIGHT - 34);
  for (const level of [0, 1]) picture.append(shape("line", { class: "grid", x1: 0, x2: WIDTH, y1: y(level * top), y2: y(level * top) }));
  const from = samples[0]?.time_ms ?? 0;
  const length = Math.max(1, (samples.at(-1)?.time_ms ?? 1) - from);
  let path = "";
  let pen = false;
  for (const sample of samples) {
    if (!known(sample[field])) { pen = false; continue; }
    path += `${pen ? "L" : "M"}${((sample.time_ms - from) / length * WIDTH).toFixed(1)} ${y(sample[field]).toFixed(1)}`;
    pen = true;
  }
  if (path) picture.append(shape("path", { class: `line ${style}`, d: path }));
  const scale = make("figcaption", undefined, "quiet");
  scale.append(make("span", samples.length > 1 ? `${span(length / 1000)} ago` : "just begun"), make("span", `peak ${show(known(last) ? peak : undefined)}`), make("span", "now"));
  figure.append(caption, picture, scale);
  return figure;
}

// The charts begin when the page is opened. A process that was replaced counts from 0.
function takeSample(report) {
  const before = reads;
  const sum = (counters) => READ_COUNTERS.reduce((total, name) => total + (counters?.[name] ?? 0), 0);
  reads = new Map((report.servers ?? []).map((server) => [`${server.slot}-${server.pid}`, sum(server.counters)]));
  const passed = (report.time_ms - samples.at(-1)?.time_ms) / 1000;
  const risen = [...reads].reduce((total, [name, count]) => total + Math.max(0, count - (before.get(name) ?? count)), 0);
  const { documents_per_s, lag_s } = report.totals;
  samples.push({ time_ms: report.time_ms, documents_per_s, lag_s, reads_per_s: passed > 0 && reads.size ? risen / passed : null });
  if (samples.length > SAMPLES_MAX) samples.shift();
}

function drawCharts(samples) {
  $("charts").replaceChildren(
    drawChart("Ingest, documents a second", samples, "documents_per_s", (value) => share(value, "/s"), "one"),
    drawChart("Reads, documents a second", samples, "reads_per_s", (value) => share(value, "/s"), "two"),
    drawChart("Longest lag", samples, "lag_s", span, "one"),
  );
}

function complain(text) {
  announce(text);
  $("state").textContent = "no answer";
  $("state").className = "dead";
  $("headline").textContent = text + (lastReport ? ` The figures are of ${moment(lastReport.time_ms)}.` : "");
}

// Names and messages come from the source, from users and from programs: write invisible characters, and those that
// reverse the order of their neighbours, as numbers, and cut long texts.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const TEXT_MAX = 400;

function plain(_, value) {
  if (typeof value !== "string") return value;
  const cut = value.length > TEXT_MAX ? `${value.slice(0, TEXT_MAX)}… (${number(value.length)} characters)` : value;
  return cut.replace(UNSEEN, (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

async function fetchJson(path) {
  const answer = await fetch(path, { cache: "no-store" });
  const value = JSON.parse(await answer.text(), plain);
  if (!answer.ok) throw new Error(`${value.title}: ${value.detail}`);
  return value;
}

async function look() {
  try {
    const report = await fetchJson("v1/status");
    lastReport = report;
    drawHeadline(report, drawMap(report));
    drawFigures(report);
    drawProcesses(report);
    drawPast(report);
    takeSample(report);
    drawCharts(samples);
    looks += 1;
    document.body.dataset.looks = looks;
  } catch (error) {
    complain(error instanceof TypeError ? "The mirror does not answer." : `${error.message}.`);
  }
}

async function keepLooking() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((resolve) => setTimeout(resolve, ASK_MS));
  }
}

function choose(cell) {
  if (!cell || !cell.dataset.vbid) return;
  for (const other of $("map").querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
  cell.tabIndex = 0;
  selected = Number(cell.dataset.vbid);
  for (const other of $("map").children) other.setAttribute("aria-selected", String(other === cell));
  $("detail").textContent = cell.title;
  $("detail").classList.add("chosen");
}

$("map").addEventListener("click", (event) => choose(event.target.closest("button")));
$("map").addEventListener("keydown", (event) => {
  const cells = [...$("map").children];
  const at = cells.indexOf(document.activeElement);
  const columns = getComputedStyle($("map")).gridTemplateColumns.split(" ").length;
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -cells.length, End: cells.length }[event.key];
  if (at < 0 || step === undefined) return;
  event.preventDefault();
  const next = cells[Math.min(cells.length - 1, Math.max(0, at + step))];
  choose(next);
  next.focus();
});
keepLooking();
