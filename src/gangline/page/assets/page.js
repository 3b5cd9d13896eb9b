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

function table(header, rows, { cards = false, label = null } = {}) {
  const numbers = header.map((each) => each.startsWith("#")), names = header.map((each) => each.replace("#", ""));
  return make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": label ?? `Table of ${names.join(", ")}` },
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

const chosen = new Set();

function runs(place) {
  const title = make("h1", {}, "Runs"), holder = make("div");
  const compared = make("button", { type: "button", disabled: true, onclick: () => { location.hash = link("compare", ...chosen); } }, "Compare");
  const count = () => { compared.disabled = chosen.size < 2; compared.textContent = chosen.size ? `Compare ${chosen.size} runs` : "Compare"; };
  count();
  const search = make("input", { type: "search", placeholder: "part of a name or state", "aria-label": "Show only runs with this text" });
  place.append(title, make("div", { class: "tools" }, search, compared, make("span", { class: "faint" }, "tick two runs or more")), holder);
  let told = null;
  const fill = () => {
    if (!told) return;
    const words = search.value.trim().toLowerCase();
    const rows = told.runs.filter((run) => `${run.id} ${run.name} ${run.phase} ${run.hosts.join(" ")}`.toLowerCase().includes(words));
    const active = document.activeElement, focused = active?.getAttribute?.("href"), box = active?.getAttribute?.("data-run");
    const tick = (run) => {
      const made = make("input", { type: "checkbox", "aria-label": `Compare ${run.id}`, "data-run": run.id, checked: chosen.has(run.id) });
      made.addEventListener("change", () => { if (made.checked) chosen.add(run.id); else chosen.delete(run.id); count(); });
      return made;
    };
    holder.replaceChildren(rows.length ? table(["run", "state", "#step", "#loss", "#tokens/s", "hosts", "last heard", "began"], rows.map((run) => [
      { long: make("span", {}, tick(run), " ", make("a", { href: link("run", run.id) }, run.id), run.name ? ` ${run.name}` : "") },
      make("span", {}, phase(run), run.waits ? ` (${run.waits})` : ""),
      run.step === null ? "-" : `${figure(run.step)} of ${figure(run.steps)}`,
      figure(run.loss), figure(run.tokens_per_s),
      { long: run.hosts.join(", ") || "-" },
      { long: run.damage ?? (run.silent ? `${ago(run.heard, told.now)}; ${run.silent}` : ago(run.heard, told.now)) },
      ago(run.created, told.now)]), { cards: true })
      : make("p", {}, told.runs.length ? "No run has this text." : "No runs yet: gangline train job.yaml starts one."));
    if (focused) holder.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    if (box) holder.querySelector(`input[data-run="${CSS.escape(box)}"]`)?.focus({ preventScroll: true });
  };
  search.addEventListener("input", fill);
  return { every: LIST_MS, async refresh() { told = await ask("/api/runs"); fill(); } };
}

// One run.

const TABS = [["", "Curves"], ["ranks", "Ranks"], ["hosts", "Hosts"], ["events", "Events"], ["logs", "Logs"], ["job", "Job"]];

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
      await buttons(tools, told);
      await part.refresh?.(told);
    },
  };
}

// Orders: a button asks first, and says what came of it.

const running = new Set();

async function buttons(tools, told) {
  const { orders } = await ask("/api/orders"), last = orders.find((order) => order.run === told.id);
  const words = last ? [last.error?.what, last.error?.seen, last.error?.fix, last.doing, last.lines.at(-1)].filter(Boolean) : [];
  const shown = JSON.stringify([told.phase, told.can_stop, told.can_resume, last?.is_done, words]);
  if (tools.dataset.shown === shown) return;
  tools.dataset.shown = shown;
  const busy = running.has(told.id) || (last && !last.is_done);
  const button = (text, kind, path, body, question) => make("button", { type: "button", class: kind, disabled: busy, onclick: () => order(told.id, text, path, body, question) }, text);
  tools.replaceChildren(...[
    told.can_stop && button("Stop", "", "stop", {}, "Its ranks save at the end of the step in which they are, and exit. It can be resumed."),
    told.can_stop && button("Stop without saving", "danger", "stop", { now: true }, "Its ranks end at once. Steps since the last checkpoint are lost."),
    told.can_resume && button("Resume", "", "resume", {}, "It goes on from its newest valid checkpoint, on the same hosts. Its checks run first."),
    words.length && make("span", { role: "status", class: last.error ? "bad" : "faint" }, `${last.what}: ${words.join("; ")}`)].filter(Boolean));
}

