"use strict";
// Asks for the state every two seconds. Words of a run only ever become text, never markup.
const PERIOD = 2000;
const LEFT = 78;  // room for the longest label, in the larger letters of a narrow window
const at = (id) => document.getElementById(id);
let chosen = null;

function clock(seconds) {
  const whole = Math.round(seconds), rest = String(whole % 60).padStart(2, "0"), minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes}:${rest}`;
  return `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${rest}`;
}

function make(name, text, attributes = {}) {
  const svg = ["path", "circle", "line", "text"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function showChoices(runs) {
  at("choices").hidden = runs.length < 2;
  const names = JSON.stringify(runs.map((run) => [run.name, run.state]));
  if (at("choices").dataset.names !== names) {  // otherwise the focus would be lost every two seconds
    const focused = document.activeElement?.dataset?.name;
    const list = make("ul");
    for (const run of runs) {
      const button = make("button", `${run.name}: ${run.state}`, { type: "button", "data-name": run.name });
      button.addEventListener("click", () => { chosen = run.name; tick(); });
      const item = make("li");
      item.append(button);
      list.append(item);
    }
    at("choices").replaceChildren(list);
    at("choices").dataset.names = names;
    if (focused) [...list.querySelectorAll("button")].find((b) => b.dataset.name === focused)?.focus();
  }
  for (const button of at("choices").querySelectorAll("button")) {
    button.setAttribute("aria-current", String(button.dataset.name === chosen));
  }
}

function showBar(id, value, most, words) {
  at(`${id}-words`).textContent = words;
  at(id).max = Math.max(most, 1);
  at(id).value = Math.min(value, most);
}

function showCurve(points) {
  const svg = at("curve");
  svg.replaceChildren();
  svg.parentElement.hidden = points.length === 0;
  at("rows").replaceChildren(...points.map(([round, accuracy]) => {
    const row = make("tr");
    row.append(make("td", String(round)), make("td", (100 * accuracy).toFixed(2)));
    return row;
  }).reverse());
  if (!points.length) return;
  const [first, last] = [points[0][0], points[points.length - 1][0]];
  const x = (round) => LEFT + (630 - LEFT) * (last === first ? 0.5 : (round - first) / (last - first));
  const y = (accuracy) => 190 - 175 * accuracy;
  for (const level of [0, 0.25, 0.5, 0.75, 1]) {
    svg.append(make("line", undefined, { x1: LEFT, x2: 630, y1: y(level), y2: y(level) }));
    svg.append(make("text", `${100 * level} %`, { x: LEFT - 6, y: y(level) + 5, "text-anchor": "end" }));
  }
  svg.append(make("text", String(first), { x: x(first), y: 212, "text-anchor": last === first ? "middle" : "start" }));
  if (last !== first) svg.append(make("text", String(last), { x: x(last), y: 212, "text-anchor": "end" }));
  svg.append(make("path", undefined, { d: points.map(([r, a], i) => `${i ? "L" : "M"}${x(r)} ${y(a)}`).join("") }));
  const [round, accuracy] = points[points.length - 1];
  svg.append(make("circle", undefined, { cx: x(round), cy: y(accuracy), r: 4 }));
  at("curve-words").textContent = `Accuracy by round; ${(100 * accuracy).toFixed(2)} % after round ${round}.`;
}

function showRun(run) {
  at("run").hidden = false;
  at("label").textContent = run.label ?? run.name;
  at("task").textContent = run.task ?? "";
  at("state").textContent = run.state;
  at("state").className = `badge ${run.state}`;
  at("problem").textContent = run.problem ?? "";
  at("parts").hidden = run.problem !== undefined;
  if (run.problem !== undefined) return;
  document.title = `${run.label}: ${run.state} - fedstill watch`;
  const total = run.rounds ?? 1;
  showBar("rounds", run.round, total, `${run.round} of ${total}`);
  const step = run.step ? ` (step ${run.step}; sent to ${run.asked})` : "";
  showBar("clients", run.answered, run.clients, `${run.answered} of ${run.clients}${step}`);
  const facts = {
    "accuracy": run.accuracy === null ? "not evaluated yet" : `${(100 * run.accuracy).toFixed(2)} %`,
    "bytes": run.words.bytes,
    "privacy": run.words.privacy,
    "left out": run.refused ? `${run.refused} ${run.refused === 1 ? "reply" : "replies"}` : "none",
    "time": clock(run.seconds),
    "time left": run.left === null ? (run.state === "running" ? "unknown yet" : "-") : `about ${clock(run.left)}`,
  };
  at("facts").replaceChildren(...Object.entries(facts).flatMap(([name, text]) => [make("dt", name), make("dd", text)]));
  showCurve(run.accuracies);
}

async function tick() {
  try {
    const reply = await fetch("state.json", { cache: "no-store" });
    if (!reply.ok) throw new Error(`status ${reply.status}`);
    const state = await reply.json();
    at("folder").textContent = state.folder;
    const runs = state.runs;
    if (!runs.some((run) => run.name === chosen)) {
      chosen = (runs.find((run) => run.state === "running") ?? runs[runs.length - 1]).name;
    }
    showChoices(runs);
    showRun(runs.find((run) => run.name === chosen));
    at("remarks").replaceChildren(...state.remarks.map((said) => make("p", said, { class: "note" })));
    const words = `Read from the run's files at ${new Date().toLocaleTimeString()}.`;
    at("status").textContent = words;
  } catch (error) {
    at("status").textContent = "fedstill watch has ended or cannot read the run; start it again.";
  }
}

tick();
setInterval(tick, PERIOD);
