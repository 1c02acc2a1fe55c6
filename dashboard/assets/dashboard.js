"use strict";
// The dashboard. The script creates elements and sets their text. It never parses markup, so that ids, inputs and
// errors stay text.

const view = document.getElementById("view");
const notice = document.getElementById("notice");
/// Milliseconds between two refreshes.
const REFRESH = 3000;
/// Entries that the chart shows.
const CHART = 150;
/// Entries of one page of the history, as the server sends them.
const HISTORY_PAGE = 500;
let allowChanges = false;
/// The number of the current view. An answer for an earlier view is discarded.
let currentView = 0;

function el(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else if (name === "href") element.href = value;
    else element.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child.nodeType ? child : document.createTextNode(String(child)));
  }
  return element;
}

function svg(tag, props, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const button = (text, click, props) => el("button", { type: "button", text, ...props, on: { click } });

// ---- Requests

/// Moves the token from the address into the session storage of the tab.
function token() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname + "#/");
  }
  return sessionStorage.getItem("token");
}

function headers(extra) {
  const given = token();
  return { ...(given ? { Authorization: "Bearer " + given } : {}), ...extra };
}

async function parse(response) {
  const answer = await response.json().catch(() => ({ error: response.statusText }));
  if (!response.ok) throw new Error(answer.error || response.statusText);
  return answer;
}

async function get(path, parameters) {
  const isGiven = ([, value]) => value !== undefined && value !== null && value !== "";
  const query = new URLSearchParams(Object.entries(parameters || {}).filter(isGiven)).toString();
  return parse(await fetch("api/" + path + (query ? "?" + query : ""), { headers: headers() }));
}

async function change(path, body) {
  const extra = { "Content-Type": "application/json", "X-Duroxide-Dashboard": "1" };
  return parse(await fetch("api/" + path, { method: "POST", headers: headers(extra), body: JSON.stringify(body) }));
}

/// Shows a message for some seconds.
function showMessage(text) {
  notice.textContent = text;
  notice.className = "";
  setTimeout(() => { if (notice.textContent === text) notice.textContent = ""; }, 8000);
}

/// Shows an error until a refresh succeeds.
function showError(error) {
  notice.textContent = error.message;
  notice.className = "error";
}

function clearError() {
  if (notice.className === "error") showMessage("");
}

// ---- Formats

function duration(millis) {
  const seconds = Math.floor(millis / 1000);
  if (seconds < 1) return Math.max(0, Math.round(millis)) + " ms";
  if (seconds < 60) return (millis / 1000).toFixed(1) + " s";
  if (seconds < 3600) return Math.floor(seconds / 60) + " min " + (seconds % 60) + " s";
  if (seconds < 86400) return Math.floor(seconds / 3600) + " h " + Math.floor((seconds % 3600) / 60) + " min";
  return Math.floor(seconds / 86400) + " d " + Math.floor((seconds % 86400) / 3600) + " h";
}

const ago = (at) => (at ? duration(Date.now() - at) + " ago" : "");
const time = (at) => (at ? new Date(at).toISOString().replace("T", " ") : "");
const hrefOf = (id, execution) => "#/i/" + encodeURIComponent(id) + (execution ? "/" + execution : "");
const instanceLink = (id) => el("a", { href: hrefOf(id), text: id });
const muted = (text) => el("p", { class: "muted", text });

function table(heads, rows, id) {
  const head = el("tr", {}, heads.map((text) => el("th", { text })));
  const toCell = (cell) => (cell && cell.nodeName === "TD" ? cell : el("td", {}, cell));
  const body = rows.map((cells) => el("tr", {}, cells.map(toCell)));
  return el("table", { id }, el("thead", {}, head), el("tbody", {}, body));
}

const statusLabel = (status) => el("span", { class: "state-" + status, text: status });

