const n = DATA.size, LEFT = 84, TOP = 16, signedPlanes = DATA.planes.length - 1;
const state = {head: 0, limit: DATA.limit, query: DATA.query, key: null, at: null, chosen: null, plane: signedPlanes - 1};
const least = DATA.cell, across = 1 + Math.max(...DATA.places.map(p => p[1])), down = 1 + Math.max(...DATA.places.map(p => p[0]));
let side = n * DATA.cell, index, values;  // of each mask: the place of a cell among the allowed ones, or -1; the stored numbers

/* First token of a block, and texts of all its tokens. */
const first = i => i * DATA.block;
const last = i => Math.min(DATA.tokens.length, (i + 1) * DATA.block) - 1;
const texts = i => DATA.tokens.slice(first(i), last(i) + 1).join(' ');
const place = i => DATA.block > 1 ? `${first(i)}–${last(i)}` : `${i}`;

async function decode() {
  const bits = new Uint8Array(await inflate(DATA.masks)), row = Math.ceil(n * n / 8);
  const counts = [];
  index = Array.from({length: bits.length / row}, (_, m) => {
    const found = new Int32Array(n * n).fill(-1); let count = 0;
    for (let i = 0; i < n * n; i++) if (bits[m * row + (i >> 3)] >> (i & 7) & 1) found[i] = count++;
    counts.push(count); return found;
  });
  const buffer = await inflate(DATA.cells), numbers = DATA.levels ? new Int8Array(buffer) : halves(buffer);
  let from = 0;
  values = DATA.heads.map((_, h) => DATA.planes.map((_, p) => {
    const count = counts[DATA.mask[h]], part = numbers.subarray(from, from + count);
    from += count; return part;
  }));
}

/* The number at a cell: null where no key is allowed, NaN where it is not a number. */
function read(head, plane, query, key) {
  const at = index[DATA.mask[head]][query * n + key];
  if (at < 0) return null;
  const stored = values[head][plane][at], largest = DATA.largest[head][plane];
  return DATA.levels ? (stored === -128 ? NaN : stored / DATA.levels * largest) : stored * largest;
}
const step = (head, plane) => DATA.largest[head][plane] * (DATA.levels ? 0.5 / DATA.levels : 2 ** -12);
function digits(value, half) {
  if (value === null) return '';
  if (Number.isNaN(value)) return 'NaN';
  return value.toFixed(half > 0 ? Math.min(12, Math.max(0, Math.ceil(-Math.log10(2 * half)) + 1)) : 0).replace('-', '−');
}

make('h1', DATA.title);
const tools = make('div', null, {class: 'row'});
const label = (text, node) => { const box = make('label', text + ' ', null, tools); box.appendChild(node); return node; };
const heads = label('head', make('select', null, {'aria-label': 'head'}));
DATA.heads.forEach((name, h) => make('option', name, {value: h}, heads));
heads.parentNode.style.display = DATA.heads.length > 1 ? '' : 'none';
const slider = label('full colour at', make('input', null, {type: 'range', min: -100, max: 0, step: 1, 'aria-label': 'full colour'}));
slider.value = Math.round(50 * Math.log10(DATA.limit / DATA.high));
slider.title = 'drag to the left to see small values; double click: as at first';
const [bars, barPen] = board(560, 30, tools);
const [sheet, pen] = board(...DATA.canvas, make('div', null, {class: 'scroll'}));
for (const [name, value] of Object.entries({tabindex: 0, role: 'application', 'aria-label': 'panels: arrow keys go from cell to cell, Enter chooses the query, c copies the code'})) sheet.setAttribute(name, value);
const where = make('div', null, {class: 'where', 'aria-live': 'polite'}), code = codeLine(), box = make('div', null, {class: 'read'});
const boxes = DATA.planes.map(name => make('div', name, {title: name}, box));
const cellsRead = boxes.map((d, p) => make('b', '', {'data-plane': DATA.planes[p]}, make('div', null, {class: 'number'}, d)));
const errors = boxes.map(d => make('span', '', null, d.lastChild));
const pick = make('div', null, {class: 'row'});
make('label', 'sources in the text by', null, pick);
const buttons = DATA.planes.map((name, p) => {
  const b = make('button', name, {type: 'button'}, pick); b.onclick = () => { state.plane = p; paintText(); point(...state.at); }; return b;
});
const strip = make('div', null, {class: 'text'});
const spans = DATA.tokens.map((text, i) => {
  const span = make('span', text, {title: `${i}: ${text}`}, strip), at = Math.floor(i / DATA.block);
  span.onclick = () => { state.query = at; state.at = state.chosen = null; update(); };
  span.onpointerenter = () => point(state.query, at);
  if (DATA.breaks[i]) make('br', null, null, strip);
  return span;
});
make('p', DATA.caption);