async function order(id, text, path, body, question) {
  if (!await sure(`${text}: ${id}?`, question, text)) return;
  running.add(id);
  try {
    await ask(`/api/runs/${encodeURIComponent(id)}/${path}`, { method: "POST", body: JSON.stringify(body),
      headers: { "content-type": "application/json", "x-gangline-key": localStorage.getItem("gangline-key") ?? "" } });
    say(`${text}: ordered`);
  } catch (error) {
    main.prepend(problem(error));
    say(`${text}: ${error.message}`);
  } finally {
    running.delete(id);
    view.refresh?.().catch(() => {});
  }
}

function sure(title, question, text) {
  const dialog = document.getElementById("ask");
  return new Promise((done) => {
    const leave = make("button", { type: "button", autofocus: true, onclick: () => dialog.close("") }, "Cancel");
    dialog.replaceChildren(make("h2", { id: "ask-title" }, title), make("p", {}, question),
      make("div", { class: "tools" }, leave, make("button", { type: "button", class: "danger", onclick: () => dialog.close("yes") }, text)));
    dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true });
    dialog.returnValue = "";
    dialog.showModal();
  });
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
  constructor(id) { this.id = id; this.told = null; this.turn = 0; }
  // Null where something newer was asked for in the meantime.
  async get(part, more = []) {
    const mine = this.turn += 1;
    const whole = part.first === null, { told } = this, words = [...part.query(), ...more];
    if (whole && told?.whole) words.push(`generation=${told.generation}`, `width=${told.width}`, `count=${told.step.length}`);
    const news = await ask(`/api/runs/${encodeURIComponent(this.id)}/series?${words.join("&")}`);
    if (mine !== this.turn) return null;
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
    async refresh(run) {
      const news = await buckets.get(part);
      if (news) { told = run; seen = news; fill(); }
    },
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
      const news = await buckets.get(part, more);
      if (!news) return;
      const { ranks: told } = news, names = told.ranks.map((each) => `${each.rank} on ${each.host}`);
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

// Hosts of a run, and over the time one of them.

const percent = (value) => value === null || value === undefined ? "-" : `${figure(value, 3)} %`;
const mbit = (value) => `${figure(value * 8 / 1e6, 3)} Mbit/s`;
const HOST_CHARTS = [["Processor, memory and pressure", /^(cpu_percent|memory_percent|pressure\/)/, percent], ["Network", /^net\//, mbit],
  ["Disks", /^disk\//, (value) => `${bytes(value)}/s`], ["GPUs in use", /utilization_percent$/, percent], ["Memory of GPUs", /^gpu.*memory_percent$/, percent],
  ["Temperature of GPUs", /temperature_c$/, (value) => `${figure(value, 3)} C`], ["Power of GPUs", /power_w$/, (value) => `${figure(value, 3)} W`],
  ["Clock of GPUs", /clock_mhz$/, (value) => `${figure(value, 4)} MHz`], ["GPUs slowed by heat or a fault", /throttled_percent$/, percent]];
const WORDS = { cpu_percent: "processor", memory_percent: "memory", "pressure/cpu_percent": "waits for the processor", "pressure/memory_percent": "waits for memory",
  "pressure/io_percent": "waits for disks", "disk/read_bytes_per_s": "reads", "disk/write_bytes_per_s": "writes" };
const short = (name) => WORDS[name] ?? name.replace(/^gpu\/(\d+)\/.*$/, "GPU $1").replace(/^net\/(.*)\/rx_bytes_per_s$/, "$1 receives").replace(/^net\/(.*)\/tx_bytes_per_s$/, "$1 sends");

function hosts(place, id) {
  let which = "", turn = 0;
  const choice = make("select", { "aria-label": "Host that is drawn" }), holder = make("div");
  choice.addEventListener("change", () => { which = choice.value; view.refresh().catch(() => {}); });
  const group = new Group({ label: clock });
  const charts = HOST_CHARTS.map(([title, , form]) => new Chart(group, { title, form, zero: !/Clock|Temp/.test(title), key: true }));
  for (const chart of charts) chart.figure.hidden = true;
  const note = make("p", { class: "faint" });
  place.append(holder, make("div", { class: "tools" }, make("span", {}, "Over the time:"), choice), note, make("div", { class: "charts" }, ...charts.map((chart) => chart.figure)));
  return {
    close: () => group.close(),
    async refresh() {
      const mine = turn += 1, told = await ask(`/api/runs/${encodeURIComponent(id)}/hosts?${which ? `host=${encodeURIComponent(which)}` : ""}`);
      if (mine !== turn) return;
      if (choice.options.length !== told.hosts.length) choice.replaceChildren(...told.hosts.map((host) => make("option", { value: host.host }, host.host)));
      choice.value = told.drawn?.host ?? "";
      holder.replaceChildren(table(["host", "#processor", "#memory", "network", "GPUs", "system", "last heard"], told.hosts.map((host) => [
        { long: make("b", {}, host.host) }, percent(host.figures.cpu_percent), host.figures.memory_bytes == null ? bytes(host.memory_total_bytes) : `${bytes(host.figures.memory_bytes)} of ${bytes(host.memory_total_bytes)}`,
        { long: traffic(host.figures) }, { long: make("span", {}, ...cards(host)) }, { long: [host.cpus && `${host.cpus} processors`, host.system, host.driver && `driver ${host.driver}`].filter(Boolean).join(", ") || "-" },
        { long: host.silent ? make("span", { class: "bad" }, `${ago(host.heard, told.now)}; ${host.silent}`) : host.heard === null ? "no samples" : ago(host.heard, told.now) }]), { cards: true }));
      const drawn = told.drawn ?? { time: [], figures: {} }, names = Object.keys(drawn.figures);
      note.textContent = told.hosts.find((host) => host.host === drawn.host)?.simulated ? "The GPUs of this host are simulated: their figures are of no real card." : drawn.time.length ? "" : "It has no samples.";
      HOST_CHARTS.forEach(([, pattern], at) => {
        const mine = names.filter((name) => pattern.test(name));
        charts[at].figure.hidden = !mine.length;
        charts[at].set({ x: drawn.time, lines: mine.map((name, place) => ({ name: short(name), mean: drawn.figures[name], colour: colour(place) })) });
      });
    },
  };
}
function traffic(figures) {
  const names = Object.keys(figures).filter((name) => /^net\/.*rx_bytes_per_s$/.test(name)), others = names.filter((name) => !name.startsWith("net/lo/"));
  const [most] = (others.length ? others : names).sort((one, other) => figures[other] - figures[one]);
  return most ? `${most.split("/")[1]}: in ${mbit(figures[most])}, out ${mbit(figures[most.replace("/rx_", "/tx_")] ?? 0)}` : "-";
}
function cards(host) {
  const rows = host.cards.map((card) => {
    const of = (name) => host.figures[`gpu/${card.index}/${name}`], parts = [["utilization_percent", "%"], ["temperature_c", "C"], ["power_w", "W"]].filter(([name]) => of(name) != null).map(([name, unit]) => `${figure(of(name), 3)} ${unit}`);
    const hot = of("throttled_percent") > 0, lost = of("lost") > 0;
    return make("div", { class: hot || lost ? "bad" : "" }, `${card.index}: ${card.name}${card.simulated ? " (simulated)" : ""} ${parts.join(", ")}${hot ? ", throttled" : ""}${lost ? ", does not answer" : ""}`);
  });
  return [...(rows.length ? rows : [host.gpus.join("; ") || "none"]), ...host.others.map((words) => make("div", { class: "bad" }, words))];
}

// Logs.

function logs(place, id) {
  // turn: whoever comes back from waiting to another number has been overtaken, and leaves all as it is.
  let attempt = "", name = "", count = null, found = null, turn = 0;
  const which = make("select", { "aria-label": "Attempt" }), choice = make("select", { "aria-label": "Log" }), text = make("pre", { tabindex: 0, role: "region", "aria-label": "Lines of the log" });
  const words = make("input", { type: "search", placeholder: "search in all logs", "aria-label": "Search in all logs", maxlength: 200 });
  const form = make("form", { class: "tools", role: "search" }, which, choice, words, make("button", {}, "Search")), note = make("p", { class: "faint", role: "status" });
  place.append(form, note, text);
  const of = (path, more = {}) => ask(`/api/runs/${encodeURIComponent(id)}/${path}?${new URLSearchParams({ ...(attempt && { attempt }), ...more })}`);
  const begin = () => { turn += 1; count = found = null; text.replaceChildren(); view.refresh().catch(() => {}); };
  which.addEventListener("change", () => { attempt = which.value; name = ""; begin(); });
  choice.addEventListener("change", () => { name = choice.value; words.value = ""; begin(); });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    found = words.value.trim();
    if (!found) { begin(); return; }
    const mine = turn += 1;
    note.textContent = "searching";
    try {
      const told = await of("search", { words: found });
      if (mine !== turn) return;
      note.textContent = [`${told.found.length}${told.is_all ? "" : " or more"} lines have these words`, ...told.missing].join("; ");
      text.replaceChildren(...told.found.flatMap((line) => [make("span", { class: "faint" }, `${line.log}:${line.line}  `), ...marked(line.text, found), "\n"]));
    } catch (error) { if (mine === turn) note.textContent = error.message; }
  });
  return {
    async refresh() {
      if (found !== null) return;
      const mine = turn += 1, told = await of("logs");
      if (mine !== turn) return;
      if (which.options.length !== told.attempts) which.replaceChildren(...Array.from({ length: told.attempts }, (_, at) => make("option", { value: at + 1 }, `attempt ${at + 1}`)).reverse());
      which.value = told.attempt;
      if ([...choice.options].map((each) => each.value).join() !== told.logs.join()) choice.replaceChildren(...told.logs.map((each) => make("option", { value: each }, each)));
      name = told.logs.includes(name) ? name : told.logs[0] ?? "";
      choice.value = name;
      if (!name) { note.textContent = ["no log of this attempt", ...told.missing].join("; "); return; }
      const end = await of("log", { name, ...(count !== null && { after: count }) });
      if (mine !== turn) return;
      const down = text.scrollTop + text.clientHeight >= text.scrollHeight - 30 || count === null;
      if (count === null || end.first > count + 1) text.replaceChildren();
      if (end.lines.length) text.append(`${end.lines.join("\n")}\n`);
      count = end.count;
      note.textContent = [`${figure(end.count)} lines${end.left_out > 0 ? `, the last ${figure(end.count - end.left_out)} are shown` : ""}${end.is_behind ? ", and the rest is being read" : ""}`, ...told.missing].join("; ");
      if (down) text.scrollTop = text.scrollHeight;
    },
  };
}
function marked(line, words) {
  const parts = [], low = line.toLowerCase(), wanted = words.toLowerCase();
  let from = 0;
  if (low.length !== line.length) return [line];
  for (let at = low.indexOf(wanted); at >= 0; at = low.indexOf(wanted, from)) { parts.push(line.slice(from, at), make("mark", {}, line.slice(at, at + wanted.length))); from = at + wanted.length; }
  return [...parts, line.slice(from)];
}

// The resolved job, and what another run has otherwise.

const TITLES = { job: "Job", data: "Data", versions: "Versions", machines: "Machines", division: "Division of the work" };

function job(place, id) {
  const choice = make("select", { "aria-label": "Run to compare with" }, make("option", { value: "" }, "no other run")), holder = make("div");
  place.append(make("div", { class: "tools" }, make("span", {}, "Compare with"), choice), holder);
  let turn = 0;
  const fill = async (mine) => {
    const other = choice.value, told = other ? await ask(`/api/diff?one=${encodeURIComponent(id)}&other=${encodeURIComponent(other)}`) : await ask(`/api/runs/${encodeURIComponent(id)}/job`);
    if (mine !== turn) return;
    const parts = other ? differences(told) : Object.entries(told.parts).filter(([, rows]) => rows.length).flatMap(([part, rows]) =>
      [make("h2", {}, TITLES[part]), table(["key", "value"], rows.map(([key, value]) => [{ long: key }, { long: value }]), { label: TITLES[part] })]);
    holder.replaceChildren(...parts, ...told.missing.map((gap) => notice(gap)));
  };
  const again = () => {
    const mine = turn += 1;
    fill(mine).catch((error) => { if (mine === turn && error.name !== "AbortError") holder.replaceChildren(problem(error)); });
  };
  choice.addEventListener("change", again);
  ask("/api/runs").then((told) => choice.append(...told.runs.filter((each) => each.id !== id).map((each) => make("option", { value: each.id }, `${each.id} ${each.name}`)))).catch(() => {});
  again();
  return {};
}
function differences(told) {
  const parts = Object.entries(told.differences).filter(([, rows]) => rows.length), { losses } = told;
  const at = (row) => `step ${figure(row.step)}: ${row.losses.map((loss) => figure(loss, 8)).join(" and ")}`;
  const words = !losses.common_steps ? "They have no step with a loss in common." : !losses.part_at ? `Their losses are equal in all ${figure(losses.common_steps)} common steps.`
    : `Their losses part at ${at(losses.part_at)}${losses.one_percent_apart_at ? `; they differ by 1 % from ${at(losses.one_percent_apart_at)}` : ""}.`;
  return [make("p", {}, words + (told.reading ? " Not all steps are read yet." : "")), ...parts.flatMap(([part, rows]) => [make("h2", {}, TITLES[part]), table(["key", ...told.runs], rows.map((row) => [{ long: row.key }, ...row.values.map((value) => ({ long: value }))]), { label: TITLES[part] })]),
    ...(parts.length ? [] : [make("p", {}, "No other difference is recorded.")])];
}

// Runs beside each other.

function compare(place, ...ids) {
  const names = ids.slice(0, 8), holder = make("div"), all = names.map((id) => new Buckets(id));
  const part = shownPart(() => view.refresh().catch(() => {}));
  const group = new Group({ onZoom: (one, other) => part.zoom(...(one === null ? [null, null] : [Math.round(one), Math.round(other)])), label: (value) => `step ${figure(Math.round(value))}` });
  const charts = Object.fromEntries(STEPS.map(([name, title]) => [name, new Chart(group, { title, key: true, zero: ["tokens_per_s", "step_s", "mfu"].includes(name), form: name === "step_s" ? seconds : figure })]));
  part.tools.firstChild.remove();
  place.append(make("h1", {}, "Comparison"), make("p", { class: "facts" }, ...names.map((id) => make("a", { href: link("run", id) }, id))), part.tools,
    make("div", { class: "charts" }, ...Object.values(charts).map((chart) => chart.figure)));
  if (names.length > 1) {
    place.append(make("h2", {}, `${names[0]} and ${names[1]}`), holder);
    ask(`/api/diff?one=${encodeURIComponent(names[0])}&other=${encodeURIComponent(names[1])}`).then((told) => holder.replaceChildren(...differences(told))).catch((error) => { if (error.told) holder.replaceChildren(problem(error)); });
  }
  return {
    every: LIST_MS,
    close: () => group.close(),
    async refresh() {
      const told = await Promise.all(all.map((each) => each.get(part)));
      if (told.includes(null)) return;
      const steps = [...new Set(told.flatMap((each) => each.step))].sort((one, other) => one - other);
      for (const [name] of STEPS) {
        const lines = told.map((each, at) => ({ name: names[at], mean: along(steps, each.step, each.figures[name].mean), colour: colour(at) }));
        charts[name].figure.hidden = name !== "loss" && lines.every((line) => line.mean.every((value) => value === null));
        charts[name].set({ x: steps, lines });
      }
    },
  };
}
// Values at other steps: between two of its own points a line goes straight, outside of them there is nothing.
function along(steps, own, values) {
  let at = 0;
  return steps.map((step) => {
    while (at < own.length && own[at] < step) at += 1;
    if (at < own.length && own[at] === step) return values[at];
    if (at === 0 || at >= own.length || values[at] === null || values[at - 1] === null) return null;
    return values[at - 1] + (values[at] - values[at - 1]) * (step - own[at - 1]) / (own[at] - own[at - 1]);
  });
}

// Sweeps.

function sweeps(place) {
  const holder = make("div");
  place.append(make("h1", {}, "Sweeps"), holder);
  return { every: LIST_MS, async refresh() {
    const told = await ask("/api/sweeps");
    holder.replaceChildren(told.sweeps.length ? table(["sweep", "job", "state", "#ended", "#failed", "#best loss", "began"], told.sweeps.map((each) => [{ long: make("a", { href: link("sweep", each.id) }, each.id) }, { long: each.job },
      make("span", { class: PHASES[each.phase] ?? "" }, each.phase), `${each.ended} of ${each.trials}`, String(each.failed), each.best_loss === null ? "-" : `${figure(each.best_loss)} (trial ${each.best_trial})`, ago(Date.parse(each.created) / 1000, told.now)]), { cards: true })
      : make("p", {}, "No sweeps yet: gangline sweep job.yaml KEY=A,B starts one."));
  } };
}
function sweep(place, id) {
  const state = make("p", { class: "facts" }), holder = make("div"), button = make("button", { type: "button", disabled: true }, "Compare the best runs");
  place.append(make("h1", {}, id), state, make("div", { class: "tools" }, button), holder);
  let best = [];
  button.addEventListener("click", () => { location.hash = link("compare", ...best); });
  return { every: LIST_MS, async refresh() {
    const told = await ask(`/api/sweeps/${encodeURIComponent(id)}`), keys = [...new Set(told.trials.flatMap((trial) => Object.keys(trial.point)))];
    state.replaceChildren(make("span", { class: PHASES[told.phase] ?? "" }, told.phase), fact("hosts", told.hosts.join(", ") || "-"), fact("trials", String(told.trials.length)), fact("best", told.best === null ? "-" : `trial ${told.best}`));
    best = told.trials.map((trial) => trial.run).filter(Boolean).slice(0, 6);
    button.disabled = best.length < 2;
    const loss = (trial) => { const steps = Object.keys(trial.losses).map(Number).sort((one, other) => one - other); return steps.length ? figure(trial.losses[steps.at(-1)]) : "-"; };
    holder.replaceChildren(table(["#rank", "#trial", ...keys, "state", "#step", `#${told.metric?.name ?? "loss"}`, "run", "why"], told.trials.map((trial) => [String(trial.rank), String(trial.number), ...keys.map((key) => trial.point[key] ?? "-"),
      make("span", { class: PHASES[trial.phase] ?? "" }, trial.phase), `${figure(trial.step)} of ${figure(trial.steps)}`, loss(trial), { long: trial.run ? make("a", { href: link("run", trial.run) }, trial.run) : "-" }, { long: trial.error?.what ?? "" }]), { cards: true }));
  } };
}

const PARTS = { "": curves, ranks, hosts, events, logs, job };
const VIEWS = { runs, run, compare, sweeps, sweep };
const NAV = [["runs", "Runs"], ["sweeps", "Sweeps"]];

addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => { if (!document.hidden) { clearTimeout(timer); again(drawn); } });
show();
