// Curves and stacked areas on a canvas. A chart is given at most some thousand points: the server makes the buckets.

const LEFT = 70, RIGHT = 10, TOP = 8, BOTTOM = 22;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const colour = (place) => place < 8 ? css(`--c${place}`) : `hsl(${(place * 47) % 360} 60% ${dark() ? 65 : 42}%)`;
const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;

export function figure(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en").replaceAll(",", " ");
  return size >= 1000 ? Math.round(value).toLocaleString("en").replaceAll(",", " ") : String(Number(value.toPrecision(digits)));
}

export function seconds(value) {
  if (value === null || value === undefined) return "-";
  return value === 0 ? "0" : Math.abs(value) < 1 ? `${Number((value * 1000).toPrecision(3))} ms` : `${Number(value.toPrecision(3))} s`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "-";
  let place = 0;
  while (Math.abs(value) >= 1024 && place < 4) { value /= 1024; place += 1; }
  return `${Number(value.toPrecision(3))} ${["B", "KiB", "MiB", "GiB", "TiB"][place]}`;
}

function ticks(low, high, most) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

// The charts of one page: they share the crosshair and the part of the run that is shown.
export class Group {
  constructor({ onZoom = () => {}, label = figure } = {}) {
    this.charts = new Set();
    this.cursor = null;
    this.onZoom = onZoom;
    this.label = label;
    this.marks = [];
    this.waits = false;
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.again = () => { for (const each of this.charts) each.stale = true; this.draw(); };
    this.scheme.addEventListener("change", this.again);
    this.sizes = new ResizeObserver((entries) => {
      for (const { target, contentRect } of entries) Object.assign(target.chart, { width: contentRect.width, height: contentRect.height, stale: true });
      this.draw();
    });
  }
  add(chart) { this.charts.add(chart); chart.canvas.chart = chart; this.sizes.observe(chart.canvas); return chart; }
  close() { this.scheme.removeEventListener("change", this.again); this.sizes.disconnect(); this.charts.clear(); }
  move(x) { this.cursor = x; this.draw(); }
  draw() {
    if (this.waits) return;
    this.waits = true;
    requestAnimationFrame(() => { this.waits = false; for (const each of this.charts) each.draw(); });
  }
}

export class Chart {
  // title; form: text of a value; stacked: areas on top of each other; tall; zero: the axis begins at 0
  constructor(group, { title, form = figure, stacked = false, tall = false, zero = false, key = false }) {
    Object.assign(this, { group, form, stacked, zero: zero || stacked, title });
    this.figure = document.createElement("figure");
    const caption = document.createElement("figcaption"), name = document.createElement("b");
    name.textContent = title;
    this.readout = document.createElement("span");
    caption.append(name, this.readout);
    this.canvas = document.createElement("canvas");
    if (tall) this.canvas.className = "tall";
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.key = document.createElement("ul");
    this.key.className = "key";
    this.figure.append(caption, this.canvas, ...(key ? [this.key] : []));
    this.data = { x: [], lines: [], points: [], levels: [] };
    this.listen();
    group.add(this);
  }

  // x: places; lines: {name, mean, low?, high?, colour}; points: [[x, y]]; levels: [{name, value, colour}]
  set(data) {
    this.data = { points: [], levels: [], ...data };
    this.key.replaceChildren(...[...this.data.lines, ...this.data.levels].map((line) => {
      const row = document.createElement("li"), sign = document.createElement("i");
      sign.style.background = line.colour;
      row.append(sign, line.name);
      return row;
    }));
    const last = this.data.x.length - 1, words = this.data.lines.slice(0, 8).map((line) => `${line.name} ${this.form(line.mean[last])}`);
    this.canvas.setAttribute("aria-label", last < 0 ? `${this.title}: nothing yet`
      : `${this.title}, ${this.data.x.length} points, last at ${this.group.label(this.data.x[last])}: ${words.join(", ")}. Arrow keys read points, plus and minus zoom, Escape shows all.`);
    this.stale = true;
    this.group.draw();
  }

  listen() {
    let begun = null;
    const at = (event) => this.value(event.clientX - this.canvas.getBoundingClientRect().left);
    this.canvas.addEventListener("pointerdown", (event) => { if (event.button === 0) { begun = event.clientX; this.canvas.setPointerCapture(event.pointerId); } });
    this.canvas.addEventListener("pointermove", (event) => {
      this.drag = begun !== null && Math.abs(event.clientX - begun) > 6 ? [begun, event.clientX].map((x) => x - this.canvas.getBoundingClientRect().left) : null;
      this.group.move(at(event));
    });
    this.canvas.addEventListener("pointerup", (event) => {
      if (this.drag) { const [one, other] = this.drag.map((x) => this.value(x)); this.group.onZoom(Math.min(one, other), Math.max(one, other)); }
      begun = this.drag = null;
      if (event.pointerType === "touch") this.group.draw();
    });
    this.canvas.addEventListener("pointercancel", () => { begun = this.drag = null; });
    this.canvas.addEventListener("pointerleave", () => { if (begun === null) this.group.move(null); });
    this.canvas.addEventListener("dblclick", () => this.group.onZoom(null, null));
    this.canvas.addEventListener("keydown", (event) => this.press(event));
  }