/// One part of an answer, or its error. A part that fails does not hide the others.
function part(answer, name, show) {
  const failure = answer.failures[name];
  return failure ? el("p", { class: "problem", text: "can't be shown: " + failure }) : show(answer[name]);
}

// ---- The overview

function trendChart(points) {
  const names = ["running", "completed", "failed", "waiting"];
  const start = points[0].at;
  const span = Math.max(1, points[points.length - 1].at - start);
  const lines = names.map((name) => {
    const max = Math.max(1, ...points.map((point) => point[name]));
    const position = (point) => ((point.at - start) / span) * 1000 + "," + (100 - (point[name] / max) * 92 - 4);
    return svg("polyline", { class: name, points: points.map(position).join(" ") });
  });
  const props = {
    class: "trend", viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img",
    "aria-label": "counts of the last half hour",
  };
  const last = points[points.length - 1];
  const keys = names.map((name) => el("span", { class: "key " + name, text: name + " " + last[name] }));
  const legend = "the last " + duration(span) + ", each line with its own scale";
  return el("div", {}, svg("svg", props, ...lines), el("div", { class: "muted" }, keys, legend));
}

function queueTable(report) {
  const turns = report.turns;
  const link = (id) => (id ? instanceLink(id) : "");
  const rows = [["turns", "", "", turns.waiting, "", ago(turns.oldest), link(turns.oldestInstance)]];
  for (const queue of report.activities) {
    rows.push([
      "activities", queue.tag || "", queue.session || "", queue.waiting, queue.running, ago(queue.oldest),
      link(queue.oldestInstance),
    ]);
  }
  const rest = turns.later + " timers and messages are due later, " + turns.deferred
    + " messages are for instances without a start" + (report.capped ? "; there is more than this" : "");
  const heads = ["queue", "tag", "session", "waiting", "running", "oldest", "of"];
  return el("div", {}, table(heads, rows, "queues"), muted(rest));
}

function workerTable(workers) {
  if (!workers.some((worker) => worker.alive)) return muted("no process looks for work");
  const slots = (capabilities) =>
    (capabilities ? capabilities.slots.from + " to " + (capabilities.slots.to - 1) : "no idle dispatcher");
  const tags = (activities) => {
    if (!activities) return "";
    if (activities.any) return "any tag";
    return [activities.untagged ? "untagged" : null, ...activities.tags].filter(Boolean).join(" ");
  };
  const rows = workers.map((worker) => [
    worker.name, ago(worker.lastHeard) + (worker.alive ? "" : ", gone"), slots(worker.turns),
    slots(worker.activities), tags(worker.activities),
  ]);
  return table(["worker", "last seen", "slots for turns", "slots for activities", "tags"], rows, "workers");
}

function undeliveredTable(intents) {
  const rows = intents.map((intent) => [
    instanceLink(intent.instance), intent.message, intent.target, ago(intent.createdAt),
    intent.reason || intent.attempts + " attempts",
  ]);
  return table(["of", "message", "for", "sent", "reason"], rows, "undelivered");
}

const filter = { status: "", name: "", text: "", parent: "", newer: "" };

function filterForm(apply) {
  const input = (name, label) => el("input", { name, placeholder: label, "aria-label": label, value: filter[name] });
  const option = (value, text) =>
    el("option", { value, text, selected: filter.status === value || filter.newer === value ? "" : null });
  const submit = (event) => {
    event.preventDefault();
    Object.assign(filter, Object.fromEntries(new FormData(form)));
    apply();
  };
  const statuses = ["Running", "Completed", "Failed", "ContinuedAsNew"].map((status) => option(status, status));
  const form = el(
    "form", { class: "filter", on: { submit } },
    el("select", { name: "status", "aria-label": "status" }, option("", "any status"), statuses),
    input("name", "orchestration"), input("text", "text in the id"), input("parent", "children of"),
    el("select", { name: "newer", "aria-label": "age" },
      option("", "any age"), option("3600", "last hour"), option("86400", "last day"), option("604800", "last week")),
    el("button", { type: "submit", text: "Show" }),
  );
  return form;
}