/* Pictures of all planes of the head, one pixel a cell. */
let pictures = [];
function colourPlanes() {
  const out = css('--out').match(/[0-9a-f]{1,2}/gi).map(x => parseInt(x.length > 1 ? x : x + x, 16));
  const paper = css('--paper');
  pictures = DATA.planes.map((_, p) => {
    const canvas = document.createElement('canvas'); canvas.width = canvas.height = n;
    const g = canvas.getContext('2d'), image = g.createImageData(n, n), holes = [], beyond = [], known = new Map();
    for (let i = 0; i < n * n; i++) {
      const v = read(state.head, p, Math.floor(i / n), i % n);
      let c = out;
      if (v !== null && Number.isNaN(v)) { holes.push(i); }
      else if (v !== null) {
        c = known.get(v); if (!c) known.set(v, c = p < signedPlanes ? shade(v, state.limit) : shade(v, 1, false));
        if (p < signedPlanes && Math.abs(v) > state.limit * (1 + 1e-9)) beyond.push(i);
      }
      image.data.set([c[0], c[1], c[2], 255], 4 * i);
    }
    g.putImageData(image, 0, 0);
    return {canvas, holes, beyond};
  });
}

const corner = p => [LEFT + DATA.places[p][1] * (side + 16), TOP + DATA.places[p][0] * (side + 22)];
const short = i => { const t = [...texts(i)]; return t.length > 10 ? t.slice(0, 9).join('') + '…' : t.join(''); };

/* A page of its own has cells as large as its window allows; a frame has its size. */
function fit() {
  if (framed) return;
  const size = Math.min((innerWidth - 132) / across - 16, (0.75 * innerHeight - 76) / down - 22) / n;
  DATA.cell = Math.max(least, size < 3 ? size : Math.floor(size)); side = n * DATA.cell;
  DATA.canvas = [108 + across * (side + 16), 76 + down * (side + 22)];
  resize(sheet, ...DATA.canvas);
}
function draw() {
  pen.clearRect(0, 0, ...DATA.canvas);
  pen.textBaseline = 'middle';
  const pattern = hatch(pen), c = DATA.cell, rows = Math.max(...DATA.places.map(p => p[0]));
  DATA.planes.forEach((name, p) => {
    const [x, y] = corner(p);
    pen.fillStyle = css('--ink'); pen.font = '600 11px system-ui'; pen.textAlign = 'left';
    pen.fillText(name, x, y - 8);
    pen.drawImage(pictures[p].canvas, x, y, side, side);
    pen.fillStyle = pattern;
    for (const i of pictures[p].holes) pen.fillRect(x + i % n * c, y + Math.floor(i / n) * c, c, c);
    if (c >= 5) for (const i of pictures[p].beyond) {
      pen.fillStyle = '#000'; pen.fillRect(x + (i % n + 0.5) * c - 1, y + (Math.floor(i / n) + 0.5) * c - 1, 2, 2);
    }
    pen.strokeStyle = css('--line'); pen.lineWidth = 1; pen.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
    pen.fillStyle = css('--mark');  // the chosen query
    pen.fillRect(x - 4, y + state.query * c + Math.max(0, c / 2 - 1.5), 3, 3);
    if (state.at) cross(x, y);
  });
  axes(rows);
}
function cross(x, y) {
  const [q, k] = state.at, c = DATA.cell;
  pen.strokeStyle = css('--mark'); pen.globalAlpha = 0.35; pen.lineWidth = 1; pen.beginPath();
  pen.moveTo(x, y + (q + 0.5) * c); pen.lineTo(x + side, y + (q + 0.5) * c);
  pen.moveTo(x + (k + 0.5) * c, y); pen.lineTo(x + (k + 0.5) * c, y + side); pen.stroke();
  pen.globalAlpha = 1; pen.strokeRect(x + k * c - 1, y + q * c - 1, c + 2, c + 2);
}
function axes(rows) {
  const c = DATA.cell, every = Math.ceil(10 / c);
  pen.font = '9px ui-monospace, monospace'; pen.fillStyle = css('--soft');
  for (let r = 0; r <= rows; r++) for (let i = 0; i < n; i += every) {
    pen.textAlign = 'right'; pen.fillText(short(i), LEFT - 7, TOP + r * (side + 22) + (i + 0.5) * c, LEFT - 12);
  }
  const bottoms = new Map();  // the lowest panel of each column
  DATA.places.forEach(([r, k]) => bottoms.set(k, Math.max(r, bottoms.get(k) ?? 0)));
  for (const [k, r] of bottoms) for (let i = 0; i < n; i += every) {
    pen.save(); pen.translate(LEFT + k * (side + 16) + (i + 0.5) * c, TOP + r * (side + 22) + side + 5); pen.rotate(-Math.PI / 2);
    pen.textAlign = 'right'; pen.fillText(short(i), 0, 0, 62); pen.restore();
  }
}
function drawBar() {
  const stacked = innerWidth < 580;  // one bar below the other
  resize(bars, stacked ? 300 : 560, stacked ? 60 : 30);
  bar(barPen, 24, 2, 200, state.limit, true, 'score');
  barPen.fillStyle = rgb(BEYOND.under); barPen.fillRect(8, 2, 12, 10); barPen.fillStyle = rgb(BEYOND.over); barPen.fillRect(228, 2, 12, 10);
  bar(barPen, stacked ? 24 : 330, stacked ? 32 : 2, 100, 1, false, 'pattern');
}

