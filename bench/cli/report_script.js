/* Draws what report_data.c writes: the curves of live bytes by owner, and the map of addresses at a
 * chosen moment. A moment is the number of an event: what it shows is the state after that event.
 * window.tenureReport is what tests ask. */
(function () {
"use strict";
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const TRACKS = data.tracks;
const EXACT_EVENTS = 20000; // a view of at most so many is drawn event by event
const ROWS = 24;

/* ---- what the page brought ------------------------------------------------------------------- */

function bytesOf(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

const doublesOf = (text) => new Float64Array(bytesOf(text).buffer);
const coarse = {
  count: data.buckets,
  stacks: doublesOf(data.stacks), most: doublesOf(data.most), least: doublesOf(data.least),
  edge: (i) => Math.min(i * data.stride, data.events),
};
const reserved = data.reserved ? doublesOf(data.reserved) : null;

/* A function that gives the next number at each call. */
function numbersOf(text) {
  const bytes = bytesOf(text);
  let at = 0;
  return () => {
    let value = 0, scale = 1, byte;
    do {
      byte = bytes[at++];
      value += (byte & 127) * scale;
      scale *= 128;
    } while (byte & 128);
    return value;
  };
}

function blocksOf(text, count) {
  const blocks = { count: count, begin: new Float64Array(count), end: new Float64Array(count),
    owner: new Uint32Array(count), stream: new Uint32Array(count), bytes: new Float64Array(count),
    offset: new Float64Array(count), pos: new Float64Array(count) };
  const number = numbersOf(text);
  let before = 0;
  for (let i = 0; i < count; i++) {
    before += number();
    const lived = number();
    blocks.begin[i] = before;
    blocks.end[i] = lived ? before + lived : Infinity;
    blocks.owner[i] = number();
    blocks.stream[i] = number();
    blocks.bytes[i] = number();
    blocks.offset[i] = number() - 1;
  }
  return blocks;
}

/* Microseconds since the first event, of the first event of each `every` and of the last. */
function timesOf(text, count) {
  const times = new Float64Array(count), number = numbersOf(text);
  let now = 0;
  for (let i = 0; i < count; i++) times[i] = now += number();
  return times;
}

const times = timesOf(data.times, data.timeCount);
const blocks = blocksOf(data.blocks, data.blockCount);
const isComplete = data.blockCount === data.blockTotal;
const trackOf = (owner) => Math.min(owner, TRACKS - 1);
const nameOfTrack = (track) => (track === 11 ? "all others" : data.owners[track]);
const nameOf = (owner) => data.owners[owner] || "others";

/* ---- words ----------------------------------------------------------------------------------- */

function sizeText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (Math.abs(bytes) >= 1024 && unit < 5) { bytes /= 1024; unit++; }
  return (unit ? bytes.toFixed(bytes < 10 ? 2 : 1) : String(bytes)) + " " + units[unit];
}

const countText = (n) => Math.round(n).toLocaleString("en-US");

function timeText(us) {
  if (us < 1000) return us.toFixed(0) + " µs";
  if (us < 1e6) return (us / 1000).toFixed(us < 1e4 ? 2 : 1) + " ms";
  return (us / 1e6).toFixed(us < 1e7 ? 3 : 2) + " s";
}

const addressText = (offset) => "0x" + (BigInt(data.base) + BigInt(offset)).toString(16);

/* When an event was, since the first: of very long histories only some are known, and what is
 * between them goes by parts. */
function timeOfEvent(event) {
  const at = Math.min(event, data.events - 1) / data.timeStride;
  const low = Math.floor(at), high = Math.min(low + 1, data.timeCount - 1);
  return times[low] + (times[high] - times[low]) * (at - low);
}

function eventOfTime(us) {
  let low = 0, high = data.events;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (timeOfEvent(middle) < us) low = middle + 1; else high = middle;
  }
  return Math.min(low, data.events - 1);
}

const whenText = (event) => "event " + countText(event + 1) + " of " + countText(data.events) +
  (data.hasTimes ? ", " + timeText(timeOfEvent(event)) : "");

/* ---- canvases -------------------------------------------------------------------------------- */

function paper(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const box = canvas.getBoundingClientRect();
  const width = Math.max(1, Math.round(box.width * ratio));
  const height = Math.max(1, Math.round(box.height * ratio));
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue("--" + name).trim();
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, width, height);
  context.font = 11 * ratio + "px system-ui, sans-serif";
  return { context, width, height, ratio, colour };
}