function countList(counts) {
  const pairs = [["Running", counts.running], ["Completed", counts.completed], ["Failed", counts.failed]];
  const items = pairs.map(([name, number]) => el("div", { class: name }, el("b", { text: number }), name));
  return el("div", { class: "counts" }, items);
}

function overviewSections(overview) {
  const section = (title, content, id) => el("section", { id }, el("h2", { text: title }), content);
  const trend = overview.trend.length > 1 ? trendChart(overview.trend) : muted("the trend appears after some seconds");
  const hasUndelivered = overview.failures.undelivered || overview.undelivered.length;
  return [
    el("div", { class: "row" },
      section("Instances", part(overview, "counts", countList), "counts"),
      section("Trend", trend, "trend")),
    el("div", { class: "row" },
      section("Queues", part(overview, "queues", queueTable)),
      section("Workers", part(overview, "workers", workerTable))),
    hasUndelivered ? section("Undelivered messages", part(overview, "undelivered", undeliveredTable)) : "",
  ];
}

async function showOverview(viewNumber) {
  const state = el("div"), list = el("div");
  let shown = 0, pages = 0, cursor = null, body = null, ages = [], listedCounts = null;
  const more = button("more", () => loadPage(cursor).catch(showError));
  const count = el("span", { class: "muted" });

  function addRow(instance) {
    const took = instance.completedAt ? duration(instance.completedAt - instance.createdAt) : "";
    const created = el("td", { text: ago(instance.createdAt) });
    ages.push([created, instance.createdAt]);
    body.append(el("tr", {},
      el("td", {}, statusLabel(instance.status)), created, el("td", { text: took }), el("td", { text: instance.name }),
      el("td", { class: "id" }, instanceLink(instance.id))));
  }

  async function loadPage(from) {
    const page = await get("instances", { ...filter, cursor: from });
    if (viewNumber !== currentView) return;
    if (!from) {
      shown = pages = 0;
      ages = [];
      const rows = table(["status", "created", "took", "orchestration", "instance"], [], "instances");
      body = rows.querySelector("tbody");
      list.replaceChildren(rows);
    }
    page.instances.forEach(addRow);
    shown += page.instances.length;
    pages += 1;
    cursor = page.cursor;
    more.hidden = !cursor;
    count.textContent = shown + (cursor ? " shown, there are more" : " instances");
  }

  async function loadState() {
    const overview = await get("overview");
    if (viewNumber !== currentView) return;
    allowChanges = overview.allowChanges;
    state.replaceChildren(...overviewSections(overview));
    for (const [cell, at] of ages) cell.textContent = ago(at);
    clearError();
    return JSON.stringify(overview.counts);
  }

  // The list is loaded again if the counts have changed, unless the user has loaded further pages.
  async function refresh() {
    const counts = await loadState();
    if (viewNumber !== currentView || counts === listedCounts || pages > 1) return;
    await loadPage(null);
    listedCounts = counts;
  }

  view.replaceChildren(state, el("section", {},
    el("h2", { text: "List" }), filterForm(() => loadPage(null).catch(showError)), list,
    el("div", { class: "pager" }, count, more)));
  await Promise.all([loadState(), loadPage(null)]);
  repeat(viewNumber, refresh);
}

// ---- An instance

function describe(entry) {
  const took = entry.ended ? ", " + duration(entry.ended - entry.at) : "";
  const attempt = entry.attempt > 1 ? ", attempt " + entry.attempt : "";
  const name = entry.due ? time(entry.due) : entry.name;
  return entry.what + " " + name + attempt + (entry.state ? ", " + entry.state : "") + took;
}

