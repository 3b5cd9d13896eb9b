// The page of gangline ui: an address behind # names a view; a view asks every two seconds for what is new.
// All text of runs and hosts goes into the page as text (textContent), never as markup.

import { Chart, Group, bytes, colour, figure, seconds } from "./charts.js";

const AGAIN_MS = 2000, LIST_MS = 4000;
const PHASES = { running: "good", finished: "good", failed: "bad", lost: "bad", unknown: "bad", stopped: "warn" };
const STEPS = [["loss", "Loss per trained token"], ["learning_rate", "Learning rate"], ["grad_norm", "Norm of the gradient"],
  ["tokens_per_s", "Tokens per second"], ["step_s", "Time of a step"], ["mfu", "Part of the peak FLOPs used (MFU)"]];
const PART_NAMES = { compute_s: "computes", data_s: "reads data", waits_s: "waits for slower ranks", network_s: "network", rest_s: "rest" };
const main = document.getElementById("content");

// The key with which this page may give orders came with the address; it is kept for this address and port.
const given = /^#key=([\w-]+)$/.exec(location.hash);
if (given) { localStorage.setItem("gangline-key", given[1]); history.replaceState(null, "", "/#/"); }

function make(name, attributes = {}, ...inner) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value); else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...inner.filter((each) => each !== null && each !== undefined));
  return made;
}
const say = (text) => { document.getElementById("said").textContent = text; };
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { signal: leaving.signal, ...options });
  } catch (error) {
    if (error.name !== "AbortError") online(false);
    throw error;
  }
  online(true);
  const type = answer.headers.get("content-type") ?? "";
  const told = type.includes("json") ? await answer.json() : { error: { what: await answer.text(), seen: "", fix: "" } };
  if (!answer.ok) throw Object.assign(new Error(told.error.what), { told: told.error });
  return told;
}
function online(is) {
  const link = document.getElementById("link");
  link.className = is ? "" : "bad";
  link.textContent = is ? "" : "gangline ui does not answer: what is shown is old";
}

function ago(seconds, now) {
  if (seconds === null || seconds === undefined) return "-";
  const passed = Math.max(0, now - seconds);
  return passed < 5 ? "now" : `${lasting(passed)} ago`;
}
function lasting(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds < 90) return `${seconds < 10 ? Number(seconds.toPrecision(2)) : Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Number((seconds / 3600).toPrecision(3))} h`;
  return `${Math.round(seconds / 86400)} days`;
}
const clock = (seconds) => { const at = new Date(seconds * 1000); return `${at.toLocaleDateString("en-CA").slice(5)} ${at.toTimeString().slice(0, 8)}`; };
const phase = (run) => make("span", { class: PHASES[run.phase] ?? "" }, run.phase + (run.silent ? "?" : ""));
const notice = (text, kind = "") => make("p", { class: `note ${kind}` }, text);
const problem = (error) => notice(error.told ? [error.told.what, error.told.seen, error.told.fix].filter(Boolean).join("\n") : String(error.message), "bad");
const fact = (name, value) => make("span", {}, `${name} `, make("b", {}, value));

function table(header, rows, { cards = false } = {}) {
  const numbers = header.map((each) => each.startsWith("#")), names = header.map((each) => each.replace("#", ""));
  return make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "table" },
    make("table", { class: cards ? "cards" : null },
      make("thead", {}, make("tr", {}, ...names.map((name, at) => make("th", { scope: "col", class: numbers[at] ? "number" : null }, name)))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell, at) =>
        make("td", { class: numbers[at] ? "number" : cell?.long ? "text" : null, "data-name": at && names[at] ? names[at] : null }, cell?.long ?? cell ?? "-")))))));
}

// Views: each returns {refresh?, close?}; refresh is called again and again while the page is seen.

let leaving = new AbortController(), view = {}, timer = null, drawn = 0;

function link(...parts) { return `#/${parts.map(encodeURIComponent).join("/")}`; }

async function show() {
  leaving.abort();
  leaving = new AbortController();
  clearTimeout(timer);
  view.close?.();
  view = {};
  const number = drawn += 1, words = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);
  const [name, ...rest] = words.length ? words : ["runs"];
  document.getElementById("nav").replaceChildren(...NAV.map(([to, text]) => make("a", { href: link(to), "aria-current": name === to ? "page" : null }, text)));
  main.replaceChildren();
  const found = VIEWS[name] ?? nothing;
  view = found(main, ...rest);
  document.title = `${rest[0] ?? (NAV.find(([to]) => to === name) ?? ["", name])[1]} - gangline`;
  again(number);
}