/* ---- the chart ------------------------------------------------------------------------------- */

const chart = $("chart"), map = $("map"), tip = $("tip");
const state = { byTime: data.hasTimes, from: 0, to: 1, moment: data.peakEvent, top: 1,
  isOff: new Array(TRACKS).fill(false), mapFrom: 0, mapTo: 1, exact: null };

const xOf = (event) => (state.byTime ? timeOfEvent(event) : event);
const eventOf = (x) => (state.byTime ? eventOfTime(x)
  : Math.max(0, Math.min(data.events - 1, Math.floor(x))));
const wholeSpan = () => (state.byTime ? Math.max(1, timeOfEvent(data.events)) : data.events);
const leftOf = (ratio) => 62 * ratio;

let changes = null; // of each event: block + 1 if it begins, minus that if it ends
function changesOfEvents() {
  if (changes) return changes;
  changes = new Int32Array(data.events + 1);
  for (let i = 0; i < blocks.count; i++) {
    changes[blocks.begin[i]] = i + 1;
    if (blocks.end[i] < Infinity) changes[blocks.end[i]] = -(i + 1);
  }
  return changes;
}

/* Event by event what every owner has, for a view that is narrow enough. */
function exactCurve(first, last) {
  const list = changesOfEvents();
  const live = new Float64Array(TRACKS);
  const count = last - first + 1;
  const curve = { count, first, last, stacks: new Float64Array(count * TRACKS),
    most: new Float64Array(count), edge: (i) => first + i };
  let total = 0;
  for (let i = 0; i < blocks.count; i++) {
    if (blocks.begin[i] >= first) break;
    if (blocks.end[i] < first) continue;
    live[trackOf(blocks.owner[i])] += blocks.bytes[i];
    total += blocks.bytes[i];
  }
  for (let i = 0; i < count; i++) {
    const change = list[first + i];
    if (change) {
      const block = Math.abs(change) - 1;
      const bytes = change > 0 ? blocks.bytes[block] : -blocks.bytes[block];
      live[trackOf(blocks.owner[block])] += bytes;
      total += bytes;
    }
    curve.stacks.set(live, i * TRACKS);
    curve.most[i] = total;
  }
  return curve;
}

function curveOfView() {
  const first = eventOf(state.from), last = eventOf(state.to);
  if (!isComplete || data.stride === 1 || last - first > EXACT_EVENTS) return coarse;
  const known = state.exact;
  if (!known || known.first > first || known.last < last)
    state.exact = exactCurve(first, last);
  return state.exact;
}

/* The stretch of the curve that holds the event. */
function indexIn(curve, event) {
  const at = curve === coarse ? Math.floor(event / data.stride) : event - curve.first;
  return Math.max(0, Math.min(curve.count - 1, at));
}

const heightOf = (curve, i) => {
  let sum = 0;
  for (let t = 0; t < TRACKS; t++) if (!state.isOff[t]) sum += curve.stacks[i * TRACKS + t];
  return sum;
};

/* For each column of pixels the stretch with most in it: no peak is lost. */
function columnsOf(curve, width) {
  const columns = new Int32Array(width);
  const step = (state.to - state.from) / width;
  let next = indexIn(curve, eventOf(state.from));
  for (let x = 0; x < width; x++) {
    const last = indexIn(curve, eventOf(state.from + (x + 1) * step));
    let best = Math.min(next, last);
    for (let i = best + 1; i <= last; i++)
      if (heightOf(curve, i) > heightOf(curve, best)) best = i;
    columns[x] = best;
    next = last;
  }
  return columns;
}

function drawGrid(p, left, bottom, top) {
  const { context, ratio } = p;
  const step = Math.pow(2, Math.floor(Math.log2(Math.max(top / 4, 1))));
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (let value = 0; value <= top; value += step) {
    const y = Math.round(bottom - (value / top) * (bottom - 8 * ratio)) + 0.5;
    context.strokeStyle = p.colour("grid");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(left, y);
    context.lineTo(p.width, y);
    context.stroke();
    context.fillStyle = p.colour("soft");
    if (y < bottom - 4 || value === 0) context.fillText(sizeText(value), left - 6 * ratio, y);
  }
}