function chartBar(entry, start, span, open) {
  const end = entry.ended || (entry.state === "waits" ? start + span : entry.at);
  const props = { class: "bar " + (entry.state || "mark"), title: describe(entry), "aria-label": describe(entry) };
  const bar = button(undefined, open, props);
  bar.style.left = Math.min(99.7, ((entry.at - start) / span) * 100) + "%";
  if (entry.state) bar.style.width = Math.max(0.2, ((end - entry.at) / span) * 100) + "%";
  return bar;
}

function timelineChart(history, open, end) {
  const start = history.startedAt, span = Math.max(1, end - start);
  const entries = history.entries.slice(0, CHART);
  const chart = el("div", { class: "chart", id: "chart" });
  chart.append(el("span", { class: "muted", text: time(start) }));
  chart.append(el("div", { class: "axis" }, [0, 0.25, 0.5, 0.75, 1].map((at) => {
    const tick = el("span", { text: duration(span * at) });
    tick.style.left = at * 100 + "%";
    return tick;
  })));
  for (const entry of entries) {
    const attempt = entry.attempt > 1 ? " (attempt " + entry.attempt + ")" : "";
    const name = "#" + entry.event + " " + entry.what + " " + (entry.due ? "" : entry.name) + attempt;
    const label = entry.instance ? el("a", { href: hrefOf(entry.instance), text: name }) : name;
    chart.append(el("div", { class: "label", title: name }, label));
    chart.append(el("div", { class: "track" }, chartBar(entry, start, span, () => open(entry))));
  }
  const rest = history.entries.length - entries.length;
  return el("div", {}, chart, rest > 0 ? muted(rest + " more in the list below") : "");
}

function instanceTree(tree, currentId) {
  const childrenOf = new Map();
  for (const instance of tree.instances) {
    if (instance.id === tree.root) continue;
    childrenOf.set(instance.parent, [...(childrenOf.get(instance.parent) || []), instance]);
  }
  const label = (instance) => el("span", {},
    statusLabel(instance.status), " ",
    instance.id === currentId ? el("b", { text: instance.id }) : instanceLink(instance.id), " ",
    el("span", { class: "muted", text: instance.name }));
  const root = tree.instances.find((instance) => instance.id === tree.root);
  const list = el("ul", { class: "tree", id: "tree" });
  // A tree may be deep, so a loop with a stack replaces recursion.
  const next = [[root, list]];
  while (next.length) {
    const [instance, parentList] = next.pop();
    if (!instance) continue;
    const item = el("li", {}, label(instance));
    parentList.append(item);
    const children = childrenOf.get(instance.id) || [];
    if (children.length) {
      const inner = el("ul", { class: "tree" });
      item.append(inner);
      for (const child of [...children].reverse()) next.push([child, inner]);
    }
  }
  return list;
}

function outcomeOf(instance, { result, customStatus }) {
  const heading = instance.status === "Failed" ? "error" : "result";
  return el("div", {},
    customStatus === null ? "" : el("p", { id: "custom" }, "status: ", el("b", { text: customStatus })),
    result === null ? "" : el("div", {},
      el("div", { class: "muted", text: heading }), el("pre", { id: "result", text: result })));
}

function valueTable(values) {
  const rows = Object.entries(values).sort().map(([key, value]) => [key, el("td", {}, el("pre", { text: value }))]);
  return rows.length ? table(["key", "value"], rows, "values") : "";
}

function executionTable(id, { count, shown }) {
  if (count < 2) return "";
  const rows = shown.map((execution) => [
    el("a", { href: hrefOf(id, execution.execution), text: execution.execution }), statusLabel(execution.status),
    time(execution.startedAt),
    execution.completedAt ? duration(execution.completedAt - execution.startedAt) : "", execution.events,
  ]);
  const heads = ["execution", "status", "started", "took", "events"];
  return el("details", {}, el("summary", { text: count + " executions" }), table(heads, rows, "executions"));
}

