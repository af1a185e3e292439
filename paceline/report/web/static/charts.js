// Charts as inline SVG: lines over time, bars, and the strip that shows what every role did.
export const NAMESPACE = "http://www.w3.org/2000/svg";

export function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "line", "path", "circle", "rect", "text", "title", "marker", "polygon"].includes(tag);
  const element = svg ? document.createElementNS(NAMESPACE, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((one) => one !== null && one !== undefined));
  return element;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toPrecision(3)} G`;
  if (size >= 1e7) return `${(value / 1e6).toPrecision(3)} M`;
  if (Number.isInteger(value) || size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size !== 0 && size < 1e-4) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  return `${Math.floor(seconds / 3600).toLocaleString("en-US")} h ${String(Math.floor((seconds % 3600) / 60)).padStart(2, "0")} min`;
}

// steps of 1, 2, 5 × a power of ten; of time: seconds, minutes, hours
function ticks(low, high, count, ofTime = false) {
  const span = high - low || 1;
  let step = 10 ** Math.floor(Math.log10(span / count));
  for (const factor of [1, 2, 5, 10]) if (span / (step * factor) <= count) { step *= factor; break; }
  if (ofTime && span > 120) step = [15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800,
    604800].find((one) => span / one <= count) ?? 2592000;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(3))}G`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  return size && size < 1e-3 ? value.toExponential(0) : String(Number(value.toPrecision(4)));
}

function shortTime(seconds) {
  if (seconds === 0) return "0";
  if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
  const hours = Math.floor(seconds / 3600), minutes = (seconds % 3600) / 60;
  if (hours < 1) return `${Number(minutes.toFixed(1))} min`;
  return minutes >= 1 ? `${hours} h ${Math.round(minutes)}` : `${hours} h`;
}

export function kindOf(event) {
  if (event.event === "restarted") return "good";
  if (event.event === "stop" || event.event === "notice") return "plain";
  if (event.event === "failed" || event.event === "rolled back" || /\b(died|is gone|hangs|killing|killed|lost)\b/.test(event.text || "")) return "bad";
  return "warn";
}

const TOP = 6, BOTTOM = 20, LEFT = 44, RIGHT = 10;
const pointers = new WeakMap(); // holder -> horizontal place of the pointer

// A chart is made for the width of its holder, and made again when the holder has another one.
const drawings = new WeakMap(); // holder -> its width, and the function that draws into it
const sizes = new ResizeObserver((entries) => requestAnimationFrame(() => {
  for (const { target } of entries) {
    const made = drawings.get(target);
    if (made && target.isConnected && target.clientWidth && made.width !== widthOf(target)) made.again();
  }
}));

const widthOf = (holder) => Math.max(holder.clientWidth, 220);

function fitted(holder, again) {
  const width = widthOf(holder);
  if (!drawings.has(holder)) sizes.observe(holder);
  drawings.set(holder, { width, again });
  return width;
}