function drawAxis(p, left, bottom) {
  const { context, ratio } = p;
  const marks = Math.max(2, Math.floor((p.width - left) / (130 * ratio)));
  context.fillStyle = p.colour("soft");
  context.textBaseline = "top";
  for (let i = 0; i <= marks; i++) {
    const x = state.from + ((state.to - state.from) * i) / marks;
    context.textAlign = i === 0 ? "left" : i === marks ? "right" : "center";
    context.fillText(state.byTime ? timeText(x) : countText(x),
      left + ((p.width - left) * i) / marks, bottom + 5 * ratio);
  }
}

function drawLine(p, left, bottom, top, columns, valueOf, name, dash) {
  const { context } = p;
  context.strokeStyle = p.colour(name);
  context.lineWidth = 1.5 * p.ratio;
  context.setLineDash(dash);
  context.beginPath();
  for (let x = 0; x < columns.length; x++) {
    const y = bottom - (valueOf(x) / top) * (bottom - 8 * p.ratio);
    if (x) context.lineTo(left + x, y); else context.moveTo(left + x, y);
  }
  context.stroke();
  context.setLineDash([]);
}

/* In each column the owners above each other, the one with the highest peak at the bottom. */
function drawStacks(p, left, bottom, top, curve, columns) {
  const scale = (bottom - 8 * p.ratio) / top;
  const base = new Float64Array(columns.length).fill(bottom);
  for (let track = 0; track < TRACKS; track++) {
    if (state.isOff[track]) continue;
    p.context.fillStyle = p.colour("c" + track);
    for (let x = 0; x < columns.length; x++) {
      const height = curve.stacks[columns[x] * TRACKS + track] * scale;
      if (height <= 0) continue;
      p.context.fillRect(left + x, base[x] - height, 1, height);
      base[x] -= height;
    }
  }
}

function drawMoment(p, left, bottom) {
  const { context, ratio } = p;
  const place = (event) => left + ((xOf(event) - state.from) / (state.to - state.from)) *
    (p.width - left);
  for (const event of data.shortages) {
    context.fillStyle = p.colour("warn");
    if (place(event) >= left) context.fillRect(place(event) - ratio, 0, 2 * ratio, bottom);
  }
  const x = place(state.moment);
  if (x < left || x > p.width) return;
  context.fillStyle = p.colour("ink");
  context.fillRect(Math.round(x - ratio / 2), 0, Math.max(1, ratio), bottom);
  context.beginPath();
  context.arc(x, 5 * ratio, 4 * ratio, 0, 7);
  context.fill();
}

function drawChart() {
  const p = paper(chart);
  const left = Math.round(leftOf(p.ratio)), bottom = p.height - 22 * p.ratio;
  const curve = curveOfView();
  const columns = columnsOf(curve, Math.max(1, p.width - left));
  const kept = (x) => (reserved && !state.isOff.some((off) => off)
    ? reserved[indexIn(coarse, curve.edge(columns[x]))] : 0);
  let top = 1;
  for (let x = 0; x < columns.length; x++)
    top = Math.max(top, heightOf(curve, columns[x]), kept(x));
  state.top = top *= 1.04;
  drawGrid(p, left, bottom, top);
  drawStacks(p, left, bottom, top, curve, columns);
  if (reserved && !state.isOff.some((off) => off))
    drawLine(p, left, bottom, top, columns, kept, "soft", [5 * p.ratio, 4 * p.ratio]);
  drawAxis(p, left, bottom);
  drawMoment(p, left, bottom);
}

/* ---- the map --------------------------------------------------------------------------------- */

/* Addresses where nothing ever lay are left out: a position counts only bytes of ranges. */
const rangeAt = new Float64Array(data.ranges.length + 1);
for (let i = 0; i < data.ranges.length; i++) rangeAt[i + 1] = rangeAt[i] + data.ranges[i][1];
const mapSpan = Math.max(1, rangeAt[data.ranges.length]);

function rangeBelow(value, valueAt) {
  let low = 0, high = data.ranges.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (valueAt(middle) <= value) low = middle; else high = middle - 1;
  }
  return low;
}