  press(event) {
    const { x } = this.data;
    if (!x.length) return;
    const place = this.group.cursor === null ? x.length - 1 : this.nearest(this.group.cursor), far = event.shiftKey ? 10 : 1;
    const moves = { ArrowLeft: place - far, ArrowRight: place + far, Home: 0, End: x.length - 1 };
    if (event.key in moves) this.group.move(x[Math.max(0, Math.min(x.length - 1, moves[event.key]))]);
    else if (event.key === "+" || event.key === "=") {
      const half = (x[x.length - 1] - x[0]) / 4;
      this.group.onZoom(Math.max(x[0], x[place] - half), Math.min(x[x.length - 1], x[place] + half));
    } else if (event.key === "-" || event.key === "Escape") this.group.onZoom(null, null);
    else return;
    event.preventDefault();
  }

  range() { const { x } = this.data; return x.length > 1 ? [x[0], x[x.length - 1]] : x.length ? [x[0] - 1, x[0] + 1] : [0, 1]; }
  value(px) { const [a, b] = this.range(); return a + Math.max(0, Math.min(1, (px - LEFT) / (this.width - LEFT - RIGHT))) * (b - a); }
  nearest(value) {
    const { x } = this.data;
    let low = 0, high = x.length - 1;
    while (low < high) { const mid = (low + high) >> 1; if (x[mid] < value) low = mid + 1; else high = mid; }
    return low > 0 && Math.abs(x[low - 1] - value) <= Math.abs(x[low] - value) ? low - 1 : low;
  }

  span() {
    const { x, lines, points, levels } = this.data;
    let low = this.zero ? 0 : Infinity, high = this.stacked ? 0 : -Infinity;
    const take = (value) => { if (value !== null && value !== undefined) { if (value < low) low = value; if (value > high) high = value; } };
    if (this.stacked) for (let at = 0; at < x.length; at += 1) take(lines.reduce((sum, line) => sum + (line.mean[at] ?? 0), 0));
    else for (const line of lines) for (const values of [line.mean, line.low, line.high]) if (values) for (const value of values) take(value);
    const [first, last] = this.range();
    for (const [at, value] of points) if (at >= first && at <= last) take(value);
    for (const each of levels) take(each.value);
    if (low > high) return [0, 1];
    if (this.stacked) return [0, high * 1.03 || 1];
    const room = (high - low) * 0.06 || Math.abs(high) * 0.06 || 1;
    return [this.zero ? 0 : low - room, high + room];
  }

