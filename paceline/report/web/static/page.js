// Asks the server for the runs once a second while the page is visible, and shows them.
import { duration, lines, make, number } from "./charts.js";
import { axisOf, Card, metricText, statePill } from "./run.js";

const find = (selector) => document.querySelector(selector);
const cards = new Map();
const colours = new Map();
let axis = "t";
let chosen = decodeURIComponent(location.hash.slice(1)).split(",").filter((one) => /^[0-9a-f]{12}$/.test(one));
let told = null;
let waiting = 0;
let failures = 0;

async function ask(path, options) {
  const answer = await fetch(path, { credentials: "same-origin", signal: AbortSignal.timeout(10000), ...options });
  if (answer.status === 403) throw new Error("refused");
  return answer;
}

async function look() {
  clearTimeout(waiting);
  if (document.hidden) return;
  try {
    told = await (await ask(`runs?show=${chosen.join(",")}`)).json();
    failures = 0;
    const shown = Object.keys(told.shown);
    if (!chosen.length && shown.length) choose(shown, false);
    say(told.runs.some((one) => one.state === "running") ? "live" : "nothing is running", false);
    show();
  } catch (error) {
    failures += 1;
    say(error.message === "refused" ? "this address is of an earlier `paceline watch`: open the new one that was printed"
      : "no answer: the command that serves this page has ended, or the connection is lost; trying again", true);
    if (!["TypeError", "TimeoutError"].includes(error.name) && error.message !== "refused") console.error(error);
  }
  const quiet = told && !told.runs.some((one) => one.state === "running");
  waiting = setTimeout(look, failures ? Math.min(1000 * 2 ** Math.min(failures - 1, 3), 8000) : quiet ? 3000 : 1000);
}

function say(text, lost) {
  find("#link").textContent = text;
  find("#link").classList.toggle("lost", lost);
}

function choose(keys, again = true) {
  chosen = keys;
  history.replaceState(null, "", `#${keys.join(",")}`);
  if (again) look();
}

function colourOf(key) {
  if (!colours.has(key)) {
    const taken = new Set([...colours].filter(([other]) => chosen.includes(other)).map(([, colour]) => colour));
    colours.set(key, [0, 1, 2, 3, 4, 5].find((one) => !taken.has(one)) ?? colours.size % 6);
  }
  return colours.get(key);
}

function show() {
  const shown = told.runs.filter((one) => told.shown[one.key]);
  find("#empty").hidden = told.runs.length > 0;
  find("#empty").textContent = `There are no runs in ${told.folders.join(", ") || "the chosen folders"} yet. \`paceline train\` makes them; they appear here by themselves.`;
  find("#chooser").hidden = told.runs.length < 2;
  chooser();
  for (const [key, card] of cards) if (!told.shown[key]) { card.element.remove(); cards.delete(key); }
  const alone = shown.length === 1;
  for (const one of shown.filter(({ key }) => !cards.has(key))) { // all of them before any chart is made: they share the width
    cards.set(one.key, new Card(one.key, { stop, readLog, readAbout }));
    find("#cards").append(cards.get(one.key).element);
  }
  for (const one of shown) cards.get(one.key).update(one, told.shown[one.key], axis, colourOf(one.key), alone);
  compare(shown.filter((one) => one.state !== "deleted"));
  document.title = shown.length ? `${shown.map((one) => one.name).join(", ")} · paceline watch` : "paceline watch";
}

