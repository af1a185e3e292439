// The card of one run: head, charts, roles, events, log, scheme.
import { bars, duration, kindOf, lines, make, number, strip } from "./charts.js";
import { topology } from "./topology.js";

export function statePill(state) {
  return make("span", { class: `pill is-${state.replace(" ", "-")}` }, state);
}

export function metricText(name, value) {
  return name === "accuracy" && Number.isFinite(value) ? `${(value * 100).toFixed(2)}%` : number(value);
}

// the curves of a run over the chosen axis: [values, x] of training, and of each metric
export function axisOf(detail, axis) {
  const { curves, evaluations } = detail;
  const at = (t) => { // the value of the axis at a time
    if (axis === "t" || !curves.t.length) return axis === "t" ? t : null;
    let n = curves.t.findIndex((one) => one >= t);
    if (n < 0) n = curves.t.length - 1;
    const before = Math.max(n - 1, 0), span = curves.t[n] - curves.t[before];
    const share = span > 0 ? Math.min(1, Math.max(0, (t - curves.t[before]) / span)) : 1;
    return curves[axis][before] + (curves[axis][n] - curves[axis][before]) * share;
  };
  const evaluated = axis === "updates" && evaluations.curves.update ? evaluations.curves.update : evaluations.t.map(at);
  return { training: axis === "t" ? curves.t : curves[axis], evaluated, at };
}

export class Card {
  constructor(key, actions) {
    this.key = key;
    this.actions = actions;
    this.parts = {};
    const part = (name, tag = "div", attributes = {}) => (this.parts[name] = make(tag, attributes));
    this.log = make("select", { "aria-label": "log", onchange: () => actions.readLog(this) });
    this.logBox = make("details", { class: "logs", ontoggle: () => actions.readLog(this) }, make("summary", {}, "Log"), this.log, part("text", "pre"));
    this.about = make("details", { ontoggle: () => actions.readAbout(this) }, make("summary", {}, "Scheme and settings"), part("about"));
    this.element = make("article", { class: "card", "data-key": key }, part("head"), part("notes"), part("charts", "div", { class: "charts" }),
      part("strip", "div", { class: "wide" }), make("div", { class: "two" }, part("topology", "div", { class: "panel" }),
        make("div", { class: "panel" }, make("h3", {}, "Events"), part("events", "ol", { class: "events", tabindex: 0 }))),
      make("div", { class: "wide" }, make("h3", {}, "Roles"), make("div", { class: "scroll", tabindex: 0 }, part("roles", "table"))), this.logBox, this.about);
    this.panels = new Map();
    this.asking = false;
    this.said = "";
  }

  update(summary, detail, axis, colour, alone) {
    this.last = [summary, detail, axis, colour, alone];
    this.element.classList.toggle("single", alone);
    this.parts.head.replaceChildren(...this.head(summary, detail, colour));
    this.parts.notes.replaceChildren(...this.notes(summary, detail));
    const deleted = summary.state === "deleted";
    for (const child of [...this.element.children].slice(2)) child.hidden = deleted;
    if (deleted) return;
    this.draw(summary, detail, axis);
    strip(this.parts.strip, { ...detail, t: detail.curves.t });
    topology(this.parts.topology, detail.roles, summary.state === "running");
    this.events(detail);
    this.roles(detail);
    this.logs(detail);
  }