  // The curves are painted once, aside; only what lies over them is drawn anew when the crosshair moves.
  draw() {
    if (!this.width) return;
    const scale = devicePixelRatio || 1, size = [Math.round(this.width * scale), Math.round(this.height * scale)];
    if (this.canvas.width !== size[0] || this.canvas.height !== size[1]) { [this.canvas.width, this.canvas.height] = size; this.stale = true; }
    if (this.stale) this.paint(scale, size);
    const pen = this.canvas.getContext("2d");
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, ...size);
    pen.drawImage(this.base, 0, 0);
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    if (this.data.x.length) this.over(pen);
    this.read();
  }

  paint(scale, size) {
    this.base ??= document.createElement("canvas");
    [this.base.width, this.base.height] = size;
    this.stale = false;
    const { width, height } = this, pen = this.base.getContext("2d"), [first, last] = this.range(), [low, high] = this.span();
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.font = "12px system-ui, sans-serif";
    const px = (value) => LEFT + (value - first) / (last - first || 1) * (width - LEFT - RIGHT);
    const py = (value) => height - BOTTOM - (value - low) / (high - low || 1) * (height - BOTTOM - TOP);
    this.px = px;
    this.axes(pen, { box: this, height, first, last, low, high, px, py });
    if (!this.data.x.length) { pen.fillStyle = css("--faint"); pen.fillText("nothing yet", LEFT + 8, height / 2); return; }
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, width - LEFT - RIGHT + 1, height - BOTTOM + 1);
    pen.clip();
    this.marks(pen, { height, px });
    if (this.stacked) this.areas(pen, { px, py }); else this.lines(pen, { px, py });
    this.extras(pen, { px, py });
    pen.restore();
  }

  axes(pen, { box, height, first, last, low, high, px, py }) {
    pen.strokeStyle = css("--grid");
    pen.fillStyle = css("--faint");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const value of ticks(low, high, Math.max(2, height / 42))) {
      pen.beginPath(); pen.moveTo(LEFT, Math.round(py(value)) + .5); pen.lineTo(box.width - RIGHT, Math.round(py(value)) + .5); pen.stroke();
      pen.fillText(this.form(value), LEFT - 6, py(value));
    }
    pen.textBaseline = "alphabetic";
    const [a, b] = [this.group.label(first), this.group.label(last)];
    pen.textAlign = "left"; pen.fillText(a, LEFT, height - 6);
    pen.textAlign = "right"; pen.fillText(b, box.width - RIGHT, height - 6);
    if (box.width > 420) { pen.textAlign = "center"; pen.fillText(this.group.label((first + last) / 2), (LEFT + box.width - RIGHT) / 2, height - 6); }
    pen.textAlign = "left";
  }

  marks(pen, { height, px }) {
    const [first, last] = this.range();
    for (const mark of this.group.marks) {
      if (mark.x < first || mark.x > last) continue;
      pen.strokeStyle = css(mark.colour);
      pen.setLineDash(mark.dash ?? []);
      pen.globalAlpha = .55;
      pen.beginPath(); pen.moveTo(px(mark.x), TOP); pen.lineTo(px(mark.x), height - BOTTOM); pen.stroke();
    }
    pen.setLineDash([]);
    pen.globalAlpha = 1;
  }

  lines(pen, { px, py }) {
    const { x, lines } = this.data, xs = x.map(px);
    for (const line of lines) {
      if (line.low && line.high && line.low.length) {
        pen.fillStyle = line.colour;
        pen.globalAlpha = .2;
        pen.beginPath();
        for (let at = 0; at < xs.length; at += 1) if (line.high[at] !== null) pen.lineTo(xs[at], py(line.high[at]));
        for (let at = xs.length - 1; at >= 0; at -= 1) if (line.low[at] !== null) pen.lineTo(xs[at], py(line.low[at]));
        pen.fill();
        pen.globalAlpha = 1;
      }
      pen.strokeStyle = line.colour;
      pen.lineWidth = 1.6;
      pen.lineJoin = "round";
      pen.beginPath();
      let on = false, dots = 0;
      for (let at = 0; at < xs.length; at += 1) {
        const value = line.mean[at];
        if (value === null || value === undefined) { on = false; continue; }
        if (on) pen.lineTo(xs[at], py(value)); else pen.moveTo(xs[at], py(value));
        on = true; dots += 1;
      }
      pen.stroke();
      if (dots === 1) { const at = line.mean.findIndex((value) => value !== null && value !== undefined); pen.fillStyle = line.colour; pen.fillRect(xs[at] - 2, py(line.mean[at]) - 2, 4, 4); }
    }
  }

  areas(pen, { px, py }) {
    const { x, lines } = this.data, xs = x.map(px), below = new Float64Array(xs.length);
    for (const line of lines) {
      pen.fillStyle = line.colour;
      pen.beginPath();
      for (let at = 0; at < xs.length; at += 1) pen.lineTo(xs[at], py(below[at] + (line.mean[at] ?? 0)));
      for (let at = xs.length - 1; at >= 0; at -= 1) pen.lineTo(xs[at], py(below[at]));
      pen.fill();
      for (let at = 0; at < xs.length; at += 1) below[at] += line.mean[at] ?? 0;
    }
  }

  extras(pen, { px, py }) {
    for (const each of this.data.levels) {
      pen.strokeStyle = each.colour;
      pen.setLineDash([6, 4]);
      pen.beginPath(); pen.moveTo(LEFT, py(each.value)); pen.lineTo(this.width, py(each.value)); pen.stroke();
      pen.setLineDash([]);
    }
    pen.fillStyle = css("--c1");
    for (const [at, value] of this.data.points) if (value !== null) { pen.beginPath(); pen.arc(px(at), py(value), 3.2, 0, 7); pen.fill(); }
  }

  over(pen) {
    const { height } = this;
    if (this.drag) { pen.fillStyle = css("--band"); pen.fillRect(Math.min(...this.drag), TOP, Math.abs(this.drag[1] - this.drag[0]), height - TOP - BOTTOM); }
    if (this.group.cursor === null) return;
    const at = Math.round(this.px(this.data.x[this.nearest(this.group.cursor)])) + .5;
    pen.strokeStyle = css("--faint");
    pen.lineWidth = 1;
    pen.beginPath(); pen.moveTo(at, TOP); pen.lineTo(at, height - BOTTOM); pen.stroke();
  }

  read() {
    if (!this.data.x.length) { this.readout.textContent = ""; return; }
    const { x, lines, points } = this.data, { cursor } = this.group, place = cursor === null ? x.length - 1 : this.nearest(cursor);
    const shown = lines.length <= 3 ? lines : [...lines].sort((one, other) => (other.mean[place] ?? 0) - (one.mean[place] ?? 0)).slice(0, 3);
    const words = shown.map((line) => (lines.length > 1 ? `${line.name} ` : "") + this.form(line.mean[place]));
    if (lines.length > shown.length) words.push("…");
    const point = points.filter(([at]) => at <= x[place]).at(-1);
    if (point) words.push(`evaluation ${this.form(point[1])}`);
    this.readout.textContent = (cursor === null ? "" : `${this.group.label(x[place])}: `) + words.join(", ");
  }
}
