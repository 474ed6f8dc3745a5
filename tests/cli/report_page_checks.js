/* Runs in the page under test, after its own script: report_page_checks.py puts it there, with what
 * must be known in `expected`, and reads the results from the element that is added here. */
(function () {
"use strict";
const expected = EXPECTED;
const report = window.tenureReport, state = report.state, data = report.data;
const chart = document.getElementById("chart"), map = document.getElementById("map");
const tip = document.getElementById("tip");
const results = [];
const check = (name, holds, detail) => results.push([name, Boolean(holds), String(detail)]);
const style = () => getComputedStyle(document.documentElement);

function colourOf(name) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const context = canvas.getContext("2d");
  context.fillStyle = style().getPropertyValue("--" + name).trim();
  context.fillRect(0, 0, 1, 1);
  return Array.from(context.getImageData(0, 0, 1, 1).data);
}

const isColour = (pixels, at, colour) => pixels[at] === colour[0] && pixels[at + 1] === colour[1] &&
  pixels[at + 2] === colour[2] && pixels[at + 3] === colour[3];

function countIn(canvas, x, width, colour) {
  const pixels = canvas.getContext("2d").getImageData(x, 0, width, canvas.height).data;
  let count = 0;
  for (let at = 0; at < pixels.length; at += 4) count += isColour(pixels, at, colour);
  return count;
}

function at(canvas, x, y, type, more) {
  const box = canvas.getBoundingClientRect();
  const Kind = type === "wheel" ? WheelEvent
    : type.startsWith("pointer") ? PointerEvent : MouseEvent;
  canvas.dispatchEvent(new Kind(type, Object.assign({ bubbles: true, cancelable: true, pointerId: 1,
    clientX: box.left + x * box.width, clientY: box.top + y * box.height }, more)));
  report.drawNow();
}

const xOfEvent = (event) => {
  const box = chart.getBoundingClientRect();
  const x = state.byTime ? report.timeOfEvent(event) : event + 0.5;
  return (62 + (x - state.from) / (state.to - state.from) * (box.width - 62)) / box.width;
};

/* ---- what is there --------------------------------------------------------------------------- */

check("nothing is fetched", performance.getEntriesByType("resource").length === 0,
  performance.getEntriesByType("resource").map((entry) => entry.name));
check("the page is as wide as the screen", document.documentElement.scrollWidth <= innerWidth,
  document.documentElement.scrollWidth + " " + innerWidth);
check("the peak is known", data.peak === expected.peak, data.peak);
check("the peak is in the curve", Math.max(...report.coarse.most) === expected.peak,
  Math.max(...report.coarse.most));
check("the end is what is alive", report.aliveAt(data.events - 1).bytes === expected.live,
  report.aliveAt(data.events - 1).bytes);
check("owners", expected.owners.every((name) => data.owners.includes(name)), data.owners);
check("dark as asked", matchMedia("(prefers-color-scheme: dark)").matches === expected.isDark, "");
const ground = getComputedStyle(document.body).backgroundColor.match(/\d+/g).map(Number);
check("the ground is dark or light", (ground[0] + ground[1] + ground[2] < 200) === expected.isDark,
  ground);
check("tables", document.querySelectorAll("table").length >= 3, "");
check("text", expected.texts.every((text) => document.body.textContent.includes(text)),
  expected.texts.filter((text) => !document.body.textContent.includes(text)));

/* The curve, event by event, is the sum of the blocks. */
let sums = 0;
for (let event = 0; event < data.events; event += Math.ceil(data.events / 40))
  sums += report.exactCurve(event, event).most[0] === report.aliveAt(event).bytes;
check("every sum is of blocks", sums >= 30 || sums === data.events, sums);

/* ---- the curves' pixels ---------------------------------------------------------------------- */

/* At the peak, beside the line of the moment, each owner's height is its bytes. */
state.byTime = false;
report.setView(data.peakEvent - 4, data.peakEvent + 5);
report.setMoment(0);
report.drawNow();
const ratio = devicePixelRatio || 1;
const column = Math.round(xOfEvent(data.peakEvent) * chart.width);
const unit = (chart.height - 30 * ratio) / state.top;
const curve = report.curveOfView();
const index = curve === report.coarse ? Math.floor(data.peakEvent / data.stride)
  : data.peakEvent - curve.first;
let drawn = 0, wrong = [];
for (let track = 0; track < data.tracks; track++) {
  const bytes = curve.stacks[index * data.tracks + track];
  const pixels = countIn(chart, column, 1, colourOf("c" + track));
  drawn += pixels;
  if (Math.abs(pixels - bytes * unit) > 2) wrong.push([track, pixels, bytes * unit]);
}
check("heights are bytes", wrong.length === 0, JSON.stringify(wrong));
check("the peak is drawn", Math.abs(drawn - expected.peak * unit) <= 2 * data.tracks,
  drawn + " " + expected.peak * unit);
report.setView(0, report.wholeSpan());
report.drawNow();
const some = data.owners.findIndex((name) => name === expected.owners[0]);
const before = countIn(chart, 0, chart.width, colourOf("c" + some));
document.querySelectorAll("#legend button")[some].click();
report.drawNow();
check("a hidden owner is not drawn", before > 20 &&
  countIn(chart, 0, chart.width, colourOf("c" + some)) === 0, before);
document.querySelectorAll("#legend button")[some].click();
report.drawNow();
check("a shown owner is drawn again",
  countIn(chart, 0, chart.width, colourOf("c" + some)) === before, before);

/* ---- zoom, hover, click ---------------------------------------------------------------------- */

const whole = state.to - state.from;
for (let i = 0; i < 5; i++) at(chart, xOfEvent(data.peakEvent), 0.5, "wheel", { deltaY: -300 });
check("the wheel zooms", state.to - state.from < whole / 50 || state.to - state.from <= 8,
  state.to - state.from);
check("around the pointer", state.from <= data.peakEvent && data.peakEvent <= state.to,
  [state.from, data.peakEvent, state.to]);
at(chart, xOfEvent(data.peakEvent), 0.5, "pointermove", {});
check("hovering tells", tip.style.display === "block" &&
  tip.textContent.includes("event " + (data.peakEvent + 1).toLocaleString("en-US")),
  tip.textContent);
at(chart, 0, 0, "pointerleave", {});
check("leaving ends it", tip.style.display === "none", "");
const left = state.from;
at(chart, 0.6, 0.5, "pointerdown", {});
at(chart, 0.5, 0.5, "pointermove", {});
at(chart, 0.4, 0.5, "pointermove", {});
at(chart, 0.4, 0.5, "pointerup", {});
check("a drag moves", state.from > left, [left, state.from]);
at(chart, 0.5, 0.5, "dblclick", {});
check("a double click shows all", state.to - state.from === whole, "");
at(chart, xOfEvent(data.peakEvent), 0.5, "pointerdown", {});
at(chart, xOfEvent(data.peakEvent), 0.5, "pointerup", {});
check("a click chooses", Math.abs(state.moment - data.peakEvent) <= data.events / 100,
  [state.moment, data.peakEvent]);
check("and says so", document.getElementById("chart-says").textContent
  .includes((state.moment + 1).toLocaleString("en-US")), "");
document.getElementById("to-peak").click();
check("to the peak", state.moment === data.peakEvent, state.moment);
document.getElementById("by-time").click();
report.drawNow();
check("by time", state.byTime && Math.abs(state.to - report.wholeSpan()) < 1, state.to);

/* ---- the map --------------------------------------------------------------------------------- */

/* At the middle of each block its colour, or that of what lies over it. */
const alive = report.aliveAt(data.peakEvent);
const pixelAt = (position) => {
  const row = position / report.mapSpan * 24;
  const x = Math.floor((row - Math.floor(row)) * map.width);
  const y = Math.floor((Math.floor(row) + 0.4) * map.height / 24);
  return Array.from(map.getContext("2d").getImageData(x, y, 1, 1).data);
};
report.setMapView(0, report.mapSpan);
report.drawNow();
let right = 0, large = 0;
for (const i of alive.list) {
  if (report.blocks.bytes[i] < report.mapSpan / 24 / map.width * 8) continue;
  large++;
  const track = Math.min(report.blocks.owner[i], data.tracks - 1);
  right += isColour(pixelAt(report.blocks.pos[i] + report.blocks.bytes[i] / 2), 0,
    colourOf("c" + track));
}
check("blocks are on the map", large >= expected.largeBlocks && right === large,
  right + " of " + large);
const big = alive.list.reduce((a, b) => (report.blocks.bytes[a] > report.blocks.bytes[b] ? a : b));
const row = (report.blocks.pos[big] + report.blocks.bytes[big] / 2) / report.mapSpan * 24;
at(map, row - Math.floor(row), (Math.floor(row) + 0.4) / 24, "pointermove", {});
check("hovering names the block", tip.textContent.includes(
  report.blocks.bytes[big].toLocaleString("en-US")) &&
  tip.textContent.includes(data.owners[report.blocks.owner[big]]), tip.textContent);
at(map, row - Math.floor(row), (Math.floor(row) + 0.4) / 24, "wheel", { deltaY: -300 });
check("the wheel zooms the map", state.mapTo - state.mapFrom < report.mapSpan / 2, "");
document.getElementById("map-all").click();
document.getElementById("to-end").click();
report.drawNow();
check("the end on the map", document.getElementById("map-says").textContent.includes(
  report.aliveAt(data.events - 1).list.length.toLocaleString("en-US") + " blocks drawn"),
  document.getElementById("map-says").textContent);

const out = document.createElement("script");
out.type = "application/json";
out.id = "check-results";
out.textContent = JSON.stringify(results).replace(/</g, "\\u003c");
document.body.append(out);
})();