  head(summary, detail, colour) {
    const running = summary.state === "running", ending = summary.stopping || summary.asked;
    const stop = !running ? null : ending ? make("button", { class: "stop", disabled: true }, "stopping …")
      : !this.asking ? make("button", { class: "stop", type: "button", onclick: () => this.ask(true) }, "Stop with a checkpoint")
        : make("div", { class: "grow" }, make("button", { class: "stop", type: "button", onclick: () => this.actions.stop(this) }, "Yes, stop this run"), make("button", { type: "button", onclick: () => this.ask(false) }, "No"));
    const servers = summary.servers && detail.roles.some((one) => one.name.startsWith("server")) ? `, ${summary.servers} server${summary.servers > 1 ? "s" : ""}` : "";
    const figures = [["updates", summary.goal ? `${number(summary.updates)} of ${number(summary.goal)}` : number(summary.updates)], ["samples per second", number(summary.rate, 3)],
      ["samples", number(summary.samples)], ["time", duration(summary.seconds)]];
    const status = detail.status;
    if (status.epochs !== null) figures.push(["epochs", number(status.epochs, 3)]);
    else if (detail.facts.epochs !== undefined) figures.push(["epochs", number(detail.facts.epochs, 3)]);
    if (status.seconds_left !== null && running) figures.push(["time left, about", duration(status.seconds_left)]);
    for (const [name, value] of Object.entries(summary.metrics)) figures.push([name, metricText(name, value)]);
    if (status.checkpoint_age !== null && running) figures.push(["newest checkpoint", `${duration(status.checkpoint_age + (detail.age || 0))} old`]);
    const restarts = detail.facts.restarts ?? detail.roles.reduce((sum, one) => sum + (one.restarts || 0), 0);
    figures.push(["restarts", number(restarts)]);
    if (detail.facts.digest) figures.push(["digest", `${detail.facts.digest.slice(0, 10)}…`]);
    const bar = summary.goal && summary.updates !== null && summary.updates !== undefined ? make("progress", { max: summary.goal, value: Math.min(summary.updates, summary.goal), "aria-label": "progress" }) : null;
    return [make("div", { class: "top" }, make("i", { class: `swatch b${colour}` }), make("h2", {}, summary.name), statePill(summary.state), stop ? make("div", { class: "grow" }, stop) : null),
      make("p", { class: "what" }, `${summary.scheme || "a scheme of the program"} on ${summary.task || "a task of the program"}, ${summary.workers ?? "?"} workers${servers} · ${summary.path}`),
      ...(bar ? [bar] : []), make("div", { class: "figures" }, ...figures.map(([name, value]) => make("div", {}, make("b", {}, value), make("span", {}, name))))];
  }

  ask(now) {
    this.asking = now;
    this.update(...this.last);
  }

  notes(summary, detail) {
    const found = [];
    const note = (text, bad = false) => found.push(make("p", { class: bad ? "note bad" : "note" }, text));
    if (this.said) note(this.said);
    if (summary.state === "deleted") note("The run directory has been deleted.", true);
    if (summary.state === "broken off") note("No process of this run is alive, and it has no result: its launcher was killed. `paceline train --resume` resumes it from the newest checkpoint.", true);
    if (summary.state === "damaged") note("The result of this run cannot be read: `paceline verify` tells more.", true);
    if (detail.error) note(detail.error, true);
    if (summary.stopping) note(`The run is ending: ${summary.stopping}.`);
    if (summary.state === "running" && detail.stale) note(`The launcher has not told anything for ${duration(detail.age)}.`, true);
    if (detail.stopped && !detail.error) note(`Stopped: ${detail.stopped}.`);
    const waits = new Map();
    for (const one of detail.roles) if (one.waits_for && summary.state === "running") waits.set(one.waits_for, [...(waits.get(one.waits_for) ?? []), one.name]);
    for (const [reason, names] of waits) note(`${names.length > 4 ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : names.join(", ")} waiting for ${reason}`);
    return found;
  }

  panel(name) {
    if (!this.panels.has(name)) { this.panels.set(name, make("div", { class: "panel" })); this.parts.charts.append(this.panels.get(name)); }
    return this.panels.get(name);
  }

  draw(summary, detail, axis) {
    const { training, evaluated, at } = axisOf(detail, axis);
    const { curves, evaluations } = detail;
    const unit = axis === "t" ? "" : axis, ofTime = axis === "t";
    const events = detail.events.map((one) => ({ x: at(one.t), kind: kindOf(one), text: one.text })).filter((one) => one.kind !== "warn" && one.x !== null);
    const common = { events, ofTime, unit };
    const loss = [{ name: "of the workers' batches", x: training, y: curves.loss, colour: 0, faint: Boolean(evaluations.curves.loss) }];
    if (evaluations.curves.loss) loss.push({ name: "evaluated", x: evaluated, y: evaluations.curves.loss, colour: 1, dots: true });
    lines(this.panel("loss"), { title: "Loss", series: loss, ...common });
    for (const [name, values] of Object.entries(evaluations.curves)) {
      if (["update", "loss", "seconds"].includes(name)) continue;
      lines(this.panel(`metric ${name}`), { title: name[0].toUpperCase() + name.slice(1), series: [{ name, x: evaluated, y: values, colour: 1, dots: true }], percent: name === "accuracy", ...common });
    }
    lines(this.panel("rate"), { title: "Samples per second", series: [{ name: "samples/s", x: training, y: curves.rate, colour: 2 }], zero: true, ...common });
    if (curves.staleness.some((one) => one !== null) || detail.ages.length) {
      lines(this.panel("staleness"), { title: "Staleness, mean so far", series: [{ name: "versions", x: training, y: curves.staleness, colour: 3 }], zero: true, ...common });
      bars(this.panel("ages"), { title: "Staleness: share of gradients by age in versions", values: detail.ages });
    }
  }