function positionOf(offset) {
  const i = rangeBelow(offset, (k) => data.ranges[k][0]);
  return rangeAt[i] + offset - data.ranges[i][0];
}

function offsetOf(position) {
  const i = rangeBelow(position, (k) => rangeAt[k]);
  return data.ranges[i][0] + position - rangeAt[i];
}

if (data.ranges.length)
  for (let i = 0; i < blocks.count; i++) blocks.pos[i] = positionOf(blocks.offset[i]);

/* The blocks that were alive after the event and lie anywhere, by position; the bytes of all. */
function aliveAt(event) {
  const found = [];
  let bytes = 0;
  for (let i = 0; i < blocks.count && blocks.begin[i] <= event; i++) {
    if (blocks.end[i] <= event) continue;
    bytes += blocks.bytes[i];
    if (blocks.offset[i] >= 0) found.push(i);
  }
  found.sort((a, b) => blocks.pos[a] - blocks.pos[b]);
  return { list: found, bytes, event };
}

let alive = aliveAt(state.moment);

function fillSpan(p, from, to, top) {
  const rowBytes = (state.mapTo - state.mapFrom) / ROWS;
  const rowHeight = (p.height - top) / ROWS;
  from = Math.max(from, state.mapFrom) - state.mapFrom;
  to = Math.min(to, state.mapTo) - state.mapFrom;
  for (let row = Math.floor(from / rowBytes); row < ROWS && row * rowBytes < to; row++) {
    const x = Math.max(0, from - row * rowBytes) / rowBytes * p.width;
    const end = Math.min(rowBytes, to - row * rowBytes) / rowBytes * p.width;
    if (end > x)
      p.context.fillRect(x, top + row * rowHeight, Math.max(end - x, 0.5),
        Math.max(1, rowHeight - 2 * p.ratio));
  }
}

function drawMap() {
  if (!map) return;
  const p = paper(map);
  p.context.fillStyle = p.colour("used");
  fillSpan(p, state.mapFrom, state.mapTo, 0);
  for (const i of alive.list) {
    if (blocks.pos[i] >= state.mapTo) break;
    if (blocks.pos[i] + blocks.bytes[i] <= state.mapFrom) continue;
    p.context.fillStyle = p.colour("c" + trackOf(blocks.owner[i]));
    p.context.globalAlpha = state.isOff[trackOf(blocks.owner[i])] ? 0.25 : 1;
    fillSpan(p, blocks.pos[i], blocks.pos[i] + blocks.bytes[i], 0);
  }
  p.context.globalAlpha = 1;
  p.context.fillStyle = p.colour("card");
  for (let i = 1; i < data.ranges.length; i++)
    fillSpan(p, rangeAt[i], rangeAt[i] + (state.mapTo - state.mapFrom) / ROWS / p.width * p.ratio,
      0);
}

function sayMap() {
  if (!map) return;
  const total = totalAt(state.moment);
  const missing = isComplete ? "" : "; the " + countText(data.blockTotal - data.blockCount) +
    " smallest blocks are not drawn";
  $("map-says").textContent = "After " + whenText(state.moment) + ": " + sizeText(total) +
    " live, " + countText(alive.list.length) + " blocks drawn" + missing + ". Shown: " +
    addressText(Math.floor(offsetOf(state.mapFrom))) + " and " +
    sizeText(state.mapTo - state.mapFrom) + " on, without gaps where no block ever was.";
}

/* What was live after the event: exact if every block is here, else the most of its bucket. */
function totalAt(event) {
  if (isComplete) return aliveAt(event).bytes;
  return coarse.most[indexIn(coarse, event)];
}

/* ---- the whole ------------------------------------------------------------------------------- */

let isDue = false;
function redraw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(drawNow);
}

function drawNow() {
  isDue = false;
  drawChart();
  drawMap();
  sayMap();
}

function setMoment(event) {
  state.moment = Math.max(0, Math.min(data.events - 1, Math.round(event)));
  alive = aliveAt(state.moment);
  $("chart-says").textContent = "Chosen: " + whenText(state.moment) + ", " +
    sizeText(totalAt(state.moment)) + " live.";
  redraw();
}