async function again(number) {
  if (number !== drawn) return;
  if (!document.hidden) {
    try { await view.refresh?.(); view.failed?.remove(); view.failed = null; }
    catch (error) {
      if (error.name === "AbortError" || number !== drawn) return;
      if (error.told) { view.failed?.remove(); main.prepend(view.failed = problem(error)); }
    }
  }
  if (number === drawn && view.refresh) timer = setTimeout(() => again(number), view.every ?? AGAIN_MS);
}

function nothing(place) { place.append(make("h1", {}, "There is no such page"), make("p", {}, make("a", { href: "#/" }, "All runs"))); return {}; }

// All runs.

function runs(place) {
  const title = make("h1", {}, "Runs"), holder = make("div"), chosen = new Set();
  const search = make("input", { type: "search", placeholder: "part of a name or state", "aria-label": "Show only runs with this text" });
  place.append(title, make("div", { class: "tools" }, search), holder);
  let told = null;
  const fill = () => {
    if (!told) return;
    const words = search.value.trim().toLowerCase();
    const rows = told.runs.filter((run) => `${run.id} ${run.name} ${run.phase} ${run.hosts.join(" ")}`.toLowerCase().includes(words));
    const focused = document.activeElement?.getAttribute?.("href");
    holder.replaceChildren(rows.length ? table(["run", "state", "#step", "#loss", "#tokens/s", "hosts", "last heard", "began"], rows.map((run) => [
      { long: make("span", {}, make("a", { href: link("run", run.id) }, run.id), run.name ? ` ${run.name}` : "") },
      make("span", {}, phase(run), run.waits ? ` (${run.waits})` : ""),
      run.step === null ? "-" : `${figure(run.step)} of ${figure(run.steps)}`,
      figure(run.loss), figure(run.tokens_per_s),
      { long: run.hosts.join(", ") || "-" },
      { long: run.damage ?? (run.silent ? `${ago(run.heard, told.now)}; ${run.silent}` : ago(run.heard, told.now)) },
      ago(run.created, told.now)]), { cards: true })
      : make("p", {}, told.runs.length ? "No run has this text." : "No runs yet: gangline train job.yaml starts one."));
    if (focused) holder.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
  };
  search.addEventListener("input", fill);
  return { every: LIST_MS, async refresh() { told = await ask("/api/runs"); fill(); } };
}

// One run.

const TABS = [["", "Curves"], ["ranks", "Ranks"], ["events", "Events"]];

function run(place, id, tab = "") {
  const state = make("p", { class: "facts" }), notes = make("div"), inner = make("div"), tools = make("div", { class: "tools" });
  place.append(make("h1", {}, id), state, notes, tools,
    make("nav", { class: "tabs", "aria-label": "Parts of the run" }, ...TABS.map(([to, text]) => make("a", { href: to ? link("run", id, to) : link("run", id), "aria-current": tab === to ? "page" : null }, text))), inner);
  const part = (PARTS[tab] ?? nothing)(inner, id);
  return {
    close: () => part.close?.(),
    async refresh() {
      const told = await ask(`/api/runs/${encodeURIComponent(id)}`), { last } = told;
      state.replaceChildren(...[phase(told), told.name && fact("job", told.name), told.attempt && fact("attempt", figure(told.attempt)),
        last.step !== undefined && fact("step", `${figure(last.step)} of ${figure(last.steps)}`), last.loss != null && fact("loss", figure(last.loss)),
        last.tokens_per_s != null && fact("tokens/s", figure(last.tokens_per_s)), told.remaining_s != null && fact("time left", lasting(told.remaining_s)),
        last.time && fact("last step written", ago(last.time, told.now)), fact("hosts", told.hosts.join(", ") || "-"),
        told.plan && fact("strategy", told.plan.strategy)].filter(Boolean));
      notes.replaceChildren(...[told.silent && notice(`The state is the last one heard: ${told.silent}`), told.trouble && notice(`Not everything could be read: ${told.trouble}`),
        told.error && notice([told.error.what, told.error.seen, told.error.fix].filter(Boolean).join("\n"), "bad"),
        told.reading && notice("Still reading the metrics: what is shown are the steps so far.")].filter(Boolean));
      await part.refresh?.(told);
    },
  };
}