  events(detail) {
    const list = detail.events.slice().reverse().map((one) => make("li", {}, make("time", { title: one.at ? new Date(one.at * 1000).toLocaleString() : "" }, duration(one.t)), make("i", { class: `dot m-${kindOf(one)}` }), make("span", {}, one.event === "rolled back" ? `returned to a checkpoint, ${one.text}` : one.event === "stop" ? `stopping: ${one.text}` : one.event === "failed" ? `failed: ${one.text}` : one.text)));
    if (detail.events_omitted) list.push(make("li", {}, make("span"), make("span"), make("span", {}, `${number(detail.events_omitted)} earlier ones are not shown`)));
    this.parts.events.replaceChildren(...(list.length ? list : [make("li", {}, make("span"), make("span"), make("span", { class: "quiet" }, "no faults and no warnings"))]));
  }

  roles(detail) {
    const several = new Set(detail.roles.map((one) => one.node ?? 0)).size > 1;
    const columns = [["role", (one) => make("b", {}, one.name), "l"], ["state", (one) => make("span", {}, make("i", { class: `dot s-${one.state.replace(" ", "-")}` }), ` ${one.state}`), "l"],
      ...(several ? [["node", (one) => (one.node < 0 ? "–" : String(one.node ?? 0)), ""]] : []), ["step", (one) => (one.step >= 0 ? number(one.step) : "–"), ""], ["samples/s", (one) => number(one.samples_per_second, 3), "spare"], ["loss", (one) => number(one.loss, 3), ""],
      ["restarts", (one) => number(one.restarts), "spare"], ["pid", (one) => (one.pid ? String(one.pid) : "–"), "spare"],
      ...(detail.roles.some((one) => one.waits_for) ? [["waits for", (one) => one.waits_for || "", "l wrap"]] : [])];
    if (!detail.roles.length) { this.parts.roles.replaceChildren(make("tbody", {}, make("tr", {}, make("td", { class: "l quiet" }, "not recorded")))); return; }
    this.parts.roles.replaceChildren(make("thead", {}, make("tr", {}, ...columns.map(([name, , side]) => make("th", { class: side }, name)))),
      make("tbody", {}, ...detail.roles.map((one) => make("tr", {}, ...columns.map(([, cell, side]) => make("td", { class: side }, cell(one)))))));
  }

  logs(detail) {
    const known = [...this.log.options].map((one) => one.value);
    if (known.join("\n") !== detail.logs.join("\n")) {
      const chosen = this.log.value;
      this.log.replaceChildren(...detail.logs.map((name) => make("option", { value: name, selected: name === chosen }, name)));
    }
    this.logBox.hidden = !detail.logs.length;
    if (this.logBox.open) this.actions.readLog(this);
  }

  showLog(text) {
    const box = this.parts.text, follow = box.scrollHeight - box.scrollTop - box.clientHeight < 30;
    if (box.textContent === text) return;
    box.textContent = text || "(empty)";
    if (follow) box.scrollTop = box.scrollHeight;
  }

  showAbout({ plan, scheme }) {
    const rows = Object.entries(plan).filter(([name]) => !["title", "launch"].includes(name)).map(([name, value]) => make("tr", {}, make("td", { class: "l" }, name.replaceAll("_", " ")), make("td", { class: "l wrap" }, typeof value === "string" ? value : JSON.stringify(value))));
    this.parts.about.replaceChildren(...(scheme.doc ? [make("h3", {}, scheme.name), make("pre", { class: "prose" }, scheme.doc)] : []), ...(scheme.source ? [make("h3", {}, `The scheme's listing${scheme.file ? ` (${scheme.file})` : ""}`), make("pre", {}, scheme.source)] : [make("p", { class: "quiet" }, "The scheme of this run was made in a program: there is no file to read it from.")]),
      make("h3", {}, "Settings that were given or are not empty"), make("div", { class: "scroll" }, make("table", {}, make("tbody", {}, ...rows))));
  }
}
