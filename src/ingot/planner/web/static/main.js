// The page: sends settings to /api and shows the plan. All numbers come from the server.

import { Line } from "./api.js";
import { showCommunication, showMemory, showStep } from "./bars.js";
import { Controls } from "./controls.js";
import { find } from "/shared/dom.js";
import { showComparison, showHead, showNotes, showRefusal, showSearch, showTrouble } from "./panels.js";
import { Settings } from "./state.js";
import { Timeline } from "./timeline.js";

const DEBOUNCE_MS = 60, SPEAK_MS = 600;
const lines = { plan: new Line(), fixes: new Line(), search: new Line(), timeline: new Line(), compare: new Line() };
let settings = Settings.fromLocation();
let controls, timeline, waiting, speaking, wanted = {}, lastMoved = "";

async function start() {
  try {
    const options = await new Line().ask("/api/options");
    controls = new Controls(find("settings"), options, { change, best });
  } catch (error) {
    return showRefusal(error);
  }
  timeline = new Timeline(askTimeline);
  find("pin").addEventListener("click", pin);
  find("copy").addEventListener("click", copy);
  addEventListener("popstate", () => { settings = Settings.fromLocation(); refresh(); });
  return refresh();
}

/** Handle a changed control. Several quick changes become one request. A pending answer is discarded, because it is for
 *  older settings and would undo the change. */
function change(words, moved) {
  lines.plan.drop();
  wanted = { ...wanted, ...words };
  lastMoved = moved;
  clearTimeout(waiting);
  asking(true);
  waiting = setTimeout(refresh, DEBOUNCE_MS);
}

/** Show another plan: a found layout, a fix, or a pinned plan. */
function apply(words) {
  settings = new Settings(words, settings.pinned);
  wanted = {};
  lastMoved = "";
  return refresh(true);
}

async function refresh(byButton = false) {
  const asked = settings.with(wanted), moved = lastMoved;
  clearTimeout(waiting);
  asking(true);
  try {
    const view = await lines.plan.ask(`/api/plan?${asked.query}${moved ? `&moved=${moved}` : ""}`);
    if (!view) return; // a newer request was sent
    wanted = {};
    lastMoved = "";
    settings = new Settings(Object.fromEntries(new URLSearchParams(view.link)), settings.pinned);
    const beside = showPlan(view);
    asking(false);
    if (byButton === true) find("plan").focus({ preventScroll: true });
    await beside;
    if (!document.body.classList.contains("asking")) find("plan").setAttribute("aria-busy", "false");
  } catch (error) {
    asking(false);
    find("plan").setAttribute("aria-busy", "false");
    wanted = {};
    showRefusal(error);
    controls.blame({ key: moved, text: error.fix || error.rule });
    say(`${error.found}. ${error.rule}. ${error.fix}`);
  }
}

/** Dim the shown plan until the answer arrives, because it belongs to older settings. */
function asking(yes) {
  document.body.classList.toggle("asking", yes);
  if (yes) find("plan").setAttribute("aria-busy", "true");
}

function showPlan(view) {
  const { plan } = view;
  history.replaceState(null, "", settings.address);
  controls.update(view);
  showHead(view);
  showTrouble(view, plan ? null : [], apply);
  for (const id of ["memory", "step", "communication", "notes"]) find(`${id}-panel`).hidden = !plan;
  find("timeline-panel").hidden = !plan?.has_timeline;
  document.querySelector(".pair").hidden = !plan;
  const download = find("download");
  download.hidden = !view.trains;
  download.href = `/api/run.toml?${settings.query}`;
  if (plan) {
    showMemory(plan.memory);
    showStep(plan.step);
    showCommunication(plan.communication);
    showNotes(view);
  }
  for (const line of ["fixes", "timeline", "compare"]) lines[line].drop();
  say(view.spoken);
  return Promise.all([plan?.has_timeline && askTimeline(), !plan?.verdict.fits && askFixes(view), askComparison()]);
}

async function askTimeline() {
  const picture = await quietly(lines.timeline.ask(`/api/timeline?${settings.query}&window=${timeline.window}`));
  if (picture) timeline.update(picture);
}

async function askFixes(view) {
  const fixes = await quietly(lines.fixes.ask(`/api/fixes?${settings.query}`));
  if (fixes) showTrouble(view, fixes, apply);
}

async function askComparison() {
  find("pin").textContent = settings.pinned ? "Pin again" : "Pin as A";
  find("compare-panel").hidden = true;
  if (!settings.pinned || settings.pinned === settings.query) return;
  const query = new URLSearchParams({ a: settings.pinned, b: settings.query });
  const found = await quietly(lines.compare.ask(`/api/compare?${query}`));
  if (found) showComparison(found, { swap: () => apply(Object.fromEntries(new URLSearchParams(settings.pinned))), unpin });
}

async function best() {
  showSearch(null, apply);
  say("Searching layouts");
  try {
    const found = await lines.search.ask(`/api/search?${settings.query}&keep=${controls.kept}`);
    if (!found) return;
    showSearch(found, apply);
    if (found.best.length) await apply(found.best[0].words);
  } catch (error) {
    find("search-panel").hidden = true;
    showRefusal(error);
  }
}

function pin() {
  settings.pinned = settings.query;
  history.replaceState(null, "", settings.address);
  askComparison();
  say("Pinned as A. Change something to compare.");
}

function unpin() {
  settings.pinned = "";
  history.replaceState(null, "", settings.address);
  askComparison();
  find("pin").focus();
}

async function copy() {
  const button = find("copy");
  try {
    await navigator.clipboard.writeText(location.href);
    button.textContent = "Copied";
  } catch {
    prompt("The link of this plan", location.href);
  }
  setTimeout(() => (button.textContent = "Copy link"), 1500);
}

/** Ignore errors of the additional panels, because the plan itself shows the problem. */
async function quietly(promise) {
  try {
    return await promise;
  } catch {
    return undefined;
  }
}

/** Announce `text` to screen readers after the settings have stopped changing. */
function say(text) {
  clearTimeout(speaking);
  speaking = setTimeout(() => (find("live").textContent = text), SPEAK_MS);
}

start();
