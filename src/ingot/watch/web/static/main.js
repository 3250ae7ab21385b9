// The page: asks for the runs, draws the charts and chapters of one question, and follows the server's events.

import { el, find, show } from "/shared/dom.js";
import { ask, refusalOf } from "./api.js";
import { draw } from "./blocks.js";
import { Chart, colorOf } from "./charts.js";
import { ago, short, whole } from "./format.js";

const REFRESH_MS = 5000; // between two requests for a chart whose smoothed line grew
const CHAPTERS_MS = 3000;
const AGAIN_MS = 10000; // after which a page that was refused asks again
const SPANS = [["all", "all steps", 1], ["half", "last half", 0.5], ["tenth", "last tenth", 0.1]];
const TALL = new Set(["loss", "speed", "memory", "cost"]); // the first chart of each question

let runs = [], kinds = {}, questions = {}, keys = [], question = "", focus = 0;
let span = "all", range = null; // range: {first, last} while a part of the steps is shown
const charts = new Map(), asked = new Map(), timers = new Map(), chapterTexts = new Map();
let events = null, again = null, isTroubled = false, missedHeads = null; // missedHeads: what came while the runs are asked for, by number
let chaptersVersion = null, chaptersAsked = 0, chaptersTimer = null;

const view = {
  get runs() { return runs.map((run) => run.name); },
  zoom(first, last) { if (last > first) setRange({ first, last }, ""); },
  reset() { setRange(null, "all"); },
};

async function start() {
  show(find("spans"), SPANS.map(([value, text]) => el("button", { type: "button", text, "data-span": value, onclick: () => pickSpan(value) })));
  addEventListener("hashchange", () => pickQuestion(location.hash.slice(1)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.recolor()));
  setInterval(showAges, 1000);
  document.addEventListener("visibilitychange", () => (document.hidden ? unfollow("not followed while hidden") : follow()));
  await everything();
  follow();
}

/** Ask for all that is shown. */
async function everything() {
  const missed = (missedHeads = new Map());
  try {
    const answer = await ask("/api/runs");
    ({ runs, kinds, questions, charts: keys } = answer);
    for (const [number, run] of missed) if (run.version > runs[number].version) runs[number] = run;
    focus = Math.min(focus, runs.length - 1);
    showQuestions();
    showHead();
    pickQuestion(location.hash.slice(1), true);
    show(find("trouble"));
    isTroubled = false;
  } catch (error) {
    refuse(error);
  }
  if (missedHeads === missed) missedHeads = null;
}

/** Listen to the server, as long as a person can see the page: browsers open few connections to one address. */
function follow() {
  unfollow("connecting");
  if (document.hidden) return;
  const own = (events = new EventSource("/api/events"));
  own.addEventListener("ready", (event) => {
    connection("on", "live");
    const versions = JSON.parse(event.data);
    if (isTroubled || versions.length !== runs.length || versions.some((version, number) => version !== runs[number].version)) everything();
  });
  own.addEventListener("trouble", (event) => refuse(JSON.parse(event.data)));
  own.onmessage = (event) => take(JSON.parse(event.data));
  own.onerror = async () => {
    connection("off", "no connection; trying again");
    if (own.readyState !== EventSource.CLOSED) return; // the browser tries again
    again = setTimeout(follow, AGAIN_MS);
    const refusal = await refusalOf("/api/events");
    if (refusal && events === own) refuse(refusal);
  };
}

/** Listen no more. text: why, beside the state of the connection. */
function unfollow(text) {
  clearTimeout(again);
  events?.close();
  events = null;
  connection("wait", text);
}

function connection(state, text) {
  find("connection").dataset.state = state;
  find("connection").lastElementChild.textContent = text;
}

/** Take in what is new. */
function take(news) {
  const before = performance.now();
  const changedKeys = news.charts.join() !== keys.join();
  keys = news.charts;
  for (const own of news.runs) {
    const was = runs[own.run];
    runs[own.run] = { ...own.head, version: own.version, reading: own.reading };
    const wait = own.reading ? REFRESH_MS : was?.reading ? 0 : 1000; // charts of a log that is read are asked for less often
    missedHeads?.set(own.run, runs[own.run]);
    if (was && was.state !== own.head.state) say(`${own.head.name} is ${own.head.state}`);
    for (const [key, chart] of charts) {
      if (own.again) refetch(key, wait);
      else if (range === null || span !== "") {
        grown(key, chart, chart.feed(own.run, own.new, own.version));
      }
    }
  }
  if (changedKeys) showCharts();
  showHead();
  if (news.runs.some((own) => own.run === focus)) chaptersSoon();
  document.documentElement.dataset.updateMs = (performance.now() - before).toFixed(1);
}

/** Ask for a chart again soon, if what it got calls for it. */
function grown(key, chart, { added, stale }) {
  if (stale || (added && (range || chart.points > 6 * chart.pixels))) refetch(key, REFRESH_MS);
}

