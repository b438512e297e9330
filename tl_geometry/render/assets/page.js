const DATA = JSON.parse(document.getElementById('data').textContent);
/* Dark where the page around is dark: a frame is two pixels higher there than a multiple of ten (with the rounding of a zoomed page: one to three), whatever the system prefers. */
const framed = 'framed' in document.documentElement.dataset, worn = document.documentElement.classList;
const system = matchMedia('(prefers-color-scheme: dark)'), dark = Object.assign(new EventTarget(), {matches: false});
function wear() {
  const rest = innerHeight % 10;
  dark.matches = framed ? rest > 0 && rest < 4 : system.matches;
  if (worn.contains('dark') !== dark.matches) { worn.toggle('dark'); dark.dispatchEvent(new Event('change')); }
}
wear();
if (framed) {
  addEventListener('resize', wear);
  /* A frame that comes into view is as high as its page, where the page around hears it (frame.js). Its first height may come without an event. */
  new ResizeObserver(() => {
    wear();
    parent.postMessage({tlgHeight: document.body.getBoundingClientRect().height}, '*');
  }).observe(document.body);
} else system.addEventListener('change', wear);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const SIGNED = {light: [[5,48,97],[67,147,195],[255,255,255],[214,96,77],[103,0,31]], dark: [[120,190,255],[40,98,160],[16,16,18],[168,60,44],[255,160,130]]};
const PLAIN = [[68,1,84],[59,82,139],[33,145,140],[94,201,98],[253,231,37]];
const BEYOND = {over: [255,176,0], under: [0,180,160]};

/* An element with text (never markup) and attributes. */
function make(tag, text, attributes, parent) {
  const node = document.createElement(tag);
  if (text !== null) node.textContent = text;
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  (parent || document.body).appendChild(node);
  return node;
}

/* The same for a drawing, in a page that names its namespace SVG (an address, which other pages must not hold). */
function add(parent, tag, attributes, text) {
  const node = parent.appendChild(document.createElementNS(SVG, tag));
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
const minus = text => text.replace('-', '−');

/* Bytes of a base64 string of deflated data. */
async function inflate(text) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Response(stream).arrayBuffer();
}

/* Values of float16 numbers. */
function halves(buffer) {
  return Float32Array.from(new Uint16Array(buffer), h => {
    const sign = h & 32768 ? -1 : 1, e = h >> 10 & 31, m = h & 1023;
    return e === 31 ? NaN : sign * (e ? 2 ** (e - 25) * (1024 + m) : 2 ** -24 * m);
  });
}

/* Colour at u in 0..1 of a list of equally spaced colours. */
function mix(stops, u) {
  const x = Math.min(Math.max(u, 0), 1) * (stops.length - 1), i = Math.min(Math.floor(x), stops.length - 2), f = x - i;
  return stops[i].map((v, c) => Math.round(v + f * (stops[i + 1][c] - v)));
}

/* Colour of a value: signed from -limit to limit with marked ends, or plain from low to high. */
function shade(value, limit, signed = true, low = 0) {
  if (!signed) return mix(PLAIN, (value - low) / (limit - low || 1));
  if (value > limit * (1 + 1e-9)) return BEYOND.over;
  if (value < -limit * (1 + 1e-9)) return BEYOND.under;
  return mix(SIGNED[dark.matches ? 'dark' : 'light'], 0.5 + 0.5 * value / limit);
}
const rgb = colour => `rgb(${colour.join()})`;
/* Ink that is readable on a colour. */
const ink = c => 0.299 * c[0] + 0.587 * c[1] + 0.114 * c[2] > 140 ? '#000' : '#fff';

/* A canvas of fixed size in CSS pixels, drawn at the resolution of the screen. */
function board(width, height, parent) {
  const node = make('canvas', null, null, parent);
  return [node, resize(node, width, height)];
}
function resize(node, width, height) {
  const f = devicePixelRatio || 1, pen = node.getContext('2d');
  node.style.width = `${width}px`; node.style.height = `${height}px`;
  node.width = Math.round(width * f); node.height = Math.round(height * f);
  pen.scale(f, f); pen.imageSmoothingEnabled = false; pen.direction = 'ltr';
  return pen;
}

/* A colour bar with its numbers. */
function bar(pen, x, y, width, limit, signed, name, low = 0) {
  for (let i = 0; i < width; i++) {
    pen.fillStyle = rgb(shade(signed ? (2 * (i + 0.5) / width - 1) * limit : low + (i + 0.5) / width * (limit - low), limit, signed, low));
    pen.fillRect(x + i, y, 1, 10);
  }
  pen.strokeStyle = css('--line'); pen.strokeRect(x - 0.5, y - 0.5, width + 1, 11);
  pen.fillStyle = css('--ink'); pen.font = '10px system-ui'; pen.textBaseline = 'top'; pen.textAlign = 'center';
  const number = v => Math.abs(v) >= 1e4 ? v.toExponential(1) : String(+v.toPrecision(3));
  if (signed) { pen.fillText('−' + number(limit), x, y + 13); pen.fillText('0', x + width / 2, y + 13); }
  else pen.fillText(number(low), x, y + 13);
  pen.fillText(number(limit), x + width, y + 13);
  pen.textAlign = 'left'; pen.textBaseline = 'middle'; pen.fillText(name, x + width + 22, y + 5);
}

/* A line of code and a button that copies it. Sandboxed frames have no navigator.clipboard, so it is copied as a selection. */
function codeLine(parent) {
  const line = make('div', null, {class: 'code'}, parent), code = make('code', '', null, line);
  const button = make('button', 'copy', {type: 'button', 'aria-label': 'copy the code of this number'}, line);
  const show = text => { code.textContent = text; button.textContent = 'copy'; };
  const copy = () => {
    getSelection().selectAllChildren(code);
    button.textContent = document.execCommand('copy') ? 'copied' : 'selected';
  };
  button.onclick = copy;
  return {show, copy};
}

/* Hatching for what is not a number. */
function hatch(pen) {
  const tile = document.createElement('canvas'); tile.width = tile.height = 4;
  const g = tile.getContext('2d'); g.fillStyle = css('--paper'); g.fillRect(0, 0, 4, 4);
  g.strokeStyle = css('--soft'); g.beginPath();
  for (const [x, y, u, v] of [[-1, 5, 5, -1], [-1, 1, 1, -1], [3, 5, 5, 3]]) { g.moveTo(x, y); g.lineTo(u, v); }
  g.stroke();
  return pen.createPattern(tile, 'repeat');
}