function setView(from, to) {
  const span = wholeSpan(), least = Math.min(span, state.byTime ? span / 1e6 : 8);
  const width = Math.max(least, Math.min(span, to - from));
  const middle = (from + to) / 2;
  state.from = Math.max(0, Math.min(span - width, middle - width / 2));
  state.to = state.from + width;
  redraw();
}

function setMapView(from, to) {
  const width = Math.max(Math.min(4096, mapSpan), Math.min(mapSpan, to - from));
  const middle = (from + to) / 2;
  state.mapFrom = Math.max(0, Math.min(mapSpan - width, middle - width / 2));
  state.mapTo = state.mapFrom + width;
  redraw();
}

/* Where in the canvas, 0 to 1, of what it shows; on the map also which row. */
function chartX(event) {
  const box = chart.getBoundingClientRect();
  const left = leftOf(1);
  return Math.max(0, Math.min(1, (event.clientX - box.left - left) / (box.width - left)));
}

function mapPosition(event) {
  const box = map.getBoundingClientRect();
  const row = Math.max(0, Math.min(ROWS - 1,
    Math.floor((event.clientY - box.top) / box.height * ROWS)));
  const x = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
  return state.mapFrom + (row + x) / ROWS * (state.mapTo - state.mapFrom);
}

function zoomChart(factor, at) {
  const x = state.from + at * (state.to - state.from);
  setView(x - (x - state.from) * factor, x + (state.to - x) * factor);
}

function zoomMap(factor, position) {
  setMapView(position - (position - state.mapFrom) * factor,
    position + (state.mapTo - position) * factor);
}

/* ---- hovering -------------------------------------------------------------------------------- */

function showTip(event, title, rows) {
  tip.textContent = "";
  const head = document.createElement("strong");
  head.textContent = title;
  tip.append(head);
  for (const [name, value, track] of rows) {
    const line = document.createElement("div");
    const label = document.createElement("span"), number = document.createElement("span");
    if (track !== undefined) {
      const swatch = document.createElement("i");
      swatch.className = "swatch s" + track;
      label.append(swatch);
    }
    label.append(name);
    number.textContent = value;
    line.append(label, number);
    tip.append(line);
  }
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  const x = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 12
    : event.clientX + 16;
  const y = Math.min(event.clientY + 14, innerHeight - box.height - 8);
  tip.style.left = Math.max(4, x) + "px";
  tip.style.top = Math.max(4, y) + "px";
}

const hideTip = () => { tip.style.display = "none"; };

function hoverChart(event) {
  const curve = curveOfView();
  const at = state.from + chartX(event) * (state.to - state.from);
  const i = indexIn(curve, eventOf(at));
  const rows = [];
  for (let t = 0; t < TRACKS; t++)
    if (curve.stacks[i * TRACKS + t] > 0)
      rows.push([nameOfTrack(t), sizeText(curve.stacks[i * TRACKS + t]), t]);
  rows.sort((a, b) => curve.stacks[i * TRACKS + b[2]] - curve.stacks[i * TRACKS + a[2]]);
  const first = curve.edge(i);
  const most = curve === coarse && data.stride > 1 ? " at most" : "";
  if (reserved) rows.push(["reserved", sizeText(reserved[indexIn(coarse, first)])]);
  showTip(event, sizeText(curve.most[i]) + most + ", " + whenText(first), rows);
}

function blockAt(position) {
  let low = 0, high = alive.list.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (blocks.pos[alive.list[middle]] <= position) low = middle; else high = middle - 1;
  }
  const i = alive.list[low];
  return i !== undefined && blocks.pos[i] <= position &&
    position < blocks.pos[i] + Math.max(1, blocks.bytes[i]) ? i : -1;
}

function hoverMap(event) {
  const position = mapPosition(event);
  const i = blockAt(position);
  if (i < 0) {
    showTip(event, "no block", [["address", addressText(Math.floor(offsetOf(position)))]]);
    return;
  }
  const end = blocks.end[i];
  showTip(event, nameOf(blocks.owner[i]), [
    ["bytes", countText(blocks.bytes[i]) + " (" + sizeText(blocks.bytes[i]) + ")",
      trackOf(blocks.owner[i])],
    ["address", addressText(blocks.offset[i])], ["stream", String(blocks.stream[i])],
    ["made", blocks.begin[i] < data.before ? "before the recording" : whenText(blocks.begin[i])],
    ["freed", end === Infinity ? "never" : whenText(end)]]);
}