/* Everything about a cell; the code is that of one panel. */
const range = i => DATA.block > 1 ? `${first(i)}:${last(i) + 1}` : i;
function point(query, key, panel = state.plane) {
  state.at = [query, key];
  code.show(`${DATA.code[panel]}[${DATA.context}, ${DATA.rows[state.head]}, ${range(query)}, ${range(key)}]`);
  where.textContent = `query ${place(query)} ${texts(query)}  ←  key ${place(key)} ${texts(key)}`;
  cellsRead.forEach((node, p) => {
    const v = read(state.head, p, query, key), half = step(state.head, p);
    node.dataset.value = v ?? ''; node.dataset.half = half;
    node.textContent = v === null ? 'not allowed' : digits(v, half);
    errors[p].textContent = v === null || Number.isNaN(v) ? '' : ' ±' + half.toPrecision(1);
  });
  draw();
}
function paintText() {
  buttons.forEach((b, p) => b.setAttribute('aria-pressed', p === state.plane));
  const marked = state.plane < signedPlanes;
  spans.forEach((span, i) => {
    const at = Math.floor(i / DATA.block), v = read(state.head, state.plane, state.query, at);
    const c = v === null || Number.isNaN(v) ? null : marked ? shade(v, state.limit) : shade(v, 1, false);
    span.style.background = c ? rgb(c) : ''; span.style.color = c ? ink(c) : '';
    span.className = (v === null ? 'off' : '') + (at === state.query ? ' here' : '');
  });
}
function strongest() {  // the key with the largest pattern of the chosen query
  let best = 0, most = -Infinity;
  for (let k = 0; k < n; k++) { const v = read(state.head, signedPlanes, state.query, k); if (v !== null && v > most) { most = v; best = k; } }
  return best;
}
function update() {
  drawBar(); colourPlanes(); paintText(); point(...(state.at ?? [state.query, strongest()]));
}
function cellAt(event) {
  const r = sheet.getBoundingClientRect(), x = event.clientX - r.left, y = event.clientY - r.top;
  for (let p = 0; p < DATA.planes.length; p++) {
    const [a, b] = corner(p), k = Math.floor((x - a) / DATA.cell), q = Math.floor((y - b) / DATA.cell);
    if (k >= 0 && k < n && q >= 0 && q < n) return [q, k, p];
  }
  return null;
}
function choose(cell) { state.query = cell[0]; state.chosen = cell; paintText(); point(...cell); }
function press(event) {
  const [q, k] = state.at, step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
  if (step) point(Math.min(n - 1, Math.max(0, q + step[0])), Math.min(n - 1, Math.max(0, k + step[1])));
  else if (event.key === 'Enter') choose(state.at);
  else if (event.key === 'c' && !event.ctrlKey && !event.metaKey) code.copy();
  else return;
  event.preventDefault();
}
function listen() {
  sheet.onpointermove = event => { const at = cellAt(event); sheet.style.cursor = at ? 'crosshair' : ''; if (at) point(...at); };
  sheet.onclick = event => { const at = cellAt(event); if (at) choose(at); };
  sheet.onpointerleave = () => state.chosen && point(...state.chosen);
  sheet.onkeydown = press;
  heads.onchange = () => { state.head = +heads.value; update(); };
  slider.oninput = () => { state.limit = DATA.high * 10 ** (slider.value / 50); update(); };
  slider.ondblclick = () => { state.limit = DATA.limit; slider.value = Math.round(50 * Math.log10(DATA.limit / DATA.high)); update(); };
  dark.addEventListener('change', update);
  addEventListener('resize', () => { fit(); drawBar(); draw(); });
}
fit();
decode().then(() => { update(); listen(); document.body.dataset.drawn = performance.now(); });
