// A chart over steps: uPlot draws the lines, this file the plan's band, the marks of incidents and the tip.

import { el, show, svg } from "/shared/dom.js";
import { short, ticks, whole } from "./format.js";

const MARK_REACH = 6; // pixels
const RETAIN = 1; // uPlot.join: a null of the server is a gap; a step that only other lines have is none
const COLORS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];

export const colorOf = (index) => css(COLORS[index % COLORS.length]);

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export class Chart {
  #plot = null;
  #data = null;
  #log = false;
  #box = el("div", { class: "plot", tabindex: "0", role: "img" });
  #tip = el("div", { class: "tip", hidden: true });
  #last = el("span", { class: "last" });
  #legend = el("ul", { class: "legend" });
  #logButton;
  #tall;
  #view;
  #asked = 0; // answers that were asked for
  #missed = null; // what came while an answer is open: [run, feeds, version]
  #observer = new ResizeObserver(() => this.#resize());
  element;

  /** view: {runs: names by number, zoom(first, last), reset()}. tall: the large chart of a screen. */
  constructor(key, kind, view, tall) {
    this.key = key;
    this.#view = view;
    this.#tall = tall;
    this.#logButton = el("button", {
      type: "button", text: "log", "aria-pressed": "false", title: "logarithmic axis", hidden: true,
      onclick: () => { this.#log = !this.#log; this.#logButton.setAttribute("aria-pressed", String(this.#log)); this.#build(); },
    });
    const head = el("h2", {}, kind.title, kind.unit ? [" ", el("small", { text: kind.unit })] : null);
    this.element = el("figure", { "data-wide": tall || key === "uses", id: `chart-${key}` }, el("figcaption", {}, head, this.#logButton, this.#last), this.#box, this.#legend);
    this.#box.append(this.#tip);
    this.#box.addEventListener("keydown", (event) => this.#key(event));
    this.#box.addEventListener("blur", () => this.#hideTip());
    this.#box.addEventListener("mouseleave", () => this.#hideTip());
    this.#box.addEventListener("dblclick", () => view.reset());
    this.#observer.observe(this.#box);
  }

  /** The width in pixels for which the server thins. */
  get pixels() {
    const width = this.#box.clientWidth || this.element.parentElement?.clientWidth || 800; // it may be hidden
    return Math.max(Math.round(width * Math.min(devicePixelRatio, 2)), 100);
  }

  /** End the chart: it is shown no more. */
  destroy() {
    this.#observer.disconnect();
    this.#plot?.destroy();
    this.#plot = null;
  }

  /** The number of points that are drawn. */
  get points() {
    return this.#data ? this.#data.lines.reduce((sum, line) => sum + line.x.length, 0) : 0;
  }

  /** Begin to ask for an answer: what comes until it is there is kept for it. Return its number. */
  ask() {
    this.#missed = [];
    return ++this.#asked;
  }

  /** End to wait for answer `number`, which does not come. */
  giveUp(number) {
    if (number === this.#asked) this.#missed = null;
  }

  /** Show answer `number` of /api/chart, unless a later one was asked for, and then add what came after the server made
   *  it. Return what feed() does. */
  update(data, number) {
    const grown = { added: false, stale: false };
    if (number !== this.#asked) return grown;
    const missed = this.#missed ?? [];
    this.#missed = null;
    this.#show(data);
    for (const [run, feeds, version] of missed) {
      if (version <= (data.versions[run] ?? Infinity)) continue;
      const { added, stale } = this.feed(run, feeds, version);
      grown.added ||= added;
      grown.stale ||= stale;
    }
    return grown;
  }

  #show(data) {
    const same = this.#data && shapeOf(this.#data) === shapeOf(data);
    this.#data = data;
    this.element.hidden = !data.lines.length;
    this.#logButton.hidden = !data.log;
    if (same && this.#plot) this.#redraw();
    else this.#build();
    this.#showLegend();
  }

  /** Add new values of run `run`, which are those of its version `version`. feeds: by series, lists by column with their
   *  steps as `step`. Return whether any was added, and whether a line without a feed waits for the server. */
  feed(run, feeds, version) {
    this.#missed?.push([run, feeds, version]);
    if (!this.#data) return { added: false, stale: false };
    let added = false, stale = false;
    for (const line of this.#data.lines) {
      if (line.run !== run || line.style === "void" || line.style === "dots") continue;
      const rows = line.feed && feeds[line.feed[0]];
      if (!line.feed) { stale ||= "steps" in feeds || "lines" in feeds; continue; }
      if (!rows) continue;
      const [, column, scale] = line.feed;
      rows.step.forEach((step, i) => {
        if (step <= line.x[line.x.length - 1]) return;
        const value = rows[column][i];
        line.x.push(step);
        line.y.push(value === null ? null : value * scale);
        added = true;
      });
    }
    if (added) { this.#redraw(); this.#showLegend(); }
    return { added, stale };
  }

  /** Draw anew in other colors. */
  recolor() {
    if (this.#data) { this.#build(); this.#showLegend(); }
  }

  #joined() {
    const { lines, stacked } = this.#data;
    if (!lines.length) return [[]];
    const tables = lines.map((line) => [line.x, this.#log ? line.y.map((v) => (v > 0 ? v : null)) : line.y]);
    const joined = uPlot.join(tables, tables.map(() => [0, RETAIN]));
    if (stacked) for (let i = 2; i < joined.length; i++) joined[i] = joined[i].map((v, k) => (v ?? 0) + (joined[i - 1][k] ?? 0));
    return stacked ? [joined[0], ...joined.slice(1).reverse()] : joined;
  }

  #redraw() {
    this.#plot?.setData(this.#joined());
  }

  #resize() {
    const width = this.#box.clientWidth;
    if (this.#plot && width && width !== this.#plot.width) this.#plot.setSize({ width, height: this.#height });
    else if (!this.#plot && width && this.#data?.lines.length) this.#build();
  }

  get #height() {
    return this.#tall ? (this.#box.clientWidth < 600 ? 250 : 320) : 190;
  }

  /** Return how a line is drawn: {stroke, width, dash, fill, points}. */
  #look(line, index) {
    const several = this.#view.runs.length > 1;
    const own = several && !this.#data.stacked ? line.run : this.#data.lines.filter((l) => l.style === "main").indexOf(line);
    const color = colorOf(Math.max(own, 0));
    const looks = {
      main: { stroke: color, width: 1.8 },
      raw: { stroke: several ? color : css("--raw"), width: 1, alpha: several ? 0.35 : 1 },
      void: { stroke: css("--void"), width: 1.2 },
      expected: { stroke: several ? color : css("--plan"), width: 1.4, dash: [6, 4] },
      dots: { stroke: several ? color : css("--c1"), width: 0, dots: true },
    };
    return this.#data.stacked ? { stroke: css("--page"), width: 1, fill: colorOf(index) } : looks[line.style];
  }

  #build() {
    this.#plot?.destroy();
    this.#plot = null;
    const width = this.#box.clientWidth;
    if (!this.#data?.lines.length || !width) return;
    const data = this.#data;
    const series = data.lines.map((line, index) => {
      const look = this.#look(line, index);
      return {
        stroke: look.stroke, width: look.width, dash: look.dash, fill: look.fill, alpha: look.alpha ?? 1, spanGaps: false,
        points: look.dots ? { show: true, size: 8, fill: look.stroke, stroke: css("--page"), width: 1.5 } : { show: line.x.length === 1, size: 6, fill: look.stroke },
        paths: look.dots ? () => null : undefined,
      };
    });
    if (data.stacked) series.reverse();
    const soft = css("--soft"), grid = { stroke: css("--grid"), width: 1 }, font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif";
    const axis = { stroke: soft, grid, ticks: { show: false }, font };
    this.#plot = new uPlot(
      {
        width, height: this.#height,
        padding: [14, 18, 0, 0],
        legend: { show: false },
        cursor: {
          sync: { key: "steps", setSeries: false }, drag: { x: true, y: false, setScale: false },
          points: { size: 7, width: 1.5 }, bind: { dblclick: () => () => null },
        },
        scales: {
          x: { time: false, range: (u, low, high) => (high > low ? [low, high] : [low - 1, low + 1]) },
          y: this.#log ? { distr: 3 } : { range: (u, low, high) => this.#range(low, high) },
        },
        axes: [
          { ...axis, values: (u, values) => values.map((v) => (Number.isInteger(v) ? whole(v) : "")), space: 70, size: 28 },
          { ...axis, values: (u, values) => ticks(values), size: 58, space: 34 },
        ],
        series: [{}, ...series],
        hooks: {
          drawClear: [(u) => this.#drawBands(u)],
          draw: [(u) => this.#drawMarks(u)],
          setCursor: [(u) => this.#moveTip(u)],
          setSelect: [(u) => this.#select(u)],
        },
      },
      this.#joined(), this.#box,
    );
    this.#describe();
  }

  #range(low, high) {
    if (low === null || high === null || !Number.isFinite(low)) return [0, 1];
    for (const band of this.#data.bands) { // a band far away does not flatten the line
      if (band.high <= high * 2.5) high = Math.max(high, band.high);
      if (band.low >= low / 2.5) low = Math.min(low, band.low);
    }
    if (this.#data.from_zero) return [Math.min(low, 0), high > 0 ? high * 1.08 : 1];
    const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 0.5;
    return [low - room, high + room];
  }

  #drawBands(u) {
    const { ctx, bbox } = u;
    for (const band of this.#data.bands) {
      const clip = (value) => Math.min(Math.max(u.valToPos(value, "y", true), bbox.top), bbox.top + bbox.height);
      const top = clip(band.high), bottom = clip(band.low);
      const away = bottom === top && (top === bbox.top || top === bbox.top + bbox.height);
      if (away) continue;
      ctx.save();
      if (bottom - top > 2) {
        ctx.fillStyle = css("--plan-area");
        ctx.fillRect(bbox.left, top, bbox.width, bottom - top);
      }
      ctx.strokeStyle = css("--plan");
      ctx.setLineDash([6, 4]);
      ctx.lineWidth = devicePixelRatio;
      ctx.beginPath();
      const middle = bottom - top > 2 ? [top, bottom] : [top];
      for (const y of middle) { ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); }
      ctx.stroke();
      ctx.restore();
    }
  }

  #drawMarks(u) {
    const { ctx, bbox } = u;
    const colors = { bad: css("--bad"), warn: css("--warn-mark"), info: css("--info-mark") };
    ctx.save();
    for (const mark of this.#data.marks) {
      const x = Math.round(u.valToPos(mark.step, "x", true)) + 0.5;
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      const size = 5 * devicePixelRatio;
      ctx.strokeStyle = ctx.fillStyle = colors[mark.severity];
      if (mark.severity !== "info") {
        ctx.globalAlpha = 0.55;
        ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
        ctx.lineWidth = devicePixelRatio;
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        ctx.globalAlpha = 1;
      }
      ctx.beginPath();
      ctx.moveTo(x - size, bbox.top - size * 1.6);
      ctx.lineTo(x + size, bbox.top - size * 1.6);
      ctx.lineTo(x, bbox.top);
      ctx.fill();
    }
    ctx.restore();
  }

  #select(u) {
    const { left, width } = u.select;
    if (width < 4) return;
    const first = Math.max(Math.floor(u.posToVal(left, "x")), 0), last = Math.ceil(u.posToVal(left + width, "x"));
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.#view.zoom(first, last);
  }

  #hideTip() {
    this.#tip.hidden = true;
  }

  #moveTip(u) {
    const { idx, left } = u.cursor;
    const here = this.#box.matches(":hover") || document.activeElement === this.#box;
    if (!here || idx === null || idx === undefined || left < 0) return this.#hideTip();
    const step = u.data[0][idx];
    const lines = this.#data.stacked ? this.#data.lines.toReversed() : this.#data.lines;
    const rows = lines.flatMap((line) => {
      const value = valueAt(line, step);
      if (value === undefined) return [];
      return [el("dt", {}, this.#keyOf(line), this.#nameOf(line)), el("dd", { text: value === null ? "not finite" : short(value, 5) })];
    });
    const near = this.#data.marks.filter((mark) => Math.abs(u.valToPos(mark.step, "x") - left) <= MARK_REACH);
    const texts = near.flatMap((mark) => mark.text.split("\n").map((text) => el("p", { class: mark.severity, text })));
    show(this.#tip, el("b", { text: `step ${whole(step)}` }), el("dl", {}, rows), texts.slice(0, 8));
    this.#tip.hidden = false;
    const box = this.#box.clientWidth, own = this.#tip.offsetWidth, x = left + u.over.offsetLeft;
    this.#tip.style.left = `${Math.max(Math.min(x + 14 + own > box ? x - own - 14 : x + 14, box - own), 0)}px`;
    this.#tip.style.top = `${u.over.offsetTop + 8}px`;
    return undefined;
  }

  #key(event) {
    const u = this.#plot;
    if (!u) return;
    const steps = u.data[0], at = u.cursor.idx ?? steps.length - 1;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -Math.ceil(steps.length / 20), PageDown: Math.ceil(steps.length / 20), Home: -Infinity, End: Infinity };
    if (event.key in moves) {
      const next = Math.min(Math.max(at + moves[event.key], 0), steps.length - 1);
      u.setCursor({ left: u.valToPos(steps[next], "x"), top: 10 });
    } else if (event.key === "+" || event.key === "-") {
      const middle = steps[at], half = ((steps[steps.length - 1] - steps[0]) / 2) * (event.key === "+" ? 0.5 : 2);
      this.#view.zoom(Math.max(Math.floor(middle - half), 0), Math.ceil(middle + half));
    } else if (event.key === "Escape") this.#view.reset();
    else return;
    event.preventDefault();
  }

  #nameOf(line) {
    return this.#view.runs.length > 1 ? `${this.#view.runs[line.run]}: ${line.name}` : line.name;
  }

  /** Return the sample of a line in a legend. neutral: in grey, for what lines of all runs have in common. */
  #keyOf(line, neutral = false) {
    const look = this.#look(line, this.#data.lines.indexOf(line));
    if (neutral) look.stroke = css("--soft");
    const key = svg("svg", { viewBox: "0 0 18 10", width: 18, height: 10, "aria-hidden": "true" });
    if (look.fill) key.append(svg("rect", { width: 12, height: 10, x: 3, fill: look.fill, rx: 2 }));
    else if (look.dots) key.append(svg("circle", { cx: 9, cy: 5, r: 4, fill: look.stroke }));
    else key.append(svg("line", { x1: 0, x2: 18, y1: 5, y2: 5, stroke: look.stroke, "stroke-width": line.style === "main" ? 3 : 2, "stroke-dasharray": look.dash ? "5 3" : null, opacity: look.alpha }));
    return key;
  }

  #showLegend() {
    const seen = new Set(), entries = [];
    const several = this.#view.runs.length > 1;
    for (const line of this.#data.lines) {
      const isRun = several && line.style === "main", name = isRun ? this.#view.runs[line.run] : line.name;
      const key = isRun ? line.run : name; // two runs may have one name
      if (seen.has(key)) continue;
      seen.add(key);
      entries.push(el("li", {}, this.#keyOf(line, several && line.style !== "main"), name));
    }
    const bands = new Map(this.#data.bands.map((band) => [band.name, band]));
    for (const [name, band] of bands) {
      const key = svg("svg", { viewBox: "0 0 18 10", width: 18, height: 10, "aria-hidden": "true" }, svg("line", { x1: 0, x2: 18, y1: 5, y2: 5, stroke: css("--plan"), "stroke-width": 2, "stroke-dasharray": "5 3" }));
      const range = band.low === band.high ? short(band.low) : `${short(band.low, 3)} to ${short(band.high, 3)}`;
      entries.push(el("li", {}, key, this.#data.bands.length > 1 ? name : `${name}: ${range}`));
    }
    const shown = entries.length > 1 || several ? entries : [];
    show(this.#legend, this.#data.note ? [...shown, el("li", { text: this.#data.note })] : shown);
    const newest = this.#data.lines.find((line) => line.style === "raw") ?? this.#data.lines.find((line) => line.style === "main");
    this.#last.textContent = newest && this.#view.runs.length === 1 && !this.#data.stacked ? short(newest.y[newest.y.length - 1]) : "";
    this.#describe();
  }

  #describe() {
    const { title, unit, first, last, lines, marks } = this.#data;
    const main = lines.find((line) => line.style === "main") ?? lines[0];
    const ends = main ? `, from ${short(main.y[0])} to ${short(main.y[main.y.length - 1])}` : "";
    const many = marks.length ? `, ${marks.length} marked place${marks.length === 1 ? "" : "s"}` : "";
    this.#box.setAttribute("aria-label", `${title}${unit ? ` in ${unit}` : ""}, steps ${whole(first)} to ${whole(last)}${ends}${many}. Arrow keys move the cursor, plus and minus zoom, Escape shows all.`);
  }
}

const shapeOf = (data) => JSON.stringify([data.stacked, data.bands.length, data.lines.map((line) => [line.name, line.style, line.run, line.x.length === 1])]);

/** Return the value of a line at a step, or undefined: that of its nearest point at or before it, if it has later ones
 *  too. */
function valueAt(line, step) {
  const { x, y } = line;
  if (!x.length || step < x[0] || step > x[x.length - 1]) return undefined;
  let low = 0, high = x.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (x[middle] <= step) low = middle;
    else high = middle - 1;
  }
  if ((line.style === "dots" || line.style === "void") && x[low] !== step) return undefined;
  return y[low];
}