async function showInstance(viewNumber, id, execution) {
  const summary = el("section"), timeline = el("section"), events = el("section"), tree = el("section");
  const doctor = el("section", { id: "doctor" });
  const detail = el("div", { id: "detail" });
  let latest = null, offset = 0;

  async function showEntry(entry) {
    const whole = entry.truncated ? await get("entry", { id, execution, event: entry.event }) : entry;
    if (viewNumber !== currentView) return;
    const payload = (name, text) =>
      (text === null || text === undefined ? [] : [el("div", { class: "muted", text: name }), el("pre", { text })]);
    detail.replaceChildren(
      el("h2", { text: "#" + whole.event + " " + describe(whole) }), muted(time(whole.at)),
      ...payload("input", whole.input), ...payload("output", whole.output));
  }

  const open = (entry) => showEntry(entry).catch(showError);

  function historyRow(entry) {
    const attempt = entry.attempt > 1 ? " (attempt " + entry.attempt + ")" : "";
    const opener = button("…", () => open(entry), { "aria-label": "show event " + entry.event });
    const name = entry.due ? time(entry.due) : entry.name;
    return [
      entry.event, time(entry.at), entry.ended ? duration(entry.ended - entry.at) : "", entry.state, entry.what,
      el("td", { class: "id" }, opener, " " + name, attempt),
    ];
  }

  async function loadHistory() {
    const history = await get("history", { id, execution, offset });
    if (viewNumber !== currentView) return;
    const isOpen = latest && latest.status === "Running" && history.execution === latest.execution;
    const end = isOpen ? Math.max(Date.now(), history.lastEventAt) : history.lastEventAt;
    timeline.replaceChildren(
      el("h2", { text: "Timeline of execution " + history.execution }), timelineChart(history, open, end), detail);
    const last = offset + history.entries.length;
    const turnTo = (text, target, isPossible) => {
      const load = () => {
        offset = target;
        loadHistory().catch(showError);
      };
      return button(text, load, { disabled: isPossible ? null : "" });
    };
    events.replaceChildren(
      el("h2", { text: "History: " + history.events + " events" }),
      table(["#", "at", "took", "state", "what", "name"], history.entries.map(historyRow), "history"),
      el("div", { class: "pager" },
        turnTo("earlier", Math.max(0, offset - HISTORY_PAGE), offset > 0), turnTo("later", last, last < history.total),
        el("span", { class: "muted", text: (offset + 1) + " to " + last + " of " + history.total })));
  }

  async function loadTree() {
    const answer = await get("tree", { id });
    if (viewNumber !== currentView) return;
    const count = answer.instances.length;
    const limited = count >= answer.limit ? ", the first " + answer.limit : "";
    tree.hidden = count < 2;
    tree.replaceChildren(
      el("h2", { text: "Instance tree: " + count + " instances" + limited }), instanceTree(answer, id));
  }

  async function refresh() {
    const answer = await get("instance", { id });
    if (viewNumber !== currentView) return;
    const instance = answer.instance;
    const facts = " " + instance.name + " " + instance.version + ", created " + ago(instance.createdAt)
      + ", last turn " + ago(instance.updatedAt);
    summary.replaceChildren(
      el("h1", { id: "name", text: instance.id }),
      el("p", {}, statusLabel(instance.status), facts),
      instance.parent ? el("p", {}, "child of ", instanceLink(instance.parent)) : "",
      part(answer, "outcome", (outcome) => outcomeOf(instance, outcome)), part(answer, "values", valueTable),
      part(answer, "executions", (executions) => executionTable(id, executions)),
      allowChanges ? actions(instance, answer.orphan === true, refresh) : "");
    const hasChanged = !latest || latest.updatedAt !== instance.updatedAt || latest.status !== instance.status;
    latest = instance;
    clearError();
    if (!hasChanged) return;
    const results = await Promise.allSettled([loadHistory(), loadTree()]);
    const failed = results.find((result) => result.status === "rejected");
    if (failed) throw failed.reason;
  }

  async function examine() {
    doctor.replaceChildren(el("h2", { text: "Doctor" }), muted("examining …"));
    const diagnosis = await get("doctor", { id });
    if (viewNumber !== currentView) return;
    const findings = diagnosis.findings.map((finding) => el("div", { class: "problem" },
      el("b", { text: finding.reason }), " " + finding.detail,
      el("div", { class: "muted", text: finding.remedy + ": " + finding.todo })));
    const repairable = diagnosis.findings.filter((finding) => finding.remedy === "repair");
    const repair = async () => {
      const result = await change("repair", { id, findings: repairable.map((finding) => finding.detail) });
      showMessage("repaired " + result.done.length + " findings" + (result.hindered ? ": " + result.hindered : ""));
      await Promise.all([examine(), refresh()]);
    };
    const healthy = findings.length || diagnosis.moves ? "" : "; nothing is wrong";
    doctor.replaceChildren(
      el("h2", { text: "Doctor" }), el("p", { text: "it " + diagnosis.state + healthy }), ...findings,
      repairable.length && allowChanges ? button("Repair", () => repair().catch(showError)) : "");
  }

  doctor.append(
    el("h2", { text: "Doctor" }), button("Examine", () => examine().catch(showError), { id: "examine" }));
  tree.hidden = true;
  view.replaceChildren(summary, doctor, timeline, tree, events);
  if (!allowChanges) allowChanges = (await get("overview")).allowChanges;
  await refresh();
  repeat(viewNumber, async () => { if (!latest || isRunning(latest)) await refresh(); });
}

