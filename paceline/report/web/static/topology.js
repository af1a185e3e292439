// Who talks to whom, as inline SVG: workers on a circle around the servers, or around the place where they meet.
import { make } from "./charts.js";

function targetOf(reason, names) {
  const found = [...(reason || "").matchAll(/worker (\d+)/g)].map((match) => `worker:${match[1]}`);
  if (/the chief/.test(reason || "")) found.push("chief");
  return found.filter((name) => names.has(name));
}

export function topology(holder, roles, running) {
  const servers = roles.filter((one) => one.name.startsWith("server"));
  const others = roles.filter((one) => one.name.startsWith("evaluator"));
  const nodes = new Set(roles.map((one) => one.node ?? 0));
  const workers = roles.filter((one) => !servers.includes(one) && !others.includes(one)).sort((a, b) => (a.node ?? 0) - (b.node ?? 0));
  const body = [make("h3", {}, "Topology, and who waits for whom")];
  if (!workers.length) { holder.replaceChildren(...body, make("p", { class: "quiet" }, "nothing recorded yet")); return; }
  const size = 340, middle = size / 2, many = workers.length > 20;
  const radius = 122, dot = many ? Math.max(4, Math.min(8, (Math.PI * radius) / workers.length - 1)) : 13;
  const places = new Map();
  const angle = (n) => (2 * Math.PI * (n + 0.5)) / workers.length - Math.PI / 2;
  workers.forEach((one, n) => places.set(one.name, [middle + radius * Math.cos(angle(n)), middle + radius * Math.sin(angle(n))]));
  servers.forEach((one, n) => {
    const inner = servers.length > 1 ? Math.min(46, 12 * servers.length) : 0, at = (2 * Math.PI * n) / servers.length - Math.PI / 2;
    places.set(one.name, [middle + inner * Math.cos(at), middle + inner * Math.sin(at)]);
  });
  others.forEach((one) => places.set(one.name, [size - 22, size - 18]));
  const svg = make("svg", { viewBox: `0 0 ${size} ${size}`, class: "topology", role: "img", "aria-label": "topology of the run" });
  const centre = servers.length ? null : [middle, middle];
  const hubs = centre ? [centre] : servers.map((one) => places.get(one.name));
  const edge = (from, to, kind, text) => {
    const length = Math.hypot(to[0] - from[0], to[1] - from[1]) || 1;
    const cut = kind === "waits" ? 17 : 0; // an arrow ends at the rim
    const tip = [to[0] - ((to[0] - from[0]) * cut) / length, to[1] - ((to[1] - from[1]) * cut) / length];
    svg.append(make("line", { class: `edge ${kind}`, x1: from[0], y1: from[1], x2: tip[0], y2: tip[1] }, make("title", {}, text)));
    if (kind !== "waits") return;
    const turn = (Math.atan2(to[1] - from[1], to[0] - from[0]) * 180) / Math.PI;
    svg.append(make("polygon", { class: "arrow", points: "0,0 -8,-4.5 -8,4.5", transform: `translate(${tip[0].toFixed(1)} ${tip[1].toFixed(1)}) rotate(${turn.toFixed(1)})` }));
  };
  const names = new Set(places.keys());
  for (const one of workers) {
    const from = places.get(one.name), waits = Boolean(one.waits_for);
    const targets = waits ? targetOf(one.waits_for, names).filter((name) => name !== one.name) : [];
    for (const hub of hubs) edge(from, hub, waits && !targets.length ? "waits" : one.state === "training" ? "busy" : "", waits ? `${one.name} waits for ${one.waits_for}` : one.name);
    for (const name of targets) edge(from, places.get(name), "waits", `${one.name} waits for ${one.waits_for}`);
  }
  for (const one of others) edge(places.get(one.name), places.get("chief") ?? [middle, middle], "", one.name);
  if (nodes.size > 1) {
    for (const node of nodes) {
      const mine = workers.map((one, n) => [one, n]).filter(([one]) => (one.node ?? 0) === node).map(([, n]) => n);
      if (!mine.length) continue;
      const pad = (Math.PI / workers.length) * 0.8, from = angle(mine[0]) - pad, to = angle(mine.at(-1)) + pad, out = radius + 27;
      const at = (turn, far = out) => `${(middle + far * Math.cos(turn)).toFixed(1)} ${(middle + far * Math.sin(turn)).toFixed(1)}`;
      svg.append(make("path", { class: "arc", d: `M${at(from)}A${out} ${out} 0 ${to - from > Math.PI ? 1 : 0} 1 ${at(to)}` }));
      const [x, y] = at((from + to) / 2, out + 11).split(" ");
      svg.append(make("text", { x, y: Number(y) + 4, "text-anchor": Math.abs(x - middle) < 20 ? "middle" : x > middle ? "start" : "end" }, node < 0 ? "not joined" : `node ${node}`));
    }
  }
  if (centre) {
    svg.append(make("circle", { class: "s-none node", cx: middle, cy: middle, r: 26 }));
    svg.append(make("text", { x: middle, y: middle + 4, "text-anchor": "middle" }, "among all"));
  }
  for (const one of [...servers, ...others, ...workers]) {
    const [x, y] = places.get(one.name), worker = workers.includes(one), index = one.name.split(":")[1] ?? "0";
    const text = `${one.name}: ${one.state}${one.waits_for ? `, waits for ${one.waits_for}` : ""}${one.restarts ? `, restarted ${one.restarts} times` : ""}`;
    const shape = `s-${one.state.replace(" ", "-")} node`;
    const r = servers.length > 6 ? 9 : 15;
    svg.append(worker ? make("circle", { class: shape, cx: x, cy: y, r: dot }, make("title", {}, text)) : make("rect", { class: shape, x: x - r, y: y - r, width: 2 * r, height: 2 * r, rx: 4 }, make("title", {}, text)));
    if (!worker || !many) svg.append(make("text", { class: "strong", x, y: y + 4, "text-anchor": "middle", "pointer-events": "none" }, worker ? (one.name === "chief" ? "c" : index) : one.name.startsWith("server") ? `S${servers.length > 1 ? index : ""}` : "E"));
    else if (Number(index) % 8 === 0) {
      const turn = Math.atan2(y - middle, x - middle), far = radius + dot + 9;
      svg.append(make("text", { x: middle + far * Math.cos(turn), y: middle + far * Math.sin(turn) + 4, "text-anchor": "middle" }, one.name === "chief" ? "c" : index));
    }
  }
  const waiting = roles.filter((one) => one.waits_for);
  const key = make("div", { class: "legend" }, make("span", {}, "c: the chief (worker 0)"), servers.length ? make("span", {}, "S: server") : null, others.length ? make("span", {}, "E: evaluator") : null,
    running ? make("span", {}, waiting.length ? "dashed arrow: waits for" : "nobody waits for long") : null);
  holder.replaceChildren(...body, svg, key);
}