// -- what is shown --

function showQuestions() {
  const link = ([value, text]) => el("a", { href: `#${value}`, text });
  show(find("questions"), Object.entries(questions).map(link));
}

function pickQuestion(wanted, anew = false) {
  const next = wanted in questions ? wanted : question || Object.keys(questions)[0];
  if (next === question && !anew) return;
  question = next;
  for (const link of find("questions").children) {
    if (link.getAttribute("href") === `#${question}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  chapterTexts.clear();
  show(find("chapters"));
  showCharts(true);
  chaptersVersion = null;
  askChapters();
}

/** Make the charts of the question, and ask for their numbers. anew: also for those that are there. */
function showCharts(anew = false) {
  const wanted = keys.filter((key) => kindOf(key).question === question);
  for (const [key, chart] of [...charts]) {
    if (wanted.includes(key) && !anew) continue;
    chart.destroy();
    charts.delete(key);
  }
  for (const key of wanted) if (!charts.has(key)) charts.set(key, new Chart(key, kindOf(key), view, TALL.has(key)));
  const ordered = wanted.map((key) => charts.get(key));
  fillRows(ordered.map((chart) => chart.element));
  const empty = el("p", { class: "empty", text: "No numbers yet: they come with the first log line." });
  show(find("charts"), ordered.length ? ordered.map((chart) => chart.element) : question === "cost" ? null : empty);
  for (const key of wanted) refetch(key, 0);
  showSpans();
}

/** Make the last chart of a row wide if it has no neighbor. */
function fillRows(figures) {
  let alone = null;
  for (const figure of [...figures, null]) {
    const wide = figure === null || figure.dataset.wide !== undefined;
    figure?.classList.toggle("wide", wide);
    if (wide && alone) alone.classList.add("wide");
    alone = wide || alone ? null : figure;
  }
}

const kindOf = (key) => kinds[key] ?? { title: key.slice(key.indexOf(":") + 1), unit: "", question: "learning" };

/** Ask for a chart, at most once in `wait` milliseconds. */
function refetch(key, wait) {
  if (timers.has(key)) {
    if (wait) return;
    clearTimeout(timers.get(key));
  }
  const due = Math.max((asked.get(key) ?? 0) + wait - performance.now(), 0);
  timers.set(key, setTimeout(() => fetchChart(key), due));
}

async function fetchChart(key) {
  timers.delete(key);
  const chart = charts.get(key);
  if (!chart) return;
  asked.set(key, performance.now());
  const numbers = ["uses", "traffic"].includes(key) ? [focus] : runs.map((_, number) => number);
  const query = new URLSearchParams({ key, runs: numbers.join(","), pixels: chart.pixels });
  const shown = shownRange();
  if (shown) { query.set("first", shown.first); if (span === "") query.set("last", shown.last); }
  const number = chart.ask();
  try {
    const answer = await ask(`/api/chart?${query}`);
    if (charts.get(key) === chart) grown(key, chart, chart.update(answer, number));
    document.documentElement.dataset.painted ??= performance.now().toFixed(0);
  } catch (error) {
    chart.giveUp(number);
    refuse(error);
  }
}

/** Return the steps that the charts show; null for all. */
function shownRange() {
  if (span === "") return range;
  const share = SPANS.find(([value]) => value === span)[2];
  if (share === 1) return null;
  const last = Math.max(...runs.map((run) => run.step));
  return { first: Math.max(Math.floor(last * (1 - share)), 1), last };
}

function pickSpan(value) {
  setRange(value === "all" ? null : { first: 0, last: 0 }, value);
}

function setRange(next, name) {
  range = next;
  span = name;
  showSpans();
  for (const key of charts.keys()) refetch(key, 0);
}

function showSpans() {
  const box = find("spans");
  for (const button of box.children) button.setAttribute("aria-pressed", String(button.dataset.span === span));
  box.querySelector("[data-own]")?.remove();
  if (span === "" && range) box.append(el("button", { type: "button", "data-own": true, "aria-pressed": "true", text: `${whole(range.first)}–${whole(range.last)} ×`, onclick: view.reset, "aria-label": "Show all steps again" }));
}

function showHead() {
  const run = runs[focus];
  if (!run) return;
  document.title = `${run.name} · step ${whole(run.step)} · ingot watch`;
  find("title").textContent = runs.length > 1 ? `${runs.length} runs` : run.name;
  showRuns();
  const total = run.steps ? ` of ${whole(run.steps)}` : "";
  const parts = [stateOf(run), ` · step ${whole(run.step)}${total}`];
  if (runs.length > 1) parts.unshift(el("b", { text: `${run.name} · ` }));
  if (run.note) parts.push(" · ", el("span", { class: "late", text: run.note }));
  parts.push(" · ", el("span", { id: "age" }));
  show(find("subtitle"), parts);
  find("track").hidden = !run.steps;
  find("track").style.setProperty("--share", run.steps ? Math.min(run.step / run.steps, 1) : 0);
  const judged = { true: "good", false: "bad" };
  const tile = (f) => el("div", { class: "tile" }, el("dt", { text: f.label }), el("dd", { class: judged[f.good] ?? null, text: f.value }), f.note ? el("dd", { class: "note", text: f.note }) : null);
  show(find("tiles"), run.figures.map(tile));
  find("tiles").hidden = !run.figures.length;
  show(find("strip"), el("b", { text: run.name }), el("span", { text: `step ${whole(run.step)}` }), run.figures.slice(0, 3).map((f) => el("span", { text: `${f.label} ${f.value}` })));
  showAges();
}

function stateOf(run) {
  return el("span", { class: `state ${run.state.replace(" ", "-")}` }, el("i", { "aria-hidden": "true" }), run.state);
}

function showAges() {
  const run = runs[focus], age = find("age");
  if (age && run) age.textContent = run.last_event ? `last event ${ago(run.last_event)}` : "no event yet";
}

/** Show the table of several runs; a row selects the run of the figures and chapters below. */
function showRuns() {
  const box = find("runs");
  box.hidden = runs.length < 2;
  if (runs.length < 2) return;
  const labels = [...new Set(runs.flatMap((run) => run.figures.map((f) => f.label)))].slice(0, 5);
  const row = (run, number) => {
    const swatch = el("i", { class: "swatch", "aria-hidden": "true" });
    swatch.style.setProperty("--swatch", colorOf(number));
    const pick = el("button", { type: "button", text: run.name, "aria-label": `Show the figures of ${run.name}` });
    const figures = labels.map((label) => el("td", { class: "r", text: run.figures.find((f) => f.label === label)?.value ?? "" }));
    const step = run.steps ? `${whole(run.step)} / ${short(run.steps)}` : whole(run.step);
    return el("tr", { "aria-selected": String(number === focus), onclick: () => pickRun(number) }, el("th", { scope: "row" }, swatch, pick), el("td", {}, stateOf(run)), el("td", { class: "r", text: step }), figures);
  };
  const text = JSON.stringify([focus, runs.map((run) => [run.name, run.state, run.step, run.figures])]);
  if (box.dataset.shown === text) return;
  const active = box.contains(document.activeElement) ? [...box.querySelectorAll("button")].indexOf(document.activeElement) : -1;
  const head = ["run", "state", "step", ...labels].map((label, i) => el("th", { scope: "col", class: i > 1 ? "r" : null, text: label }));
  show(box, el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, runs.map(row)))));
  box.dataset.shown = text;
  if (active >= 0) box.querySelectorAll("button")[active]?.focus();
}

function pickRun(number) {
  focus = number;
  showHead();
  chaptersVersion = null;
  askChapters();
  for (const key of ["uses", "traffic"]) if (charts.has(key)) refetch(key, 0);
}

// -- chapters --

function chaptersSoon() {
  if (chaptersTimer) return;
  chaptersTimer = setTimeout(askChapters, Math.max(chaptersAsked + CHAPTERS_MS - performance.now(), 0));
}

async function askChapters() {
  clearTimeout(chaptersTimer);
  chaptersTimer = null;
  chaptersAsked = performance.now();
  const run = runs[focus];
  if (!run || chaptersVersion === `${focus}:${run.version}`) return;
  chaptersVersion = `${focus}:${run.version}`;
  try {
    showChapters(await ask(`/api/chapters?run=${focus}`));
  } catch (error) {
    refuse(error);
  }
}

/** Draw the chapters of the question; those that have not changed stay as they are, with what is open in them. */
function showChapters(all) {
  const own = all.filter((chapter) => chapter.question === question), box = find("chapters");
  const elements = own.map((chapter) => {
    const text = JSON.stringify(chapter), id = `chapter-${chapter.anchor}`, before = find(id);
    if (before && chapterTexts.get(id) === text) return before;
    chapterTexts.set(id, text);
    const open = new Set([...(before?.querySelectorAll("details[open]") ?? [])].map((details) => details.dataset.key));
    const section = el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title`, text: chapter.title }), chapter.blocks.map(draw));
    for (const details of section.querySelectorAll("details")) details.open = open.has(details.dataset.key);
    return section;
  });
  if (elements.length !== box.children.length || elements.some((element, i) => element !== box.children[i])) show(box, elements);
}

// -- messages --

function refuse(error) {
  isTroubled = true;
  const { found, rule, fix } = error;
  const line = (name, text) => (text ? el("p", {}, el("small", { text: `${name}  ` }), text) : null);
  show(find("trouble"), el("div", { class: "notice bad-edge", role: "alert" }, el("strong", { text: found ?? String(error) }), line("rule", rule), line("fix", fix)));
}

function say(text) {
  find("live").textContent = text;
}

start();