function chooser() {
  const head = ["run", "state", "scheme", "workers", "updates", "reached", "samples/s", "time"];
  const spare = new Set(["workers", "samples/s", "time", "scheme"]);
  const side = (name) => [["run", "state", "scheme"].includes(name) ? "l" : "", spare.has(name) ? "spare" : ""].join(" ").trim();
  find("#runs thead").replaceChildren(make("tr", {}, ...head.map((name) => make("th", { class: side(name) }, name))));
  const focused = document.activeElement?.dataset?.run;
  find("#runs tbody").replaceChildren(...told.runs.slice().reverse().map((one) => {
    const on = chosen.includes(one.key);
    const box = make("input", { type: "checkbox", "data-run": one.key, onchange: () => toggle(one.key) });
    box.checked = on;
    const reached = one.metrics.accuracy !== undefined ? metricText("accuracy", one.metrics.accuracy) : one.metrics.loss !== undefined ? `loss ${number(one.metrics.loss, 3)}` : "–";
    const cells = [make("label", {}, box, on ? make("i", { class: `swatch b${colourOf(one.key)}` }) : null, one.name), statePill(one.state), one.scheme || "–", number(one.workers), number(one.updates), reached, number(one.rate, 3), duration(one.seconds)];
    return make("tr", {}, ...cells.map((cell, n) => make("td", { class: side(head[n]) }, cell)));
  }));
  if (focused) find(`[data-run="${focused}"]`)?.focus({ preventScroll: true });
}

function toggle(key) {
  const rest = chosen.filter((one) => one !== key);
  choose(rest.length === chosen.length ? [...chosen, key] : rest.length ? rest : chosen);
}

const panels = new Map();
function compare(shown) {
  find("#comparison").hidden = shown.length < 2;
  if (shown.length < 2) return;
  const holder = find("#comparison .charts");
  const over = shown.map((one) => [one, told.shown[one.key], axisOf(told.shown[one.key], axis)]);
  const metrics = [...new Set(over.flatMap(([, detail]) => Object.keys(detail.evaluations.curves)))].filter((name) => name !== "update" && name !== "seconds");
  const wanted = [["Loss of the workers' batches", ([, detail, x]) => [x.training, detail.curves.loss], {}], ...metrics.map((name) => [`${name[0].toUpperCase()}${name.slice(1)}, evaluated`, ([, detail, x]) => [x.evaluated, detail.evaluations.curves[name] ?? []], { percent: name === "accuracy" }]),
    ["Samples per second", ([, detail, x]) => [x.training, detail.curves.rate], { zero: true }], ["Staleness, mean so far", ([, detail, x]) => [x.training, detail.curves.staleness], { zero: true }]];
  const filled = wanted.filter(([, curve]) => over.some((one) => curve(one)[1].some((y) => y !== null)));
  for (const [name, panel] of panels) if (!filled.some(([other]) => other === name)) { panel.remove(); panels.delete(name); }
  for (const [title, curve, options] of filled) {
    if (!panels.has(title)) { panels.set(title, make("div", { class: "panel" })); holder.append(panels.get(title)); }
    lines(panels.get(title), { title, ofTime: axis === "t", unit: axis === "t" ? "" : axis, ...options, series: over.map((one) => { const [x, y] = curve(one); return { name: one[0].name, x, y, colour: colourOf(one[0].key) }; }) });
  }
}

async function stop(card) {
  card.asking = false;
  try {
    const answer = await ask("stop", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ run: card.key }) });
    card.said = `${(await answer.json()).said}.`;
  } catch {
    card.said = "The request to stop has not reached the server.";
  }
  look();
}

async function readLog(card) {
  if (!card.logBox.open || !card.log.value) return;
  try { card.showLog((await (await ask(`log?run=${card.key}&file=${encodeURIComponent(card.log.value)}`)).json()).text); } catch { /* the next look tells */ }
}

async function readAbout(card) {
  if (!card.about.open) return;
  try { card.showAbout(await (await ask(`about?run=${card.key}`)).json()); } catch { /* the next look tells */ }
}

for (const button of document.querySelectorAll("#axis button")) {
  button.addEventListener("click", () => {
    axis = button.dataset.axis;
    for (const one of document.querySelectorAll("#axis button")) one.setAttribute("aria-pressed", String(one === button));
    if (told) show();
  });
}
addEventListener("hashchange", () => { chosen = decodeURIComponent(location.hash.slice(1)).split(",").filter((one) => /^[0-9a-f]{12}$/.test(one)); look(); });
document.addEventListener("visibilitychange", look);
addEventListener("online", look);
look();