// The part of the steps that is shown, and whether the axis has steps or times.
function shownPart(onChange) {
  const part = { first: null, last: null, axis: localStorage.getItem("gangline-axis") ?? "step" };
  const axis = make("select", { "aria-label": "Axis" }, ...["step", "time"].map((each) => make("option", { value: each, selected: part.axis === each }, `by ${each}`)));
  const all = make("button", { type: "button", disabled: true, onclick: () => part.zoom(null, null) }, "Whole run");
  axis.addEventListener("change", () => { part.axis = axis.value; localStorage.setItem("gangline-axis", axis.value); onChange(); });
  part.zoom = (first, last) => { Object.assign(part, { first, last }); all.disabled = first === null; say(first === null ? "The whole run is shown" : `Steps ${first} to ${last} are shown`); onChange(); };
  part.tools = make("div", { class: "tools" }, axis, all, make("span", { class: "faint" }, "drag over a chart to zoom"));
  part.query = () => part.first === null ? [] : [`first=${part.first}`, `last=${part.last}`];
  return part;
}

// Buckets of the whole run, of which only the new ones come.
class Buckets {
  constructor(id) { this.id = id; this.told = null; }
  async get(part, more = []) {
    const whole = part.first === null, { told } = this, words = [...part.query(), ...more];
    if (whole && told?.whole) words.push(`generation=${told.generation}`, `width=${told.width}`, `count=${told.step.length}`);
    const news = await ask(`/api/runs/${encodeURIComponent(this.id)}/series?${words.join("&")}`);
    news.whole = whole;
    if (news.from > 0 && told) {
      const join = (old, fresh) => [...old.slice(0, news.from), ...fresh];
      news.step = join(told.step, news.step);
      news.time = join(told.time, news.time);
      for (const [name, lines] of Object.entries(news.figures)) for (const kind of Object.keys(lines)) lines[kind] = join(told.figures[name][kind], lines[kind]);
    }
    return this.told = news;
  }
}

function stepAt(told, value, axis) {
  if (axis === "step") return Math.round(value);
  let at = told.time.findIndex((time) => time >= value);
  if (at < 0) at = told.time.length - 1;
  return told.step[at];
}
function marksOf(told, buckets, axis) {
  const found = buckets.attempts.slice(1).map(([, step]) => ({ x: axis === "step" ? step : null, step, colour: "--faint", dash: [3, 3] }));
  for (const event of told.events) {
    const kind = EVENT_COLOURS[event.event];
    if (kind) found.push({ x: axis === "time" ? event.time : event.step, colour: kind, time: event.time });
  }
  return found.map((mark) => mark.x !== null && mark.x !== undefined ? mark : { ...mark, x: place(mark, buckets, axis) }).filter((mark) => mark.x !== null);
}
function place(mark, buckets, axis) {
  const [from, to, value] = axis === "time" ? [buckets.step, buckets.time, mark.step] : [buckets.time, buckets.step, mark.time];
  if (value === null || value === undefined || !from.length) return null;
  const at = from.findIndex((each) => each >= value);
  return at < 0 ? null : to[at];
}
const EVENT_COLOURS = Object.fromEntries([
  ...["failing", "failed", "unreachable", "hanging", "replicas-differ", "save-failed", "card", "trouble"].map((name) => [name, "--bad"]),
  ...["straggler", "restarting", "step-skipped", "spike", "memory-off", "host-left-out", "leaving", "standing", "doubted"].map((name) => [name, "--warn"]),
  ...["returned", "reachable", "going on", "straggler-over", "resumed"].map((name) => [name, "--good"])]);

function curves(place, id) {
  let seen = null, told = null, last = null;
  const part = shownPart(() => view.refresh().catch(() => {})), buckets = new Buckets(id);
  const group = new Group({
    onZoom: (one, other) => part.zoom(...(one === null ? [null, null] : [stepAt(seen, one, part.axis), stepAt(seen, other, part.axis)])),
    label: (value) => part.axis === "step" ? `step ${figure(Math.round(value))}` : clock(value),
  });
  const charts = Object.fromEntries(STEPS.map(([name, title]) => [name, new Chart(group, { title, zero: ["tokens_per_s", "step_s", "mfu"].includes(name), form: name === "step_s" ? seconds : figure })]));
  const grid = make("div", { class: "charts" }, ...Object.values(charts).map((chart) => chart.figure));
  const key = make("ul", { class: "key" }, ...[["--bad", "fault"], ["--warn", "slow, skipped or restarting"], ["--good", "over"]].map(([name, text]) => {
    const sign = make("i"); sign.style.background = `var(${name})`; return make("li", {}, sign, text);
  }));
  place.append(part.tools, key, grid);
  const fill = () => {
    group.marks = marksOf(told, seen, part.axis);
    for (const [name] of STEPS) {
      const lines = seen.figures[name];
      charts[name].figure.hidden = lines.mean.every((value) => value === null) && name !== "loss";
      charts[name].set({
        x: part.axis === "step" ? seen.step : seen.time,
        lines: [{ name, ...lines, colour: css("--c0") }],
        points: name === "loss" ? seen.evaluations.map(([step, loss]) => [part.axis === "step" ? step : place_of(step), loss]).filter(([at]) => at !== null) : [],
      });
    }
  };
  const place_of = (step) => { const at = seen.step.findIndex((each) => each >= step); return at < 0 ? null : seen.time[at]; };
  return {
    close: () => group.close(),
    async refresh(run) { told = run; seen = await buckets.get(part); fill(); },
  };
}

