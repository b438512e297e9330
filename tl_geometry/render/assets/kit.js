'use strict';
/* One page: its parts draw themselves from PAGE, and redraw what depends on `state` when one of them selects. */
const PAGE = JSON.parse(document.getElementById('data').textContent);
const SVG = 'http://www.w3.org/2000/svg';
const dark = matchMedia('(prefers-color-scheme: dark)');
const state = {row: 0, map: 0, i: 0, j: 0, kept: [0, 0], query: 0, source: 0, node: 0, shown: 0, ...PAGE.start};
const listeners = [];
const PARTS = {};

function select(change) {
  Object.assign(state, change);
  for (const listen of listeners) listen(change);
}

/* An element with text (never markup) and attributes. */
function make(parent, tag, text = null, attributes = {}) {
  return fill(parent.appendChild(document.createElement(tag)), text, attributes);
}
function pen(parent, tag, attributes = {}, text = null) {
  return fill(parent.appendChild(document.createElementNS(SVG, tag)), text, attributes);
}
function fill(node, text, attributes) {
  if (text !== null) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

/* Three significant digits, with a true minus. */
function number(value, plus = false) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  const size = Math.abs(value);
  const short = size && (size < 1e-3 || size >= 1e5) ? value.toExponential(1) : String(+value.toPrecision(3));
  return (plus && value > 0 ? '+' : '') + short.replaceAll('-', '−');
}

const STOPS = {
  light: [[5, 48, 97], [67, 147, 195], [255, 255, 255], [214, 96, 77], [103, 0, 31]],
  dark: [[150, 205, 255], [40, 98, 160], [15, 18, 22], [168, 60, 44], [255, 170, 140]],
};

/* Colour of a value between -limit (blue) and limit (red). */
function shade(value, limit, theme = dark.matches ? 'dark' : 'light') {
  const stops = STOPS[theme];
  const x = 2 + 2 * Math.max(-1, Math.min(1, value / limit)), low = Math.min(Math.floor(x), 3);
  return stops[low].map((c, k) => Math.round(c + (x - low) * (stops[low + 1][k] - c)));
}
const sign = value => `var(--${value < 0 ? 'negative' : 'positive'})`;
const rgb = colour => `rgb(${colour.join()})`;
const ink = c => 0.299 * c[0] + 0.587 * c[1] + 0.114 * c[2] > 140 ? '#000' : '#fff';

/* The bytes of a base64 string of deflated data. */
function inflate(text) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Response(stream);
}
async function halves(text) {
  return Float32Array.from(new Uint16Array(await inflate(text).arrayBuffer()), h => {
    const exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent === 31) return NaN;
    return (h & 32768 ? -1 : 1) * (exponent ? 2 ** (exponent - 25) * (1024 + fraction) : 2 ** -24 * fraction);
  });
}

/* A colour scale with its ends, and the function that sets it. */
function scale(parent, theme) {
  const box = make(parent, 'span'), [low, strip, high] = ['', 'scale', ''].map(name => make(box, 'span', '', {class: name}));
  return (limit, signed) => {
    low.textContent = signed ? number(-limit) : '0';
    high.textContent = number(limit);
    const ends = (signed ? [-1, -0.5, 0, 0.5, 1] : [0, 0.5, 1]).map(u => rgb(shade(u, 1, theme)));
    strip.style.background = `linear-gradient(90deg, ${ends.join()})`;
  };
}

function choose(parent, label, names, key) {
  const box = make(parent, 'label', `${label} `), list = make(box, 'select', null, {'aria-label': label});
  names.forEach((name, k) => make(list, 'option', name, {value: k}));
  list.value = state[key];
  list.onchange = () => select({[key]: +list.value});
}

/* Signed bars: rows of {label, value, colour, go}. */
function bars(parent, rows) {
  const limit = Math.max(...rows.map(row => Math.abs(row.value || 0))) || 1;
  for (const {label, value, colour, go} of rows) {
    const line = make(parent, 'div', null, {class: 'bar'}), name = make(line, go ? 'button' : 'span', null, {title: label});
    if (colour) make(name, 'i', null, {class: 'key', style: `background:${colour}`});
    name.append(label);
    if (go) name.onclick = go;
    const width = 50 * Math.abs(value || 0) / limit, left = value < 0 ? 50 - width : 50;
    make(make(line, 'i'), 'u', null, {style: `left:${left}%;width:${width}%;background:${sign(value)}`});
    make(line, 'b', number(value, true), {'data-value': value});
  }
}

async function start() {
  make(document.body, 'h1', PAGE.title);
  make(document.body, 'p', PAGE.caption);
  for (const part of PAGE.parts) await PARTS[part.kind](part, make(document.body, 'section'));
  const folded = make(document.body, 'details');
  make(folded, 'summary', 'How this was made');
  folded.append(PAGE.source);
  dark.addEventListener('change', () => select({row: state.row}));
  select({...state});
  document.body.dataset.drawn = '1';
}
