"use strict";
// The page. Elements are made and given text; no markup is ever read, so that what users wrote stays text.

const view = document.getElementById("view");
const notice = document.getElementById("notice");
const REFRESH = 3000;
let allowChanges = false;
/// Counts up with each view: an answer for a view that was left is thrown away.
let visit = 0;

function el(tag, props, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else if (name === "class") made.className = value;
    else if (name === "text") made.textContent = value;
    else if (name === "href") made.href = value;
    else made.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child === undefined || child === null || child === false) continue;
    made.append(child.nodeType ? child : document.createTextNode(String(child)));
  }
  return made;
}

function svg(tag, props, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// ---- Asking

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

async function answer(response) {
  const told = await response.json().catch(() => ({ error: response.statusText }));
  if (!response.ok) throw new Error(told.error || response.statusText);
  return told;
}

async function ask(what, parameters) {
  const given = Object.entries(parameters || {}).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const question = new URLSearchParams(given).toString();
  return answer(await fetch("api/" + what + (question ? "?" + question : ""), { headers: headers() }));
}

async function order(what, body) {
  const told = headers({ "Content-Type": "application/json", "X-Duroxide-Page": "1" });
  return answer(await fetch("api/" + what, { method: "POST", headers: told, body: JSON.stringify(body) }));
}

/// Something was done, or went wrong; the first is shown for a while, the second until it goes well again.
function say(text, wrong) {
  notice.textContent = text;
  notice.className = wrong ? "wrong" : "";
  if (!wrong) setTimeout(() => { if (notice.textContent === text) notice.textContent = ""; }, 8000);
}

function well() {
  if (notice.className === "wrong") say("");
}

// ---- Telling

function length(millis) {
  const seconds = Math.floor(millis / 1000);
  if (seconds < 1) return Math.max(0, Math.round(millis)) + " ms";
  if (seconds < 60) return (millis / 1000).toFixed(1) + " s";
  if (seconds < 3600) return Math.floor(seconds / 60) + " min " + (seconds % 60) + " s";
  if (seconds < 86400) return Math.floor(seconds / 3600) + " h " + Math.floor((seconds % 3600) / 60) + " min";
  return Math.floor(seconds / 86400) + " d " + Math.floor((seconds % 86400) / 3600) + " h";
}

const ago = (at) => (at ? length(Date.now() - at) + " ago" : "");
const moment = (at) => (at ? new Date(at).toISOString().replace("T", " ") : "");
const link = (id, execution) => "#/i/" + encodeURIComponent(id) + (execution ? "/" + execution : "");
const slots = (stand) => (stand ? stand.slots.from + " to " + (stand.slots.to - 1) : "nobody waits");

function table(heads, rows, name) {
  const head = el("tr", {}, heads.map((text) => el("th", { text })));
  const body = rows.map((cells) => el("tr", {}, cells.map((cell) => (cell && cell.nodeName === "TD" ? cell : el("td", {}, cell)))));
  return el("table", { id: name }, el("thead", {}, head), el("tbody", {}, body));
}

const state = (status) => el("span", { class: "state-" + status, text: status });

/// A part of an answer, or why it is missing: one part that fails hides no other.
const part = (told, name, show) => (told.failures[name] ? el("p", { class: "ill", text: "can't be shown: " + told.failures[name] }) : show(told[name]));

// ---- The overview

function trend(points) {
  const names = ["running", "completed", "failed", "waiting"];
  const from = points[0].at;
  const span = Math.max(1, points[points.length - 1].at - from);
  const lines = names.map((name) => {
    const values = points.map((point) => point[name]);
    const most = Math.max(1, ...values);
    const at = (point) => ((point.at - from) / span) * 1000 + "," + (100 - (point[name] / most) * 92 - 4);
    return svg("polyline", { class: name, points: points.map(at).join(" ") });
  });
  const picture = svg("svg", { class: "trend", viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": "counts over the last minutes" }, ...lines);
  const last = points[points.length - 1];
  const keys = names.map((name) => el("span", { class: "key " + name, text: name + " " + last[name] }));
  return el("div", {}, picture, el("div", { class: "quiet" }, keys, "the last " + length(span) + ", each by its own scale"));
}

function queues(told) {
  const turns = told.turns;
  const of = (id) => (id ? el("a", { href: link(id), text: id }) : "");
  const rows = [["turns", "", "", turns.waiting, "", ago(turns.oldest), of(turns.oldestInstance)]];
  for (const queue of told.activities) {
    rows.push(["activities", queue.tag || "", queue.session || "", queue.waiting, queue.running, ago(queue.oldest), of(queue.oldestInstance)]);
  }
  const rest = turns.later + " timers and messages for later, " + turns.deferred + " for instances that nobody has started";
  return el("div", {}, table(["queue", "tag", "session", "waiting", "running", "oldest", "of"], rows, "queues"), el("p", { class: "quiet", text: rest + (told.capped ? "; there is more than this" : "") }));
}

function fleet(members) {
  if (!members.some((member) => member.alive)) return el("p", { class: "quiet", text: "no process looks for work" });
  const rows = members.map((member) => [
    member.name, ago(member.lastHeard) + (member.alive ? "" : ", gone"), slots(member.turns), slots(member.activities),
    member.activities ? (member.activities.any ? "any tag" : [member.activities.untagged ? "untagged" : null, ...member.activities.tags].filter(Boolean).join(" ")) : "",
  ]);
  return table(["member", "heard of", "turns of slots", "activities of slots", "tags"], rows, "fleet");
}

function late(intents) {
  const rows = intents.map((intent) => [el("a", { href: link(intent.instance), text: intent.instance }), intent.message, intent.target, ago(intent.createdAt), intent.reason || intent.attempts + " attempts"]);
  return table(["of", "message", "for", "sent", "why"], rows, "late");
}

const filter = { status: "", name: "", text: "", parent: "", newer: "" };

function filters(again) {
  const input = (name, hint) => el("input", { name, placeholder: hint, "aria-label": hint, value: filter[name] });
  const option = (value, text) => el("option", { value, text, selected: filter.status === value || filter.newer === value ? "" : null });
  const form = el(
    "form", { class: "filter", on: { submit: (event) => { event.preventDefault(); Object.assign(filter, Object.fromEntries(new FormData(form))); again(); } } },
    el("select", { name: "status", "aria-label": "status" }, option("", "any status"), ["Running", "Completed", "Failed", "ContinuedAsNew"].map((status) => option(status, status))),
    input("name", "orchestration"), input("text", "text in the id"), input("parent", "children of"),
    el("select", { name: "newer", "aria-label": "age" }, option("", "any age"), option("3600", "last hour"), option("86400", "last day"), option("604800", "last week")),
    el("button", { type: "submit", text: "Show" }),
  );
  return form;
}

async function overview(mine) {
  const status = el("div"), where = el("div");
  let shown = 0, pages = 0, cursor = null, rows = null, ages = [], listed = null;
  const more = el("button", { type: "button", text: "more", on: { click: () => page(cursor).catch((error) => say(error.message, true)) } });
  const count = el("span", { class: "quiet" });

  async function page(from) {
    const told = await ask("instances", { ...filter, cursor: from });
    if (mine !== visit) return;
    if (!from) {
      shown = pages = 0;
      ages = [];
      const made = table(["status", "created", "took", "orchestration", "instance"], [], "instances");
      rows = made.querySelector("tbody");
      where.replaceChildren(made);
    }
    for (const instance of told.instances) {
      const took = instance.completedAt ? length(instance.completedAt - instance.createdAt) : "";
      const id = el("td", { class: "id" }, el("a", { href: link(instance.id), text: instance.id }));
      const created = el("td", { text: ago(instance.createdAt) });
      ages.push([created, instance.createdAt]);
      rows.append(el("tr", {}, el("td", {}, state(instance.status)), created, el("td", { text: took }), el("td", { text: instance.name }), id));
    }
    shown += told.instances.length;
    pages += 1;
    cursor = told.cursor;
    more.hidden = !cursor;
    count.textContent = shown + (cursor ? " shown, there are more" : " instances");
  }

  async function look() {
    const told = await ask("overview");
    if (mine !== visit) return;
    allowChanges = told.allowChanges;
    const counts = (now) => el("div", { class: "counts" }, [["Running", now.running], ["Completed", now.completed], ["Failed", now.failed]].map(([name, number]) => el("div", { class: name }, el("b", { text: number }), name)));
    status.replaceChildren(
      el("div", { class: "row" },
        el("section", { id: "counts" }, el("h2", { text: "Instances" }), part(told, "counts", counts)),
        el("section", { id: "trend" }, el("h2", { text: "Trend" }), told.trend.length > 1 ? trend(told.trend) : el("p", { class: "quiet", text: "after a few seconds there is a line" }))),
      el("div", { class: "row" },
        el("section", {}, el("h2", { text: "Queues" }), part(told, "queues", queues)),
        el("section", {}, el("h2", { text: "Fleet" }), part(told, "members", fleet))),
      told.failures.late || told.late.length ? el("section", {}, el("h2", { text: "Not delivered" }), part(told, "late", late)) : "",
    );
    for (const [cell, at] of ages) cell.textContent = ago(at);
    well();
    return JSON.stringify(told.counts);
  }

  // The list follows the counts, unless somebody has gone on in it: one question where something has changed.
  async function follow() {
    const counts = await look();
    if (mine !== visit || counts === listed || pages > 1) return;
    await page(null);
    listed = counts;
  }

  view.replaceChildren(status, el("section", {}, el("h2", { text: "List" }), filters(() => page(null).catch((error) => say(error.message, true))), where, el("div", { class: "pager" }, count, more)));
  await Promise.all([look(), page(null)]);
  repeat(mine, follow);
}

// ---- An instance

const CHART = 150;

function bar(entry, begins, span, act) {
  const end = entry.ended || (entry.state === "waits" ? begins + span : entry.at);
  const kind = entry.state || "mark";
  const made = el("button", { type: "button", class: "bar " + kind, title: describe(entry), "aria-label": describe(entry), on: { click: act } });
  made.style.left = Math.min(99.7, ((entry.at - begins) / span) * 100) + "%";
  if (entry.state) made.style.width = Math.max(0.2, ((end - entry.at) / span) * 100) + "%";
  return made;
}

function describe(entry) {
  const took = entry.ended ? ", " + length(entry.ended - entry.at) : "";
  const attempt = entry.attempt > 1 ? ", attempt " + entry.attempt : "";
  return entry.what + " " + (entry.due ? moment(entry.due) : entry.name) + attempt + (entry.state ? ", " + entry.state : "") + took;
}

function chart(told, show, upto) {
  const begins = told.begins, span = Math.max(1, upto - begins);
  const entries = told.entries.slice(0, CHART);
  const grid = el("div", { class: "chart", id: "chart" });
  grid.append(el("span", { class: "quiet", text: moment(begins) }));
  grid.append(el("div", { class: "axis" }, [0, 0.25, 0.5, 0.75, 1].map((at) => {
    const tick = el("span", { text: length(span * at) });
    tick.style.left = at * 100 + "%";
    return tick;
  })));
  for (const entry of entries) {
    const name = "#" + entry.event + " " + entry.what + " " + (entry.due ? "" : entry.name) + (entry.attempt > 1 ? " (attempt " + entry.attempt + ")" : "");
    const label = entry.instance ? el("a", { href: link(entry.instance), text: name }) : name;
    grid.append(el("div", { class: "label", title: name }, label));
    grid.append(el("div", { class: "track" }, bar(entry, begins, span, () => show(entry))));
  }
  const rest = told.entries.length - entries.length;
  return el("div", {}, grid, rest > 0 ? el("p", { class: "quiet", text: rest + " more in the list below" }) : "");
}

function family(told, here) {
  const below = new Map();
  for (const member of told.members) {
    if (member.id !== told.root) below.set(member.parent, [...(below.get(member.parent) || []), member]);
  }
  const leaf = (member) => el("span", {}, state(member.status), " ", member.id === here ? el("b", { text: member.id }) : el("a", { href: link(member.id), text: member.id }), " ", el("span", { class: "quiet", text: member.name }));
  const root = told.members.find((member) => member.id === told.root);
  const list = el("ul", { class: "tree", id: "tree" });
  // Families may be deep, so this is no function that calls itself.
  const next = [[root, list]];
  while (next.length) {
    const [member, into] = next.pop();
    if (!member) continue;
    const item = el("li", {}, leaf(member));
    into.append(item);
    const children = below.get(member.id) || [];
    if (children.length) {
      const inner = el("ul", { class: "tree" });
      item.append(inner);
      for (const child of [...children].reverse()) next.push([child, inner]);
    }
  }
  return list;
}

async function instance(mine, id, execution) {
  const about = el("section"), picture = el("section"), events = el("section"), relatives = el("section"), health = el("section", { id: "health" });
  const detail = el("div", { id: "detail" });
  let moved = null, from = 0;

  async function show(entry) {
    let whole = entry;
    if (entry.cut) whole = await ask("entry", { id, execution, event: entry.event });
    if (mine !== visit) return;
    const part = (name, text) => (text === null || text === undefined ? "" : [el("div", { class: "quiet", text: name }), el("pre", { text })]);
    detail.replaceChildren(el("h2", { text: "#" + whole.event + " " + describe(whole) }), el("p", { class: "quiet", text: moment(whole.at) }), ...[part("input", whole.input), part("output", whole.output)].flat().filter(Boolean));
  }

  const open = (entry) => show(entry).catch((error) => say(error.message, true));

  async function timeline() {
    const told = await ask("history", { id, execution, from });
    if (mine !== visit) return;
    const running = moved && moved.status === "Running" && told.execution === moved.execution;
    const upto = running ? Math.max(Date.now(), told.ends) : told.ends;
    picture.replaceChildren(el("h2", { text: "Timeline of execution " + told.execution }), chart(told, open, upto), detail);
    const rows = told.entries.map((entry) => [
      entry.event, moment(entry.at), entry.ended ? length(entry.ended - entry.at) : "", entry.state, entry.what,
      el("td", { class: "id" }, el("button", { type: "button", text: "…", "aria-label": "show event " + entry.event, on: { click: () => open(entry) } }), " " + (entry.due ? moment(entry.due) : entry.name), entry.attempt > 1 ? " (attempt " + entry.attempt + ")" : ""),
    ]);
    const last = from + told.entries.length;
    const move = (text, to, can) => el("button", { type: "button", text, disabled: can ? null : "", on: { click: () => { from = to; timeline().catch((error) => say(error.message, true)); } } });
    events.replaceChildren(
      el("h2", { text: "History: " + told.events + " events" }), table(["#", "at", "took", "state", "what", "name"], rows, "history"),
      el("div", { class: "pager" }, move("earlier", Math.max(0, from - 500), from > 0), move("later", last, last < told.total), el("span", { class: "quiet", text: (from + 1) + " to " + last + " of " + told.total })));
  }

  async function look() {
    const answer = await ask("instance", { id });
    if (mine !== visit) return;
    const told = answer.instance;
    const values = (all) => {
      const rows = Object.entries(all).sort().map(([key, value]) => [key, el("td", {}, el("pre", { text: value }))]);
      return rows.length ? table(["key", "value"], rows, "values") : "";
    };
    const row = (one) => [el("a", { href: link(id, one.execution), text: one.execution }), state(one.status), moment(one.startedAt), one.completedAt ? length(one.completedAt - one.startedAt) : "", one.events];
    const executions = ({ count, shown }) => (count > 1 ? el("details", {}, el("summary", { text: count + " executions" }), table(["execution", "status", "started", "took", "events"], shown.map(row), "executions")) : "");
    const outcome = ({ result, customStatus }) => el("div", {},
      customStatus === null ? "" : el("p", { id: "custom" }, "status: ", el("b", { text: customStatus })),
      result === null ? "" : el("div", {}, el("div", { class: "quiet", text: told.status === "Failed" ? "why" : "result" }), el("pre", { id: "result", text: result })));
    about.replaceChildren(
      el("h1", { id: "name", text: told.id }),
      el("p", {}, state(told.status), " " + told.name + " " + told.version + ", created " + ago(told.createdAt) + ", last turn " + ago(told.updatedAt)),
      told.parent ? el("p", {}, "child of ", el("a", { href: link(told.parent), text: told.parent })) : "",
      part(answer, "outcome", outcome), part(answer, "values", values), part(answer, "executions", executions),
      allowChanges ? actions(id, told, answer.orphan === true, look) : "");
    const news = !moved || moved.updatedAt !== told.updatedAt || moved.status !== told.status;
    moved = told;
    well();
    if (!news) return;
    const failed = (await Promise.allSettled([timeline(), tree()])).find((one) => one.status === "rejected");
    if (failed) throw failed.reason;
  }

  async function tree() {
    const told = await ask("tree", { id });
    if (mine !== visit) return;
    const cut = told.members.length >= told.most ? ", the first " + told.most : "";
    relatives.hidden = told.members.length < 2;
    relatives.replaceChildren(el("h2", { text: "Family: " + told.members.length + " instances" + cut }), family(told, id));
  }

  async function examine() {
    health.replaceChildren(el("h2", { text: "Doctor" }), el("p", { class: "quiet", text: "looks …" }));
    const told = await ask("doctor", { id });
    if (mine !== visit) return;
    const ill = told.findings.map((finding) => el("div", { class: "ill" }, el("b", { text: finding.reason }), " " + finding.detail, el("div", { class: "quiet", text: finding.remedy + ": " + finding.todo })));
    const mendable = told.findings.filter((finding) => finding.remedy === "repair");
    const repair = async () => {
      const done = await order("repair", { id, said: mendable.map((finding) => finding.detail) });
      say("mended " + done.done.length + (done.hindered ? ": " + done.hindered : ""));
      await Promise.all([examine(), look()]);
    };
    health.replaceChildren(
      el("h2", { text: "Doctor" }), el("p", { text: "it " + told.state + (ill.length || told.moves ? "" : "; nothing is wrong") }), ...ill,
      mendable.length && allowChanges ? el("button", { type: "button", text: "Repair", on: { click: () => repair().catch((error) => say(error.message, true)) } }) : "");
  }

  health.append(el("h2", { text: "Doctor" }), el("button", { type: "button", id: "examine", text: "Examine", on: { click: () => examine().catch((error) => say(error.message, true)) } }));
  relatives.hidden = true;
  view.replaceChildren(about, health, picture, relatives, events);
  if (!allowChanges) allowChanges = (await ask("overview")).allowChanges;
  await look();
  repeat(mine, async () => { if (!moved || moved.status === "Running" || moved.status === "ContinuedAsNew") await look(); });
}

function actions(id, told, orphan, look) {
  const act = (what, body) => order(what, { id, ...body }).then((done) => { say(done.done); return look(); }).catch((error) => say(error.message, true));
  const name = el("input", { placeholder: "event", "aria-label": "event" }), data = el("input", { placeholder: "data", "aria-label": "data" });
  const running = told.status === "Running" || told.status === "ContinuedAsNew";
  const sure = (question, then) => () => { if (confirm(question)) then(); };
  return el("div", { class: "actions" },
    running ? [name, data, el("button", { type: "button", text: "Raise", on: { click: () => act("raise", { name: name.value, text: data.value }) } })] : "",
    running ? el("button", { type: "button", text: "Cancel", on: { click: sure("Ask " + id + " to stop?", () => act("cancel", { text: "from the page" })) } }) : "",
    told.parent && !orphan ? "" : el("button", { type: "button", text: "Delete", on: { click: sure("Delete " + id + " and all that descends from it?", () => order("delete", { id, force: running, createdAt: told.createdAt }).then((done) => { location.hash = "#/"; say(done.done); }).catch((error) => say(error.message, true))) } }));
}

// ---- Going around

function repeat(mine, look) {
  const again = async () => {
    if (mine !== visit) return;
    // Who does not look asks for nothing.
    if (document.visibilityState === "visible") {
      try { await look(); } catch (error) { if (mine === visit) say(error.message, true); }
    }
    setTimeout(again, REFRESH);
  };
  setTimeout(again, REFRESH);
}

async function go() {
  token();
  const mine = ++visit;
  const [, kind, id, execution] = location.hash.slice(1).split("/");
  try {
    if (kind === "i" && id) await instance(mine, decodeURIComponent(id), execution);
    else await overview(mine);
  } catch (error) {
    if (mine === visit) say(error.message, true);
  }
}

const root = document.documentElement;
const kept = localStorage.getItem("theme");
if (kept) root.dataset.theme = kept;
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
});
addEventListener("hashchange", go);
go();