// holder: an element; series: [{name, x, y, colour, dots, faint}]; events: [{x, kind, text}]
export function lines(holder, given) {
  const { title, series, events = [], ofTime = false, height = 170, zero = false, percent = false, unit = "" } = given;
  const drawn = series.map((one) => ({ ...one, points: one.x.map((x, n) => [x, one.y[n]]).filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y) && x !== null && y !== null) }));
  const all = drawn.flatMap((one) => one.points);
  const width = fitted(holder, () => lines(holder, given));
  const body = [make("h3", {}, title)];
  if (!all.length) {
    holder.replaceChildren(...body, make("p", { class: "quiet" }, "nothing recorded yet"));
    return;
  }
  const xs = all.map(([x]) => x), high = Math.max(...xs), low = Math.min(0, ...xs);
  const span = high - low || 1;
  const [bottom, top] = range(all.map(([, y]) => y), zero);
  const px = (x) => LEFT + ((x - low) / span) * (width - LEFT - RIGHT);
  const py = (y) => TOP + (1 - (y - bottom) / (top - bottom)) * (height - TOP - BOTTOM);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${title}: ${drawn.map((one) => `${one.name} ${number(one.points.at(-1)?.[1])}`).join(", ")}` });
  for (const y of ticks(bottom, top, 5)) {
    svg.append(make("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: py(y), y2: py(y) }));
    svg.append(make("text", { x: LEFT - 6, y: py(y) + 4, "text-anchor": "end" }, percent ? `${Number((y * 100).toPrecision(3))}%` : short(y)));
  }
  svg.append(...bottomAxis(low, low + span, px, width, height, ofTime));
  for (const one of events) {
    if (one.x >= low && one.x <= low + span) svg.append(make("line", { class: `event e-${one.kind}`, x1: px(one.x), x2: px(one.x), y1: TOP, y2: height - BOTTOM }, make("title", {}, one.text)));
  }
  for (const one of drawn) {
    if (!one.points.length) continue;
    const path = one.points.map(([x, y], n) => `${n ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
    svg.append(make("path", { class: `curve k${one.colour}${one.faint ? " faint" : ""}`, d: path }));
    if (one.dots || one.points.length === 1) for (const [x, y] of one.points.length > 60 ? one.points.slice(-1) : one.points) svg.append(make("circle", { class: `f${one.colour}`, cx: px(x), cy: py(y), r: 2.5 }));
  }
  const legend = drawn.length > 1 ? make("div", { class: "legend" }, ...drawn.filter((one) => one.points.length).map((one) => make("span", {}, make("i", { class: `dot b${one.colour}${one.faint ? " faint" : ""}` }), one.name))) : null;
  const hair = make("line", { class: "hair", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
  const tip = make("div", { class: "tip", hidden: true });
  svg.append(hair);
  const point = (place) => {
    if (place === undefined) { tip.hidden = true; hair.setAttribute("visibility", "hidden"); return; }
    const wanted = low + ((place - LEFT) / (width - LEFT - RIGHT)) * span;
    const near = drawn.filter((one) => one.points.length).map((one) => [one, one.points.reduce((a, b) => (Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a))]);
    const x = near.map(([, p]) => p[0]).reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a));
    const event = events.find((one) => Math.abs(px(one.x) - place) < 5);
    tip.textContent = [`${ofTime ? duration(x) : number(x)}${unit ? ` ${unit}` : ""}`, ...near.map(([one, p]) => `${one.name}: ${percent ? `${(p[1] * 100).toFixed(2)}%` : number(p[1])}`), ...(event ? [event.text] : [])].join("\n");
    tip.hidden = false;
    hair.setAttribute("visibility", "visible");
    hair.setAttribute("x1", px(x)); hair.setAttribute("x2", px(x));
    const side = px(x) > width / 2;
    tip.style.left = side ? "" : `${px(x) + 8}px`;
    tip.style.right = side ? `${width - px(x) + 8}px` : "";
    tip.style.top = "1.6rem";
  };
  const over = (event) => { const box = svg.getBoundingClientRect(); const place = ((event.clientX - box.left) / box.width) * width; pointers.set(holder, place); point(place); };
  svg.addEventListener("pointermove", over);
  svg.addEventListener("pointerdown", over);
  svg.addEventListener("pointerleave", () => { pointers.delete(holder); point(undefined); });
  holder.replaceChildren(...body, svg, ...(legend ? [legend] : []), tip);
  if (pointers.has(holder)) point(pointers.get(holder));
}

// a few values far outside must not flatten the rest: the range ends where 2 % of the values lie beyond, if that helps
function range(values, zero) {
  const sorted = [...values].sort((a, b) => a - b);
  let low = sorted[0], high = sorted.at(-1);
  const usual = sorted[Math.floor(sorted.length * 0.98)];
  if (sorted.length > 50 && high > low + 5 * (usual - low) && usual > low) high = usual + 0.5 * (usual - low);
  if (zero) low = Math.min(0, low);
  if (low === high) { const pad = Math.abs(low) * 0.1 || 1; return [zero ? 0 : low - pad, high + pad]; }
  const pad = (high - low) * 0.06;
  return [zero && low === 0 ? 0 : low - pad, high + pad];
}