const isRunning = (instance) => instance.status === "Running" || instance.status === "ContinuedAsNew";

function actions(instance, isOrphan, refresh) {
  const id = instance.id;
  const act = (path, body) => change(path, { id, ...body })
    .then((result) => { showMessage(result.done); return refresh(); })
    .catch(showError);
  const remove = () => change("delete", { id, force: isRunning(instance), createdAt: instance.createdAt })
    .then((result) => { location.hash = "#/"; showMessage(result.done); })
    .catch(showError);
  const confirmed = (question, then) => () => { if (confirm(question)) then(); };
  const name = el("input", { placeholder: "event", "aria-label": "event" });
  const data = el("input", { placeholder: "data", "aria-label": "data" });
  const raise = () => act("raise", { name: name.value, text: data.value });
  const cancel = confirmed("Ask " + id + " to stop?", () => act("cancel", { text: "cancelled from the dashboard" }));
  const confirmedRemove = confirmed("Delete " + id + " and all its descendants?", remove);
  return el("div", { class: "actions" },
    isRunning(instance) ? [name, data, button("Raise", raise), button("Cancel", cancel)] : "",
    instance.parent && !isOrphan ? "" : button("Delete", confirmedRemove));
}

// ---- Navigation

function repeat(viewNumber, refresh) {
  const again = async () => {
    if (viewNumber !== currentView) return;
    // A hidden tab sends no requests.
    if (document.visibilityState === "visible") {
      try { await refresh(); } catch (error) { if (viewNumber === currentView) showError(error); }
    }
    setTimeout(again, REFRESH);
  };
  setTimeout(again, REFRESH);
}

async function navigate() {
  token();
  const viewNumber = ++currentView;
  const [, kind, id, execution] = location.hash.slice(1).split("/");
  try {
    if (kind === "i" && id) await showInstance(viewNumber, decodeURIComponent(id), execution);
    else await showOverview(viewNumber);
  } catch (error) {
    if (viewNumber === currentView) showError(error);
  }
}

const root = document.documentElement;
const storedTheme = localStorage.getItem("theme");
if (storedTheme) root.dataset.theme = storedTheme;
document.getElementById("theme").addEventListener("click", () => {
  const prefersDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : prefersDark;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
});
addEventListener("hashchange", navigate);
navigate();