/* ---- pointers -------------------------------------------------------------------------------- */

/* A drag moves the view, two fingers zoom, a click is a click. */
function listen(canvas, act) {
  const down = new Map();
  let moved = 0, spread = 0;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    act.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), event);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    down.set(event.pointerId, event);
    if (canvas.setPointerCapture && event.isTrusted) canvas.setPointerCapture(event.pointerId);
    moved = 0;
    spread = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = down.get(event.pointerId);
    if (!before) { act.hover(event); return; }
    down.set(event.pointerId, event);
    moved += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
    const all = [...down.values()];
    if (all.length === 2) {
      const now = Math.hypot(all[0].clientX - all[1].clientX, all[0].clientY - all[1].clientY);
      if (spread > 0 && now > 0) act.zoom(spread / now, event);
      spread = now;
    } else if (moved > 4) {
      hideTip();
      act.drag(event.clientX - before.clientX, event);
    }
  });
  const release = (event) => {
    if (down.delete(event.pointerId) && moved <= 4 && event.type === "pointerup") act.click(event);
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("dblclick", act.reset);
}

listen(chart, {
  zoom: (factor, event) => zoomChart(factor, chartX(event)),
  drag: (pixels) => {
    const by = -pixels / chart.getBoundingClientRect().width * (state.to - state.from);
    setView(state.from + by, state.to + by);
  },
  hover: hoverChart,
  click: (event) => setMoment(eventOf(state.from + chartX(event) * (state.to - state.from))),
  reset: () => setView(0, wholeSpan()),
});
chart.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (step) {
    event.preventDefault();
    setMoment(state.moment + step * (event.shiftKey ? data.stride * 20 : 1));
  }
});
if (map)
  listen(map, {
    zoom: (factor, event) => zoomMap(factor, mapPosition(event)),
    drag: (pixels) => {
      const by = -pixels / map.getBoundingClientRect().width *
        (state.mapTo - state.mapFrom) / ROWS;
      setMapView(state.mapFrom + by, state.mapTo + by);
    },
    hover: hoverMap,
    click: hoverMap,
    reset: () => setMapView(0, mapSpan),
  });

/* ---- buttons --------------------------------------------------------------------------------- */

const onClick = (id, action) => { if ($(id)) $(id).addEventListener("click", action); };
onClick("zoom-in", () => zoomChart(0.5, 0.5));
onClick("zoom-out", () => zoomChart(2, 0.5));
onClick("zoom-all", () => setView(0, wholeSpan()));
onClick("to-peak", () => setMoment(data.peakEvent));
onClick("to-end", () => setMoment(data.events - 1));
onClick("map-in", () => zoomMap(0.5, (state.mapFrom + state.mapTo) / 2));
onClick("map-out", () => zoomMap(2, (state.mapFrom + state.mapTo) / 2));
onClick("map-all", () => setMapView(0, mapSpan));
onClick("by-time", () => {
  const first = eventOf(state.from), last = eventOf(state.to);
  state.byTime = !state.byTime;
  $("by-time").setAttribute("aria-pressed", String(state.byTime));
  setView(xOf(first), xOf(last + 1));
});

const legend = $("legend");
for (let track = 0; track < TRACKS; track++) {
  const button = document.createElement("button"), swatch = document.createElement("i");
  swatch.className = "swatch s" + track;
  button.append(swatch, nameOfTrack(track));
  button.title = "show or hide";
  button.setAttribute("aria-pressed", "true");
  button.addEventListener("click", () => {
    state.isOff[track] = !state.isOff[track];
    button.classList.toggle("off", state.isOff[track]);
    button.setAttribute("aria-pressed", String(!state.isOff[track]));
    redraw();
  });
  legend.append(button);
}

window.tenureReport = { data, state, blocks, coarse, setView, setMapView, setMoment, drawNow,
  aliveAt, exactCurve, timeOfEvent, mapSpan, wholeSpan, curveOfView };
window.addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
setView(0, wholeSpan());
setMapView(0, mapSpan);
setMoment(data.peakEvent);
drawNow();
document.documentElement.dataset.drawn = String(Math.round(performance.now()));
})();