function bottomAxis(low, high, px, width, height, ofTime) {
  const parts = [make("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM })];
  for (const x of ticks(low, high, Math.max(2, Math.min(8, Math.floor(width / 85))), ofTime)) {
    parts.push(make("line", { class: "axis", x1: px(x), x2: px(x), y1: height - BOTTOM, y2: height - BOTTOM + 4 }));
    parts.push(make("text", { x: px(x), y: height - 4, "text-anchor": px(x) > width - 30 ? "end" : "middle" }, ofTime ? shortTime(x) : short(x)));
  }
  return parts;
}

export function bars(holder, given) {
  const { title, values, height = 170, note } = given;
  const width = fitted(holder, () => bars(holder, given)), total = values.reduce((a, b) => a + b, 0);
  const body = [make("h3", {}, title)];
  if (!total) { holder.replaceChildren(...body, make("p", { class: "quiet" }, note || "nothing recorded yet")); return; }
  let most = values.length; // rare large values at the end are one bar
  let beyond = 0;
  while (most > 24 && beyond + values[most - 1] < total / 200) beyond += values[--most];
  const shown = beyond ? [...values.slice(0, most), beyond] : values.slice();
  const top = Math.max(...shown) / total;
  const step = (width - LEFT - RIGHT) / shown.length;
  const py = (share) => TOP + (1 - share / (top * 1.06)) * (height - TOP - BOTTOM);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": title });
  for (const y of ticks(0, top * 1.06, 5)) {
    svg.append(make("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: py(y), y2: py(y) }));
    svg.append(make("text", { x: LEFT - 6, y: py(y) + 4, "text-anchor": "end" }, `${Number((y * 100).toPrecision(3))}%`));
  }
  const every = Math.ceil(shown.length / (width / 34));
  shown.forEach((count, n) => {
    const name = beyond && n === most ? `${most}+` : String(n);
    const x = LEFT + n * step;
    if (count) svg.append(make("rect", { class: "f0", x: x + Math.min(2, step * 0.1), width: Math.max(step - Math.min(4, step * 0.2), 1), y: py(count / total), height: Math.max(height - BOTTOM - py(count / total), 1) }, make("title", {}, `${name}: ${number(count)} gradients, ${((100 * count) / total).toFixed(1)}%`)));
    if (n % every === 0 || (beyond && n === most && (n - 1) % every)) svg.append(make("text", { x: x + step / 2, y: height - 4, "text-anchor": "middle" }, name));
  });
  svg.append(make("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM }));
  holder.replaceChildren(...body, svg);
}

// one row per role: the colour is its state. names, t, states (a text per time, a letter per role), letters, events
export function strip(holder, given) {
  const { names, t, states, letters, events, launches } = given;
  const body = [make("h3", {}, "What every role did, and events")];
  if (!t.length || !names.length) { holder.replaceChildren(...body, make("p", { class: "quiet" }, "nothing recorded yet")); return; }
  const width = fitted(holder, () => strip(holder, given)), row = names.length > 24 ? 7 : names.length > 12 ? 11 : 16;
  const left = 72, marks = 16, height = marks + names.length * row + BOTTOM + 4, end = Math.max(t.at(-1), ...events.map((one) => one.t)) || 1;
  const px = (at) => left + (at / end) * (width - left - RIGHT);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "states of the roles over time" });
  const every = Math.ceil(14 / row);
  names.forEach((name, n) => {
    const y = marks + n * row;
    if (n % every === 0) svg.append(make("text", { x: left - 6, y: y + row / 2 + 4, "text-anchor": "end" }, name));
    svg.append(make("rect", { class: "s-none", x: left, y, width: width - left - RIGHT, height: row - 1 }));
    for (let k = 0; k < t.length;) {
      let last = k;
      while (last + 1 < t.length && states[last + 1][n] === states[k][n]) last += 1;
      const from = px(k ? t[k - 1] : 0), to = px(t[last]); // a state holds from the line before to its own
      const state = letters[states[k][n]];
      if (state) svg.append(make("rect", { class: `s-${state.replace(" ", "-")}`, x: from, y, width: Math.max(to - from, 1), height: row - 1 }, make("title", {}, `${name}: ${state}, ${duration(k ? t[k - 1] : 0)} to ${duration(t[last])}`)));
      k = last + 1;
    }
  });
  for (const one of launches.slice(1)) svg.append(make("line", { class: "hair", x1: px(one.t), x2: px(one.t), y1: 0, y2: height - BOTTOM }, make("title", {}, `resumed: launch ${one.number}`)));
  for (const one of events) {
    const kind = kindOf(one), x = px(one.t), text = `${duration(one.t)}: ${one.text}`;
    const index = names.indexOf(one.role || names.find((name) => (one.text || "").startsWith(`${name} `)));
    svg.append(make("line", { class: `event e-${kind}`, x1: x, x2: x, y1: marks - 4, y2: height - BOTTOM - 2 }, make("title", {}, text)));
    svg.append(make("polygon", { class: `e-${kind}`, points: `${x - 5},3 ${x + 5},3 ${x},12` }, make("title", {}, text)));
    if (index >= 0) svg.append(make("circle", { class: `e-${kind} node`, cx: x, cy: marks + index * row + row / 2, r: Math.min(5, row / 2) }, make("title", {}, text)));
  }
  svg.append(...bottomAxis(0, end, px, width, height, true).map((one, n) => { if (!n) one.setAttribute("x1", left); return one; }));
  const seen = [...new Set(states.join(""))].map((letter) => letters[letter]).filter(Boolean);
  const legend = make("div", { class: "legend" }, ...seen.map((state) => make("span", {}, make("i", { class: `swatch s-${state.replace(" ", "-")}` }), state)),
    ...[["bad", "died, failed, rolled back"], ["good", "restarted"], ["warn", "warning"], ["plain", "stop, notice"]].filter(([kind]) => events.some((one) => kindOf(one) === kind)).map(([kind, text]) => make("span", {}, make("i", { class: `dot m-${kind}` }), text)));
  holder.replaceChildren(...body, svg, legend);
}