// Ranks.

function ranks(place, id) {
  let chosen = "";
  const part = shownPart(() => view.refresh().catch(() => {})), buckets = new Buckets(id);
  const choice = make("select", { "aria-label": "Rank whose time is drawn" }, make("option", { value: "" }, "all ranks, mean"));
  choice.addEventListener("change", () => { chosen = choice.value; view.refresh().catch(() => {}); });
  const group = new Group({
    onZoom: (one, other) => part.zoom(...(one === null ? [null, null] : [Math.round(one), Math.round(other)])), label: (value) => `step ${figure(Math.round(value))}`,
  });
  const time = new Chart(group, { title: "Where a step's time goes", stacked: true, tall: true, key: true, form: seconds });
  const shares = new Chart(group, { title: "Micro-batches by rank", stacked: true, tall: true, key: true });
  const memory = new Chart(group, { title: "Memory by rank, and its plan", zero: true, tall: true, form: bytes });
  const note = make("p", { class: "faint" }), holder = make("div");
  part.tools.firstChild.remove();
  part.tools.prepend(choice);
  place.append(part.tools, note, make("div", { class: "charts" }, time.figure, shares.figure, memory.figure), make("h2", {}, "Mean of the steps shown"), holder);
  return {
    close: () => group.close(),
    async refresh() {
      const more = chosen ? [`rank=${chosen.split(" ")[0]}`, `host=${encodeURIComponent(chosen.split(" ")[1])}`] : [];
      const { ranks: told } = await buckets.get(part, more), names = told.ranks.map((each) => `${each.rank} on ${each.host}`);
      note.textContent = told.every > 1 ? `Ranks are drawn from every ${told.every}th step.` : "";
      if (choice.options.length !== names.length + 1) {
        choice.replaceChildren(make("option", { value: "" }, "all ranks, mean"), ...told.ranks.map((each, at) => make("option", { value: `${each.rank} ${each.host}` }, `rank ${names[at]}`)));
        choice.value = chosen;
      }
      time.set({ x: told.step, lines: told.parts.map((name, at) => ({ name: PART_NAMES[name], mean: told.time[at], colour: css(`--p${at}`) })) });
      const few = names.length <= 16;
      shares.set({ x: told.step, lines: told.shares.map((mean, at) => ({ name: names[at], mean, colour: colour(at) })) });
      shares.key.hidden = !few;
      const plan = few ? told.planned_bytes.map((value, at) => ({ name: `plan of ${names[at]}`, value, colour: colour(at) })).filter((each) => each.value != null)
        : [Math.max(...told.planned_bytes.filter((each) => each != null))].filter(Number.isFinite).map((value) => ({ name: "most planned", value, colour: css("--warn") }));
      memory.set({ x: told.step, lines: told.memory.map((mean, at) => ({ name: names[at], mean, colour: colour(at) })), levels: plan });
      holder.replaceChildren(table(["rank", "host", ...told.parts.map((name) => `#${PART_NAMES[name]}`), "#memory", "#planned"],
        told.ranks.map((each, at) => [String(each.rank), each.host, ...told.means[at].map(seconds),
          bytes(told.memory[at].at(-1)), bytes(told.planned_bytes[at])]), { cards: true }));
    },
  };
}

// Events.

function events(place) {
  const holder = make("div");
  place.append(holder);
  return {
    refresh(told) {
      const rows = told.events.slice().reverse().map((each) => [each.time ? clock(each.time) : "-", each.step === null || each.step === undefined ? "-" : figure(each.step),
        { long: make("span", { class: (EVENT_COLOURS[each.event] ?? "").replace("--", "") }, each.text) }]);
      holder.replaceChildren(rows.length ? table(["time", "#step", "what"], rows) : make("p", {}, "No events yet."));
    },
  };
}

const PARTS = { "": curves, ranks, events };
const VIEWS = { runs, run };
const NAV = [["runs", "Runs"]];

addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => { if (!document.hidden) { clearTimeout(timer); again(drawn); } });
show();
